"""How does one pass over the data go on, batch by batch?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from paddle_shard.agree import Agreement
from paddle_shard.errors import ArgumentError, BatchStructureError, PaddleShardError, SplitError, UnequalEndsError
from paddle_shard.loader.agreeing import open_agreement
from paddle_shard.loader.compat import asked_by_to_static
from paddle_shard.loader.stream_pass import AgreedPass, stream_outlook
from paddle_shard.place.field import FieldLayout
from paddle_shard.place.placer import BatchRows
from paddle_shard.plan.seeding import derive_key, derive_seed
from paddle_shard.plan.state import LoaderState
from paddle_shard.reading.chunk import Slice
from paddle_shard.reading.local_shuffle import MixedPass
from paddle_shard.reading.request import ReadRequest
from paddle_shard.samplers import IndexBatch
from paddle_shard.samplers.stream_batches import StreamBatch

if TYPE_CHECKING:
    from paddle_shard.loader.loader import ShardDataloader
    from paddle_shard.loader.stream_source import StreamSetup


class ShardIterator:
    """One pass over one epoch; any number of them are independent of each other.

    Attributes:
        epoch: The epoch, fixed when the iterator is made.
        start: Where in it the pass began.
    """

    def __init__(self, loader: ShardDataloader, *, look: bool = False) -> None:
        """Start the pass.

        Args:
            loader: Whose epoch it is.
            look: Only to see the first batch; a sampler of the user's own is left as it is.
        """
        self._loader = loader
        self.start = start = loader._run.start()
        self.epoch = start.epoch
        self._progress = loader._run.begin(start)
        self._closed = False
        self._pending: deque[_Pending] = deque()
        self._current: _Pending | None = None
        # Neither the feed nor the requests refer to this object, so that abandoning it ends its workers at once.
        if loader._source.stream is not None:
            self._pass: Any = _StreamFeed(loader, start, self._pending)
            return
        source = loader._source.batches
        batches = (source.untouched() if look else source).epoch(start.epoch, start)
        requests = _requests(loader, start, islice(batches, 1) if look else batches, self._pending)
        self._pass = loader._reading.start(requests)
        ranks = loader._agreeing_ranks
        if not look and len(ranks) > 1:
            self._pass = AgreedPass(self._pass, _agreement(loader, ranks, ends_must_agree=True))

    @property
    def step(self) -> int:
        """Batches of the epoch that were delivered so far, before a resume too."""
        return self._progress.steps

    def __iter__(self) -> ShardIterator:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            DataReadError: A sample could not be read, transformed or collated; of a stream, by any rank.
            BatchStructureError: The batch does not fit the meshes.
            PeerLostError: Another rank of a stream's readers died, is silent, or has left its loop.
        """
        if self._closed:
            raise StopIteration
        try:
            placed, pending = self._placed(next(self._pass))
        except StopIteration:
            self.close()
            self._loader._run.finished(self._progress)
            raise
        except UnequalEndsError as error:
            self.close()
            raise _unequal(self._loader, error) from None
        except BatchStructureError as error:
            self.close()
            raise BatchStructureError(f"epoch {self.epoch}, step {self.step}: {error}") from None
        except BaseException:
            self.close()
            raise
        self._current = pending
        self._loader._run.delivered(self._progress, pending.batch, pending.own_ids(self._loader._own_layout))
        return placed

    def peek(self) -> Any:
        """Return the first batch of a stream without delivering it."""
        return self._placed(self._pass.peek())[0]

    def _placed(self, batch: Any) -> tuple[Any, _Pending]:
        self._loader._check_split(batch)
        if not self._pending:
            raise BatchStructureError(
                "the DataLoader's own __iter__ yields more batches than it was asked for: it must go on to "
                "super().__iter__() once, and yield one batch for each of that."
            )
        pending = self._pending.popleft()
        if pending.rows is None:
            pending.rows = self._loader._item_rows(batch)
        return self._loader._placer.place(batch, pending.rows, self._loader._input_keys), pending

    @property
    def valid(self) -> Any:
        """bool[rows] for the batch that was delivered last: True where a row is real, False where padding.

        Placed as the rows of the batch's last field, so that `(metric * valid).sum() / valid.sum()` is exact.
        """
        if self._current is None:
            raise PaddleShardError("valid: no batch has been delivered yet; call next() first.")
        assert self._current.rows is not None
        return self._loader._placer.valid(self._current.valid(), self._current.rows)

    def close(self) -> None:
        """End its workers and threads; safe to call again. Abandoning the iterator does it too."""
        self._closed = True
        self._pass.close()

    def __enter__(self) -> ShardIterator:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_pass"):
            self.close()


@dataclass(slots=True)
class _Pending:
    """What was requested for a step."""

    batch: IndexBatch
    rows: BatchRows | None
    """Which rows are read; None: known when they are."""
    local: bool
    """The batch's rows are this rank's only."""
    indices: list[Any]

    def valid(self) -> Any:
        """bool, one for each row that is read."""
        assert self.rows is not None
        if self.local:
            return self.batch.valid(np.arange(len(self.rows.read)))
        if self.batch.num_rows != self.rows.num_rows:  # an item that is a whole batch has no padding
            return np.ones(len(self.rows.read), bool)
        return self.batch.valid(self.rows.read)

    def own_ids(self, layout: FieldLayout) -> list[Any]:
        """Return the samples of this process's slice, padding left out."""
        if self.rows is None or self.local or len(self.indices) != len(self.rows.read):
            return self.indices
        if not layout.on_mesh:
            return []
        mine, valid = self.rows.positions(layout), self.valid()
        if len(mine) == len(self.indices) and valid.all():
            return self.indices
        return [self.indices[position] for position in mine[valid[mine]].tolist()]


