"""How is a pass begun: what is read for each step, and made of it?"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import paddle
import paddle.distributed as dist

from paddle_shard.agree import Agreement
from paddle_shard.errors import DataReadError, SplitError, UnequalEndsError
from paddle_shard.loader.agreeing import PREFETCH, PREFETCH_ALONE, open_agreement
from paddle_shard.loader.notes import StepNotes
from paddle_shard.loader.placed_pass import PlacedPass
from paddle_shard.loader.prefetch import DrawnAhead
from paddle_shard.loader.say_once import say_once
from paddle_shard.loader.source import Source
from paddle_shard.loader.stream_pass import AgreedPass, stream_outlook
from paddle_shard.place.field import FieldLayout
from paddle_shard.place.lengths import rows_of
from paddle_shard.place.placer import BatchRows, tensors
from paddle_shard.plan.seeding import derive_key, derive_seed
from paddle_shard.plan.state import LoaderState
from paddle_shard.reading.chunk import NO_STAND_IN, Slice
from paddle_shard.reading.digest import digest
from paddle_shard.reading.local_shuffle import MixedPass
from paddle_shard.reading.request import ReadRequest
from paddle_shard.replicas.split_check import first_batch
from paddle_shard.samplers import IndexBatch, UserBatches
from paddle_shard.samplers.stream_batches import StreamBatch

if TYPE_CHECKING:
    from paddle_shard.loader.loader import ShardDataloader
    from paddle_shard.loader.stream_setup import StreamSetup


@dataclass(slots=True)
class Pending:
    """What was requested for a step."""

    batch: IndexBatch
    rows: BatchRows | None
    """Which rows are read; None: known when they are."""
    local: bool
    """The batch's rows are this rank's only."""
    indices: list[Any] | npt.NDArray[np.int64]
    num_bytes: int = 0
    """Of the rows that were read."""
    layout: FieldLayout | None = None
    """Of the batch's last field."""
    row_shapes: Any = ()
    """(dtype, *shape of a row) of each tensor; with `pad_to`, those that have yet to be placed, by path."""
    digest: int = 0
    """Of the batches that a sampler of the user's own has drawn so far."""
    is_first: bool = False
    """Of its pass."""
    first: dict[str, Any] | None = None
    """What the ranks compare of the first batch, where each has rows of its own."""
    skipped: npt.NDArray[np.bool_] | None = None
    """Of the rows that are read, those whose sample could not be; None: there are none."""

    @property
    def all_real(self) -> bool:
        """Whether every row is; False also where that is not known."""
        return self.skipped is None and self.batch.all_real

    def valid(self) -> Any:
        """bool, one for each row that is read."""
        found = self._served()
        return found if self.skipped is None else found & ~self.skipped

    def _served(self) -> Any:
        assert self.rows is not None
        if self.local:
            return self.batch.valid(np.arange(len(self.rows.read)))
        if self.batch.num_rows != self.rows.num_rows:  # an item that is a whole batch has no padding
            return np.ones(len(self.rows.read), bool)
        return self.batch.valid(self.rows.read)

    def num_rows(self) -> int:
        """Return how many rows this process reads."""
        assert self.rows is not None
        return len(self.rows.read)

    def num_real_rows(self) -> int:
        """Return how many of the rows that this process reads are real."""
        return self.num_rows() if self.all_real else int(np.count_nonzero(self.valid()))

    def num_skipped(self) -> int:
        """Return how many of the rows that this process reads stand for samples that could not be."""
        return 0 if self.skipped is None else int(np.count_nonzero(self.skipped & self._served()))

    def own_ids(self, layout: FieldLayout) -> list[Any] | npt.NDArray[np.int64]:
        """Return the samples of this process's slice, padding left out."""
        if self.rows is None or self.local or len(self.indices) != len(self.rows.read):
            return self.indices
        if not layout.on_mesh:
            return []
        mine = self.rows.positions(layout)
        if not self.all_real:
            mine = mine[self.valid()[mine]]
        if len(mine) == len(self.indices):
            return self.indices
        if isinstance(self.indices, np.ndarray):
            return self.indices[mine]
        return [self.indices[position] for position in mine.tolist()]


