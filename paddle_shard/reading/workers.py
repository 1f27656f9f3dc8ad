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
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle.io

from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.reading.channel import Channel
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.pace import Pace
from paddle_shard.reading.request import Reader, Request
from paddle_shard.reading.worker import MOST_AT_ONCE, WorkerSettings, work
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
    So each worker's channel is a queue, and nothing needs to be sorted. If batches are quick and small, a message has
    several requests; each is answered as soon as it is read.
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
        self.num_workers: int = num_workers or settings.num_workers
        self._reader, self._reads_all = reader, reads_all
        self._init_fn, self._ahead = settings.worker_init_fn, int(settings.prefetch_factor)
        self.worker_timeout = min(worker_timeout, settings.timeout) if settings.timeout > 0 else worker_timeout
        self._workers: list[Any] = []
        self._channels: list[Channel] = []
        self._requests: Iterator[Request] = iter(())
        self.pending: deque[Request] = deque()
        """Requests that were drawn and whose answers were not taken."""
        self.unsent: deque[tuple[int, list[Request]]] = deque()
        """(worker, requests) of each message that was not sent yet. The requests are in `pending`, too."""
        self._under_way: list[deque[int]] = []
        """For each worker and each message sent: the number of requests whose answers were not taken."""
        self.error: Exception | None = None
        """The error to raise after the last of `pending`."""
        self._num_asked = self._num_taken = 0
        self._pace, self._looked, self._at_once = Pace(), 0, 1
        """Pace of the batches; number of batches at the last look at the clock; requests per message."""
        self.interrupted = False
        self.process = os.getpid()
        """Id of the process that the workers belong to."""
        _pools.add(self)

    def start(self, requests: Iterator[Request]) -> None:
        """Start a pass; the previous pass must have ended.

        Args:
            requests: The requests. If they cannot always be drawn, `ready(count)` returns how many of `count` can be.
        """
        if not all(worker.is_alive() for worker in self._workers):
            self.shut_down()
        self.process, self._requests, self.error = os.getpid(), requests, None
        self.pending.clear()
        self.unsent.clear()
        self._ready = getattr(requests, "ready", lambda count: count)
        self._num_asked, self._num_taken, self._looked, self._pace = 0, 0, 0, Pace()
        self._under_way = [deque() for _ in range(self.num_workers)]
        if not self._workers:
            self._start_workers()
        self._ask()

    def next(self) -> tuple[Request, Any]:
        """Return the next request and its answer.

        Raises:
            StopIteration: There is no further request.
            WorkersLostError: The answer will never come. Its request is the first of `pending`.
            Exception: Drawing or sending the next request failed.
        """
        number = self._num_taken % self.num_workers
        under_way = self._under_way[number]
        if self.unsent or not under_way:
            self._ask()
        if not self.pending:
            if self.error is not None:
                raise self.error
            raise StopIteration
        batch = self._received(number)
        request = self.pending.popleft()
        self._num_taken += 1
        under_way[0] -= 1
        if not under_way[0]:
            under_way.popleft()
            self._look_at_the_clock(self._channels[number].num_bytes)
            self._ask()
        return request, batch

    @property
    def num_ahead(self) -> int:
        """Number of requests that may be drawn before their answers are taken."""
        return self.num_workers * self._ahead * self._at_once

    def at_hand(self, count: int) -> bool:
        """Return whether the next `count` answers have come or will never come; True also if there are no more."""
        workers = self.num_workers
        coming = range(self._num_taken, min(self._num_taken + count, self._num_asked))[:workers]
        return all(self._channels[i % workers].wait(0) for i in coming)

    def stop_asking(self) -> None:
        """Draw no further requests. The answers to those in `pending` can still be taken."""
        self._requests = iter(())

    def interrupt(self) -> None:
        """Make a call of `next` in another thread end."""
        self.interrupted = True
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.interrupt()

    def let_go(self) -> None:
        """Close the channels, so that the workers end by themselves."""
        self._requests = iter(())
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
        for channel in self._channels:
            channel.close()
        # Else the interpreter would end the workers together with this process.
        multiprocessing.process._children.difference_update(self._workers)  # type: ignore[attr-defined]
        self._workers, self._channels = [], []

    def _start_workers(self) -> None:
        with kept([NumpyGenerator()]):  # Paddle draws it there, too, but changes the user's generator
            seed = int(np.random.randint(sys.maxsize))
        settings = WorkerSettings(
            reader=self._reader,
            num_workers=self.num_workers,
            init_fn=self._init_fn,
            reads_all=self._reads_all,
            seed=seed,
            num_ahead=self._ahead,
        )
        try:
            with garbage_left_to_the_parent(), signals_held():
                for number in range(self.num_workers):
                    self._start_worker(number, settings)
        except BaseException:
            self.shut_down()
            raise

    def _start_worker(self, number: int, settings: WorkerSettings) -> None:
        with in_use:  # no other thread may fork before the new socket is noted
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._channels.append(Channel(ours, self._ahead * MOST_AT_ONCE))
            with theirs:
                worker = multiprocessing.Process(
                    target=work, args=(number, theirs, settings), name=f"paddle_shard-worker-{number}", daemon=True
                )
                worker.start()
            self._workers.append(worker)

    def _ask(self) -> None:
        """Send the workers as many requests ahead as they may have."""
        while self.unsent or self._draw():
            number, requests = self.unsent[0]
            try:
                self._channels[number].send(*requests)
            except BlockingIOError:  # the worker is busy with earlier messages
                return
            except ConnectionError:  # reported when the answer is due
                pass
            except Exception as error:
                raise_if_a_handlers(error)  # by a signal handler: the message may have been sent
                self._leave_out(requests.pop(), error)  # if an earlier one is at fault, the next attempt fails
                if requests:
                    continue
            self.unsent.popleft()
            if requests:
                self._under_way[number].append(len(requests))

    def _leave_out(self, request: Request, error: Exception) -> None:
        """End the pass at a request that cannot be sent. Answers to later requests of other workers are not taken."""
        if not any(request is other for other in self.pending):  # it comes after another one that cannot be sent
            return
        failure = ReadFailure.of(error, what="sending the request", index=None, worker=None)
        self._requests, self.error = iter(()), failure.error(request)
        while self.pending.pop() is not request:
            pass

    def _draw(self) -> bool:
        """Draw the requests of the next messages; return whether there are any."""
        workers, first, drawn = self.num_workers, self._num_asked, list[Request]()
        count = workers * self._at_once if self._at_once > 1 else 1
        if any(len(self._under_way[(first + i) % workers]) >= self._ahead for i in range(min(count, workers))):
            return False
        count = self._ready(count)
        try:
            while len(drawn) < count:
                drawn.append(next(self._requests))
        except StopIteration:
            pass
        except Exception as error:  # from the user's sampler: it is raised at its own step, not ahead
            raise_if_a_handlers(error)
            self._requests, self.error = iter(()), error
        self.unsent.extend(((first + i) % workers, drawn[i::workers]) for i in range(min(len(drawn), workers)))
        self.pending.extend(drawn)
        self._num_asked += len(drawn)
        return bool(drawn)

    def _look_at_the_clock(self, num_bytes: int) -> None:
        """Set the number of requests per message that suits the time and the size of the batches."""
        if self._num_taken - self._looked >= 2 * self.num_ahead:  # at most half of them were ready at the last look
            self._looked = self._num_taken
            self._pace.look(self._num_taken, num_bytes)
        self._at_once = self._pace.requests_at_once(num_bytes, MOST_AT_ONCE)

    def _received(self, number: int) -> Any:
        """Return the next answer of a worker."""
        channel, waited = self._channels[number], 0.0
        while True:
            with contextlib.suppress(BlockingIOError):
                return self._answer(channel, number)
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

    def _answer(self, channel: Channel, number: int) -> Any:
        def failed(error: Exception) -> ReadFailure:
            raise_if_a_handlers(error)  # by a signal handler: the answer may be lost
            return ReadFailure.of(error, what="receiving the batch", index=None, worker=number)

        try:
            (answer,) = channel.receive(failed)
        except EOFError:
            raise self._lost(number) from None
        return answer

    def _lost(self, number: int) -> WorkersLostError:
        """Return the error for a worker that has ended."""
        if not self.interrupted:
            self._workers[number].join(_LOOK_SECONDS)  # it may still be ending
        ended = {at: worker.exitcode for at, worker in enumerate(self._workers) if worker.exitcode is not None}
        named = ", ".join(f"worker {at} (exit code {code})" for at, code in ended.items() if code or at == number)
        return WorkersLostError(f"a worker process ended: {named or f'worker {number}'}", number)
