"""Locks on files among the processes of a host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


@contextmanager
def file_lock(file: IO[bytes]) -> Iterator[None]:
    """Hold a lock on an open file among processes and threads; without effect if the file cannot be locked."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):
        yield
        return
    try:
        yield
    finally:  # closing is not enough: a child that was forked meanwhile has the file open, too
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
