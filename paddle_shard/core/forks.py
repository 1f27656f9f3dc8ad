"""Fork locks: keep other threads out of critical work while this process is forked.

A child has only the thread that forks: what another thread has locked stays locked there.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

no_fork = threading.RLock()
"""Held by a thread that works with Paddle, creates a client of a store, or creates and registers a socket. Its
holder must not fork: a thread that forks takes this lock first, and other locks after it."""
MAX_WAIT = 5.0
"""Seconds for which a fork waits for other threads, which may be waiting for the forking one."""


_reader_locks: weakref.WeakKeyDictionary[Any, None] = (
    weakref.WeakKeyDictionary()
)
"""In the order in which they were made: a thread that waits for another has the older lock."""


def reader_lock() -> Any:
    """Return a new lock for a thread that reads ahead to hold during each batch, so that no fork finds it in one.

    A thread that reads may hold a lock of the data set, which a forked child would never see released.
    """
    lock = threading.RLock()  # the thread that holds it may fork, too
    _reader_locks[lock] = None
    return lock


@contextmanager
def between_batches() -> Iterator[None]:
    """Fork inside the `with` block, with no thread in the middle of a batch, if all finish in time."""
    deadline = time.monotonic() + MAX_WAIT
    held = []
    # Not `list(_reader_locks)`: other threads make locks meanwhile.
    for lock_ref in _reader_locks.keyrefs():
        lock = lock_ref()
        seconds = max(0.0, deadline - time.monotonic())
        if lock is not None and lock.acquire(timeout=seconds):
            held.append(lock)
    try:
        yield
    finally:
        for lock in held:
            lock.release()


def _end_in_child() -> None:
    global _reader_locks
    # the threads that hold the old ones are not here
    _reader_locks = weakref.WeakKeyDictionary()
    no_fork.release()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(
        before=no_fork.acquire,
        after_in_parent=no_fork.release,
        after_in_child=_end_in_child,
    )
