"""How does a pass begin: what does it read for each step, and what does it make of it?"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from paddle_shard.agree import Agreement, AloneAgreement
from paddle_shard.comm.agreeing import PREFETCH, PREFETCH_ALONE, open_agreement
from paddle_shard.comm.replicas import Following, Leading
from paddle_shard.delivery.described import DescribedPass, DescribedStreamPass
from paddle_shard.delivery.notes import StepNotes
from paddle_shard.delivery.pending import Pending
from paddle_shard.delivery.placing import placed
from paddle_shard.delivery.prefetch import DrawnAhead
from paddle_shard.delivery.setup import PassSetup
from paddle_shard.delivery.step_pass import StepPass, stream_readiness
from paddle_shard.errors import DataReadError, SplitError, UnequalEndsError
from paddle_shard.inputs.source import Source
from paddle_shard.inputs.stream_batches import StreamBatch
from paddle_shard.inputs.stream_setup import StreamSetup
from paddle_shard.plan.seeding import derive_key, derive_seed
from paddle_shard.plan.state import LoaderState
from paddle_shard.reading.chunk import NO_STAND_IN, Slice
from paddle_shard.reading.digest import digest
from paddle_shard.reading.follower import Sharing
from paddle_shard.reading.local_shuffle import MixedPass
from paddle_shard.reading.passes import Pass
from paddle_shard.reading.request import ReadRequest
from paddle_shard.samplers import DealtBatch, IndexBatch, UserBatches
from paddle_shard.samplers.left_out import without


def _requests(
    setup: PassSetup, start: LoaderState, batches: Iterator[IndexBatch], pending: deque[Pending]
) -> Iterator[ReadRequest]:
    """Yield what this rank reads at each step, and append the step to `pending`."""
    source = setup.source
    key = derive_seed("sample", setup.options.seed, start.epoch)
    step = start.steps
    several, drawn = setup.own_layout.num_data_ranks > 1, 0
    compared = len(setup.agreeing_ranks) > 1 and _draws_for_all(source)
    for batch in without(batches, setup.run.skips, start.epoch, start.samples):
        step += batch.passed[0]
        if source.item_is_batch:
            rows, indices = None, batch.take(range(1))
        elif source.split:
            rows, indices = setup.rows.of_split(batch.num_rows), batch.take(range(batch.num_rows))
        else:
            rows = setup.rows.of(batch.num_rows, batch.micro_size)
            batch = source.dealt(batch)
            indices = batch.take(rows.asked)
            if compared and isinstance(batch, DealtBatch):
                drawn = zlib.crc32(batch.order.tobytes(), drawn)
            if compared and isinstance(source.batches, UserBatches):
                drawn = digest(batch.take(range(batch.num_rows)), drawn)
        first = step == start.steps
        pending.append(Pending(batch, rows, source.split, indices, digest=drawn, is_first=first, step=step))
        pads = setup.pad_to is not None
        split = several and (len(indices) < batch.num_rows or source.split) and not pads
        yield ReadRequest(start.epoch, step, indices, source.item_is_batch, key, split, pads)
        step += 1


def index_pass(setup: PassSetup, start: LoaderState, look: bool) -> StepPass:
    """Return a pass over data that has an index; it yields (placed batch, `Pending`)."""
    pending: deque[Pending] = deque()
    source = setup.source.batches
    batches = (source.untouched() if look else source).epoch(start.epoch, start)
    requests = _requests(setup, start, islice(batches, 1) if look else batches, pending)

    def place(batch: Any) -> tuple[Any, Pending]:
        found = pending.popleft()
        skipped = [row for row, _ in reading.skipped.popleft()] if setup.options.skip_errors else ()
        if skipped:
            found.skipped = np.isin(np.arange(len(found.indices)), skipped)
        return placed(setup, batch, found)

    end, sharing = (None, None) if look else _shared(setup)
    prefetch = 0 if look or (isinstance(end, Following) and not setup.dataloader.num_workers) else setup.prefetch
    if _reads_nothing(setup):
        reading, draw, prefetch = DescribedPass(requests, setup.described.example), _draw_nothing, 0
    elif not prefetch:
        reading, draw = setup.reading.start(requests, sharing), _draw_nothing
    else:
        drawn, given = DrawnAhead(requests), setup.dataloader
        drawn.draw(given.prefetch_factor * given.num_workers)  # the first requests that the workers get
        reading = setup.reading.start(drawn, sharing)

        def draw(count: int) -> None:
            drawn.draw(count + reading.num_ahead)

    compared = (lambda found, made: made[1].digest) if _draws_for_all(setup.source) else None
    with _closed_on_failure(reading):
        return _step_pass(
            setup,
            start,
            reading,
            place,
            alone=look,
            ends_must_agree=True,
            digest=compared,
            end=end,
            prefetch=prefetch,
            if_worth_it=setup.if_worth_it,
            draw=draw,
        )


def _reads_nothing(setup: PassSetup) -> bool:
    """Return whether this rank holds none of the data, and knows from the user what the batches are like."""
    return setup.described is not None and not setup.own_layout.on_mesh


def _shared(setup: PassSetup) -> tuple[Leading | Following | None, Sharing]:
    """Return this rank's end of the connection to those that it shares a reader with, and how its pass uses it."""
    end = setup.replicas.open(setup.options.timeout)
    return end, setup.replicas.sharing(end)


