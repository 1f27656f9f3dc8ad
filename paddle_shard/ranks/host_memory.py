"""Memory that the ranks of one host share, without a file that could be left behind."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Sequence

from paddle_shard.ranks.progress import MAX_ITERATIONS, ProgressTable
from paddle_shard.reading.channel import Slots, map_file

_PLACE = re.compile(r"^(/proc/\d+/fd/\d+) (\w+)$")
"""Matches (file of a process, token); no other file is opened."""
_TOKEN_SIZE = 16
"""Bytes at the beginning of the memory by which a rank knows that it has mapped that of its group."""


class HostTable(ProgressTable):
    """A table in the memory of a host.

    The file has no name: the ranks open it through /proc, so nothing is left of it when they end.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        """Make the memory on the first rank."""
        super().__init__(ranks, rank)
        self._size = _TOKEN_SIZE + 8 * MAX_ITERATIONS * len(ranks)
        self.place = ""
        """Name of the memory for the other ranks; empty: there is none."""
        if rank == ranks[0]:
            with contextlib.suppress(OSError):
                self._slots = Slots(1, self._size)
                token = secrets.token_bytes(_TOKEN_SIZE)
                self._slots.memory[:_TOKEN_SIZE] = token
                self.place = (
                    f"/proc/{os.getpid()}/fd/{self._slots.file} {token.hex()}"
                )

    def find(self, place: str) -> None:
        """Map the memory at a place, unless it is that of another host or container."""
        with contextlib.suppress(OSError, ValueError):
            [(path, token)] = _PLACE.findall(place)
            memory = map_file(os.open(path, os.O_RDWR), self._size)
            if memory is not None and memory[:_TOKEN_SIZE].hex() == token:
                shape = MAX_ITERATIONS, len(self._ranks)
                self._words = memory[_TOKEN_SIZE:].cast("Q", shape)
