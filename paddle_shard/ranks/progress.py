"""How far the ranks of one host are, in memory that all of them have mapped: no message is needed in a steady run."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from paddle_shard.ranks.protocol import PASSES
from paddle_shard.ranks.verdict import NEVER
from paddle_shard.reading.channel import Slots, mapped

_TOKEN = 16
"""Bytes at the beginning of the memory by which a rank knows that it has mapped that of its group."""
_LOW = (1 << 16) - 1
_STEPS = (1 << 32) - 1


class ProgressTable:
    """A word for each rank and pass: number of the pass (16 bits), of notes that were sent (16) and of steps (32).

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
        self._is_shared = False

    @staticmethod
    def size_of(num_ranks: int) -> int:
        """Return the number of words."""
        return (PASSES + 1) * num_ranks

    @property
    def is_shared(self) -> bool:
        """True once all ranks have joined."""
        if not self._is_shared:
            self._is_shared = all(self._words[PASSES * len(self._ranks) :])
        return self._is_shared

    def join(self) -> None:
        """Tell the others that this rank posts all that it announces."""
        self._words[PASSES * len(self._ranks) + self._index] = 1

    def post(self, number: int, step: int, num_notes: int) -> None:
        """Publish that this rank has announced the steps before `step` of a pass, and sent so many notes before."""
        first = number % PASSES * len(self._ranks)
        self._words[first + self._index] = (
            (number & _LOW) << 48 | (num_notes & _LOW) << 32 | step
        )

    def least(self, number: int, heard: Mapping[int, Any]) -> int:
        """Return the number of steps of a pass that all ranks have announced; 0 if that is not known.

        Args:
            number: Number of the pass.
            heard: Global rank -> number of its notes that have arrived. Steps with missing notes are not known.
        """
        first, found = number % PASSES * len(self._ranks), NEVER
        for rank, word in zip(
            self._ranks, self._words[first : first + len(self._ranks)], strict=True
        ):
            missing = (word >> 32) - heard.get(rank, 0) & _LOW
            if word >> 48 != number & _LOW or 0 < missing <= _LOW // 2:
                return 0
            found = min(found, word & _STEPS)
        return found


class TableOfHost:
    """Makes or finds the memory of a group's table.

    The file has no name: the others open it through /proc, so nothing is left of it when they end.
    """

    def __init__(self, ranks: Sequence[int], rank: int, *, is_hub: bool) -> None:
        """Make the memory on the hub's rank."""
        self._ranks = tuple(ranks)
        self._rank = rank
        self._size = _TOKEN + 8 * ProgressTable.size_of(len(self._ranks))
        self._slots: Slots | None = None
        self.place = ""
        """Where other ranks find the memory; empty: they cannot."""
        if is_hub:
            with contextlib.suppress(OSError):
                self._slots = Slots(1, self._size)
                token = secrets.token_bytes(_TOKEN)
                self._slots.memory[:_TOKEN] = token
                self.place = f"/proc/{os.getpid()}/fd/{self._slots.file} {token.hex()}"

    def find(self, place: str) -> ProgressTable | None:
        """Return the table at a place; None if it is that of another host or container."""
        memory: Any = None if self._slots is None else self._slots.memory
        with contextlib.suppress(OSError, ValueError):
            path, token = place.split()
            if memory is None:
                memory = mapped(os.open(path, os.O_RDWR), self._size)
            if memory is not None and memory[:_TOKEN].hex() == token:
                return ProgressTable(memory[_TOKEN:].cast("Q"), self._ranks, self._rank)
        return None
