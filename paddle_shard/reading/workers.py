"""How are worker processes started, spoken to, and ended?"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import paddle.io

from paddle_shard import forks
from paddle_shard.forks import LONGEST, no_fork, wait_for_imports
from paddle_shard.randomness import NumpyGenerator, kept
from paddle_shard.reading.channel import Channel
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.reader import Reader
from paddle_shard.reading.worker import WorkerSettings, work
from paddle_shard.reading.worker_guards import garbage_left_to_the_parent, signals_held, stacks_of

CLOSE_SECONDS = 1.0
"""Seconds that a worker has to finish its sample when its pass is closed. After that it is killed."""
_LOOK_SECONDS = 1.0
"""Seconds between two checks for killed workers while no answer comes."""
_OTHERS_SECONDS = 5.0
"""Seconds without an answer after which a dead worker ends the pass: it may have held a lock that others wait for."""
_TOLD_SECONDS = 60.0
"""Seconds without an answer after which the log says once where the worker is."""

_SHORT = {
    errno.EMFILE: "More open files for this process (ulimit -n), or fewer workers, help: each takes three",
    errno.EAGAIN: "More processes for this user (ulimit -u, or the container's limit), or fewer workers, help",
    errno.ENOMEM: "More memory, or fewer workers, help",
}
"""What may be short when processes are started, and what helps."""

_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


_NAME = "paddle_shard-worker-"


def _leave_workers_to_the_parent() -> None:
    for pool in list(_pools):
        pool.leave_to_the_parent()
    # Else the interpreter would end the workers together with this process. (One that is just being started, too.)
    children = multiprocessing.process._children  # type: ignore[attr-defined]
    children.difference_update([child for child in children if child.name.startswith(_NAME)])


os.register_at_fork(after_in_child=_leave_workers_to_the_parent)


def _shut_down_all() -> None:
    """End the workers before `multiprocessing` sends them a SIGTERM and waits: they leave it to this process."""
    for pool in list(_pools):
        pool.shut_down()


_processes: set[int] = set()
"""The processes that call `_shut_down_all` when they end. `atexit` would not, in a process of `multiprocessing`."""


def drawn_seed() -> int:
    """Return a seed for workers."""
    with kept([NumpyGenerator()]):  # Paddle draws it there, too, but changes the user's generator
        return int(np.random.randint(sys.maxsize))


class WorkersLostError(Exception):
    """A worker has ended or hangs."""

    def __init__(self, text: str, worker: int) -> None:
        super().__init__(text)
        self.worker = worker


class WorkerPool:
    """Some worker processes, each of which reads one request after another. Persistent ones serve several passes."""

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
        self.num_ahead = int(settings.prefetch_factor)
        """Number of requests that a worker may have at a time."""
        self._settings = WorkerSettings(
            reader=reader,
            num_workers=self.num_workers,
            init_fn=settings.worker_init_fn,
            reads_all=reads_all,
            num_ahead=self.num_ahead,
        )
        self.worker_timeout = min(worker_timeout, settings.timeout) if settings.timeout > 0 else worker_timeout
        self._workers: list[Any] = []
        self._channels: list[Channel] = []
        self._theirs: tuple[socket.socket, int] | None = None
        """The other end of a worker's channel while the worker is started, and the thread that starts it."""
        self.interrupted = self._told = False
        _pools.add(self)

    def start(self) -> None:
        """Start the workers that a pass needs; the previous pass must have ended."""
        if not all(worker.is_alive() for worker in self._workers):
            self.shut_down()
        if self._workers:
            return
        settings, seed = self._settings, drawn_seed()
        if os.getpid() not in _processes:
            _processes.add(os.getpid())
            multiprocessing.util.Finalize(None, _shut_down_all, exitpriority=0)
        deadline = time.monotonic() + LONGEST
        try:
            with forks.reader_gate.closed(), garbage_left_to_the_parent(), signals_held():
                for number in range(self.num_workers):
                    with no_fork:  # if another thread forks, its child closes both sockets
                        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                        ours.setblocking(False)
                        self._channels.append(Channel(ours, settings.num_ahead))
                        self._theirs = theirs, threading.get_ident()
                    args = number, theirs, settings, seed
                    wait_for_imports(deadline)
                    with theirs:
                        worker = multiprocessing.Process(target=work, args=args, name=f"{_NAME}{number}", daemon=True)
                        worker.start()
                    self._theirs = None
                    self._workers.append(worker)
        except BaseException as error:
            num_started = len(self._workers)
            self.shut_down()
            if isinstance(error, OSError) and error.errno in _SHORT:
                raise OSError(
                    error.errno,
                    f"{os.strerror(error.errno)}: of {self.num_workers} workers, {num_started} could be started. "
                    f"{_SHORT[error.errno]}",
                ) from error
            raise

    def send(self, number: int, request: Any) -> None:
        """Send a worker a request; see `Channel.send`."""
        self._channels[number].send(request)

    def has_answer(self, number: int) -> bool:
        """Return whether a worker's next answer has come, or will never come."""
        return self._channels[number].wait(0)

    def interrupt(self) -> None:
        """Make a call of `receive` in another thread end."""
        self.interrupted = True
        for channel in self._channels:
            with contextlib.suppress(OSError):
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
        if self._theirs is not None and self._theirs[1] != threading.get_ident():  # else this is the worker
            self._theirs[0].close()
        self._workers, self._channels = [], []

    def receive(self, number: int) -> Any:
        """Return the next answer of a worker.

        Raises:
            WorkersLostError: A worker has ended or hangs.
        """

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
                raise WorkersLostError(f"{text}. {self._where(number)}", number)
            if waited >= _TOLD_SECONDS and not self._told:
                self._told = True
                logging.getLogger("paddle_shard").warning(
                    "worker %d has said nothing for %g s. It is waited for until %g s are over (timeout=). %s",
                    *(number, waited, self.worker_timeout, self._where(number)),
                )

    def _where(self, number: int) -> str:
        """Say where a worker is that does not answer."""
        stacks = stacks_of(self._workers[number].pid)
        return (
            f"It is here:\n{stacks}"
            if stacks
            else "It cannot say where it is: it may be stopped, or in C code that lets no thread run"
        )

    def _lost(self, number: int) -> WorkersLostError:
        """Return the error for a worker that has ended."""
        if not self.interrupted:
            self._workers[number].join(_LOOK_SECONDS)  # it may still be ending
        ended = {at: worker.exitcode for at, worker in enumerate(self._workers) if worker.exitcode is not None}
        named = ", ".join(f"worker {at} (exit code {code})" for at, code in ended.items() if code or at == number)
        text = f"a worker process ended: {named or f'worker {number}'}"
        if -signal.SIGKILL in ended.values():
            text += ". The system sends SIGKILL (-9) when memory runs out: its log (dmesg) would say so, and fewer "
            text += "workers or a smaller prefetch_factor help"
        return WorkersLostError(text, number)
