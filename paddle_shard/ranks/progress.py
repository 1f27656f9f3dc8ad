"""Table of the progress of ranks in memory that they share, so that a steady run needs no messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paddle_shard.ranks.decision import NEVER

MAX_ITERATIONS = 64
"""Most iterations that are on a table at the same time; older ones are reported in messages only."""
_MASK = (1 << 16) - 1
_STEPS = (1 << 32) - 1


class ProgressTable:
    """A word for each rank and iteration: number of the iteration (16 bits), notes sent (16) and steps (32).

    A rank writes a word in one store, so that another reads all of it or none.
    """

    def __init__(self, words: Any, ranks: Sequence[int], rank: int) -> None:
        """Take over the memory.

        Args:
            words: Memory of `size_of` numbers of 64 bits.
            ranks: Global ranks that take part.
            rank: That of this process.
        """
        self._words = words
        self._ranks = tuple(ranks)
        self._index = self._ranks.index(rank)
        self._joined = MAX_ITERATIONS * len(self._ranks)
        """Where the words begin by which ranks join."""

    @staticmethod
    def size_of(num_ranks: int) -> int:
        """Return the number of words."""
        return (MAX_ITERATIONS + 1) * num_ranks

    @property
    def is_shared(self) -> bool:
        """True once all ranks have joined."""
        return all(self._words[self._joined :])

    def join(self) -> None:
        """Announce that this rank posts its progress."""
        self._words[self._joined + self._index] = 1

    def post(self, number: int, step: int, num_notes: int) -> None:
        """Publish that this rank has announced the steps before `step` of an iteration, and sent so many notes."""
        first = number % MAX_ITERATIONS * len(self._ranks)
        self._words[first + self._index] = (
            (number & _MASK) << 48 | (num_notes & _MASK) << 32 | step
        )

    def least(self, number: int, num_received: Mapping[int, int]) -> int:
        """Return the number of steps of an iteration that all ranks have announced; 0 if that is not known.

        Args:
            number: Number of the iteration.
            num_received: Global rank -> number of its notes that have arrived. Steps with missing notes are not known.
        """
        first = number % MAX_ITERATIONS * len(self._ranks)
        least = NEVER
        for index, rank in enumerate(self._ranks, first):
            word = self._words[index]
            missing = (word >> 32) - num_received.get(rank, 0) & _MASK
            if word >> 48 != number & _MASK or 0 < missing <= _MASK // 2:
                return 0
            least = min(least, word & _STEPS)
        return least
