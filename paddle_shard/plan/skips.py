"""Which samples does a run leave out because the user said so?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.mixture import without_epoch

Stretch = tuple[int, int, int]
"""(epoch, first position, position after the last)."""


@dataclass(frozen=True)
class Skips:
    """The positions and the samples that are never read.

    Examples:
        >>> skips = Skips().joined([(0, 4, 8), (0, 6, 10)], [17])
        >>> skips.stretches, skips.rows(0, 3, np.array([5, 17, 6])).tolist()
        (((0, 4, 10),), [False, True, True])
    """

    stretches: tuple[Stretch, ...] = ()
    """In order, disjoint, none empty."""
    samples: tuple[int | str, ...] = field(default=())
    """Ids of samples in the data set, in every epoch; those of a mixture without the epoch of their source."""

    def joined(self, stretches: Iterable[Stretch], samples: Iterable[int | str]) -> Skips:
        """Return skips that leave out more."""
        of_epochs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for epoch, first, end in (*self.stretches, *stretches):
            of_epochs[epoch].append((first, end))
        found = [(epoch, *stretch) for epoch in sorted(of_epochs) for stretch in united(of_epochs[epoch])]
        known = {*self.samples, *samples}
        return Skips(tuple(found), tuple(sorted(known, key=lambda one: (isinstance(one, str), one))))

    def concerns(self, epoch: int) -> bool:
        """Return False if nothing of an epoch can be left out."""
        return bool(self.samples) or any(stretch[0] == epoch for stretch in self.stretches)

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
        if not self.samples:
            return found
        array = ids if isinstance(ids, np.ndarray) else np.asarray(ids)
        if array.dtype.kind in "iu":  # a sampler of the user's own may draw texts, too
            found |= np.isin(without_epoch(array), self._numbers)
        else:
            found |= np.array([one in self._known for one in ids], bool)
        return found

    @cached_property
    def _known(self) -> frozenset[int | str]:
        return frozenset(self.samples)

    @cached_property
    def _numbers(self) -> npt.NDArray[np.int64]:
        return np.array([one for one in self.samples if isinstance(one, int)], np.int64)

    @classmethod
    def checked(cls, stretches: Any, samples: Any) -> Skips:
        """Return the skips of a saved state; a TypeError or ValueError if they are damaged."""
        read = [(counted(epoch), counted(first), counted(end, first + 1)) for epoch, first, end in stretches]
        return cls().joined(read, [sample if isinstance(sample, str) else counted(sample) for sample in samples])


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
