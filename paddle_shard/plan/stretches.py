"""Which batch size does a step have, and where does it begin, if the size changes on the way?"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from paddle_shard.errors import ArgumentError


class Stretches:
    """The steps of an epoch, in stretches of batches of one size.

    Examples:
        >>> stretches = Stretches(((0, 4), (8, 3)), end=15)
        >>> [stretches.step(number) for number in range(5)], stretches.step_and_row(13)
        ([(0, 4), (4, 4), (8, 3), (11, 3), (14, 3)], (3, 2))
        >>> stretches.num_full, stretches.rest
        (4, 1)
    """

    def __init__(self, segments: tuple[tuple[int, int], ...], end: int) -> None:
        """Set up.

        Args:
            segments: (first position, batch size) of each stretch.
            end: Position after the last that is served or padded.
        """
        self._segments, self._steps = segments, [0]
        """The stretches, and the step at which each begins."""
        for (first, size), (stop, _) in pairwise(segments):
            self._steps.append(self._steps[-1] + -(-(stop - first) // size))
        first, size = segments[-1]
        full, self.rest = divmod(max(0, end - first), size)
        """`rest`: positions that are left for a short last batch."""
        self.num_full = self._steps[-1] + full
        """Steps without a short last batch."""

    def step(self, number: int) -> tuple[int, int]:
        """Return the position of the first row of a step, and the rows of a full batch there."""
        at = bisect_right(self._steps, number, 1) - 1
        first, size = self._segments[at]
        return first + (number - self._steps[at]) * size, size

    def step_and_row(self, position: int) -> tuple[int, int]:
        """Return the step that holds a position, and the row in its batch."""
        at = bisect_right(self._segments, position, key=lambda segment: segment[0]) - 1
        first, size = self._segments[at]
        step, row = divmod(position - first, size)
        return self._steps[at] + step, row


def check_segments(segments: tuple[tuple[int, int], ...], batch_size: int, num_positions: int) -> None:
    """Refuse segments that do not describe an epoch.

    Raises:
        ArgumentError: They do not begin at 0, a batch of theirs is cut, or the last one has another batch size.
    """
    fine = segments[0][0] == 0 and segments[-1][1] == batch_size
    for (first, size), (end, _) in pairwise(segments):
        fine &= size >= 1 and end >= first and not ((end - first) % size and end != num_positions)
    if not fine:
        raise ArgumentError(
            "segments must begin at 0, hold whole batches only, and end with this batch size "
            f"{batch_size}, got {segments}."
        )


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
        if firsts[:1] != [0] or any(one >= other for one, other in pairwise(firsts)):
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
