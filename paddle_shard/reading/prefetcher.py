"""How is a pass read while the model computes?"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque

from paddle_shard.clock import TRANSPORT, WAITING, at, clock
from paddle_shard.plan.step import Step
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.executor import Executor, Wrapper, complete
from paddle_shard.reading.reader import DrewBesideError
from paddle_shard.reading.worker_guards import signals_held
from paddle_shard.say_once import say_once

QUICK = 0.001
"""Seconds of a read below which handing it from thread to thread costs more than it saves."""
MOST_BYTES = 256 << 20
"""Bytes that batches ahead may take, if there is more than one of them and the user has not said how many."""
_KEPT = 0.5
"""Share of the earlier estimate of a read's seconds that is kept at each further read."""
_JOIN_SECONDS = 1.0
"""Seconds that closing waits for a read that cannot be interrupted. Its thread then ends by itself later."""

_LOOP_DRAWS = (
    "prefetch: a global generator (numpy's, Python's or Paddle's) was drawn from while a thread read ahead, so the "
    "data is read on the thread of the training loop from here on. Draw from a generator of your own in the loop, or "
    "use workers (num_workers=), to read ahead."
)

_open: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


class Prefetcher(Wrapper):
    """Takes batches from another executor in a thread, some steps ahead of the caller.

    The thread runs only while reading draws nothing from this process's global generators, which belong to the training
    loop. Until it runs, the caller's thread reads. One thread at a time uses the inner executor.
    """

    def __init__(self, inner: Executor, count: int, *, always: bool, elsewhere: bool) -> None:
        """Wrap an executor.

        Args:
            inner: The executor.
            count: Most batches that are kept ready.
            always: True if the thread is started in any case; False: once a read takes a millisecond or more.
            elsewhere: True if other processes read. Then a read takes what is done to have it here, without waiting.
        """
        super().__init__(inner)
        self._count, self._always = count, always
        self._now = time.thread_time if elsewhere else time.perf_counter
        self._changed = threading.Condition()
        self._waiting: deque[Step] = deque()
        """Steps that were submitted here, and not to the inner executor yet."""
        self._left = 0
        """Steps that were submitted and whose batches were not read yet."""
        self._done: deque[Batch | BaseException] = deque()
        """What the thread has read, and at last what it has failed with."""
        self._seconds, self._num_read = 0.0, 0
        """What a read takes on the caller's thread, and how many it has made."""
        self._thread: threading.Thread | None = None
        self._running = False
        self._over = False
        """True if the thread must end, and never runs again."""
        self._process = os.getpid()

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
        if not self._running and self._may_run():
            self._start()
        if self._running or self._done:
            with self._changed:
                with at(WAITING) as mine:
                    while self._running and self._left and not self._done:
                        self._changed.wait()
                found = self._done.popleft() if self._done else None
                self._changed.notify_all()
            mine.blame(getattr(found, "spent", None))
            if isinstance(found, BaseException):
                try:
                    raise found
                finally:
                    del found  # it would hold this frame, and the frame it
            if found is not None:
                complete(found)
                return found
        began = self._now()
        found = self._read(beside=False)
        self._left -= 1
        took = self._now() - began
        self._num_read += 1
        if self._num_read > 1:  # at the first one more is done than reading
            kept = _KEPT if self._num_read > 2 else 0.0
            self._seconds = kept * self._seconds + (1 - kept) * took
        return found

    def ready(self) -> bool:
        """See `Executor`."""
        return bool(self._done) or (not self._running and self._inner.ready())

    def close(self, *, ended: bool = False) -> None:
        """See `Executor`."""
        if os.getpid() == self._process:  # a forked child has no thread, and its copy of the lock may stay locked
            ended = ended and self.stop_thread(interrupt=False)
            if not ended:
                self.stop_thread(interrupt=True)
        self._inner.close(ended=ended)

    def stop_thread(self, *, interrupt: bool) -> bool:
        """End the thread; return whether it has ended before a second was over. Safe from any thread."""
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

    def _read(self, *, beside: bool) -> Batch:
        while self._waiting:
            self._inner.submit(self._waiting.popleft())
        return self._inner.take(beside=beside)

    def _has_room(self) -> bool:
        if self._always or not self._done or len(self._done) >= self._count:  # the user's number
            return len(self._done) < self._count
        sizes = [found.num_bytes for found in self._done if isinstance(found, Batch)]
        return sum(sizes) + max(sizes, default=0) <= MOST_BYTES

    def _may_run(self) -> bool:
        return not self._over and (self._always or self._seconds >= QUICK) and self._inner.runs_free

    def _start(self) -> None:
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
        failure: BaseException | None = None
        try:
            while True:
                with self._changed:
                    while not self._over and not (self._left and self._has_room()):
                        self._changed.wait()
                    if self._over:
                        return
                outer = clock().begin(TRANSPORT)
                found = self._read(beside=True)
                found.spent = clock().end(outer, "prefetching thread")
                with self._changed:
                    self._left -= 1
                    self._done.append(found)
                    self._changed.notify_all()
        except DrewBesideError as error:
            self._over = True  # the caller's thread reads from here on
            if error.drew:
                say_once(_LOOP_DRAWS)
        except BaseException as error:  # raised when the caller takes this step
            failure = error
        finally:
            with self._changed:
                if failure is not None:
                    self._done.append(failure)
                failure = None  # it would hold this frame, and the frame it
                self._running = False
                self._changed.notify_all()


@atexit.register
def _stop_all() -> None:
    """End the threads before the interpreter shuts down, since they would continue to work during the shutdown."""
    for prefetcher in list(_open):
        prefetcher.stop_thread(interrupt=False)