def _draws_for_all(source: Source) -> bool:
    """Return whether each rank draws the whole global batches from the user's own sampler, or deals their rows."""
    return not source.split and (isinstance(source.batches, UserBatches) or source.costs is not None)


@contextmanager
def _closed_on_failure(reading: Any) -> Iterator[None]:
    """Close a reading if no pass over it can be made, or if a signal handler raises before the pass is made."""
    try:
        yield
    except BaseException:
        reading.close()
        raise


def _draw_nothing(count: int) -> None:
    """Draw nothing: the reading draws the requests itself, on the caller's thread."""


def stream_pass(setup: PassSetup, start: LoaderState) -> StepPass:
    """Return a pass over a stream; it yields (placed batch, `Pending`)."""
    source = setup.source
    assert source.stream is not None
    num_steps = source.stream.batches.steps_left(start)
    end, sharing = _shared(setup)
    reading = _reading(setup, source.stream, start, num_steps, sharing)
    with _closed_on_failure(reading):
        return _step_pass(
            setup,
            start,
            reading,
            _StreamSteps(setup, start),
            ends_must_agree=source.tail.refuses,
            readiness=stream_readiness(source.tail, num_steps),
            num_steps=num_steps,
            digest=(lambda found, made: found.digest) if source.stream.read_by_all else None,
            end=end,
            prefetch=setup.prefetch,
        )


def _step_pass(
    setup: PassSetup,
    start: LoaderState,
    reading: Pass,
    prepare: Any,
    *,
    alone: bool = False,
    ends_must_agree: bool,
    digest: Any = None,
    end: Leading | Following | None = None,
    **how: Any,
) -> StepPass:
    """Return a pass that keeps in step with the other ranks, if there are any; `how` goes to `StepPass`."""
    alone = alone or len(setup.agreeing_ranks) == 1
    agreement: Agreement | AloneAgreement = AloneAgreement()
    if not alone:
        same_data = digest is not None
        agreement = _agreement(setup, start, ends_must_agree=ends_must_agree, same_data=same_data)
        if end is not None:
            end.begin(setup.agreeing_ranks, agreement)
    notes, follows = None, isinstance(end, Following)
    if not alone or setup.pad_to is not None:
        notes = StepNotes(
            holds_rows=setup.own_layout.on_mesh or not setup.source.split,
            split=setup.source.split,
            batch_check=None if alone else setup.batch_check,
            pad_to=setup.pad_to,
        )
    return StepPass(
        reading,
        agreement,
        prepare=prepare,
        notes=notes,
        in_bursts=not setup.dataloader.num_workers and not follows,
        shares=end is not None,
        follows=follows,
        digest=None if alone else digest,
        **how,
    )


