"""How is a pass read while the model computes?"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from paddle.base.framework import _current_expected_place, _set_expected_place

from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.reading.pace import Pace
from paddle_shard.reading.worker_guards import signals_held
from paddle_shard.say_once import say_once

_JOIN_SECONDS = 1.0
"""Seconds that closing a pass waits for a read that cannot be interrupted. Its thread then ends by itself later."""

_open: weakref.WeakSet[Ahead] = weakref.WeakSet()


class Ahead:
    """Does a pass's work in a separate thread, some steps ahead of the caller.

    The thread only does work that draws nothing from the global random generators. So no generator is used or seeded
    in parallel to the training thread. The caller does the other work itself, when it needs it.
    """

    def __init__(
        self,
        work: Callable[[bool], bool],
        runs_free: Callable[[], bool],
        pace: Pace | None = None,
        marks: Callable[[], Any] = lambda: None,
    ) -> None:
        """Keep the arguments; `start` starts the thread.

        Args:
            work: Does one step and returns True if the step is done; raises StopIteration if there are no more steps.
                Its argument is True in the thread. Then it may return False: the caller has to do the step.
            runs_free: Returns True if the thread can do the next step, as far as is known.
            pace: The pace of the steps that the caller's thread does. The thread starts once they are known not to be
                quick, since it costs about 50 us per step. None: it starts at once.
            marks: Returns a value that changes when the process draws from a global generator. A loop that draws is
                read on its own thread: a sample that draws now and then would take the loop's numbers.
        """
        self._work, self._runs_free, self._pace, self._marks = work, runs_free, pace, marks
        self._left: Any = None
        """The marks when the loop was last left to itself."""
        self._loop_draws = False
        self._changed = threading.Condition()
        self._done = self._limit = 0
        self._busy = self._over = False
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._place = _current_expected_place()

    def start(self) -> bool:
        """Start the thread if it pays off; return True if the thread can do the next step."""
        pace = self._pace
        if self._thread is None and pace is not None and (not pace.reads_known or pace.reads_quickly):
            return False
        with self._changed:
            self._look_at_the_loop()
            if self._thread is None and not self._over and self._may_run():
                thread = threading.Thread(target=self._run, name="paddle_shard-prefetch", daemon=True)
                with signals_held():  # a handler may raise only once the thread is stored and can be stopped
                    thread.start()
                    _open.add(self)
                    self._thread = thread
            return self._running()

    def _running(self) -> bool:
        return self._thread is not None and self._may_run()

    def _may_run(self) -> bool:
        return self._runs_free() and not self._loop_draws

    def _look_at_the_loop(self) -> None:
        """See whether the loop has drawn since it was last left to itself."""
        if self._left is not None and not self._loop_draws and self._marks() != self._left:
            self._loop_draws = True
            if self._pace is None:
                say_once(
                    "prefetch: the training loop draws from numpy's or Python's global generator, so the data is read "
                    "while it waits, on its own thread. Draw from a generator of your own, or use workers "
                    "(num_workers=), to read ahead."
                )

    def leave(self) -> None:
        """Note that the caller gets a batch."""
        if self._thread is not None or self._pace is None or not self._pace.reads_quickly:
            self._left = self._marks()

    def need(self, count: int, limit: int) -> None:
        """Wait until `count` steps are done, or all if there are fewer; the thread continues up to `limit`."""
        if self._thread is None:
            while self._done < count and not self._over:
                self._do_here()
            return
        with self._changed:
            self._limit = limit
            self._changed.notify_all()
            while self._done < count and not self._over:
                if self._busy or self._running():
                    self._changed.wait()
                else:
                    self._do_here()
        if self._failure is not None:
            raise self._failure

    def stop(self, interrupt: Callable[[], None] = lambda: None) -> bool:
        """End the thread and return whether it has ended. It is safe to call this again, and from any thread.

        Args:
            interrupt: Makes a waiting read return.
        """
        if os.getpid() != self._process:  # a forked child has no thread, and its copy of the lock may stay locked
            return True
        with self._changed:
            self._over = True
            self._changed.notify_all()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        interrupt()
        thread.join(_JOIN_SECONDS)
        _open.discard(self)
        return not thread.is_alive()

    def _do_here(self) -> None:
        """Do a step on the caller's thread. The other thread, if there is one, must not do it."""
        done, began = self._done, time.perf_counter()
        try:
            self._done += self._work(False)
        except StopIteration:
            self._over = True
        if self._pace is not None and self._done > done:
            self._pace.has_read(time.perf_counter() - began)

    def _run(self) -> None:
        _set_expected_place(self._place)  # each thread has a current place of its own
        try:
            while True:
                with self._changed:
                    while not self._over and not (self._done < self._limit and self._may_run()):
                        self._changed.wait()
                    if self._over:
                        return
                    self._busy = True
                done = self._work(True)
                with self._changed:
                    self._done += done
                    self._busy = False
                    self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as failure:  # `work` reports the failures of batches itself, so this is another failure
            self._failure = failure
        finally:
            with self._changed:
                self._busy, self._over = False, True
                self._changed.notify_all()


@atexit.register
def _stop_all() -> None:
    """End the threads before the interpreter shuts down, since they would continue to work during the shutdown."""
    for ahead in list(_open):
        ahead.stop()


class DrawnAhead:
    """Requests that are drawn on the caller's thread, since the user's sampler may run, and taken in another thread."""

    def __init__(self, requests: Iterator[Any]) -> None:
        self._requests, self._drawn, self._count = requests, deque[Any](), 0
        self._end: Exception | None = None

    def draw(self, count: int) -> None:
        """Draw until `count` requests were drawn in all, or there are no more."""
        while self._count < count and self._end is None:
            try:
                self._drawn.append(next(self._requests))
                self._count += 1
            except StopIteration:
                self._end = StopIteration()
            except Exception as error:  # the sampler's: raised after the requests that it has drawn
                raise_if_a_handlers(error)
                self._end = error

    def ready(self, count: int) -> int:
        """Return how many of `count` requests can be taken now."""
        return count if self._end is not None else min(count, len(self._drawn))

    def __iter__(self) -> DrawnAhead:
        return self

    def __next__(self) -> Any:
        if self._drawn:
            return self._drawn.popleft()
        assert self._end is not None, "more is taken than was drawn"
        if isinstance(self._end, StopIteration):  # a new object: a stored one would keep the caller's frames alive
            raise StopIteration
        raise self._end
