"""How does one process of a host wait until another one is done with a file?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any


def flocked(file: Any, *flags: str) -> bool:
    """Lock or unlock a file by flags of `fcntl`; return False if another process has it, or there are no locks."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, sum(getattr(fcntl, flag) for flag in flags))
        return True
    return False


@contextmanager
def held(file: IO[bytes]) -> Iterator[bool]:
    """Hold a lock among processes and threads; yield False if the file cannot be locked."""
    locked = flocked(file, "LOCK_EX")
    try:
        yield locked
    finally:  # closing is not enough: a child that was forked meanwhile has the file open, too
        flocked(file, "LOCK_UN")
