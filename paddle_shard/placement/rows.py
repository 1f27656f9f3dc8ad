"""Batch rows: the rows of a global batch that a rank reads, and those that each field takes from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paddle_shard.placement.field import FieldLayout
from paddle_shard.placement.local_tensor import TensorMaker
from paddle_shard.plan.partition import Rows, slice_rows


class BatchRows:
    """The rows of one global batch that a rank has read, and the rows that each field takes from them."""

    def __init__(
        self,
        num_rows: int,
        micro_size: int | None,
        layouts: Sequence[FieldLayout],
        *,
        read: Rows | None = None,
        apart: bool = False,
    ) -> None:
        """Compute the rows.

        Args:
            num_rows: Rows of the global batch.
            micro_size: Rows of each micro-batch; None: the batch is a single micro-batch.
            layouts: Layouts of all fields.
            read: Rows that this rank has read, ascending; None: those that its fields take.
            apart: True if each data rank has read only rows of its own, so its batch may hold fields that are not per
                row.
        """
        self.num_rows = num_rows
        self.apart = apart
        self._micro_size = micro_size
        self._positions: dict[int, Rows] = {}
        if read is None:
            rows = [
                self._rows_of(layout) for layout in layouts if layout.on_mesh
            ]
            # A rank on none of the meshes reads one row, for the dtypes and the other dims.
            read = np.unique(np.concatenate(rows or [np.zeros(1, np.int64)]))
        self.read = read
        self.to_read = as_range(read)
        """The rows that are read; a range if they are consecutive."""

    def _rows_of(self, layout: FieldLayout) -> Rows:
        return slice_rows(
            self.num_rows,
            layout.num_data_ranks,
            layout.data_rank,
            self._micro_size,
        )

    def positions(self, layout: FieldLayout) -> Rows:
        """Return the positions of a field's rows on this rank among the rows that were read."""
        # The cache is keyed by id(layout), since layouts live as long.
        positions = self._positions.get(id(layout))
        if positions is None:
            positions = np.searchsorted(self.read, self._rows_of(layout))
            self._positions[id(layout)] = positions
        return positions

    def valid(
        self, mask: np.ndarray[Any, Any], layout: FieldLayout, make: TensorMaker
    ) -> Any:
        """Return one bool per row of a field, True if the row is valid, placed like the rows.

        Args:
            mask: bool[len(read)], for the rows that were read.
            layout: The layout of the field.
            make: Makes tensors where the batch is.
        """
        rows = np.ones(self.num_rows // layout.num_data_ranks, bool)
        if layout.on_mesh:
            rows = mask[self.positions(layout)]
        tensor = make([rows], True)()[0]
        if layout.is_local:
            return tensor
        return layout.rows_only.distributed(tensor, "valid")


def as_range(rows: Rows) -> Rows | range:
    """Return ascending rows as a range if they are consecutive."""
    if not len(rows) or rows[-1] - rows[0] != len(rows) - 1:
        return rows
    return range(int(rows[0]), int(rows[-1]) + 1)
