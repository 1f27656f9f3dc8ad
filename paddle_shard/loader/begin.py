"""How does a pass begin: what does it read for each step, and what does it make of it?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from paddle_shard.core.checks import length_or_none
from paddle_shard.data.identity import identity_of_files, identity_of_samples, in_words
from paddle_shard.data.samplers import PlanBatches, UserBatches
from paddle_shard.errors import ArgumentError, SplitError, UnequalEndsError
from paddle_shard.loader.notes import StepNotes
from paddle_shard.loader.placing import (
    PassSetup,
    Placing,
    note_summary,
    placed_of_stream,
)
from paddle_shard.loader.source import knows_no_rank
from paddle_shard.loader.step_pass import Feed, StepPass
from paddle_shard.plan.shard_plan import num_skipped
from paddle_shard.plan.state import LoaderState
from paddle_shard.ranks.agreeing import gather_of, open_agreement, tell_failed
from paddle_shard.ranks.agreement import Agreement
from paddle_shard.ranks.reports import Terms
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.executor import WorkerExecutor


def begin(setup: PassSetup, start: LoaderState) -> StepPass:
    """Return a pass from a position on; it yields placed batches."""
    source, stream, alone = (
        setup.source,
        setup.source.stream,
        len(setup.agreeing_ranks) == 1,
    )
    reading, replicas = setup.reading, setup.replicas
    run = setup.run
    _settle_draws(setup, start)
    if isinstance(source.batches, PlanBatches) and source.batches.data is not None:
        _check_length(source.batches)
    look = None if setup.batch_check is None else partial(note_summary, setup, start)
    prepare: Callable[[Batch], Batch] = Placing(setup, look)
    if stream is None:
        compares = not source.split and (
            source.batches.plan_of(start) is None or source.costs is not None
        )
        skips = run.skips(start)
        steps = source.batches.steps(
            start, setup.rows.to_read, skips, compared=compares and not alone
        )
        plan = source.batches.plan_of(start)
        num_steps = (
            None
            if plan is None
            else plan.num_steps - num_skipped(plan.num_steps, skips, start.steps)
        )
    else:
        compares = stream.read_by_all
        num_steps = stream.known_steps(start)
        steps = stream.steps(start, compared=not alone or len(stream.chunks) > 1)
    if num_steps is not None:
        num_steps -= start.steps
    if stream is not None:
        prepare = partial(placed_of_stream, setup, prepare, start, num_steps)

    # Workers are forked here, before the agreement connects to the other ranks in a thread of its own.
    core = None if replicas.follows else reading.start()
    executor = core
    agreement: Agreement | None = None
    try:
        if (
            run.identity is None
            and setup.options.verify is not None
            and not source.split
        ):
            digests = (
                core.digests if isinstance(core, WorkerExecutor) else reading.digests
            )
            dataset = setup.options.dataloader.dataset
            run.note_identity(
                identity_of_samples(
                    dataset, source.batches.plan_of(LoaderState()), digests
                )
                if stream is None
                else identity_of_files(stream.stage.source.files_identity())
            )
        if not alone:
            agreement = _agreement(
                setup,
                start,
                ends_must_agree=stream is None
                or source.tail.refuses
                or (stream.whole_items and compares),
                same=compares,
            )
            executor = replicas.shared(core, agreement)
        assert executor is not None
        feed = Feed(
            steps,
            executor,
            num_steps,
            on_training_thread=source.batches.on_training_thread,
        )
        if (
            reading.num_workers
        ):  # they begin to read before the first batch is asked for
            feed.fill(0, in_thread=False)
        return StepPass(
            feed,
            agreement,
            prepare=prepare,
            num_steps=num_steps,
            notes=None if alone and setup.placer.pad_to is None else StepNotes(setup),
            compares=compares,
            num_ahead=setup.prefetch,
            profiler=setup.stats.profiler,
        )
    except BaseException as error:  # also a signal handler's
        if isinstance(error, Exception):
            tell_failed(
                "its iter(loader) failed", error, setup.agreeing_ranks, by=agreement
            )
        for begun in (agreement, executor):
            if begun is not None:
                begun.close()
        raise


def _check_length(batches: PlanBatches) -> None:
    """Refuse data that has another length than when the loader was made: some would be left out, or not be there."""
    name, now, then = (
        type(batches.data).__name__,
        length_or_none(batches.data),
        batches.plan.num_samples,
    )
    if now not in (None, then):
        raise ArgumentError(
            f"the {name} had {then} samples when the loader was made, and has {now} now. Make a new loader of it."
        )


def _settle_draws(setup: PassSetup, start: LoaderState) -> None:
    """Find out, once, whether the sampler of data that is split already draws for its data rank alone.

    All ranks seed it alike at first. If it yields the same on all data ranks, it does not know its rank, as the
    PKSampler of PaddleClas: what it draws is meant for one rank. If not, it cuts its rows out of a common order.
    (Paddle's plain ones yield each sample once: if it is the same on two data ranks, the data is not split after all.)
    """
    batches, own, ranks = setup.source.batches, setup.own_layout, setup.agreeing_ranks
    if not (setup.source.split and isinstance(batches, UserBatches)) or knows_no_rank(
        batches.batch_sampler
    ):
        return
    if batches.draws_for or own.num_data_ranks == 1 or len(ranks) == 1:
        return
    told = set(
        gather_of(
            ranks,
            batches.first_draw(start.epoch),
            setup.options.timeout,
            "iter(loader)",
        )
    )
    if told != {""}:
        batches.draws_for.append((own.data_rank,) if len(told) == 1 else ())


def _agreement(
    setup: PassSetup, start: LoaderState, *, ends_must_agree: bool, same: bool
) -> Agreement:
    facts = {**setup.facts, **in_words(setup.run.identity or {})}
    terms = Terms(
        label={**facts, "epoch": start.epoch, "step": start.steps},
        name=f"{setup.facts['data set']}, epoch {start.epoch}",
        timeout=setup.options.timeout,
        ends_must_agree=ends_must_agree,
        same_data=same,
        exit_when_lost=setup.options.on_lost == "exit",
        first_step=start.steps,
    )
    return open_agreement(setup.agreeing_ranks, terms)


def unequal_ends(setup: PassSetup, error: UnequalEndsError) -> Exception:
    """Return the error to raise if ranks have different numbers of batches; for data with an index, make another."""
    if setup.source.stream is not None:
        return error
    where = f"at step {error.step} the data of global ranks {list(error.ended)} has ended and that of "
    where += f"{list(error.went_on)} has not"
    if setup.source.split:
        return SplitError(
            f"is_dataset_splitted=True, but {where}: ranks would part. Give every data rank as many rows, or leave "
            "is_dataset_splitted at False to have this loader split the data."
        )
    sampler = setup.source.custom_sampler
    what = type(
        setup.options.dataloader.dataset if sampler is None else sampler
    ).__name__
    error.args = (
        f"{where}: the loader's {what} is not the same on all ranks. Seed it alike on all of them.",
    )
    return error
