"""What is an order of samples?"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import numpy as np

from paddle_shard.plan.shuffle import Indices


class Order(Protocol):
    """A bijection of [0, length) and its inverse, on int64 arrays: the order of one epoch."""

    def __call__(self, positions: Indices) -> Indices:
        """Return what stands at each position."""

    def inverse(self, samples: Indices) -> Indices:
        """Return the position of each sample."""

    def between(self, start: int, stop: int) -> Indices:
        """Return what stands at positions [start, stop)."""


class Identity:
    """The order 0, 1, 2, ..."""

    def __call__(self, positions: Indices) -> Indices:
        """Return the positions."""
        return positions

    def inverse(self, samples: Indices) -> Indices:
        """Return the samples."""
        return samples

    def between(self, start: int, stop: int) -> Indices:
        """Return the positions."""
        return np.arange(start, stop, dtype=np.int64)


class Ordering:
    """A way to order the samples of every epoch: a value, the same on all ranks.

    To add one, write a subclass in a file of its own and a row of `orders.ORDERINGS`. The seed is part of every saved
    state; `fingerprint` adds what else the order depends on.
    """

    __slots__ = ()

    name: ClassVar[bool | str]
    """What a saved state calls it."""
    shuffles: ClassVar[bool] = True
    """Each epoch has an order of its own."""
    pads_first: ClassVar[bool] = False
    """Padding is added before the shuffle, so that it may stand anywhere in the epoch."""

    def order(self, length: int, seed: int, epoch: int, width: int) -> Order:
        """Return the order of an epoch.

        Args:
            length: Number of positions.
            seed: Of the run.
            epoch: Any int.
            width: Rows of a micro-batch.
        """
        raise NotImplementedError

    def num_positions(self, num_samples: int, num_data_ranks: int) -> int:
        """Return the positions of an epoch: the samples, and the padding that `pads_first`.

        Args:
            num_samples: Of the data set.
            num_data_ranks: Which read it.
        """
        return num_samples

    def fingerprint(self, *, num_data_ranks: int, accumulation: int) -> dict[str, Any]:
        """Return what the order depends on, besides the number of samples, the seed and the epoch: for JSON."""
        return {}

    def for_dataset(self, dataset: Any) -> Ordering:
        """Return the ordering as it suits a data set, where the user has only given its name."""
        return self

    def advice(self, num_samples: int, num_data_ranks: int, width: int) -> str | None:
        """Return what the user should know of the order with these sizes, if anything."""
        return None
