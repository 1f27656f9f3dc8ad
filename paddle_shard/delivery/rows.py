"""Which rows of a global batch does this rank read?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle.io

from paddle_shard.errors import BatchStructureError
from paddle_shard.inputs.source import Source
from paddle_shard.place.field import FieldLayout
from paddle_shard.place.placer import BatchPlacer, BatchRows
from paddle_shard.plan.partition import nearest_multiples


class LoaderRows:
    """The rows of batches of any size, for one loader."""

    def __init__(
        self, source: Source, placer: BatchPlacer, own_layout: FieldLayout, *, described: bool = False
    ) -> None:
        """Set up.

        Args:
            source: What is read.
            placer: Has the layouts of all fields.
            own_layout: Layout of the field whose rows this rank reads.
            described: True if a rank on no mesh reads nothing, and has a batch of one row from the user.
        """
        self._source, self._placer, self._own = source, placer, own_layout
        self._described = described and not own_layout.on_mesh
        self._of_size: dict[tuple[int, int], BatchRows] = {}

    def of(self, num_rows: int, micro_size: int) -> BatchRows:
        """Return the rows of a global batch of samples that have an index."""
        key = num_rows, micro_size
        if key not in self._of_size:
            if len(self._of_size) > 64:
                self._of_size.clear()
            rows = self._of_size[key] = BatchRows(num_rows, micro_size, self._placer.layouts)
            rows.apart = isinstance(self._source.custom_sampler, paddle.io.DistributedBatchSampler)
        return self._of_size[key]

    def of_split(self, num_local_rows: int) -> BatchRows:
        """Return the rows of a batch for which each data rank has rows of its own."""
        rows = BatchRows(num_local_rows * self._own.num_data_ranks, None, [self._own])
        rows.apart = True
        if not self._own.on_mesh:
            rows.read = np.arange(1 if self._described else num_local_rows)
        return rows

    def of_stream(self) -> BatchRows:
        """Return the rows of a stream's batches, which all have the same size."""
        source, stream = self._source, self._source.stream
        assert source.batch_size is not None
        assert stream is not None
        if source.split:
            return self.of_split(source.batch_size)
        assert stream.batches.plan is not None
        rows = BatchRows(source.batch_size, stream.batches.plan.micro_rows, self._placer.layouts)
        rows.read = np.zeros(1, np.int64) if self._described else stream.read_rows()
        return rows

    def of_item(self, batch: Any, keys: Sequence[Any] | None) -> BatchRows:
        """Return the rows of a batch that was read whole.

        Raises:
            BatchStructureError: The batch cannot be split evenly.
        """
        num_rows = self._placer.num_rows(batch, keys)
        if self._source.split:
            return self.of_split(1 if num_rows is None else num_rows)
        unit = math.lcm(*(layout.num_data_ranks for layout in self._placer.layouts)) * self._source.accumulation
        if num_rows is None:  # nothing is split
            num_rows = unit
        if num_rows % unit:
            raise BatchStructureError(
                f"an item of the data set is a global batch of {num_rows} rows, which cannot be split evenly by "
                f"{unit}. Nearest sizes that can: {' or '.join(map(str, nearest_multiples(num_rows, unit)))}."
            )
        return BatchRows(num_rows, num_rows // self._source.accumulation, self._placer.layouts, whole=True)
