"""How are worker processes started, sent requests, and ended?"""

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
from typing import Any

import numpy as np
import paddle.io

from paddle_shard.plan.handlers import ignoring, raise_if_a_handlers
from paddle_shard.reading.batch import Chunk
from paddle_shard.reading.channel import Channel
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.reader import Reader
from paddle_shard.reading.worker import WorkerSettings, work
from paddle_shard.reading.worker_guards import garbage_left_to_the_parent, in_use, signals_held
from paddle_shard.samplers.randomness import NumpyGenerator, kept

CLOSE_SECONDS = 1.0
"""Seconds that a worker has to finish its sample when its pass is closed. After that it is killed."""
_LOOK_SECONDS = 1.0
"""Seconds between two checks for killed workers while no answer comes."""
_OTHERS_SECONDS = 5.0
"""Seconds without an answer after which a dead worker ends the pass: it may have held a lock that others wait for."""

_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _leave_workers_to_the_parent() -> None:
    for pool in list(_pools):
        pool.leave_to_the_parent()


os.register_at_fork(after_in_child=_leave_workers_to_the_parent)


@atexit.register
def _shut_down_all() -> None:
    """End the workers before `multiprocessing` sends them a SIGTERM: like this process, they may ignore it."""
    for pool in list(_pools):
        pool.shut_down()


class WorkersLostError(Exception):
    """A worker has ended or hangs."""

    def __init__(self, text: str, worker: int) -> None:
        super().__init__(text)
        self.worker = worker


