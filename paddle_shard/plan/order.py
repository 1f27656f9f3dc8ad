"""Interfaces of an order: `Order`, the order of one epoch, and `Ordering`, which makes the orders of all epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
"""Positions of an epoch, or samples."""
Fingerprint = Mapping[str, Any]
"""What an order depends on, as a saved state stores it: JSON-able."""
BLOCK = 4096
"""Positions that are computed at once, even if only a few are needed."""


class Order:
    """The order of one epoch: a bijection of [0, length) and its inverse, on int64 arrays of any shape."""

    _newest: tuple[int, Indices] | None = None
    """The number and the samples of the block that was computed last."""

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
        """Return the samples at positions [start, stop). A short range is cut from a block that is kept."""
        if not 0 < stop - start < BLOCK:
            return self(np.arange(start, stop))
        first = start // BLOCK
        samples = self._block(first)
        if stop > (first + 1) * BLOCK:
            samples = np.concatenate([samples, self._block(first + 1)])
        return samples[start - first * BLOCK : stop - first * BLOCK]

    def _block(self, number: int) -> Indices:
        newest = self._newest  # read once, as one value: threads share an order
        if newest is None or newest[0] != number:
            start = number * BLOCK
            samples = self(np.arange(start, min(start + BLOCK, self.length)))
            self._newest = newest = (number, samples)
        return newest[1]


class Identity(Order):
    """The order 0, 1, 2, ..."""

    def __call__(self, positions: Indices) -> Indices:
        """Return the positions."""
        return positions

    def inverse(self, samples: Indices) -> Indices:
        """Return the samples."""
        return samples


def groups_by_key(*keys: Indices) -> Iterator[tuple[Indices, list[int]]]:
    """Yield (indices of the entries, key) for each different key, which has a number of each array; keys ascend.

    Examples:
        >>> [(chosen.tolist(), key) for chosen, key in groups_by_key(np.array([1, 0, 1]), np.array([5, 5, 5]))]
        [([1], [0, 5]), ([0, 2], [1, 5])]
    """
    ascending = np.lexsort(keys[::-1])
    sorted_keys = np.stack(keys, axis=1)[ascending]  # [entry, key]
    is_last = np.ones(len(ascending), bool)
    is_last[:-1] = (sorted_keys[1:] != sorted_keys[:-1]).any(axis=1)
    start = 0
    for last in np.flatnonzero(is_last).tolist():
        yield ascending[start : last + 1], sorted_keys[last].tolist()
        start = last + 1


class Ordering:
    """A way to order the samples of every epoch. It is a value, and the same on all ranks.

    To add one, write a subclass in its own file and add a row to `orders.ORDERINGS`. The seed is part of every saved
    state; `fingerprint` adds what else the order depends on, and `of_fingerprint` reads it.
    """

    __slots__ = ()

    name: ClassVar[bool | str]
    """Name of the ordering in a saved state."""
    pads_first: ClassVar[bool] = False
    """True if padding is added before the shuffle, so that it may be anywhere in the epoch."""
    drawn_by: ClassVar[str | None] = None
    """Name of what draws the samples, for certificates, if an epoch does not have each sample of the data set once."""

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

    def fingerprint(
        self, *, num_data_ranks: int, accumulation: int
    ) -> Fingerprint:
        """Return what the order depends on besides the number of samples, the seed and the epoch, as JSON values."""
        return {}

    @classmethod
    def of_fingerprint(cls, fingerprint: Fingerprint) -> Ordering:  # noqa: ARG003
        """Return the ordering with the settings that a `fingerprint` holds; the default suits one without settings."""
        return cls()

    def for_dataset(self, dataset: Any) -> Ordering:
        """Return the ordering adapted to a data set; called if the user has given only a name."""
        return self
