"""Which files, sockets and pieces of memory does this process hold open?

They are told by what they are and not counted: what an earlier test has left to the collector or to a thread may be
closed at any moment, while they are read, too.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

__all__ = ["Descriptor", "open_files"]


class Descriptor(NamedTuple):
    """One that is open: its number, what it is, and where it leads."""

    number: int
    device: int
    inode: int
    target: str

    @property
    def kind(self) -> str:
        """ "socket", "pipe", "anon_inode" and so on; "file" for what has a path."""
        return self.target.partition(":")[0] if ":" in self.target else "file"

    @property
    def is_memory(self) -> bool:
        """Whether it is memory that a channel has made."""
        return self.target.startswith("/memfd:paddle_shard")


def open_files() -> set[Descriptor]:
    """All that are open now."""
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        # the listing's own, and what another thread closes meanwhile
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            found.add(
                Descriptor(
                    number,
                    status.st_dev,
                    status.st_ino,
                    os.readlink(f"/proc/self/fd/{number}"),
                )
            )
    return found
