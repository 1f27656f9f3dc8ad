"""Placing: what a pass knows of its loader, and how it places a batch that was read."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import paddle
import paddle.io

from paddle_shard.core.forks import no_fork
from paddle_shard.core.trees import leaves, named_leaves
from paddle_shard.data.samplers import UserBatches
from paddle_shard.errors import BatchStructureError, DataReadError, UnequalEndsError
from paddle_shard.loader.options import LoaderOptions
from paddle_shard.loader.stats import LoaderStats
from paddle_shard.placement.field import FieldLayout
from paddle_shard.placement.local_tensor import TensorMaker
from paddle_shard.placement.placer import BatchPlacer
from paddle_shard.placement.rows import BatchRows
from paddle_shard.plan.partition import Rows, nearest_multiples
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.step import Ids, Step, as_ids
from paddle_shard.ranks.batch_check import FEW_STEPS, BatchCheck, summary
from paddle_shard.ranks.replicas import Replicas
from paddle_shard.reading.batch import NO_STAND_IN, Batch
from paddle_shard.reading.digest import WHOLE, digest
from paddle_shard.reading.executor import MAKING_TENSORS, read_errors
from paddle_shard.reading.reading import Reading
from paddle_shard.reading.source import Source
from paddle_shard.reading.tensors import as_array, becomes_tensor
from paddle_shard.run.run import Run


class LoaderRows:
    """The rows of batches of any size, for one loader."""

    def __init__(
        self, source: Source, layouts: Sequence[FieldLayout], own_layout: FieldLayout
    ) -> None:
        """Set up.

        Args:
            source: The order of the loader.
            layouts: Layouts of all fields.
            own_layout: Layout of the field whose rows this rank reads.
        """
        self._source = source
        self._layouts = layouts
        self._own = own_layout
        self._of_samples = lru_cache(maxsize=64)(
            partial(_rows_of_samples, source, layouts)
        )

    def to_read(self, num_rows: int, micro_size: int) -> Rows | range:
        """Return which rows of a global batch this rank reads: the order's `RowsOf`."""
        if self._source.item_is_batch:
            return range(1)
        if self._source.split:
            return range(num_rows)
        return self._of_samples(num_rows, micro_size).to_read

    def of(self, step: Step, value: Any, placer: BatchPlacer) -> BatchRows:
        """Return the rows of a batch that was read for a step, which the placer will place.

        Raises:
            BatchStructureError: The batch was read whole and cannot be split evenly.
        """
        source, own, num_rows = self._source, self._own, step.num_rows
        if not (source.item_is_batch or source.split):
            return self._of_samples(num_rows, step.micro_size)
        found = (
            placer.num_rows(value) if source.item_is_batch else num_rows
        )  # None: no field of it has rows
        if source.split:
            num_rows = 1 if found is None else found
            read = None if own.on_mesh else np.arange(num_rows)
            return BatchRows(
                num_rows * own.num_data_ranks, None, [own], read=read, apart=True
            )
        if (
            found is None
            and own.num_data_ranks > 1
            and not any(map(becomes_tensor, leaves(value)))
        ):
            raise BatchStructureError(
                f"an item is a whole batch, of which each data rank gets its rows, but {value!r:.100} has no "
                f"array or tensor with rows: each of {own.num_data_ranks} data ranks would get all of it. If an item "
                "is a sample, let a DataLoader make batches: paddle.io.DataLoader(what is given, batch_size=rows of "
                "all ranks)."
            )
        unit = (
            math.lcm(*(layout.num_data_ranks for layout in self._layouts))
            * source.accumulation
        )
        num_rows = unit if found is None else found
        if num_rows % unit:
            raise BatchStructureError(
                f"an item of the data set is a global batch of {num_rows} rows, which cannot be split evenly by "
                f"{unit}. Nearest sizes that can: {' or '.join(map(str, nearest_multiples(num_rows, unit)))}."
            )
        return BatchRows(
            num_rows,
            num_rows // source.accumulation,
            self._layouts,
            read=np.arange(num_rows),
        )


def _rows_of_samples(
    source: Source, layouts: Sequence[FieldLayout], num_rows: int, micro_size: int
) -> BatchRows:
    """Return the rows of a global batch of samples."""
    apart = isinstance(source.custom_sampler, paddle.io.DistributedBatchSampler)
    read = None if source.stream is None else source.stream.read_rows()
    return BatchRows(num_rows, micro_size, layouts, read=read, apart=apart)


@dataclass(frozen=True, kw_only=True)
class PassSetup:
    """A loader's settings when a pass begins, and the objects that all its passes share."""

    options: LoaderOptions
    """Their `dataloader` is the user's, or one made for the given stream; it is only read and never changed."""
    source: Source
    placer: BatchPlacer
    own_layout: FieldLayout
    """Layout of the field whose rows this rank reads."""
    rows: LoaderRows
    reading: Reading
    """The settings of the DataLoader, used to read."""
    run: Run
    stats: LoaderStats
    agreeing_ranks: tuple[int, ...]
    facts: Mapping[str, Any]
    """Settings that must be the same on all ranks."""
    batch_check: BatchCheck | None
    """Compares what the ranks have read; None: they do not compare it."""
    replicas: Replicas
    """How reading is shared with other ranks."""
    prefetch: int
    """Batches that a thread keeps ready; 0: there is no thread."""

    def delivered_ids(self, batch: Batch) -> tuple[Ids, int]:
        """Return the samples that this process delivers with a batch, and how many more could not be read."""
        if (
            self.source.split or batch.step.parts
        ):  # the rows that were read are this rank's only
            return batch.step.ids, 0
        return batch.own_ids(self.own_layout)


