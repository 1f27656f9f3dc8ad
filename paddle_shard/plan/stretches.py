"""Where does each step of an epoch begin, if the batch size changes on the way?"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

from paddle_shard.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """The steps of an epoch, in stretches of batches of one size.

    Examples:
        >>> stretches = Stretches(segments=((0, 4), (8, 3)), end=15)
        >>> [stretches.first_position(step) for step in range(5)], stretches.step_and_row(13)
        ([0, 4, 8, 11, 14], (3, 2))
        >>> stretches.num_full, stretches.rest
        (4, 1)
    """

    segments: tuple[tuple[int, int], ...]
    """(first position, batch size) of each stretch."""
    end: int
    """Position after the last that is served or padded."""
    _steps: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Step at which each stretch begins."""
    _firsts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        steps, starts = [0], [first for first, _ in self.segments]
        for (first, size), end in zip(self.segments, starts[1:], strict=False):
            steps.append(steps[-1] + -(-(end - first) // size))
        object.__setattr__(self, "_steps", tuple(steps))
        object.__setattr__(self, "_firsts", tuple(starts))

    @property
    def rest(self) -> int:
        """Positions that are left for a short last batch."""
        first, size = self.segments[-1]
        return max(0, self.end - first) % size

    @property
    def num_full(self) -> int:
        """Steps without a short last batch."""
        first, size = self.segments[-1]
        return self._steps[-1] + max(0, self.end - first) // size

    def first_position(self, step: int) -> int:
        """Return the position of the first row of a step."""
        at = self._at(step)
        first, size = self.segments[at]
        return first + (step - self._steps[at]) * size

    def batch_size(self, step: int) -> int:
        """Return the rows of a full batch at a step."""
        return self.segments[self._at(step)][1]

    def step_and_row(self, position: int) -> tuple[int, int]:
        """Return the step that holds a position, and the row in its batch."""
        at = bisect_right(self._firsts, position) - 1
        first, size = self.segments[at]
        step, row = divmod(position - first, size)
        return self._steps[at] + step, row

    def _at(self, step: int) -> int:
        return len(self._steps) - 1 if step >= self._steps[-1] else bisect_right(self._steps, step) - 1


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
