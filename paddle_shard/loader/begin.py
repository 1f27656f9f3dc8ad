"""Beginning an epoch iterator: its steps, the executor that reads them, and the agreement of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from paddle_shard.data.identity import (
    identity_of_copies,
    identity_of_files,
    identity_of_samples,
)
from paddle_shard.errors import SplitError, UnequalEndsError
from paddle_shard.loader.placing import Placing, place_stream
from paddle_shard.loader.setup import LoaderSetup
from paddle_shard.loader.step_messages import StepMessages
from paddle_shard.loader.step_pass import Feed, StepPass
from paddle_shard.plan.shard_plan import num_skipped_steps
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.step import Steps
from paddle_shard.ranks.agreeing import open_agreement, report_failure
from paddle_shard.ranks.agreement import Agreement
from paddle_shard.ranks.reports import AgreementConfig
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.executor import Executor, WorkerExecutor


class _Steps(NamedTuple):
    """The steps of an epoch iterator."""

    steps: Steps
    number: int | None
    """How many there are; None: the end shows when it comes."""
    are_compared: bool
    """True if the ranks compare digests of what they have read or drawn."""


def begin(setup: LoaderSetup, start: LoaderState) -> StepPass:
    """Return the steps from a position on; it yields placed batches."""
    steps = _steps_from(setup, start)
    place: Callable[[Batch], Batch] = Placing(setup, start)
    if setup.source.stream is not None:
        place = partial(
            place_stream,
            policy=setup.source.tail,
            is_begun=start.samples > 0,
            num_steps=steps.number,
            place=place,
        )

    # Workers are forked before the agreement connects to the other ranks in a thread of its own.
    reader = None if setup.replicas.follows else setup.reading.start()
    executor = reader
    agreement: Agreement | None = None
    try:
        _note_identity(setup, reader)
        if not setup.is_alone:
            agreement = _open_agreement(
                setup, start, same_data=steps.are_compared
            )
            executor, place = setup.replicas.shared(reader, agreement, place)
        assert executor is not None
        feed = Feed(
            steps.steps,
            executor,
            steps.number,
            on_training_thread=setup.source.batches.on_training_thread,
        )
        # they read before the first batch is requested
        if setup.reading.num_workers:
            feed.fill(0, in_thread=False)
        return StepPass(
            feed,
            agreement,
            place=place,
            messages=StepMessages(setup),
            compares=steps.are_compared,
            num_ahead=setup.prefetch,
            profiler=setup.stats.profiler,
        )
    except BaseException as error:  # also a signal handler's
        if isinstance(error, Exception):
            report_failure(
                "its iter(loader) failed", error, setup.ranks, by=agreement
            )
        for opened in (agreement, executor):
            if opened is not None:
                opened.close()
        raise


def _steps_from(setup: LoaderSetup, start: LoaderState) -> _Steps:
    """Return the steps of this rank from a position on."""
    source = setup.source
    batches = source.batches
    stream = source.stream
    is_own_order = stream is None and batches.plan_of(start) is None
    if stream is not None:
        are_compared = stream.read_by_all
        has_digests = not setup.is_alone or len(stream.chunks) > 1
    else:
        # The user's sampler and costs may differ between ranks.
        are_compared = not source.split and (
            is_own_order or source.costs is not None
        )
        has_digests = are_compared and not setup.is_alone
    skips = setup.run.skips(start)
    steps = batches.steps(
        start, setup.rows.to_read, skips, compared=has_digests
    )
    # The lengths of a user's sampler may be estimates.
    num_steps = None if is_own_order else batches.known_steps(start)
    if num_steps is not None:
        num_steps -= start.steps + num_skipped_steps(
            num_steps, skips, start.steps
        )
    return _Steps(steps, num_steps, are_compared)


def _note_identity(setup: LoaderSetup, executor: Executor | None) -> None:
    """Set the identity of the data, when the first iterator of a run begins."""
    source = setup.source
    if setup.run.identity is not None or setup.verify is None or source.split:
        return
    if source.stream is not None:
        files = source.stream.stage.source.files_identity()
        setup.run.note_identity(identity_of_files(files))
        return
    reads = executor if isinstance(executor, WorkerExecutor) else setup.reading
    dataset = setup.dataloader.dataset
    setup.run.note_identity(identity_of_samples(dataset, reads.digests))


def _open_agreement(
    setup: LoaderSetup, start: LoaderState, *, same_data: bool
) -> Agreement:
    stream = setup.source.stream
    identity = identity_of_copies(setup.run.identity or {})
    position = {"epoch": start.epoch, "step": start.steps}
    terms = AgreementConfig(
        label={**setup.config, **identity, **position},
        name=f"{setup.config['data set']}, epoch {start.epoch}",
        timeout=setup.timeout,
        ends_must_agree=stream is None
        or setup.source.tail.refuses
        or (stream.whole_items and same_data),
        same_data=same_data,
        exit_when_lost=setup.exit_when_lost,
        first_step=start.steps,
    )
    return open_agreement(setup.ranks, terms)


def unequal_ends(setup: LoaderSetup, error: UnequalEndsError) -> Exception:
    """Return the error to raise if ranks have different numbers of batches."""
    source = setup.source
    if source.stream is not None:
        return error
    where = (
        f"at step {error.step} the data of global ranks {list(error.ended)} has ended and that of "
        f"{list(error.went_on)} has not"
    )
    if source.split:
        return SplitError(
            f"is_dataset_splitted=True, but {where}: ranks would part. Give every data rank as many rows, or leave "
            "is_dataset_splitted at False to have this loader split the data."
        )
    sampler = source.custom_sampler
    name = type(
        setup.dataloader.dataset if sampler is None else sampler
    ).__name__
    error.args = (
        f"{where}: the loader's {name} is not the same on all ranks. Seed it alike on all of them.",
    )
    return error
