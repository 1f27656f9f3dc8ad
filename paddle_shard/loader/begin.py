"""Beginning an epoch iterator: its steps, the executor that reads them, and the agreement of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from paddle_shard.data.identity import (
    identity_of_copies,
    identity_of_files,
    identity_of_samples,
)
from paddle_shard.loader.placing import Placing, place_stream
from paddle_shard.loader.setup import LoaderSetup
from paddle_shard.loader.step_messages import StepMessages
from paddle_shard.loader.step_pass import Feed, StepPass
from paddle_shard.plan.shard_plan import num_skipped_steps
from paddle_shard.plan.state import LoaderState
from paddle_shard.ranks.agreeing import open_agreement, report_failure
from paddle_shard.ranks.agreement import Agreement
from paddle_shard.ranks.reports import AgreementConfig
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.executor import Executor, WorkerExecutor
from paddle_shard.reading.source import Source


def begin(setup: LoaderSetup, start: LoaderState) -> StepPass:
    """Return the steps from a position on; it yields placed batches."""
    source = setup.source
    are_compared = _are_compared(source, start)
    num_steps = _num_steps(setup, start)
    steps = source.batches.steps(
        start,
        setup.rows.to_read,
        setup.run.skips(start),
        compared=_have_digests(setup, are_compared),
    )
    place: Callable[[Batch], Batch] = Placing(setup, start)
    if source.stream is not None:
        place = partial(
            place_stream,
            policy=source.tail,
            is_begun=start.samples > 0,
            num_steps=num_steps,
            place=place,
        )

    # Workers are forked before the agreement connects to the other ranks in a thread of its own.
    reader = None if setup.replicas.follows else setup.reading.start()
    executor = reader
    agreement: Agreement | None = None
    try:
        _note_identity(setup, reader)
        if not setup.is_alone:
            agreement = _open_agreement(setup, start, same_data=are_compared)
            executor, place = setup.replicas.shared(reader, agreement, place)
        assert executor is not None
        feed = Feed(
            steps,
            executor,
            num_steps,
            on_training_thread=source.batches.on_training_thread,
        )
        # they read before the first batch is requested
        if setup.reading.num_workers:
            feed.fill(0, in_thread=False)
        return StepPass(
            feed,
            agreement,
            place=place,
            messages=StepMessages(setup),
            compares=are_compared,
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


def _are_compared(source: Source, start: LoaderState) -> bool:
    """Return whether the ranks compare digests of what they have read or drawn."""
    if source.stream is not None:
        return source.stream.read_by_all
    # The user's sampler and costs may differ between ranks.
    may_differ = (
        source.batches.plan_of(start) is None
        or source.batches.balance_rows is not None
    )
    return may_differ and not source.split


def _have_digests(setup: LoaderSetup, are_compared: bool) -> bool:
    """Return whether the steps have digests, also for the workers of one rank that read the same stream."""
    stream = setup.source.stream
    if stream is None:
        return are_compared and not setup.is_alone
    return not setup.is_alone or len(stream.chunks) > 1


def _num_steps(setup: LoaderSetup, start: LoaderState) -> int | None:
    """Return the number of steps from a position on; None: the end shows when it comes."""
    source = setup.source
    if source.stream is None and source.batches.plan_of(start) is None:
        return None  # the lengths of a user's sampler may be estimates
    num_steps: int | None = source.batches.known_steps(start)
    if num_steps is None:
        return None
    skips = setup.run.skips(start)
    skipped = num_skipped_steps(num_steps, skips, start.steps)
    return num_steps - start.steps - skipped


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
