"""What is known of a step, from its request to its delivery?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.place.field import FieldLayout
from paddle_shard.place.placer import BatchRows
from paddle_shard.samplers import IndexBatch


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