def _requests(
    loader: ShardDataloader, start: LoaderState, batches: Iterator[IndexBatch], pending: deque[_Pending]
) -> Iterator[ReadRequest]:
    """Yield what this rank reads at each step, and note it."""
    source = loader._source
    key = derive_seed("sample", loader.seed, start.epoch)
    step = start.steps
    several = loader._own_layout.num_data_ranks > 1
    for batch in batches:
        if source.item_is_batch:
            rows, indices = None, batch.take(np.zeros(1, np.int64))
        elif source.split:
            rows, indices = loader._split_rows(batch.num_rows), batch.take(np.arange(batch.num_rows))
        else:
            rows = loader._rows(batch.num_rows, batch.micro_size)
            indices = batch.take(rows.read)
        pending.append(_Pending(batch, rows, source.split, indices))
        yield ReadRequest(
            epoch=start.epoch,
            step=step,
            indices=indices,
            item_is_batch=source.item_is_batch,
            key=key,
            rows_are_split=several and (len(indices) < batch.num_rows or source.split),
        )
        step += 1


class _StreamFeed:
    """A stream's pass, which notes what each of its batches holds."""

    def __init__(self, loader: ShardDataloader, start: LoaderState, pending: deque[_Pending]) -> None:
        source = loader._source
        assert source.stream is not None
        self._pending, self._size = pending, source.batch_size
        plan = source.stream.batches.plan
        self._micro_size = 0 if plan is None else plan.micro_rows
        self._rows = None if plan is None else loader._stream_rows()
        num_steps = loader._run.num_steps_or_none()
        self._pass = AgreedPass(
            _reading(loader, source.stream, start),
            _agreement(loader, loader._agreeing_ranks, ends_must_agree=source.tail == "error"),
            outlook=stream_outlook(source.tail, num_steps),
            num_steps=None if num_steps is None else num_steps - start.steps,
        )

    def __next__(self) -> Any:
        return self._noted(next(self._pass))

    def peek(self) -> Any:
        return self._noted(self._pass.peek())

    def close(self) -> None:
        self._pass.close()

    def _noted(self, found: Slice) -> Any:
        items = self._size is None
        batch = StreamBatch(
            num_rows=0 if self._size is None else self._size,
            micro_size=self._micro_size,
            num_real=1 if self._size is None else self._size,
            real=found.real,
            sampler_state=found.state,
        )
        self._pending.append(_Pending(batch, None if items else self._rows, True, []))
        return found.batch


def _unequal(loader: ShardDataloader, error: UnequalEndsError) -> Exception:
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


def _agreement(loader: ShardDataloader, ranks: Sequence[int], *, ends_must_agree: bool) -> Agreement:
    return open_agreement(
        ranks,
        workers=loader._given.num_workers > 0,
        ends_must_agree=ends_must_agree,
        label=repr(loader),
        timeout=loader.timeout,
    )


def _reading(loader: ShardDataloader, stream: StreamSetup, start: LoaderState) -> Any:
    """Start reading a stream's slices from a position on."""
    mixed, begin = stream.batches.mixed, start
    if mixed is not None:  # begin at a window of batches
        assert stream.batches.plan is not None
        skip = start.steps % mixed[0]
        begin = replace(start, steps=start.steps - skip, samples=start.samples - skip * stream.batches.plan.batch_size)
    reading = loader._reading.start(stream.requests(begin), stream.places(), stream.num_workers)
    if mixed is None:
        return reading
    own = loader._own_layout
    rank = own.data_rank if own.on_mesh else 0
    return MixedPass(
        reading,
        loader._reading.gather,
        window=mixed[0],
        first_window=begin.steps // mixed[0],
        skip=skip,
        key=derive_key("local shuffle", loader.seed, start.epoch, rank),
    )


class LoaderCall:
    """What `loader()` returns: iterating starts a fresh pass every time, and so does a bare `next`.

    Trainers call the loader once and enumerate the result every epoch; `dist.to_static` takes one `next`.
    """

    def __init__(self, loader: ShardDataloader) -> None:
        self._loader = loader
        self._iterator: ShardIterator | None = None

    def __iter__(self) -> ShardIterator:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if asked_by_to_static():
            return describe(self._loader)
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = None
            raise


def describe(loader: ShardDataloader) -> Any:
    """Return one batch for `dist.to_static` to read shapes and placements from; the order does not move.

    Raises:
        BatchStructureError: Not what a static model takes: a list or dict of tensors, the label last.
    """
    loader._warn_if_batches_differ()
    try:
        batch = loader._first_batch()
    except StopIteration:
        raise ArgumentError("dist.to_static needs a batch to describe the inputs, but the loader has none.") from None
    if isinstance(batch, tuple):
        batch = list(batch)  # Paddle takes the label off with pop()
    if not isinstance(batch, list | dict) or len(batch) < 2:
        raise BatchStructureError(
            f"dist.to_static takes batches that are a list or a dict of at least two fields, the label last; "
            f"this loader's are {type(batch).__name__}"
            + (f" of {len(batch)}." if isinstance(batch, list | dict) else ".")
        )
    others = [path for path, leaf in _leaves(batch, "batch") if not isinstance(leaf, paddle.Tensor)]
    if others:
        raise BatchStructureError(
            f"dist.to_static takes tensors and lists of them only, but {', '.join(others)} are none. Take them "
            "out of the batch with a collate_fn, or give to_static an input_spec."
        )
    return batch


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and path == "batch":
        for key, child in value.items():
            yield from _leaves(child, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value):
            yield from _leaves(child, f"{path}[{number}]")
    else:
        yield path, value
