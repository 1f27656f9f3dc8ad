"""Fork locks: keep other threads out of critical work while this process is forked.

A child has only the thread that forks: what another thread has locked stays locked there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

no_fork = threading.RLock()
"""Held by a thread that works with Paddle, creates a client of a store, or creates and registers a socket. Its
holder must not fork: a thread that forks takes this lock first, and other locks after it."""
LONGEST = 5.0
"""Seconds for which a fork waits for other threads, which may be waiting for the forking one."""


class ReaderGate:
    """Lets threads that read ahead finish their batch before this process is forked.

    A thread that reads may hold a lock of the data set, which a forked child would never see released.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_readers = 0
        self._num_forks = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read one batch inside the `with` block; wait while a fork is prepared."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_forks, LONGEST)
            self._num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers -= 1
                self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Fork inside the `with` block, with no reader in the middle of a batch, if all finish in time."""
        with self._changed:
            self._num_forks += 1
            self._changed.wait_for(lambda: not self._num_readers, LONGEST)
        try:
            yield
        finally:
            with self._changed:
                self._num_forks -= 1
                self._changed.notify_all()


reader_gate = ReaderGate()


def _end_in_child() -> None:
    global reader_gate
    reader_gate = ReaderGate()  # the threads that hold the old one are not here
    no_fork.release()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(
        before=no_fork.acquire,
        after_in_parent=no_fork.release,
        after_in_child=_end_in_child,
    )
