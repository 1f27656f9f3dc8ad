"""Which sample stands at a position of an epoch, in any of the orders there are?"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np

from paddle_shard.plan.blocks import Blocks, block_order
from paddle_shard.plan.shuffle import Indices, permutation

PADDLE = ("paddle", "paddle unshuffled")
"""Orders of Paddle's `DistributedBatchSampler`, whose padding comes before the shuffle."""
SHUFFLES = (False, True, "blocks", *PADDLE)
Shuffle: TypeAlias = bool | str | Blocks
"""One of `SHUFFLES`, or what "blocks" stands for."""


class Order(Protocol):
    """A bijection of [0, length) and its inverse, on int64 arrays."""

    def __call__(self, positions: Indices) -> Indices:
        """Return what stands at each position."""

    def inverse(self, samples: Indices) -> Indices:
        """Return the position of each sample."""

    def between(self, start: int, stop: int) -> Indices:
        """Return what stands at positions [start, stop)."""


class Sequential:
    """0, 1, 2, ..."""

    def __call__(self, positions: Indices) -> Indices:
        """Return the positions."""
        return positions

    def inverse(self, samples: Indices) -> Indices:
        """Return the samples."""
        return samples

    def between(self, start: int, stop: int) -> Indices:
        """Return the positions."""
        return np.arange(start, stop, dtype=np.int64)


class PaddleOrder:
    """The shuffle of Paddle's `DistributedBatchSampler`: a table, drawn from `RandomState(epoch)`."""

    def __init__(self, length: int, epoch: int) -> None:
        self._table = np.arange(length, dtype=np.int64)
        np.random.RandomState(epoch).shuffle(self._table)
        self._inverse: Indices | None = None

    def __call__(self, positions: Indices) -> Indices:
        """Return what stands at each position."""
        return self._table[positions]

    def inverse(self, samples: Indices) -> Indices:
        """Return the position of each sample."""
        if self._inverse is None:
            self._inverse = np.empty_like(self._table)
            self._inverse[self._table] = np.arange(len(self._table))
        return self._inverse[samples]

    def between(self, start: int, stop: int) -> Indices:
        """Return what stands at positions [start, stop)."""
        return self._table[start:stop]


def order_of(shuffle: Shuffle, length: int, seed: int, epoch: int, width: int) -> Order:
    """Return the order of an epoch.

    Args:
        shuffle: A `Blocks`, or one of `SHUFFLES` but "blocks", whose size a plan decides.
        length: Number of positions.
        seed: Not used by "paddle", whose order is Paddle's own.
        epoch: For "paddle" at least 0.
        width: Rows of a micro-batch; only the order of blocks depends on it.
    """
    if isinstance(shuffle, Blocks):
        return block_order(length, shuffle, width, seed, epoch)
    if shuffle == "paddle":
        return _paddle_order(length, epoch)
    return permutation(length, "order", seed, epoch) if shuffle is True else Sequential()


@lru_cache(maxsize=2)
def _paddle_order(length: int, epoch: int) -> PaddleOrder:
    return PaddleOrder(length, epoch)