def _requests(
    loader: ShardDataloader, start: LoaderState, batches: Iterator[IndexBatch], pending: deque[Pending]
) -> Iterator[ReadRequest]:
    """Yield what this rank reads at each step, and note it."""
    source = loader._source
    key = derive_seed("sample", loader.seed, start.epoch)
    step = start.steps
    several, drawn = loader._own_layout.num_data_ranks > 1, 0
    compared = len(loader._agreeing_ranks) > 1 and _draws_for_all(source)
    for batch in batches:
        if source.item_is_batch:
            rows, indices = None, batch.take(range(1))
        elif source.split:
            rows, indices = loader._split_rows(batch.num_rows), batch.take(range(batch.num_rows))
        else:
            rows = loader._rows(batch.num_rows, batch.micro_size)
            indices = batch.take(rows.asked)
            if compared:
                drawn = digest(batch.take(range(batch.num_rows)), drawn)
        pending.append(Pending(batch, rows, source.split, indices, digest=drawn, is_first=step == start.steps))
        split = several and (len(indices) < batch.num_rows or source.split) and loader._pad_to is None
        yield ReadRequest(start.epoch, step, indices, source.item_is_batch, key, split)
        step += 1


def index_pass(loader: ShardDataloader, start: LoaderState, look: bool) -> Any:
    """Start reading data that has an index; yields (placed batch, what was requested)."""
    pending: deque[Pending] = deque()
    source = loader._source.batches
    batches = (source.untouched() if look else source).epoch(start.epoch, start)
    requests = _requests(loader, start, islice(batches, 1) if look else batches, pending)

    def place(batch: Any) -> tuple[Any, Pending]:
        found = pending.popleft()
        skipped = [row for row, _ in reading.skipped.popleft()] if loader._on_error == "skip" else ()
        if skipped:
            found.skipped = np.isin(np.arange(len(found.indices)), skipped)
        return _placed(loader, batch, found, alone=alone)

    alone = look or len(loader._agreeing_ranks) == 1
    prefetch = 0 if look else loader._prefetch
    if not prefetch:
        reading, draw = loader._reading.start(requests), _draw_nothing
    else:
        drawn, given = DrawnAhead(requests), loader._given
        drawn.draw(given.prefetch_factor * given.num_workers)  # what the workers are asked for at first
        reading = loader._reading.start(drawn)

        def draw(count: int) -> None:
            drawn.draw(count + reading.num_ahead)

    read = (lambda found, made: made[1].digest) if _draws_for_all(loader._source) else None
    with _closed_on_failure(reading):
        if alone:
            return PlacedPass(reading, place, prefetch, loader._worth, draw)
        return _agreed(loader, start, reading, place, ends_must_agree=True, worth=loader._worth, draw=draw, digest=read)


def _draws_for_all(source: Source) -> bool:
    """Return whether each rank draws the global batches from a sampler of the user's own."""
    return isinstance(source.batches, UserBatches) and not source.split


@contextmanager
def _closed_on_failure(reading: Any) -> Iterator[None]:
    """Close a reading if a pass over it cannot be made, or a signal's handler raises before it is."""
    try:
        yield
    except BaseException:
        reading.close()
        raise


def _draw_nothing(count: int) -> None:
    """Leave the requests to the reading, which is on the caller's thread."""


