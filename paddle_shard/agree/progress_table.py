"""How can all ranks see at once how far each of them is?"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

PASSES = 64
"""Most passes that are on the table at the same time; further open passes use rounds only."""
MAX_STEP = 1 << 32


class ProgressTable:
    """The number of steps of a pass that each rank can serve, in memory that all ranks share.

    Reading it costs a fraction of a microsecond, but it tells less than a round: neither why a rank stops, nor its
    notes. A rank's entry is correct whenever it is read, and only grows within a pass.
    """

    def __init__(self, words: MutableSequence[int], rank: int, size: int) -> None:
        """Use the shared memory.

        Args:
            words: `PASSES * size` int64 words, all 0 at first; each word is written as a whole.
            rank: Position of this process among the ranks.
            size: Number of ranks.
        """
        self._words, self._rank, self._size = words, rank, size

    def post(self, number: int, step: int) -> None:
        """Post that this rank can serve every step before `step` of pass `number`."""
        self._words[number % PASSES * self._size + self._rank] = (number + 1) * MAX_STEP + min(step, MAX_STEP - 1)

    def least(self, number: int) -> int:
        """Return the number of steps of pass `number` that every rank can serve, as far as the table shows."""
        start, none = number % PASSES * self._size, (number + 1) * MAX_STEP
        found: Sequence[int] = self._words[start : start + self._size]
        least = min(found)
        return least - none if least >= none and max(found) < none + MAX_STEP else 0
