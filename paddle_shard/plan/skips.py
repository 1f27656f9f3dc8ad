"""Which samples does a run leave out because the user said so?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.mixture import without_epoch

Stretch = tuple[int, int, int]
"""(epoch, first position, position after the last)."""
LeftOut = tuple[int | str, int, int]
"""(id of a sample, epoch and position from which on it is left out): what was delivered before stays delivered."""


@dataclass(frozen=True)
class Skips:
    """The positions and the samples that are never read.

    Examples:
        >>> skips = Skips().joined([(0, 4, 8), (0, 6, 10)], [(17, 0, 3)])
        >>> skips.stretches, skips.rows(0, 2, np.array([17, 5, 6])).tolist(), skips.rows(1, 0, np.array([17])).tolist()
        (((0, 4, 10),), [False, False, True], [True])
    """

    stretches: tuple[Stretch, ...] = ()
    """In order, disjoint, none empty."""
    samples: tuple[LeftOut, ...] = ()
    """Samples of the data set, each once; ids of a mixture are without the epoch of their source."""

    def joined(self, stretches: Iterable[Stretch], samples: Iterable[LeftOut]) -> Skips:
        """Return skips that leave out more."""
        of_epochs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for epoch, first, end in (*self.stretches, *stretches):
            of_epochs[epoch].append((first, end))
        found = [(epoch, *stretch) for epoch in sorted(of_epochs) for stretch in united(of_epochs[epoch])]
        earliest: dict[int | str, tuple[int, int]] = {}
        for sample, epoch, position in (*self.samples, *samples):
            earliest[sample] = min(earliest.get(sample, (epoch, position)), (epoch, position))
        known = sorted(earliest, key=lambda one: (isinstance(one, str), one))
        return Skips(tuple(found), tuple((sample, *earliest[sample]) for sample in known))

    def leaves_out(self, sample: int | str) -> bool:
        """Return whether a sample of the data set is left out, from any position on."""
        if isinstance(sample, int):
            sample = int(without_epoch(np.array([sample], np.int64))[0])
        return any(sample == one for one, _, _ in self.samples)

    def concerns(self, epoch: int) -> bool:
        """Return False if nothing of an epoch can be left out."""
        return any(since <= epoch for since, _ in self._since) or any(of == epoch for of, _, _ in self.stretches)

    def rows(self, epoch: int, first: int, ids: Any) -> npt.NDArray[np.bool_]:
        """Return which rows are left out: one bool for each id.

        Args:
            epoch: The epoch.
            first: Position of the first row.
            ids: The samples' ids, at consecutive positions.
        """
        found = np.zeros(len(ids), bool)
        for of_epoch, start, end in self.stretches:
            if of_epoch == epoch:
                found[max(0, start - first) : max(0, end - first)] = True
        for (since, position), (samples, numbers) in self._since.items():
            if since > epoch:
                continue
            begin = max(0, position - first) if since == epoch else 0
            some = ids[begin:]
            array = some if isinstance(some, np.ndarray) else np.asarray(some)
            if array.dtype.kind in "iu":  # a sampler of the user's own may draw texts, too
                found[begin:] |= np.isin(without_epoch(array), numbers)
            else:
                found[begin:] |= np.array([one in samples for one in some], bool)
        return found

    @cached_property
    def _since(self) -> dict[tuple[int, int], tuple[set[int | str], npt.NDArray[np.int64]]]:
        """(epoch, position) -> the samples that are left out from there on, and those of them that are ints."""
        found: dict[tuple[int, int], set[int | str]] = defaultdict(set)
        for sample, epoch, position in self.samples:
            found[epoch, position].add(sample)
        return {
            since: (samples, np.array([one for one in samples if isinstance(one, int)], np.int64))
            for since, samples in found.items()
        }

    @classmethod
    def checked(cls, stretches: Any, samples: Any) -> Skips:
        """Return the skips of a saved state; a TypeError or ValueError if they are damaged."""
        read = [(counted(epoch), counted(first), counted(end, first + 1)) for epoch, first, end in stretches]
        left = [
            (sample if isinstance(sample, str) else counted(sample), counted(epoch), counted(position))
            for sample, epoch, position in samples
        ]
        return cls().joined(read, left)


def united(stretches: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the positions of some stretches [first, end) as stretches that are ascending and do not touch.

    Examples:
        >>> united([(6, 10), (0, 4), (3, 5), (5, 6), (12, 12)])
        ((0, 10),)
    """
    found: list[tuple[int, int]] = []
    for first, end in sorted(stretches):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif first < end:
            found.append((first, end))
    return tuple(found)


def counted(value: Any, least: int = 0) -> int:
    """Return a number of a saved state; a ValueError if it is no int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(value)
    return value