class Placing:
    """Places the batches of one pass; with `pad_to`, tensors stay `Unplaced` until all ranks' lengths are known."""

    def __init__(self, setup: PassSetup, look: Callable[[Batch], None] | None) -> None:
        """Begin a pass.

        Args:
            setup: Of the loader.
            look: Is shown each batch as the user's code leaves it; None: nothing is.
        """
        self._setup = setup
        self._look = look
        self._maker = TensorMaker(setup.options.dataloader.places[0])

    def __call__(self, batch: Batch) -> Batch:
        """Place a batch, or leave the rest to `batch.finish` if only the thread that computes may do it."""
        setup = self._setup
        if self._look is not None:
            self._look(batch)
        step = batch.step
        with no_fork, read_errors(step, MAKING_TENSORS):
            recipe, leaves = setup.placer.recipe(
                batch.value,
                lambda value: setup.rows.of(step, value, setup.placer),
                (step.num_rows, step.micro_size),
            )
            placed = recipe.begin(leaves, batch.owned, self._maker)
            if recipe.is_host and self._maker.is_on_cpu:
                batch.value = placed()
            else:
                batch.value = None
                batch.finish = placed
        batch.placed = recipe
        batch.count()
        batch.delivered_ids = setup.delivered_ids(batch)
        return batch


def placed_of_stream(
    setup: PassSetup,
    place: Callable[[Batch], Batch],
    start: LoaderState,
    num_steps: int | None,
    batch: Batch,
) -> Batch:
    """Return a stream's batch, placed if it holds anything.

    Args:
        setup: Of the loader.
        place: Places a batch.
        start: Where the pass began.
        num_steps: Steps that are left in the pass; None: not known yet.
        batch: What was read.

    Raises:
        StopIteration: The pass ends before it.
        UnequalEndsError: The parts end at different times, which the tail forbids.
        DataReadError: Rows are missing that should be there.
    """
    tail = setup.source.tail
    # A known end needs no agreement; and a whole batch with new samples is no end. Otherwise the tail decides.
    if num_steps is not None or (batch.whole and batch.fresh):
        batch.exhausted = batch.value is None and batch.empty
    elif tail.pads or tail.repeats:
        batch.exhausted = batch.empty or not batch.fresh
    elif tail.refuses and not batch.empty:
        raise UnequalEndsError(
            "tail='error': the stream's parts do not end together with a whole batch. Choose tail='pad', "
            "'drop' or 'repeat', or num_batches=."
        )
    else:
        raise StopIteration
    if batch.value is not None:
        return place(batch)
    if not (tail.pads and batch.empty):  # only possible if the end was known
        raise DataReadError(
            "a part of the stream has fewer samples than its source said it would have, and tail='drop' does not "
            "make rows up. Count the source again (its index may be of older files)."
        )
    if start.samples == 0:
        raise DataReadError(NO_STAND_IN.format(batch.why or "every part is empty"))
    return batch  # most likely the pass was resumed past the end, so there is nothing to deliver


def note_summary(setup: PassSetup, start: LoaderState, batch: Batch) -> None:
    """Note what the ranks, which compare what they read, compare of a batch, if they compare this one.

    Args:
        setup: Of the loader.
        start: Where the pass began.
        batch: What was read. Arrays have not gone to a device yet, so that nothing is copied back.
    """
    every: Any = setup.options.verify
    wanted = batch.is_first or (every != "first" and batch.step.number % every == 0)
    begins = setup.source.split and batch.step.number < start.steps + FEW_STEPS
    if not (wanted or begins) or batch.value is None:
        return
    ids = np.asarray(batch.step.ids).tolist()
    stream = setup.source.stream
    key = (
        f"parts {stream.parts}"
        if stream is not None
        else f"{zlib.crc32(repr(ids).encode())} of {len(ids)}"
    )
    arrays = [
        (path, _compared(leaf))
        for path, leaf in named_leaves(batch.value, "", _is_list_of_values)
    ]
    batches = setup.source.batches
    cuts = isinstance(setup.source.custom_sampler, paddle.io.DistributedBatchSampler)
    if (
        isinstance(batches, UserBatches)
        and setup.source.split
        and cuts
        and not batches.draws_for
    ):
        arrays = [
            ("the sampler's indices", as_ids(ids))
        ]  # whether it draws for its rank alone is not known
    if batch.skipped is not None:  # its rows hold other samples than their own
        key += f" but for {np.flatnonzero(batch.skipped).tolist()}"
    found = summary(
        arrays,
        step=batch.step.number,
        first=batch.is_first,
        key=key,
        ids=[one if isinstance(one, int | str) else repr(one) for one in ids],
        num_steps=setup.run.num_steps_or_none(start),
    )
    batch.summary = found if wanted or len(found["rows"]) == 1 else None


def _is_list_of_values(value: Any) -> bool:
    """Return whether a list has an item for each row, such as a text, and no tensors."""
    return isinstance(value, list) and not any(
        becomes_tensor(leaf) for leaf in leaves(value)
    )


def _compared(leaf: Any) -> np.ndarray[Any, Any]:
    """Return the array of a leaf; of what becomes no tensor, digests: one for each item of a list or array."""
    if becomes_tensor(leaf):  # `as_array` refuses dtypes whose rows cannot be taken
        found: np.ndarray[Any, Any] = (
            leaf.numpy() if isinstance(leaf, paddle.Tensor) else as_array(leaf)
        )
        return found
    if isinstance(leaf, list | np.ndarray):
        return np.array([digest(item, 0, WHOLE) for item in leaf], np.uint32)
    return np.array(digest(leaf, 0, WHOLE), np.uint32)
