"""What is a global batch that a user's own sampler has named?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.partition import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class UserBatch:
    """A global batch as a user's sampler named it."""

    indices: list[Any]
    """Whatever the data set is indexed with; padding at the end."""
    drawn: npt.NDArray[np.int64]
    """Numbers of those that the sampler drew, which are all but the padding."""
    micro_size: int
    padding: int = 0
    sampler_state: Mapping[str, Any] | None = None
    last: bool = False
    """Whether the sampler was seen to end behind it. False also where nobody has looked yet."""

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
        """Whether no row is padding."""
        return self.padding == 0

    def take(self, rows: Rows | range) -> list[Any]:
        """Return the data set's indices at some rows."""
        return [self.indices[row] for row in (rows if isinstance(rows, range) else rows.tolist())]

    def valid(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of some rows are real."""
        return rows < self.num_real
