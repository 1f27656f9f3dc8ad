"""Locks among the processes of a host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def file_lock(path: str) -> Iterator[None]:
    """Hold a lock among processes and threads, by a file that exists meanwhile; without effect if it cannot be made."""
    with ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            handle = os.open(path, os.O_CREAT | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Closing is not enough: a child that was forked meanwhile has the file open, too.
            stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)
            stack.callback(Path(path).unlink, missing_ok=True)
        yield