def stream_pass(loader: ShardDataloader, start: LoaderState) -> AgreedPass:
    """Start reading a stream; yields (placed batch, what it holds)."""
    source = loader._source
    assert source.stream is not None
    num_steps = source.stream.batches.steps_left(start)
    reading = _reading(loader, source.stream, start, num_steps)
    with _closed_on_failure(reading):
        return _agreed(
            loader,
            start,
            reading,
            _StreamSteps(loader, start),
            ends_must_agree=source.tail == "error",
            outlook=stream_outlook(source.tail, num_steps),
            num_steps=num_steps,
            digest=(lambda found, made: found.digest) if source.stream.read_by_all else None,
        )


def _agreed(
    loader: ShardDataloader, start: LoaderState, reading: Any, prepare: Any, *, ends_must_agree: bool, **how: Any
) -> AgreedPass:
    """Return a pass that keeps in step with the other ranks; `how` it is read is for `AgreedPass`."""
    return AgreedPass(
        reading,
        _agreement(loader, start, ends_must_agree=ends_must_agree, same_data=how.get("digest") is not None),
        prepare=prepare,
        notes=StepNotes(
            holds_rows=loader._own_layout.on_mesh or not loader._source.split,
            split_check=loader._split_check,
            pad_to=loader._pad_to,
        ),
        in_bursts=not loader._given.num_workers,
        prefetch=loader._prefetch,
        **how,
    )


class _StreamSteps:
    """Makes of a slice what is delivered."""

    def __init__(self, loader: ShardDataloader, start: LoaderState) -> None:
        source = loader._source
        assert source.stream is not None
        self._loader, self._stream, self._size = loader, source.stream, source.batch_size
        self._start, self._pads = start, source.tail == "pad"
        self._local_rows = (start.sampler or {}).get("rows", 0)
        plan = source.stream.batches.plan
        self._micro_size = 0 if plan is None else plan.micro_rows
        self._rows = None if plan is None else loader._stream_rows()
        self._begun = False
        self._first: Any = None
        """Of a rank that has batches of its own."""

    def __call__(self, found: Slice) -> tuple[Any, Pending] | None:
        if found.batch is None and not (self._pads and found.empty):  # only where the end was known
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
            return None  # gone on from behind the end, most likely, where there is nothing to deliver
        made = StreamBatch(
            num_rows=self._size or 0,
            micro_size=self._micro_size,
            num_real=1 if self._size is None else self._size,
            real=found.real,
            sampler_state=found.state,
        )
        first, self._begun = not self._begun, True
        return _placed(self._loader, batch, Pending(made, self._rows, True, [], is_first=first, skipped=found.skipped))

    def _own(self, batch: Any) -> Any:
        """Return a rank's own batch; where its data has ended, its first one of the epoch again."""
        if batch is None:
            if self._first is None:
                self._first = self._read_first()
            return self._first
        if self._first is None and self._start.steps == 0:
            self._first = batch
        return batch

    def _read_first(self) -> Any:
        request, why = self._stream.first_item(self._start.epoch, self._local_rows), "it has none"
        reading = self._loader._reading.start(iter([[request]]), [np.arange(1)], 0)
        try:
            found = next(reading).batch
        except (DataReadError, StopIteration) as error:
            found, why = None, str(error)
        finally:
            reading.close()
        if found is None:
            raise DataReadError(NO_STAND_IN.format(why))
        return found


def _placed(loader: ShardDataloader, batch: Any, pending: Pending, *, alone: bool = False) -> tuple[Any, Pending]:
    """Return a batch placed; with `pad_to` unless `alone`, when the other ranks have said how long their rows are."""
    if pending.is_first and loader._split_check is not None:
        pending.first = first_batch((leaf.numpy() for leaf in tensors(batch)), loader._run.num_steps_or_none())
    if pending.rows is None:
        pending.rows = loader._item_rows(batch)
    pending.row_shapes, pending.num_bytes = _measured(tuple((tensor.dtype, *tensor.shape) for tensor in tensors(batch)))
    pad_to = loader._pad_to
    placed, pending.layout, apart = loader._placer.place(batch, pending.rows, loader._input_keys, pad_to)
    if pad_to is not None:
        pending.row_shapes = rows_of(placed)
        if alone:
            placed = pad_to.finished(placed, {dist.get_rank(): pending.row_shapes})
    elif apart:
        pending.row_shapes = [*pending.row_shapes, *apart]
    if pending.is_first and isinstance(batch, Mapping) and len(placed) < len(batch):
        left_out = [key for key in batch if key not in placed]
        say_once("input_keys=%s: the keys %s of the batch are left out.", repr(list(placed)), repr(left_out))
    return placed, pending


