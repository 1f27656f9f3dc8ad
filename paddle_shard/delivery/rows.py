"""Which rows of a global batch does this rank read?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import paddle.io

from paddle_shard.errors import BatchStructureError
from paddle_shard.inputs.source import Source
from paddle_shard.place.field import FieldLayout
from paddle_shard.place.placer import BatchPlacer, BatchRows
from paddle_shard.plan.partition import Rows, nearest_multiples
from paddle_shard.reading.batch import Batch


class LoaderRows:
    """The rows of batches of any size, for one loader."""

    def __init__(self, source: Source, layouts: Sequence[FieldLayout], own_layout: FieldLayout) -> None:
        """Set up.

        Args:
            source: The order of the loader.
            layouts: Layouts of all fields.
            own_layout: Layout of the field whose rows this rank reads.
        """
        self._source, self._layouts, self._own = source, layouts, own_layout
        self._of_size: dict[tuple[int, int], BatchRows] = {}

    def to_read(self, num_rows: int, micro_size: int) -> Rows | range:
        """Return which rows of a global batch this rank reads: the order's `RowsOf`."""
        if self._source.item_is_batch:
            return range(1)
        if self._source.split:
            return range(num_rows)
        return self._of_samples(num_rows, micro_size).asked

    def of(self, batch: Batch, placer: BatchPlacer) -> BatchRows:
        """Return the rows of a batch that was read, which the placer will place."""
        if self._source.item_is_batch:
            return self._of_item(placer.num_rows(batch.value))
        if self._source.split:
            return self._of_split(batch.step.num_rows)
        return self._of_samples(batch.step.num_rows, batch.step.micro_size)

    def _of_samples(self, num_rows: int, micro_size: int) -> BatchRows:
        """Return the rows of a global batch of samples."""
        key, source = (num_rows, micro_size), self._source
        if key not in self._of_size:
            if len(self._of_size) > 64:
                self._of_size.clear()
            rows = self._of_size[key] = BatchRows(num_rows, micro_size, self._layouts)
            rows.apart = isinstance(source.custom_sampler, paddle.io.DistributedBatchSampler)
            if source.stream is not None:
                rows.read = source.stream.read_rows()
        return self._of_size[key]

    def _of_split(self, num_local_rows: int) -> BatchRows:
        """Return the rows of a batch for which each data rank has rows of its own."""
        rows = BatchRows(num_local_rows * self._own.num_data_ranks, None, [self._own])
        rows.apart = True
        if not self._own.on_mesh:
            rows.read = np.arange(num_local_rows)
        return rows

    def _of_item(self, num_rows: int | None) -> BatchRows:
        """Return the rows of a batch that was read whole; None: no field of it is split.

        Raises:
            BatchStructureError: The batch cannot be split evenly.
        """
        if self._source.split:
            return self._of_split(1 if num_rows is None else num_rows)
        unit = math.lcm(*(layout.num_data_ranks for layout in self._layouts)) * self._source.accumulation
        if num_rows is None:  # nothing is split
            num_rows = unit
        if num_rows % unit:
            raise BatchStructureError(
                f"an item of the data set is a global batch of {num_rows} rows, which cannot be split evenly by "
                f"{unit}. Nearest sizes that can: {' or '.join(map(str, nearest_multiples(num_rows, unit)))}."
            )
        return BatchRows(num_rows, num_rows // self._source.accumulation, self._layouts, whole=True)
