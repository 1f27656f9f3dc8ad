"""How are a pass's requests read by Paddle's worker processes?"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import paddle.io
from paddle.io.dataloader import dataloader_iter as machinery

from paddle_shard.errors import ArgumentError, DataReadError
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.parcel import pack, unpack
from paddle_shard.reading.passes import shallow_copy, without_patches
from paddle_shard.reading.request import Reader, Request
from paddle_shard.reading.worker_guards import (
    WatchedQueue,
    end_with_the_parent,
    forget_shared_memory,
    freed,
    garbage_left_to_the_parent,
    remove_shared_memory,
    signals_held,
)
from paddle_shard.reading.worker_info import ShownInfo, shown
from paddle_shard.samplers.randomness import NumpyGenerator, kept

CLOSE_SECONDS = 1.0
"""How long a worker may finish its sample when its pass is closed, before it is killed."""


_FORGET_AFTER = 1024
"""Batches."""


class _Feed:
    """The batch sampler that Paddle's machinery draws requests from, ahead of their delivery."""

    def __init__(self) -> None:
        self.pending: deque[Request] = deque()
        self.error: Exception | None = None
        self._requests: Iterator[Request] = iter(())

    def start(self, requests: Iterator[Request]) -> None:
        self.pending.clear()
        self.error, self._requests = None, requests

    def stop(self) -> None:
        """Let go of the requests: Paddle's threads live on for a while, and requests hold the loader."""
        self._requests = iter(())

    def __iter__(self) -> Iterator[list[Request]]:
        while True:
            try:
                request = next(self._requests)
            except StopIteration:
                return
            except Exception as error:  # the user's sampler: raised at its own step, not when drawn ahead
                self.error = error
                return
            self.pending.append(request)
            yield [request]


class _WorkerDataset:
    """What a worker process sees as its data set: reads a request, returns a parcel."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.init_failure: ReadFailure | None = None

    def __getitem__(self, request: Request) -> list[Any]:
        worker = paddle.io.get_worker_info().id
        batch = self.init_failure or self.reader.read(request, worker)
        try:
            return pack(batch)
        except Exception as error:
            return pack(ReadFailure.of(error, what="sending the batch", index=None, worker=worker))


class _WorkerInit:
    """Runs the user's `worker_init_fn` and keeps its failure, which Paddle would hide."""

    def __init__(self, dataset: _WorkerDataset, init_fn: Callable[[int], None] | None, *, reads_all: bool) -> None:
        self._dataset = dataset
        self._init_fn = init_fn
        self._reads_all = reads_all

    def __call__(self, worker: int) -> None:
        end_with_the_parent()
        own = paddle.io.get_worker_info()
        # The user's functions look for their own data set here; WorkerInfo refuses a plain assignment.
        object.__setattr__(own, "dataset", self._dataset.reader.dataset)
        try:
            if self._init_fn is not None:
                # Paddle's documented way to split a stream is to narrow it here; what is cut behind it must be whole.
                with shown(ShownInfo(0, 1, own.dataset, own.seed) if self._reads_all else own):
                    self._init_fn(worker)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._dataset.init_failure = ReadFailure.of(error, what="worker_init_fn", index=None, worker=worker)


def _only(items: list[Any]) -> Any:
    return items[0]


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_of_the_parent: list[Any] = []
"""Kept in a forked child: their finalizers would end the parent's workers, or wait for threads that are not here."""


def _leave_workers_to_the_parent() -> None:
    for pool in list(_pools):
        pool.leave_to_the_parent()


os.register_at_fork(after_in_child=_leave_workers_to_the_parent)


class WorkerPool:
    """A set-up of Paddle's worker machinery; with persistent workers it serves one pass after another."""

    def __init__(
        self,
        settings: paddle.io.DataLoader,
        reader: Reader,
        num_workers: int | None = None,
        *,
        patience: float = math.inf,
        reads_all: bool = False,
    ) -> None:
        """Make a private DataLoader with the settings of the user's.

        Args:
            settings: Read only.
            reader: What the workers run.
            num_workers: Where there are to be fewer than in the settings.
            patience: Seconds after which a worker that has not answered counts as hung.
            reads_all: Every worker reads the whole data set, and keeps some of it: the user's `worker_init_fn` is
                shown a single worker then, so that it leaves the data set whole.
        """
        self.feed = _Feed()
        self.persistent = bool(settings._persistent_workers)
        view = shallow_copy(settings, paddle.io.DataLoader)
        dataset = _WorkerDataset(reader)
        view.dataset, view.batch_sampler, view.collate_fn = dataset, self.feed, _only
        view.worker_init_fn = _WorkerInit(dataset, settings.worker_init_fn, reads_all=reads_all)
        view.dataset_kind = 0  # a map-style data set, whose items are parcels
        view.auto_collate_batch, view.batch_size, view.drop_last = True, None, False
        view.pin_memory, view._iterator = False, None
        view.num_workers = num_workers or settings.num_workers
        self._view, self.patience = view, patience
        self.iterator: Any = None
        self.num_taken = 0
        """Batches that have come, in all passes."""
        self.process = os.getpid()
        """Whose workers they are."""
        _pools.add(self)

    def leave_to_the_parent(self) -> None:
        """Forget the workers, in a forked child: they are its parent's."""
        if self.iterator is not None:
            self.iterator._shutdown = True
            _of_the_parent.append(self.iterator)
        self.iterator = self._view._iterator = None

    def start(self, requests: Iterator[Request]) -> None:
        """Start a pass; the one before it must have ended.

        Paddle would raise from its SIGCHLD handler when a worker is killed, wherever the user's code is then. So it
        is not told the workers; the machinery finds the dead by itself, when it has waited 5 s for them.
        """
        if self.iterator is not None and not all(worker.is_alive() for worker in self.iterator._workers):
            self.shut_down()
        self.process = os.getpid()
        self.feed.start(requests)
        # Paddle draws the workers' seeds from the user's generator.
        with kept([NumpyGenerator()]), garbage_left_to_the_parent(), signals_held(), freed(self.iterator):
            self.iterator = paddle.io.DataLoader.__iter__(self._view)
            machinery.core._erase_process_pids(id(self.iterator))
        if not isinstance(self.iterator._data_queue, WatchedQueue):
            self.iterator._data_queue = WatchedQueue(self.iterator, self.patience)

    def dead_workers(self) -> dict[int, int]:
        """Return the exit codes of the workers that have ended with an error, by number."""
        workers = enumerate(getattr(self.iterator, "_workers", ()))
        return {number: worker.exitcode for number, worker in workers if worker.exitcode}

    def hung_worker(self) -> int | None:
        """Return the worker that has not answered for too long."""
        watched = getattr(self.iterator, "_data_queue", None)
        return watched.hung if isinstance(watched, WatchedQueue) else None

    def shut_down(self) -> None:
        """End the workers, threads and shared memory of the machinery."""
        iterator, self.iterator, self._view._iterator = self.iterator, None, None
        self.feed.stop()
        if iterator is None:
            return
        with contextlib.suppress(OSError, ValueError):  # another thread that waited for the workers ends it, too
            iterator._try_shutdown_all(timeout=CLOSE_SECONDS)
        for worker in iterator._workers:
            if worker.is_alive():
                worker.kill()
                worker.join()
        remove_shared_memory([worker.pid for worker in iterator._workers])
        forget_shared_memory()


