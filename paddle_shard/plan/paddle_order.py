"""In which order does Paddle's own `DistributedBatchSampler` serve the samples?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from paddle_shard.plan.order import Identity, Order, Ordering
from paddle_shard.plan.shuffle import Indices


class PaddleOrder:
    """The shuffle of Paddle's `DistributedBatchSampler`: a table, drawn from `RandomState(epoch)`."""

    def __init__(self, length: int, epoch: int) -> None:
        """Draw the order of an epoch.

        Args:
            length: Number of positions, padding included.
            epoch: The epoch; at least 0, as numpy requires.
        """
        self._table = np.arange(length, dtype=np.int64)
        np.random.RandomState(epoch).shuffle(self._table)
        self._inverse: Indices | None = None

    def __call__(self, positions: Indices) -> Indices:
        """Return the sample at each position."""
        return self._table[positions]

    def inverse(self, samples: Indices) -> Indices:
        """Return the position of each sample."""
        if self._inverse is None:
            self._inverse = np.empty_like(self._table)
            self._inverse[self._table] = np.arange(len(self._table))
        return self._inverse[samples]

    def between(self, start: int, stop: int) -> Indices:
        """Return the samples at positions [start, stop)."""
        return self._table[start:stop]


@dataclass(frozen=True)
class PaddleOrdering(Ordering):
    """The order of `paddle.io.DistributedBatchSampler`, including its padding.

    It depends on the number of data ranks. It does not depend on the seed: Paddle seeds it with the epoch.
    """

    name: ClassVar[bool | str] = "paddle"
    pads_first: ClassVar[bool] = True

    def order(self, length: int, seed: int, epoch: int, width: int) -> Order:
        """See `Ordering`."""
        return _order(length, epoch)

    def num_positions(self, num_samples: int, num_data_ranks: int) -> int:
        """See `Ordering`: Paddle gives every data rank the same number of samples."""
        return num_samples + -num_samples % num_data_ranks

    def fingerprint(self, *, num_data_ranks: int, accumulation: int) -> dict[str, Any]:
        """See `Ordering`."""
        return {"num_data_ranks": num_data_ranks}


@dataclass(frozen=True)
class PaddleSequential(PaddleOrdering):
    """The order of a `DistributedBatchSampler` that does not shuffle. A loader uses it; users cannot name it."""

    name: ClassVar[bool | str] = "paddle unshuffled"
    shuffles: ClassVar[bool] = False

    def order(self, length: int, seed: int, epoch: int, width: int) -> Order:
        """See `Ordering`."""
        return Identity()


@lru_cache(maxsize=2)
def _order(length: int, epoch: int) -> PaddleOrder:
    return PaddleOrder(length, epoch)
