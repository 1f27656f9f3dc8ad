"""What is a global batch of a user's own sampler?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.partition import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class UserBatch:
    """A global batch that a user's sampler has drawn."""

    indices: list[Any]
    """Indices into the data set, of any type; padding is at the end."""
    drawn: npt.NDArray[np.int64]
    """Numbers of the indices that the sampler drew: all except the padding."""
    micro_size: int
    padding: int = 0
    sampler_state: Mapping[str, Any] | None = None
    last: bool = False
    """True if the sampler is known to end after this batch. False also if that was not checked."""
    passed: tuple[int, int] = (0, 0)
    load: tuple[float, float] = (0.0, 0.0)

    @property
    def num_rows(self) -> int:
        """Rows of the global batch, padding included."""
        return len(self.indices)

    @property
    def num_real(self) -> int:
        """Rows that are not padding."""
        return len(self.indices) - self.padding

    @property
    def all_real(self) -> bool:
        """True if no row is padding."""
        return self.padding == 0

    def take(self, rows: Rows | range) -> list[Any]:
        """Return the data set's indices at some rows."""
        return [self.indices[row] for row in (rows if isinstance(rows, range) else rows.tolist())]

    def valid(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of some rows are real."""
        return rows < self.num_real

    def num_left_out(self, rows: Rows) -> int:
        """Return 0: no sample is left out."""
        return 0
