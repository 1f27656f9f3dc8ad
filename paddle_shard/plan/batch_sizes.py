"""Which batch size does a step have, if the size changes by a schedule?"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from paddle_shard.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The global batch of each stretch of a run.

    A batch is never cut: a new size holds from the first batch that begins at the given sample or after it. What is
    left of an epoch is its short last batch, and the next epoch begins with the size that is due by then.

    Examples:
        >>> sizes = BatchSizes(((0, 4), (10, 6)))
        >>> sizes.segments(origin=0, at=0, end=30), sizes.segments(origin=30, at=0, end=30)
        (((0, 4), (12, 6)), ((0, 6),))
    """

    entries: tuple[tuple[int, int], ...]
    """(sample of the run, rows of a global batch from there on); the first sample is 0, and they ascend."""

    def __post_init__(self) -> None:
        firsts = [first for first, _ in self.entries]
        if firsts[:1] != [0] or any(one >= other for one, other in itertools.pairwise(firsts)):
            raise ArgumentError(f"batch_size: the schedule must begin at sample 0 and ascend, got {firsts}.")

    def segments(self, *, origin: int, at: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return (first position, batch size) for each stretch of an epoch.

        Args:
            origin: The sample of the run with which the epoch begins.
            at: Position in the epoch at which the first of the stretches begins.
            end: Position after the last.
        """
        due = [size for first, size in self.entries if first <= origin + at]
        found = [(at, due[-1])]
        for first, size in self.entries[len(due) :]:
            begun, before = found[-1]
            switch = begun + max(0, -(-(first - origin - begun) // before)) * before
            if switch >= end:
                break
            if switch == begun:
                found.pop()
            if not found or found[-1][1] != size:
                found.append((switch, size))
        return tuple(found)
