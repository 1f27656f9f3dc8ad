"""How are worker processes asked, one request after another, and ended?"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import multiprocessing.process
import os
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle.io

from paddle_shard.reading.channel import Channel
from paddle_shard.reading.failure import ReadFailure, raised_by_a_handler
from paddle_shard.reading.request import Reader, Request
from paddle_shard.reading.worker import WorkerSettings, work
from paddle_shard.reading.worker_guards import garbage_left_to_the_parent, in_use, signals_held
from paddle_shard.samplers.randomness import NumpyGenerator, kept

CLOSE_SECONDS = 1.0
"""How long a worker may finish its sample when its pass is closed, before it is killed."""
_LOOK_SECONDS = 1.0
"""How often it is looked for workers that were killed, where nothing comes."""
_OTHERS_SECONDS = 5.0
"""How long one worker is waited for where another was killed, which may have held a lock."""

_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _leave_workers_to_the_parent() -> None:
    for pool in list(_pools):
        pool.leave_to_the_parent()


os.register_at_fork(after_in_child=_leave_workers_to_the_parent)


@atexit.register
def _shut_down_all() -> None:
    """End the workers before `multiprocessing` asks them with a SIGTERM, which they may ignore as this process does."""
    for pool in list(_pools):
        pool.shut_down()


class WorkersLostError(Exception):
    """A worker has ended or hangs."""

    def __init__(self, text: str, worker: int) -> None:
        super().__init__(text)
        self.worker = worker


class WorkerPool:
    """Some worker processes, each of which reads one request after another; with persistent ones for several passes.

    Request i of a pass is read by worker i modulo their number, and batches are taken in the order of their requests;
    so each worker's channel is a queue of its own, and there is nothing to put in order.
    """

    def __init__(
        self,
        settings: paddle.io.DataLoader,
        reader: Reader,
        num_workers: int | None = None,
        *,
        patience: float = math.inf,
        reads_all: bool = False,
    ) -> None:
        """Start nothing yet.

        Args:
            settings: The user's; read only.
            reader: What the workers run.
            num_workers: Where there are to be fewer than in the settings.
            patience: Seconds after which a worker that has not answered counts as hung.
            reads_all: Every worker reads the whole data set, and keeps some of it: the user's `worker_init_fn` is
                shown a single worker then, so that it leaves the data set whole.
        """
        self.persistent = bool(settings._persistent_workers)
        self.num_workers = num_workers or settings.num_workers
        self._reader, self._reads_all = reader, reads_all
        self._init_fn, self._ahead = settings.worker_init_fn, settings.prefetch_factor
        self.patience = min(patience, settings.timeout) if settings.timeout > 0 else patience
        self._workers: list[Any] = []
        self._channels: list[Channel] = []
        self._requests: Iterator[Request] = iter(())
        self.pending: deque[Request] = deque()
        """What was asked, and has not come."""
        self._unsent: Request | None = None
        self._error: Exception | None = None
        self._num_asked = self._num_taken = 0
        self.interrupted = False
        self.process = os.getpid()
        """Whose workers they are."""
        _pools.add(self)

    def start(self, requests: Iterator[Request]) -> None:
        """Start a pass; the one before it must have ended."""
        if not all(worker.is_alive() for worker in self._workers):
            self.shut_down()
        self.process, self._requests, self._unsent, self._error = os.getpid(), requests, None, None
        self.pending.clear()
        self._num_asked = self._num_taken = 0
        if not self._workers:
            self._start_workers()
        self._ask()

    def next(self) -> tuple[Request, Any]:
        """Return the next request and what it was answered with.

        Raises:
            StopIteration: There is none.
            WorkersLostError: It will never come; it is the first of `pending`.
            Exception: What drawing the requests raised.
        """
        self._ask()
        if not self.pending:
            if self._error is not None:
                raise self._error
            raise StopIteration
        batch = self._received(self._num_taken % self.num_workers)
        self._num_taken += 1
        request = self.pending.popleft()
        self._ask()
        return request, batch

    def stop_asking(self) -> None:
        """Ask for nothing further; what is pending can still be taken."""
        self._requests, self._unsent = iter(()), None
        while len(self.pending) > self._num_asked - self._num_taken:
            self.pending.pop()

    def interrupt(self) -> None:
        """Make a call of `next` in another thread end."""
        self.interrupted = True
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.interrupt()

    def shut_down(self) -> None:
        """End the workers; safe to call again, also when the call before was interrupted."""
        self._requests = iter(())
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        try:
            for worker in self._workers:
                worker.join(max(0.0, deadline - time.monotonic()))
        finally:
            for worker in self._workers:
                if worker.is_alive():
                    worker.kill()
                    worker.join()
        self._workers, self._channels = [], []

    def leave_to_the_parent(self) -> None:
        """Forget the workers, in a forked child: they are its parent's, and only that is to hold their channels."""
        for channel in self._channels:
            channel.close()
        # Which the interpreter would end with this process.
        multiprocessing.process._children.difference_update(self._workers)  # type: ignore[attr-defined]
        self._workers, self._channels = [], []

    def _start_workers(self) -> None:
        with kept([NumpyGenerator()]):  # Paddle draws it there, too, but from the user's
            seed = int(np.random.randint(sys.maxsize))
        settings = WorkerSettings(
            reader=self._reader,
            num_workers=self.num_workers,
            init_fn=self._init_fn,
            reads_all=self._reads_all,
            seed=seed,
            num_slots=self._ahead,
        )
        try:
            with garbage_left_to_the_parent(), signals_held():
                for number in range(self.num_workers):
                    self._start_worker(number, settings)
        except BaseException:
            self.shut_down()
            raise

    def _start_worker(self, number: int, settings: WorkerSettings) -> None:
        with in_use:  # no other thread forks between the making of a socket and its note
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._channels.append(Channel(ours, self._ahead))
            with theirs:
                worker = multiprocessing.Process(
                    target=work, args=(number, theirs, settings), name=f"paddle_shard-worker-{number}", daemon=True
                )
                worker.start()
            self._workers.append(worker)

    def _ask(self) -> None:
        """Give the workers as many requests ahead as they may have."""
        while self._num_asked - self._num_taken < self.num_workers * self._ahead:
            if self._unsent is None:
                try:
                    self._unsent = next(self._requests)
                except StopIteration:
                    return
                except Exception as error:  # the user's sampler: raised at its own step, not when drawn ahead
                    if raised_by_a_handler(error):
                        raise
                    self._requests, self._error = iter(()), error
                    return
                self.pending.append(self._unsent)
            try:
                self._channels[self._num_asked % self.num_workers].send(self._unsent)
            except BlockingIOError:  # it is busy with those before
                return
            except ConnectionError:  # found out when its answer is due
                pass
            except Exception as error:
                if raised_by_a_handler(error):  # it may have been sent
                    raise
                failure = ReadFailure.of(error, what="sending the request", index=None, worker=None)
                self._requests, self._error = iter(()), failure.error(self.pending.pop())
                self._unsent = None
                return
            self._unsent = None
            self._num_asked += 1

    def _received(self, number: int) -> Any:
        """Return the next answer of a worker."""
        channel, waited = self._channels[number], 0.0
        while True:
            with contextlib.suppress(BlockingIOError):
                return self._answer(channel, number)
            seconds = min(_LOOK_SECONDS, self.patience - waited)
            if channel.wait(seconds):
                continue
            waited += seconds
            if waited >= _OTHERS_SECONDS:
                killed = next((at for at, worker in enumerate(self._workers) if worker.exitcode is not None), None)
                if killed is not None:
                    raise self._lost(killed)
            if waited >= self.patience:
                text = f"worker {number} has said nothing for {self.patience:g} s; the loader's timeout= says so"
                raise WorkersLostError(text, number)

    def _answer(self, channel: Channel, number: int) -> Any:
        try:
            return channel.receive()
        except BlockingIOError:
            raise
        except EOFError:
            raise self._lost(number) from None
        except Exception as error:
            if raised_by_a_handler(error):  # it may not have been received
                raise
            return ReadFailure.of(error, what="receiving the batch", index=None, worker=number)

    def _lost(self, number: int) -> WorkersLostError:
        """Return the error for a worker that has ended."""
        if not self.interrupted:
            self._workers[number].join(_LOOK_SECONDS)  # it may still be ending
        ended = {at: worker.exitcode for at, worker in enumerate(self._workers) if worker.exitcode is not None}
        named = ", ".join(f"worker {at} (exit code {code})" for at, code in ended.items() if code or at == number)
        return WorkersLostError(f"a worker process ended: {named or f'worker {number}'}", number)
