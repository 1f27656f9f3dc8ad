"""Locks on files among the processes of a host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


@contextmanager
def held(file: IO[bytes]) -> Iterator[bool]:
    """Hold a lock among processes and threads; yield False if the file cannot be locked."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):
        yield False
        return
    try:
        yield True
    finally:  # closing is not enough: a child that was forked meanwhile has the file open, too
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