class _StreamSteps:
    """Turns a stream's slices into what is delivered."""

    def __init__(self, setup: PassSetup, start: LoaderState) -> None:
        source = setup.source
        assert source.stream is not None
        self._setup, self._stream, self._size = setup, source.stream, source.batch_size
        self._start, self._pads = start, source.tail.pads
        self._local_rows = (start.sampler or {}).get("rows", 0)
        plan = source.stream.batches.plan
        self._micro_size = 0 if plan is None else plan.micro_rows
        self._rows = None if plan is None else setup.rows.of_stream()
        self._begun = 0
        self._first: Any = None
        """The first batch of the epoch, if the rank has batches of its own."""

    def __call__(self, found: Slice) -> tuple[Any, Pending] | None:
        if found.batch is None and not (self._pads and found.empty):  # only possible if the end was known
            raise DataReadError(
                "a part of the stream has fewer samples than its source said it would have, and tail='drop' does not "
                "make rows up. Count the source again (its index may be of older files)."
            )
        batch = found.batch
        try:
            if self._rows is None and self._pads:
                batch = self._own(batch)
            elif batch is None:
                raise DataReadError(NO_STAND_IN.format(found.why or "every part is empty"))
        except DataReadError:
            if self._start.samples == 0:
                raise
            return None  # most likely the pass was resumed past the end, so there is nothing to deliver
        made = StreamBatch(
            num_rows=self._size or 0,
            micro_size=self._micro_size,
            num_real=1 if self._size is None else self._size,
            real=found.real,
            sampler_state=found.state,
        )
        first, step = not self._begun, self._start.steps + self._begun
        self._begun += 1
        pending = Pending(made, self._rows, True, [], is_first=first, step=step, skipped=found.skipped)
        return placed(self._setup, batch, pending)

    def _own(self, batch: Any) -> Any:
        """Return a rank's own batch; if the rank's data has ended, return its first batch of the epoch again."""
        if batch is None:
            if self._first is None:
                self._first = self._read_first()
            return self._first
        if self._first is None and self._start.steps == 0:
            self._first = batch
        return batch

    def _read_first(self) -> Any:
        request, why = self._stream.first_item(self._start.epoch, self._local_rows), "it has none"
        reading = self._setup.reading.start(iter([[request]]), lambda _=None: [np.arange(1)], 0)
        try:
            found = next(reading).batch
        except (DataReadError, StopIteration) as error:
            found, why = None, str(error)
        finally:
            reading.close()
        if found is None:
            raise DataReadError(NO_STAND_IN.format(why))
        return found


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
    what = type(setup.dataloader.dataset if sampler is None else sampler).__name__
    error.args = (f"{where}: the loader's {what} is not the same on all ranks. Seed it alike on all of them.",)
    return error


def _least_ahead(setup: PassSetup) -> int:
    """Return the least number of steps to read ahead if ranks agree on them."""
    if setup.prefetch and not setup.if_worth_it:  # the user chose it
        return setup.prefetch
    return PREFETCH if setup.dataloader.num_workers else PREFETCH_ALONE


def _agreement(setup: PassSetup, start: LoaderState, *, ends_must_agree: bool, same_data: bool) -> Agreement:
    stream = setup.source.stream
    return open_agreement(
        setup.agreeing_ranks,
        prefetch=_least_ahead(setup),
        ends_must_agree=ends_must_agree,
        facts={**setup.facts, "epoch": start.epoch, "step": start.steps},
        name=f"{type(setup.dataloader.dataset).__name__}, epoch {start.epoch}",
        timeout=setup.options.timeout,
        on_lost=setup.options.on_lost,
        same_data=same_data,
        ends_apart=None if stream is None else stream.ends_apart,
        first_step=start.steps,
    )


def _reading(setup: PassSetup, stream: StreamSetup, start: LoaderState, num_steps: int | None, sharing: Sharing) -> Any:
    """Start to read a stream's slices at a position."""
    if _reads_nothing(setup):
        return DescribedStreamPass(setup.described.example)
    mixed = stream.batches.mixed
    compared = len(setup.agreeing_ranks) > 1 or len(stream.chunks) > 1
    if mixed is None:
        return setup.reading.start(stream.requests(start, compared), stream.places, stream.num_workers, sharing)
    assert stream.batches.plan is not None
    # Rows are mixed in windows of batches, so reading begins at the start of a window.
    skip = start.steps % mixed[0]
    begin = replace(start, steps=start.steps - skip, samples=start.samples - skip * stream.batches.plan.batch_size)
    own = setup.own_layout
    return MixedPass(
        setup.reading.start(stream.requests(begin, compared), stream.places, stream.num_workers, sharing),
        setup.reading.gather,
        setup.reading.even,
        window=mixed[0],
        first_window=begin.steps // mixed[0],
        skip=skip,
        num_steps=None if num_steps is None else num_steps + skip,
        key=derive_key("local shuffle", setup.options.seed, start.epoch, own.data_rank if own.on_mesh else 0),
    )
