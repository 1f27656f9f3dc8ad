"""Worker pools: start worker processes, exchange messages with them, and end them."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle.io

from paddle_shard.core import forks
from paddle_shard.core.randomness import NumpyGenerator, kept
from paddle_shard.reading.channel import Channel
from paddle_shard.reading.chunk_reader import ChunkRequest
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.reader import Reader
from paddle_shard.reading.worker import WorkerSettings, work
from paddle_shard.reading.worker_guards import signals_held

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


def _shut_down_all() -> None:
    """End the workers before `multiprocessing` sends them a SIGTERM and waits: they leave it to this process."""
    for pool in list(_pools):
        pool.shut_down()


_processes: set[int] = set()
"""The processes that call `_shut_down_all` when they end. `atexit` would not, in a process of `multiprocessing`."""


def new_worker_seed() -> int:
    """Return a seed for workers."""
    # Paddle uses this generator, too, but changes the user's.
    with kept([NumpyGenerator()]):
        return int(np.random.randint(sys.maxsize))


class WorkersLostError(Exception):
    """A worker has ended or hangs."""

    def __init__(self, text: str, worker: int) -> None:
        super().__init__(text)
        self.worker = worker

    def failure(self) -> ReadFailure:
        """Return the failure of a step that is to be read."""
        return ReadFailure.of(self, what="reading", worker=self.worker)


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
        num_shares: int = 1,
    ) -> None:
        """Set up; nothing is started yet.

        Args:
            settings: The user's DataLoader, which is not changed.
            reader: The reader that the workers run.
            num_workers: Number of workers; None: as in the settings.
            worker_timeout: Seconds after which a worker that has not answered counts as hung.
            reads_all: True if every worker reads the whole data set and keeps some of it. Then the user's
                `worker_init_fn` sees a single worker, so that it leaves the data set whole.
            num_shares: Workers that read a share of each batch. Each may have as many more requests.
        """
        self._workers: list[Any] = []
        self._channels: list[Channel] = []
        self.persistent = bool(settings._persistent_workers)
        self.num_workers: int = num_workers or settings.num_workers
        # With threads one more, which they begin while the batch before is handed over.
        self.num_ahead = int(settings.prefetch_factor) * num_shares
        self.num_ahead += reader.num_threads > 0
        """Number of requests that a worker may have at a time."""
        self._settings = WorkerSettings(
            reader=reader,
            num_workers=self.num_workers,
            init_fn=settings.worker_init_fn,
            reads_all=reads_all,
            num_ahead=self.num_ahead,
        )
        self.worker_timeout = min(worker_timeout, settings.timeout or math.inf)
        self.interrupted = False
        self._process = os.getpid()
        _pools.add(self)

    def start(self) -> None:
        """Start the workers that a pass needs; the previous pass must have ended."""
        if not all(worker.is_alive() for worker in self._workers):
            self.shut_down()
        if self._workers:
            return
        seed = new_worker_seed()
        self._process = os.getpid()
        if self._process not in _processes:
            _processes.add(self._process)
            multiprocessing.util.Finalize(None, _shut_down_all, exitpriority=0)
        try:
            with signals_held(), forks.between_batches():
                for number in range(self.num_workers):
                    self._start_worker(number, seed)
        except OSError as error:
            num_started = len(self._workers)
            self.shut_down()
            raise OSError(
                error.errno,
                f"{error.strerror}: of {self.num_workers} workers, {num_started} could be started. Raise the limit of "
                "open files (ulimit -n), processes (ulimit -u) or memory, or use fewer workers",
            ) from error
        except BaseException:
            self.shut_down()
            raise

    def _start_worker(self, number: int, seed: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            self._channels.append(Channel(ours, self.num_ahead))
            arguments = (number, theirs, self._settings, seed)
            name = f"paddle_shard-worker-{number}"
            worker = multiprocessing.Process(
                target=work, args=arguments, name=name, daemon=True
            )
            worker.start()
        self._workers.append(worker)

    def send(
        self, number: int, request: Any, *, is_first: bool = False
    ) -> None:
        """Send a worker a request, the first of an epoch iterator if `is_first`; see `Channel.send`."""
        if isinstance(request, ChunkRequest) and not is_first:
            request = request.step  # the worker has the rest
        self._channels[number].send((request, is_first))

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
        self._workers = []
        self._channels = []

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # A signal handler may have raised in the constructor, or the collector may find this first in a forked child.
        # When the interpreter ends, it has ended the workers.
        if getattr(self, "_process", None) == os.getpid() and not ending():
            self.shut_down()

    def leave_to_the_parent(self) -> None:
        """Forget the workers in a forked child: they are the parent's, and only the parent may hold their channels."""
        self._workers = []
        self.shut_down()

    def receive(self, number: int) -> Any:
        """Return the next answer of a worker, or why it cannot be read.

        Raises:
            WorkersLostError: A worker has ended or hangs.
        """
        channel = self._channels[number]
        waited = 0.0
        while True:
            try:
                with contextlib.suppress(BlockingIOError):
                    return channel.receive()
            except EOFError:
                raise self._lost(number) from None
            except Exception as error:
                return ReadFailure.of(
                    error, what="receiving the batch", worker=number
                )
            seconds = min(_LOOK_SECONDS, self.worker_timeout - waited)
            if channel.wait(seconds):
                continue
            waited += seconds
            if waited >= _OTHERS_SECONDS:
                for other, worker in enumerate(self._workers):
                    if worker.exitcode is not None:
                        raise self._lost(other)
            if waited >= self.worker_timeout:
                raise WorkersLostError(
                    f"worker {number} has not answered for {self.worker_timeout:g} s (timeout=). "
                    f"`py-spy dump --pid {self._workers[number].pid}` shows where it is",
                    number,
                )

    def _lost(self, number: int) -> WorkersLostError:
        """Return the error for a worker that has ended."""
        worker = self._workers[number]
        if not self.interrupted:
            worker.join(_LOOK_SECONDS)  # it may still be ending
        code = worker.exitcode
        text = f"a worker process ended: worker {number} (exit code {code})"
        if code == -signal.SIGKILL:
            text += ". SIGKILL (-9) comes when memory runs out: use fewer workers or a smaller prefetch_factor"
        return WorkersLostError(text, number)
