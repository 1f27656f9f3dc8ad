"""Memory that the ranks of one host share, without a file that could be left behind."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence

from paddle_shard.ranks.progress import ProgressTable
from paddle_shard.reading.channel import Slots, mapped

_TOKEN_SIZE = 16
"""Bytes at the beginning of the memory by which a rank knows that it has mapped that of its group."""


class HostMemory:
    """Makes or finds the memory of a group's table.

    The file has no name: the others open it through /proc, so nothing is left of it when they end.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        """Make the memory on the first rank."""
        self._ranks = ranks
        self._rank = rank
        self._size = _TOKEN_SIZE + 8 * ProgressTable.size_of(len(ranks))
        self.place = ""
        """Where other ranks find the memory; empty: they cannot."""
        if rank == ranks[0]:
            with contextlib.suppress(OSError):
                self._slots = Slots(1, self._size)
                self._slots.memory[:_TOKEN_SIZE] = token = secrets.token_bytes(
                    _TOKEN_SIZE
                )
                self.place = f"/proc/{os.getpid()}/fd/{self._slots.file} {token.hex()}"

    def find(self, place: str) -> ProgressTable | None:
        """Return the table at a place; None if it is that of another host or container."""
        with contextlib.suppress(OSError, ValueError):
            path, token = place.split()
            memory = mapped(os.open(path, os.O_RDWR), self._size)
            if memory is not None and memory[:_TOKEN_SIZE].hex() == token:
                words = memory[_TOKEN_SIZE:].cast("Q")
                return ProgressTable(words, self._ranks, self._rank)
        return None