class WorkerPass:
    """Reads in Paddle's worker processes, ahead of the caller."""

    def __init__(
        self,
        requests: Iterator[Request],
        pool: WorkerPool,
        idle: list[WorkerPool],
        to_tensor: Callable[[Any], Any],
    ) -> None:
        """Start the pass.

        Args:
            requests: Drawn ahead, on the caller's thread.
            pool: Not in use.
            idle: Where a persistent pool goes back to when the pass has ended.
            to_tensor: Makes a tensor of an array that did not travel as one.
        """
        self._pool: WorkerPool | None = pool
        self._idle = idle
        self._to_tensor = to_tensor
        self._interrupted = False
        self.skipped: deque[list[tuple[int, str]]] = deque()
        """See `DirectPass`."""
        pool.start(requests)

    def __iter__(self) -> WorkerPass:
        return self

    def __next__(self) -> Any:
        pool = self._pool
        if pool is None:
            raise StopIteration
        if pool.process != os.getpid():
            raise ArgumentError(
                f"this iterator was made by process {pool.process}, whose workers read for it; a forked child makes "
                "one of its own: iter(loader)."
            )
        try:
            parcel = next(pool.iterator)
        except StopIteration:
            self._pool = None
            lost = self._lost(pool, None) if pool.feed.pending else None  # before the dead are forgotten
            if pool.persistent and lost is None and not self._interrupted:
                self._idle.append(pool)
            else:
                pool.shut_down()
            if self._interrupted:
                raise
            if pool.feed.error is not None:
                raise pool.feed.error from None
            if lost is not None:
                raise lost from None
            raise
        except Exception as error:
            dead = self._lost(pool, error)
            self.close()
            raise dead from error
        request = pool.feed.pending.popleft()
        pool.num_taken += 1
        if pool.num_taken % _FORGET_AFTER == 0:
            forget_shared_memory()
        batch = unpack(parcel, self._to_tensor)
        if isinstance(batch, ReadFailure):
            self.close()
            raise batch.error(request)
        return without_patches(batch, self.skipped)

    runs_free = True

    def next_free(self) -> Any:
        """Return the next batch: this process reads nothing."""
        return next(self)

    def interrupt(self) -> None:
        """Close the queue on which `next` waits."""
        pool = self._pool
        if pool is not None and pool.iterator is not None:
            self._interrupted = True
            pool.iterator._exit_thread_expectedly()

    @staticmethod
    def _lost(pool: WorkerPool, error: Exception | None) -> DataReadError:
        dead = ", ".join(f"worker {n} (exit code {code})" for n, code in pool.dead_workers().items())
        cause = f"a worker process ended: {dead}" if dead else "the worker machinery ended early"
        worker, hung = next(iter(pool.dead_workers()), None), pool.hung_worker()
        if hung is not None:
            worker, cause = (
                hung,
                f"worker {hung} has said nothing for {pool.patience:g} s; the loader's timeout= says so",
            )
        failure = ReadFailure(
            what="reading",
            index=None,
            cause_type=type(error).__name__ if error is not None else "WorkersLost",
            cause=cause,
            traceback=str(error),
            worker=worker,
        )
        return failure.error(pool.feed.pending[0])

    def finish(self) -> None:
        """End the pass; persistent workers finish what they were asked for, and wait for another."""
        pool = self._pool
        if pool is None or not pool.persistent:
            self.close()
            return
        pool.feed.stop()
        try:
            for _ in pool.iterator:  # what is asked of them cannot be taken back
                pool.feed.pending.popleft()
        except Exception:  # a worker that was killed
            self.close()
            return
        self._pool = None
        self._idle.append(pool)

    def close(self) -> None:
        """End the workers; also persistent ones, which may be in the middle of a batch."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shut_down()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # at interpreter shutdown
            logging.getLogger(__name__).debug("closing a pass failed", exc_info=True)
