"""Where can all ranks see at a glance how far each of them is?"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

PASSES = 64
"""Passes that may be open at once and are all on the table; others do without."""
MAX_STEP = 1 << 32


class ProgressTable:
    """How many steps of a pass each rank can serve, in memory that all of them see.

    It says less than a round, and costs a fraction of a microsecond: neither why a rank goes no further, nor what it
    has noted. What stands here of a rank is true whenever it is read, and only grows within a pass.
    """

    def __init__(self, words: MutableSequence[int], rank: int, size: int) -> None:
        """Look at the memory.

        Args:
            words: `PASSES * size` zeros in the beginning: int64, each written as a whole.
            rank: Position of this process among the ranks.
            size: How many there are.
        """
        self._words, self._rank, self._size = words, rank, size

    def post(self, number: int, step: int) -> None:
        """Say that this rank can serve every step before `step` of pass `number`."""
        self._words[number % PASSES * self._size + self._rank] = (number + 1) * MAX_STEP + min(step, MAX_STEP - 1)

    def least(self, number: int) -> int:
        """Return the step before which every rank can serve all of pass `number`, as far as can be seen here."""
        start, none = number % PASSES * self._size, (number + 1) * MAX_STEP
        found: Sequence[int] = self._words[start : start + self._size]
        least = min(found)
        return least - none if least >= none and max(found) < none + MAX_STEP else 0
