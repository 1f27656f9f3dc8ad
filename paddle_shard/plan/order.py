"""What is an order of samples?"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
"""Positions of an epoch, or samples."""
BLOCK = 4096
"""Positions that are computed at once, even if only a few are needed."""


class Order:
    """The order of one epoch: a bijection of [0, length) and its inverse, on int64 arrays of any shape."""

    _newest: tuple[int, Indices] = (-1, np.empty(0, np.int64))
    """The block of positions that was computed last: its first position, and its samples."""

    def __init__(self, length: int) -> None:
        self.length = length
        """Number of positions."""

    def __call__(self, positions: Indices) -> Indices:
        """Return the sample at each position: int64, same shape."""
        raise NotImplementedError

    def inverse(self, samples: Indices) -> Indices:
        """Return the position of each sample: int64, same shape."""
        raise NotImplementedError

    def between(self, start: int, stop: int) -> Indices:
        """Return the samples at positions [start, stop); short stretches are cut from a block that is kept."""
        if stop - start >= BLOCK:
            return self(np.arange(start, stop, dtype=np.int64))
        parts = []
        while start < stop:
            first, block = (
                self._newest
            )  # read once, as one value: threads share an order
            if first != start - start % BLOCK:
                first = start - start % BLOCK
                block = self(
                    np.arange(first, min(first + BLOCK, self.length), dtype=np.int64)
                )
                self._newest = first, block
            upto = min(stop, first + BLOCK)
            parts.append(block[start - first : upto - first])
            start = upto
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


class Identity(Order):
    """The order 0, 1, 2, ..."""

    def __call__(self, positions: Indices) -> Indices:
        """Return the positions."""
        return positions

    def inverse(self, samples: Indices) -> Indices:
        """Return the samples."""
        return samples


class Ordering:
    """A way to order the samples of every epoch. It is a value, and the same on all ranks.

    To add one, write a subclass in its own file and add a row to `orders.ORDERINGS`. The seed is part of every saved
    state; `fingerprint` adds what else the order depends on.
    """

    __slots__ = ()

    name: ClassVar[bool | str]
    """Name of the ordering in a saved state."""
    shuffles: bool = True
    """True if each epoch has its own order. An order that is always the same, such as by length, has False."""
    pads_first: ClassVar[bool] = False
    """True if padding is added before the shuffle, so that it may be anywhere in the epoch."""
    own_ids: ClassVar[bool] = False
    """True if the entries of an order are not the numbers below its length, but ids that the data set understands."""

    def order(self, length: int, seed: int, epoch: int, width: int) -> Order:
        """Return the order of an epoch.

        Args:
            length: Number of positions.
            seed: Seed of the run.
            epoch: The epoch, any int.
            width: Rows of a micro-batch.
        """
        raise NotImplementedError

    def num_positions(self, num_samples: int, num_data_ranks: int) -> int:
        """Return the number of positions of an epoch: the samples, plus the padding if `pads_first`.

        Args:
            num_samples: Number of samples in the data set.
            num_data_ranks: Number of data ranks that read it.
        """
        return num_samples

    def padding_from(self, epoch: int, length: int) -> int:
        """Return the position of an epoch whose sample is the first of the padding, unless `pads_first`.

        Args:
            epoch: The epoch.
            length: Number of positions.
        """
        return 0

    def fingerprint(self, *, num_data_ranks: int, accumulation: int) -> dict[str, Any]:
        """Return what the order depends on besides the number of samples, the seed and the epoch, as JSON values."""
        return {}

    def for_dataset(self, dataset: Any) -> Ordering:
        """Return the ordering adapted to a data set; called if the user has given only a name."""
        return self
