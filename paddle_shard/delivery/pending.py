"""What is known about a step, from its request to its delivery?"""

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
    """A step from its request to its delivery."""

    batch: IndexBatch
    rows: BatchRows | None
    """Rows to read; None until they are read."""
    local: bool
    """The batch's rows are this rank's only."""
    indices: list[Any] | npt.NDArray[np.int64]
    num_bytes: int = 0
    """Size in bytes of the rows that were read."""
    layout: FieldLayout | None = None
    """Layout of the batch's last field."""
    row_shapes: Any = ()
    """(dtype, *shape of a row) of each tensor; with `pad_to`, a dict of them for the `Unplaced` tensors, by path."""
    digest: int = 0
    """Digest of the batches that a user's sampler has drawn so far."""
    is_first: bool = False
    """True for the first step of its pass."""
    step: int = 0
    """Step of the epoch."""
    summary: dict[str, Any] | None = None
    """Summary of the batch for the ranks to compare; None: this one is not compared."""
    skipped: npt.NDArray[np.bool_] | None = None
    """Mask of the rows whose sample could not be read; None: there are none."""

    @property
    def all_real(self) -> bool:
        """True if every row is known to be real."""
        return self.skipped is None and self.batch.all_real

    def valid(self) -> Any:
        """Return one bool for each row that this process reads: True if the row is real."""
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
        """Return how many of the rows that this process reads replace samples that were not read."""
        assert self.rows is not None
        left_out = 0 if self.all_real else self.batch.num_left_out(self.rows.read)
        return left_out if self.skipped is None else left_out + int(np.count_nonzero(self.skipped & self._served()))

    def own_ids(self, layout: FieldLayout) -> list[Any] | npt.NDArray[np.int64]:
        """Return the ids of the samples in this process's slice, without padding."""
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
