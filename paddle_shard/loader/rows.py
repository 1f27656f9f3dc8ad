"""The rows of global batches of any size: which this rank reads, and which each field takes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import paddle.io

from paddle_shard.core.trees import leaves
from paddle_shard.errors import BatchStructureError
from paddle_shard.placement.placer import BatchPlacer
from paddle_shard.placement.rows import BatchRows
from paddle_shard.plan.partition import Rows, nearest_multiples
from paddle_shard.plan.step import Step
from paddle_shard.reading.source import Source
from paddle_shard.reading.tensors import becomes_tensor


class LoaderRows:
    """The rows of batches of any size, for one loader."""

    def __init__(self, source: Source, placer: BatchPlacer) -> None:
        """Initialize.

        Args:
            source: The order of the loader.
            placer: Knows the layouts of all fields.
        """
        self._source = source
        self._layouts = placer.layouts
        self._own = placer.row_layout
        self._unit = placer.num_data_ranks * source.accumulation
        self._of_samples = lru_cache(maxsize=64)(self._compute)

    def to_read(self, num_rows: int, micro_size: int) -> Rows | range:
        """Return which rows of a global batch this rank reads: the order's `RowsOf`."""
        if self._source.item_is_batch:
            return range(1)
        if self._source.split:
            return range(num_rows)
        return self._of_samples(num_rows, micro_size).to_read

    def of(self, step: Step, value: Any, placer: BatchPlacer) -> BatchRows:
        """Return the rows of a batch that was read for a step.

        Args:
            step: The step.
            value: The batch.
            placer: Places it.

        Raises:
            BatchStructureError: The batch was read whole and cannot be split evenly.
        """
        if not (self._source.item_is_batch or self._source.split):
            return self._of_samples(step.num_rows, step.micro_size)
        num_rows: int | None = step.num_rows
        if self._source.item_is_batch:
            num_rows = placer.num_rows(value)  # None if no field has rows
        if self._source.split:
            return self._of_local_batch(1 if num_rows is None else num_rows)
        return self._of_global_batch(num_rows, value)

    def _compute(self, num_rows: int, micro_size: int) -> BatchRows:
        """Return the rows of a global batch of samples."""
        stream = self._source.stream
        sampler = self._source.custom_sampler
        return BatchRows(
            num_rows,
            micro_size,
            self._layouts,
            read=None if stream is None else stream.read_rows(),
            apart=isinstance(sampler, paddle.io.DistributedBatchSampler),
        )

    def _of_local_batch(self, num_rows: int) -> BatchRows:
        """Return the rows of a batch of a data rank's own rows."""
        row_layout = self._own
        read = None if row_layout.on_mesh else np.arange(num_rows)
        num_global = num_rows * row_layout.num_data_ranks
        return BatchRows(num_global, None, [row_layout], read=read, apart=True)

    def _of_global_batch(self, num_rows: int | None, value: Any) -> BatchRows:
        """Return the rows of a global batch that was read whole."""
        num_data_ranks = self._own.num_data_ranks
        has_tensors = any(map(becomes_tensor, leaves(value)))
        if num_rows is None and num_data_ranks > 1 and not has_tensors:
            raise BatchStructureError(
                f"an item is a whole batch, of which each data rank gets its rows, but {value!r:.100} has no "
                f"array or tensor with rows: each of {num_data_ranks} data ranks would get all of it. If an item "
                "is a sample, let a DataLoader make batches: paddle.io.DataLoader(what is given, batch_size=rows of "
                "all ranks)."
            )
        unit = self._unit
        if num_rows is None:
            num_rows = unit
        if num_rows % unit:
            sizes = " or ".join(map(str, nearest_multiples(num_rows, unit)))
            raise BatchStructureError(
                f"an item of the data set is a global batch of {num_rows} rows, which cannot be split evenly by "
                f"{unit}. Nearest sizes that can: {sizes}."
            )
        micro_size = num_rows // self._source.accumulation
        return BatchRows(
            num_rows, micro_size, self._layouts, read=np.arange(num_rows)
        )