class WorkerPool:
    """Some worker processes, each of which reads one request after another. Persistent ones serve several passes.

    Request i of a pass is read by worker i modulo their number, and batches are taken in the order of their requests.
    So each worker's channel is a queue, nothing needs to be sorted, and three numbers tell which requests are where.
    """

    def __init__(
        self,
        settings: paddle.io.DataLoader,
        reader: Reader,
        num_workers: int | None = None,
        *,
        worker_timeout: float = math.inf,
        reads_all: bool = False,
    ) -> None:
        """Set up; nothing is started yet.

        Args:
            settings: The user's DataLoader, which is not changed.
            reader: The reader that the workers run.
            num_workers: Number of workers; None: as in the settings.
            worker_timeout: Seconds after which a worker that has not answered counts as hung.
            reads_all: True if every worker reads the whole data set and keeps some of it. Then the user's
                `worker_init_fn` is told that there is a single worker, so that it leaves the data set whole.
        """
        self.persistent = bool(settings._persistent_workers)
        self._num_workers: int = num_workers or settings.num_workers
        self._settings = WorkerSettings(
            reader=reader,
            num_workers=self._num_workers,
            init_fn=settings.worker_init_fn,
            reads_all=reads_all,
            num_ahead=int(settings.prefetch_factor),
        )
        self.worker_timeout = min(worker_timeout, settings.timeout) if settings.timeout > 0 else worker_timeout
        self._workers: list[Any] = []
        self._channels: list[Channel] = []
        self._num_taken = self._num_sent = 0
        self._unsent: deque[Any] = deque()
        """Requests that follow those that were sent."""
        self._failures: dict[int, ReadFailure] = {}
        """Number of a request -> why it could not be sent."""
        self.interrupted = False
        _pools.add(self)

    @property
    def depth(self) -> int:
        """Number of requests that keep all workers busy."""
        return self._num_workers * self._settings.num_ahead

    def start(self) -> None:
        """Start a pass; the previous pass must have ended."""
        if not all(worker.is_alive() for worker in self._workers):
            self.shut_down()
        self._num_taken = self._num_sent = 0
        self._unsent.clear()
        self._failures.clear()
        if not self._workers:
            self._start_workers()

    def ask(self, request: Any) -> None:
        """Ask the next worker for something; it is sent as soon as the worker may have one more request."""
        self._unsent.append(request)
        self._send()

    def take(self) -> Chunk | ReadFailure:
        """Return the next answer, in the order in which was asked.

        Raises:
            WorkersLostError: A worker has ended or hangs.
        """
        self._send()
        answer = self._failures.get(self._num_taken)
        if answer is None:
            answer = self._received(self._num_taken % self._num_workers)
        self._num_taken += 1
        self._send()
        return answer

    def ready(self, count: int) -> bool:
        """Return whether the next `count` answers have come or will never come."""
        first, asked = self._num_taken, self._num_sent + len(self._unsent)
        return all(
            number in self._failures or (number < self._num_sent and self._channels[number % self._num_workers].wait(0))
            for number in range(first, min(first + min(count, self._num_workers), asked))
        )

    def drained(self) -> bool:
        """Take all that was asked for, since it cannot be taken back; return whether the workers can serve a pass."""
        try:
            while self._num_taken < self._num_sent + len(self._unsent):
                self.take()
        except WorkersLostError:
            return False
        return not self.interrupted

    def interrupt(self) -> None:
        """Make a call of `take` in another thread end."""
        self.interrupted = True
        for channel in self._channels:
            with ignoring(OSError):
                channel.interrupt()

    def let_go(self) -> None:
        """Close the channels, so that the workers end by themselves."""
        for channel in self._channels:
            channel.close()

    def shut_down(self) -> None:
        """End the workers; safe to call again, also after an interrupted call."""
        self.let_go()
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
        """Forget the workers in a forked child: they are the parent's, and only the parent may hold their channels."""
        self.let_go()
        # Else the interpreter would end the workers together with this process.
        multiprocessing.process._children.difference_update(self._workers)  # type: ignore[attr-defined]
        self._workers, self._channels = [], []

    def _start_workers(self) -> None:
        with kept([NumpyGenerator()]):  # Paddle draws it there, too, but changes the user's generator
            seed = int(np.random.randint(sys.maxsize))
        settings = self._settings
        try:
            with garbage_left_to_the_parent(), signals_held():
                for number in range(self._num_workers):
                    with in_use:  # no other thread may fork before the new socket is noted
                        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                        ours.setblocking(False)
                        self._channels.append(Channel(ours, settings.num_ahead))
                        name, args = f"paddle_shard-worker-{number}", (number, theirs, settings, seed)
                        with theirs:
                            worker = multiprocessing.Process(target=work, args=args, name=name, daemon=True)
                            worker.start()
                        self._workers.append(worker)
        except BaseException:
            self.shut_down()
            raise

    def _send(self) -> None:
        """Send as many requests as the workers may have, in their order."""
        # Of the requests that were sent and not taken, one in `num_workers` is with the worker of the next one.
        while self._unsent and (self._num_sent - self._num_taken) // self._num_workers < self._settings.num_ahead:
            request = self._unsent[0]
            try:
                self._channels[self._num_sent % self._num_workers].send(request)
            except BlockingIOError:  # the worker is busy with earlier messages
                return
            except ConnectionError:  # told when the answer is due
                pass
            except Exception as error:
                raise_if_a_handlers(error)  # by a signal handler: the message may have been sent
                indices = tuple(getattr(request, "indices", ()))
                self._failures[self._num_sent] = ReadFailure.of(error, what="sending the request", indices=indices)
            self._unsent.popleft()
            self._num_sent += 1

    def _received(self, number: int) -> Any:
        """Return the next answer of a worker."""

        def failed(error: Exception) -> ReadFailure:
            return ReadFailure.of(error, what="receiving the batch", worker=number)

        channel, waited = self._channels[number], 0.0
        while True:
            try:
                with contextlib.suppress(BlockingIOError):
                    return channel.receive(failed)
            except EOFError:
                raise self._lost(number) from None
            seconds = min(_LOOK_SECONDS, self.worker_timeout - waited)
            if channel.wait(seconds):
                continue
            waited += seconds
            if waited >= _OTHERS_SECONDS:
                killed = next((at for at, worker in enumerate(self._workers) if worker.exitcode is not None), None)
                if killed is not None:
                    raise self._lost(killed)
            if waited >= self.worker_timeout:
                text = f"worker {number} has said nothing for {self.worker_timeout:g} s; the loader's timeout= says so"
                raise WorkersLostError(text, number)

    def _lost(self, number: int) -> WorkersLostError:
        """Return the error for a worker that has ended."""
        if not self.interrupted:
            self._workers[number].join(_LOOK_SECONDS)  # it may still be ending
        ended = {at: worker.exitcode for at, worker in enumerate(self._workers) if worker.exitcode is not None}
        named = ", ".join(f"worker {at} (exit code {code})" for at, code in ended.items() if code or at == number)
        return WorkersLostError(f"a worker process ended: {named or f'worker {number}'}", number)
