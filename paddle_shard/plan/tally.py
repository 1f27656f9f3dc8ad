"""How do three numbers tell which samples were delivered?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.seeding import derive_seed

Total = tuple[int, int, int]
"""Number of samples, and two sums mod 2^64 of keyed hashes of their ids."""

_TOGETHER = 64
"""Batches whose samples are added at once."""
_KEYS = tuple(np.uint64(derive_seed("certificate", number)) for number in range(2))
_MULTIPLY = np.uint64(0x9E3779B97F4A7C15)
_FINISH = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_MASK = (1 << 64) - 1


def id_sums(ids: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Return two sums mod 2^64 of keyed hashes of sample ids.

    With sums of the ids themselves, or their xor, a missed sample and repeated ones may cancel out. With these
    sums that happens only by chance, 1 in 2^128.
    """
    words = ids.astype(np.uint64)
    return _one_sum(words, _KEYS[0]), _one_sum(words, _KEYS[1])


def _one_sum(words: npt.NDArray[np.uint64], key: np.uint64) -> int:
    h = (words ^ key) * _MULTIPLY
    for _ in range(2):
        h ^= h >> _SHIFT
        h *= _FINISH
    h ^= h >> _SHIFT
    return int(np.add.reduce(h, dtype=np.uint64))


class Tally(NamedTuple):
    """Counts samples, in about a microsecond per batch. It is a value: adding samples returns a new one."""

    num_ids: int = 0
    summed: tuple[int, int] = (0, 0)
    """Sums of the samples that are not waiting."""
    waiting: Any = None
    """(samples, the waiting ones before them) that are not yet in the sums, or None."""
    num_waiting: int = 0
    """Number of waiting batches."""

    def added(self, ids: Sequence[Any] | npt.NDArray[np.int64]) -> Tally:
        """Return the tally with more samples, given by their indices in the data set."""
        found = Tally(self.num_ids + len(ids), self.summed, (ids, self.waiting), self.num_waiting + 1)
        return found if found.num_waiting < _TOGETHER else Tally(found.num_ids, found.total[1:])

    @property
    def total(self) -> Total:
        """Total of the samples so far."""
        waiting, found = self.waiting, []
        while waiting is not None:
            found.append(as_ids(waiting[0]))
            waiting = waiting[1]
        sums = id_sums(np.concatenate(found)) if found else (0, 0)
        return plus((self.num_ids, *self.summed), (0, *sums))


def as_ids(indices: Sequence[Any] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return numbers for a data set's indices: ints unchanged, others from a hash of their `repr`."""
    if isinstance(indices, np.ndarray):
        return indices
    try:
        found = np.array(indices)
    except ValueError:  # tuples of several lengths
        found = np.array(None)
    if found.dtype.kind == "i" and found.ndim == 1:
        return found.astype(np.int64, copy=False)
    numbers = [index if isinstance(index, int) else derive_seed("id", index) for index in indices]
    return np.array(numbers, dtype=object).astype(np.uint64).view(np.int64)


def plus(one: Total, other: Total, times: int = 1) -> Total:
    """Return a total plus `times` another one; -1 subtracts it."""
    return one[0] + times * other[0], (one[1] + times * other[1]) & _MASK, (one[2] + times * other[2]) & _MASK
