"""What may other threads be in the middle of while this process is forked?

A child has only the thread that forks: what another one has locked stays locked there for ever, and what it has half
imported stays half.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

no_fork = threading.RLock()
"""Held by a thread that works with Paddle, makes a client of a store, or makes a socket and notes it. Who holds it may
not fork: locks are held then in an order, and another thread that forks has the others already."""
LONGEST = 5.0
"""Seconds that a fork waits for other threads: they may wait for this one."""


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
_numpys: list[Any] = []
"""The lock of numpy's global generator, while a fork goes on."""


def wait_for_imports(deadline: float) -> None:
    """Wait until no other thread imports anything; it may begin again before the next line of code, but hardly does.

    Args:
        deadline: When to go on all the same, by `time.monotonic`.
    """
    locks: dict[str, Any] = getattr(importlib._bootstrap, "_module_locks", {})
    while time.monotonic() < deadline:
        owners = [getattr(reference(), "owner", None) for reference in list(locks.values())]
        if not set(owners) - {None, threading.get_ident()}:
            return
        time.sleep(0.002)


def _begin() -> None:
    no_fork.acquire()
    found = getattr(np.random, "get_bit_generator", None)
    lock: Any = (found() if found else np.random.mtrand._rand._bit_generator).lock  # numpy before 1.24
    if lock.acquire(timeout=LONGEST):  # workers seed it at once
        _numpys.append(lock)


def _end() -> None:
    if _numpys:
        _numpys.pop().release()
    no_fork.release()


def _end_in_child() -> None:
    global reader_gate
    reader_gate = ReaderGate()  # the threads that hold the old one are not here
    _end()
    if "fsspec.asyn" in sys.modules:  # its own hook means to do so, but sets another variable
        with suppress(AttributeError):
            sys.modules["fsspec.asyn"].reset_lock()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(before=_begin, after_in_parent=_end, after_in_child=_end_in_child)