@lru_cache(maxsize=64)
def _measured(shapes: tuple[Any, ...]) -> tuple[Sequence[Any], int]:
    """Return (dtype, *shape of a row) of each tensor, and the bytes of all, from (dtype, *shape) of each."""
    num_bytes = sum(math.prod(shape) * _element_size(dtype) for dtype, *shape in shapes)
    return [[str(dtype).rsplit(".", 1)[-1], *shape[1:]] for dtype, *shape in shapes], num_bytes


@cache
def _element_size(dtype: Any) -> int:
    return int(paddle.empty([1], dtype).element_size())


def unequal_ends(loader: ShardDataloader, error: UnequalEndsError) -> Exception:
    """Return the error for data with an index, whose ranks have not the same number of batches."""
    if loader._source.stream is not None:
        return error
    where = f"at step {error.step} the data of global ranks {list(error.ended)} has ended and that of "
    where += f"{list(error.went_on)} has not"
    if loader._source.split:
        return SplitError(
            f"is_dataset_splitted=True, but {where}: ranks would part. Give every data rank as many rows, or leave "
            "is_dataset_splitted at False to have this loader split the data."
        )
    sampler = type(loader._source.custom_sampler).__name__
    error.args = (f"{where}: the loader's {sampler} is not the same on all ranks. Seed it alike on all of them.",)
    return error


def _least_ahead(loader: ShardDataloader) -> int:
    """Return how many steps are read ahead at least where ranks agree on them."""
    if loader._prefetch and not loader._worth:  # as the user has said
        return loader._prefetch
    return PREFETCH if loader._given.num_workers else PREFETCH_ALONE


def _agreement(loader: ShardDataloader, start: LoaderState, *, ends_must_agree: bool, same_data: bool) -> Agreement:
    stream = loader._source.stream
    return open_agreement(
        loader._agreeing_ranks,
        prefetch=_least_ahead(loader),
        ends_must_agree=ends_must_agree,
        facts={**loader._facts, "epoch": start.epoch, "step": start.steps},
        name=f"{type(loader.dataset).__name__}, epoch {start.epoch}",
        timeout=loader.timeout,
        on_lost=loader._on_lost,
        same_data=same_data,
        ends_apart=None if stream is None else stream.ends_apart,
        first_step=start.steps,
    )


def _reading(loader: ShardDataloader, stream: StreamSetup, start: LoaderState, num_steps: int | None) -> Any:
    """Start reading a stream's slices from a position on."""
    mixed = stream.batches.mixed
    compared = len(loader._agreeing_ranks) > 1 or len(stream.chunks) > 1
    if mixed is None:
        return loader._reading.start(stream.requests(start, compared), stream.places(), stream.num_workers)
    assert stream.batches.plan is not None  # it begins at a window of batches
    skip = start.steps % mixed[0]
    begin = replace(start, steps=start.steps - skip, samples=start.samples - skip * stream.batches.plan.batch_size)
    own = loader._own_layout
    return MixedPass(
        loader._reading.start(stream.requests(begin, compared), stream.places(), stream.num_workers),
        loader._reading.gather,
        loader._reading.even,
        window=mixed[0],
        first_window=begin.steps // mixed[0],
        skip=skip,
        num_steps=None if num_steps is None else num_steps + skip,
        key=derive_key("local shuffle", loader.seed, start.epoch, own.data_rank if own.on_mesh else 0),
    )
