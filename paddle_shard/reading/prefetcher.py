"""How is a pass read while the model computes?"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from typing import Any

from paddle.base.framework import _current_expected_place, _set_expected_place

from paddle_shard.plan.step import Step
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.executor import Executor, Wrapper
from paddle_shard.reading.reader import DrewBesideError
from paddle_shard.reading.worker_guards import signals_held
from paddle_shard.samplers.randomness import states
from paddle_shard.say_once import say_once

QUICK = 0.001
"""Seconds of a read below which handing it from thread to thread costs more than it saves."""
_KEPT = 0.5
"""Share of the earlier estimate of a read's seconds that is kept at each further read."""
_JOIN_SECONDS = 1.0
"""Seconds that closing waits for a read that cannot be interrupted. Its thread then ends by itself later."""

_LOOP_DRAWS = (
    "prefetch: numpy's or Python's global generator was drawn from while a thread read ahead, so the data is read on "
    "the thread of the training loop from here on. Draw from a generator of your own in the loop, or use workers "
    "(num_workers=), to read ahead."
)

_open: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


class Prefetcher(Wrapper):
    """Takes batches from another executor in a thread, some steps ahead of the caller.

    The thread runs only while reading draws nothing from this process's global generators, which belong to the training
    loop. Until it runs, the caller's thread reads. One thread at a time uses the inner executor.
    """

    def __init__(self, inner: Executor, count: int, *, always: bool) -> None:
        """Wrap an executor.

        Args:
            inner: The executor.
            count: Most batches that are kept ready.
            always: True if the thread is started in any case; False: once a read takes a millisecond or more.
        """
        super().__init__(inner)
        self._count, self._always = count, always
        self._changed = threading.Condition()
        self._waiting: deque[Step] = deque()
        """Steps that were submitted here, and not to the inner executor yet."""
        self._left = 0
        """Steps that were submitted and whose batches were not read yet."""
        self._done: deque[tuple[Batch | None, BaseException | None]] = deque()
        self._seconds = 0.0
        self._draws_from = inner.draws_from
        self._left_at: list[Any] | None = None
        """The generators when the caller was given a batch, if reading may draw from them."""
        self._thread: threading.Thread | None = None
        self._running = self._over = False
        self._place, self._process = _current_expected_place(), os.getpid()

    @property
    def depth(self) -> int:
        """See `Executor`. Until the thread runs, the user's sampler draws as late as it can."""
        return self._inner.depth + (self._count if self._running or self._may_run() else 0)

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        with self._changed:
            self._left += 1
            if self._running or self._waiting:  # the thread uses the inner executor, and passes the step on
                self._waiting.append(step)
                self._changed.notify_all()
                return
        self._inner.submit(step)

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        if self._running and self._left_at is not None and states(self._draws_from) != self._left_at:
            self._yield_to_the_loop()
        self._start()
        try:
            return self._next()
        finally:
            self._left_at = states(self._draws_from) if self._running and self._draws_from else None

    def _next(self) -> Batch:
        with self._changed:
            while not self._done and self._running:
                self._changed.wait()
            if self._done:
                found, failure = self._done.popleft()
                self._changed.notify_all()
                if failure is not None:
                    raise failure
                assert found is not None
                return found
        began = time.perf_counter()
        found = self._take(beside=False)
        took = time.perf_counter() - began
        self._seconds = _KEPT * self._seconds + (1 - _KEPT) * took if self._seconds else took
        return found

    def _yield_to_the_loop(self) -> None:
        """Stop the thread: the loop draws from the generators that samples may begin to draw from."""
        say_once(_LOOP_DRAWS)
        with self._changed:
            self._over = True
            self._changed.notify_all()
            while self._running:
                self._changed.wait()

    def ready(self) -> bool:
        """See `Executor`."""
        return bool(self._done) or (not self._running and self._inner.ready())

    def interrupt(self) -> None:
        """See `Executor`."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._inner.interrupt()

    def finish(self) -> None:
        """See `Executor`."""
        if self._ended(interrupt=False):
            self._inner.finish()
        else:
            self.close()

    def close(self) -> None:
        """See `Executor`."""
        self._ended(interrupt=True)
        self._inner.close()

    def _ended(self, *, interrupt: bool) -> bool:
        """End the thread and return whether it has ended; safe from any thread."""
        if os.getpid() != self._process:  # a forked child has no thread, and its copy of the lock may stay locked
            return True
        with self._changed:
            self._over = True
            self._changed.notify_all()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        if interrupt and thread.is_alive():
            self._inner.interrupt()
        thread.join(_JOIN_SECONDS)
        _open.discard(self)
        return not thread.is_alive()

    def _take(self, *, beside: bool) -> Batch:
        while self._waiting:
            self._inner.submit(self._waiting.popleft())
        found = self._inner.take(beside=beside)
        with self._changed:
            self._left -= 1
        return found

    def _may_run(self) -> bool:
        return not self._over and (self._always or self._seconds >= QUICK) and self._inner.runs_free

    def _start(self) -> None:
        """Start the thread, if it may run and pays off."""
        if self._running or not self._may_run():
            return
        thread = threading.Thread(target=self._run, name="paddle_shard-prefetch", daemon=True)
        with signals_held():  # a handler may raise only once the thread is stored and can be stopped
            self._running = True
            try:
                thread.start()
            except BaseException:  # nobody would say that it has ended
                self._running = False
                raise
            _open.add(self)
            self._thread = thread

    def _run(self) -> None:
        _set_expected_place(self._place)  # each thread has a current place of its own
        failure: BaseException | None = None
        try:
            while True:
                with self._changed:
                    while not self._over and not (self._left and len(self._done) < self._count):
                        self._changed.wait()
                    if self._over:
                        return
                found = self._take(beside=True)
                with self._changed:
                    self._done.append((found, None))
                    self._changed.notify_all()
        except DrewBesideError as error:
            self._always, self._seconds, self._over = False, 0.0, True  # the caller's thread reads from here on
            if error.drew:
                say_once(_LOOP_DRAWS)
        except BaseException as error:  # raised when the caller takes this step
            failure = error
        finally:
            with self._changed:
                if failure is not None:
                    self._done.append((None, failure))
                self._running = False
                self._changed.notify_all()


@atexit.register
def _stop_all() -> None:
    """End the threads before the interpreter shuts down, since they would continue to work during the shutdown."""
    for prefetcher in list(_open):
        prefetcher._ended(interrupt=False)
