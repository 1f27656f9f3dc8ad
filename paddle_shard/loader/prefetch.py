"""How is a pass read while the model computes?"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from paddle.base.framework import _current_expected_place, _set_expected_place

_JOIN_SECONDS = 1.0
"""How long a read that cannot be interrupted is waited for when a pass is closed; then its thread ends by itself."""

_open: weakref.WeakSet[Ahead] = weakref.WeakSet()


class Ahead:
    """Does a pass's work in a thread of its own, some steps ahead of the caller.

    Work that may draw from the global random generators is done only while the caller waits for it, so that nothing is
    drawn or seeded beside the training thread; and all of it in the same thread, since a data set may hold what only
    the thread can use that has made it (a connection to SQLite).
    """

    def __init__(self, work: Callable[[bool], bool], runs_free: Callable[[], bool]) -> None:
        """Start nothing yet: the thread starts when something is needed.

        Args:
            work: Does one step and returns whether that is done; raises StopIteration where there is none. It is told
                whether the caller may be at work, too; then it may refuse.
            runs_free: Whether work can be done then.
        """
        self._work, self._runs_free = work, runs_free
        self._changed = threading.Condition()
        self._done = self._limit = 0
        self._waiting = self._over = False
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._place = _current_expected_place()

    def need(self, count: int, limit: int) -> None:
        """Wait until `count` steps are done, or there are no more; the thread goes on to `limit` meanwhile."""
        with self._changed:
            self._limit = limit
            if self._thread is None and not self._over:
                self._thread = threading.Thread(target=self._run, name="paddle_shard-prefetch", daemon=True)
                self._thread.start()
                _open.add(self)
            self._changed.notify_all()
            self._waiting = True
            try:
                while self._done < count and not self._over:
                    self._changed.wait()
            finally:
                self._waiting = False
        if self._failure is not None:
            raise self._failure

    def stop(self, interrupt: Callable[[], None] = lambda: None, seconds: float = _JOIN_SECONDS) -> bool:
        """End the thread; return whether it has ended. Safe to call again, and from any thread.

        Args:
            interrupt: Makes a read return that waits for something.
            seconds: To wait for it.
        """
        if os.getpid() != self._process:  # a forked child has no such thread, and perhaps a lock that nobody lets go
            return True
        with self._changed:
            self._over = True
            self._changed.notify_all()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        interrupt()
        thread.join(seconds)
        _open.discard(self)
        return not thread.is_alive()

    def _may_work(self) -> bool:
        return self._done < self._limit and (self._waiting or self._runs_free())

    def _run(self) -> None:
        _set_expected_place(self._place)  # a thread's own; the device's, where it has one
        try:
            while True:
                with self._changed:
                    while not self._over and not self._may_work():
                        self._changed.wait()
                    if self._over:
                        return
                    free = not self._waiting
                done = self._work(free)
                with self._changed:
                    self._done += done
                    self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as failure:  # work keeps its failures to itself: this is none of a batch
            self._failure = failure
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()


@atexit.register
def _stop_all() -> None:
    """End the threads before the interpreter does, under which they would work on."""
    for ahead in list(_open):
        ahead.stop()


class DrawnAhead:
    """Requests that are drawn on the caller's thread, where a sampler of the user's may run, and taken in another."""

    def __init__(self, requests: Iterator[Any]) -> None:
        self._requests, self._drawn, self._count = requests, deque[Any](), 0
        self._end: Exception | None = None

    def draw(self, count: int) -> None:
        """Draw until there were `count`, or there are no more."""
        while self._count < count and self._end is None:
            try:
                self._drawn.append(next(self._requests))
                self._count += 1
            except StopIteration:
                self._end = StopIteration()
            except Exception as error:  # the sampler's: raised behind what it has drawn
                self._end = error

    def __iter__(self) -> DrawnAhead:
        return self

    def __next__(self) -> Any:
        if self._drawn:
            return self._drawn.popleft()
        assert self._end is not None, "more is taken than was drawn"
        raise self._end
