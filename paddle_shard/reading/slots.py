"""How do the arrays of a message lie in memory that several processes have mapped?"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paddle_shard.plan.handlers import raise_if_a_handlers

_ALIGNMENT = 64
_GRAIN = 64 << 10


def ample(size: int) -> int:
    """Return a size with some reserve, in bytes, since batches differ in size."""
    return -(-(size + size // 4) // _GRAIN) * _GRAIN


class Slots:
    """Slots of equal size in an unnamed file in memory. It exists as long as a process has it open or mapped."""

    def __init__(self, num_slots: int, room: int) -> None:
        """Make the file and map it; it takes no memory yet.

        Raises:
            OSError: The file cannot be made or mapped.
        """
        self.room = room
        """Size of a slot in bytes."""
        self._there = [0] * num_slots
        self.file = -1
        if hasattr(os, "memfd_create"):  # missing if Python was built for a C library from before 2018
            self.file = os.memfd_create("paddle_shard")
        else:
            with tempfile.TemporaryFile(dir="/dev/shm") as file:
                self.file = os.dup(file.fileno())
        try:
            os.ftruncate(self.file, num_slots * room)
            self.memory = memoryview(mmap.mmap(self.file, num_slots * room))
        except BaseException:
            self.close()
            raise

    def slot(self, number: int, size: int) -> memoryview:
        """Return a slot, of which at least `size` bytes are allocated.

        Raises:
            OSError: There is not enough memory.
        """
        start = number * self.room
        if self._there[number] < size:
            there = min(-(-size // _GRAIN) * _GRAIN, self.room)
            os.posix_fallocate(self.file, start, there)  # else a write would kill the process if memory is short
            self._there[number] = there
        return self.memory[start : start + self.room]

    def close(self) -> None:
        """Close the file, so that its number is free; safe to call again. Dropping the slots does it, too."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self.close()


def mapped(file: int, size: int) -> memoryview | None:
    """Map a file in memory and close it; None if no addresses are left."""
    try:
        return memoryview(mmap.mmap(file, size))
    except OSError as error:
        raise_if_a_handlers(error)
        return None
    finally:
        os.close(file)


def layout(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return where each piece begins, after a table of their lengths, and where the last piece ends."""
    starts, end = [], 8 * len(lengths)
    for length in lengths:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + length
    return starts, end


def write(memory: memoryview, pieces: Sequence[memoryview], starts: Sequence[int]) -> None:
    """Write the pieces of a message, with the starts that `layout` has returned."""
    struct.pack_into(f"<{len(pieces)}Q", memory, 0, *[piece.nbytes for piece in pieces])
    for piece, start in zip(pieces, starts, strict=True):
        memory[start : start + piece.nbytes] = piece


def read(memory: memoryview, num_pieces: int) -> tuple[memoryview, list[Any]]:
    """Return the first piece of a message as it lies there, and copies of the others."""
    lengths = struct.unpack_from(f"<{num_pieces}Q", memory)
    (start, length), *arrays = zip(layout(lengths)[0], lengths, strict=True)
    return memory[start : start + length], [np.frombuffer(memory, np.uint8, size, at).copy() for at, size in arrays]
