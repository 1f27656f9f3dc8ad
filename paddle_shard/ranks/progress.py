"""Table of the progress of ranks in memory that those of one host share, so that a steady run needs no messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paddle_shard.ranks.decision import NEVER

MAX_ITERATIONS = 64
"""Most iterations that are on a table at the same time; older ones are reported in messages only."""
_MASK = (1 << 16) - 1
_STEPS = (1 << 32) - 1


class ProgressTable:
    """A word for each rank and iteration: mark of the iteration (16 bits), notes sent (16) and steps (32).

    A rank writes a word in one store, so that another reads all of it or none.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        """Begin without memory: nothing is posted, and no rank is seen.

        Args:
            ranks: Global ranks that take part.
            rank: That of this process.
        """
        self._ranks = ranks
        self._index = ranks.index(rank)
        self._words: Any = None

    def find(self, place: str) -> None:
        """Use the memory at a place, if it can be reached."""

    def post(self, number: int, step: int, num_notes: int) -> None:
        """Publish that this rank has announced the steps before `step` of an iteration, and sent so many notes."""
        if self._words is not None:
            self._words[number % MAX_ITERATIONS, self._index] = (
                _tag(number) << 48 | (num_notes & _MASK) << 32 | step
            )

    def least(self, number: int, num_received: Mapping[int, int]) -> int:
        """Return the number of steps of an iteration that all ranks have announced; -1 if not all ranks post it.

        Args:
            number: Number of the iteration.
            num_received: Global rank -> number of its notes that have arrived. If one is missing, no step is known.
        """
        if self._words is None:
            return -1
        least = NEVER
        for index, rank in enumerate(self._ranks):
            word = self._words[number % MAX_ITERATIONS, index]
            if word >> 48 != _tag(number):
                return -1
            missing = (word >> 32) - num_received.get(rank, 0) & _MASK
            least = (
                0 if 0 < missing <= _MASK // 2 else min(least, word & _STEPS)
            )
        return least


def _tag(number: int) -> int:
    """Return the mark of an iteration in the words of the ranks that post it: never 0, as in fresh memory."""
    return number % _MASK + 1
