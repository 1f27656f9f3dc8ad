"""Who runs the readers of a pass?

An executor takes steps and gives back their batches, in the same order. Two of them read: in this process
(`InlineExecutor`), and in worker processes (`WorkerExecutor`). One takes what another rank has read
(`ranks/replicas.py`). The others wrap an executor, with the same methods.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from paddle.base.framework import _current_expected_place_, _dygraph_place_guard
from paddle.framework import core

from paddle_shard.clock import STARTING, TENSORS, TRANSPORT, at, clock
from paddle_shard.errors import DifferentDataError
from paddle_shard.forks import no_fork
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.step import Step
from paddle_shard.reading.batch import Batch, Chunk, Even, joined
from paddle_shard.reading.chunk_reader import OwnBatches
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.reader import Reader
from paddle_shard.reading.tensors import arrays_of, becomes_tensor
from paddle_shard.reading.workers import WorkerPool, WorkersLostError
from paddle_shard.say_once import say_once
from paddle_shard.tree import mapped, named_leaves


class Executor:
    """Reads the steps that are submitted."""

    @property
    def depth(self) -> int:
        """Number of steps that should be submitted and not taken, so that it need not wait for more."""
        return 1

    @property
    def runs_free(self) -> bool:
        """True if another thread than the caller's may take: reading draws no random numbers in this process."""
        return True

    def submit(self, step: Step) -> None:
        """Ask for a step."""
        raise NotImplementedError

    def take(self, *, beside: bool = False) -> Batch:
        """Return the batch of the first step that was not taken yet.

        Args:
            beside: True if another thread than the caller's takes.

        Raises:
            StopIteration: All steps that were submitted were taken, or the executor was closed.
            DataReadError: Reading it failed.
            DrewBesideError: `beside`, and something drew random numbers: the caller's thread must take it.
        """
        raise NotImplementedError

    def ready(self) -> bool:
        """Return whether `take` need not wait."""
        return False

    def interrupt(self) -> None:
        """Make a call of `take` that waits in another thread return, if possible. Then it must be closed."""

    def stop(self) -> None:
        """Note that nothing more will be submitted or taken."""

    def close(self, *, ended: bool = False) -> None:
        """End the workers and threads; safe to call again.

        Args:
            ended: True if all ranks have come to the end of the pass; persistent workers may stay.
        """


@contextlib.contextmanager
def told_of(step: Step, what: str) -> Iterator[None]:
    """Raise an error inside as a `DataReadError` of a step, for which this was done."""
    try:
        yield
    except Exception as error:
        raise ReadFailure.of(error, what=what).error(step) from None


class _Reads(Executor):
    """What the executors that read have in common: they join what several readers have read for a step."""

    def __init__(self, places: Sequence[Rows] = (), even: Even | None = None) -> None:
        """Set up.

        Args:
            places: For each part of a step, the places of its rows in the batch; empty: a step has one part, in order.
            even: Pads the rows of several parts to one length; None: they must be alike.
        """
        self._places, self._even, self._own_batches = places, even, OwnBatches()
        self._steps: deque[Step] = deque()
        """Steps that were submitted and not taken."""

    def _batch(self, answers: Sequence[Chunk | ReadFailure]) -> Batch:
        """Return the batch of the next step, for which the readers have given these answers."""
        step, chunks = self._steps.popleft(), list[Chunk]()
        for answer in answers:
            if isinstance(answer, ReadFailure):
                self.close()
                raise answer.error(step)
            chunks.append(answer)
            if answer.digest != chunks[0].digest:
                raise DifferentDataError(
                    f"step {step.number}: the workers of this rank have read different data, though each reads the "
                    "same stream and keeps its own rows. Seed what draws random numbers in it alike in all of them. "
                    "Leave a split among the workers (by worker_init_fn, or by their number) to this loader."
                )
            for _, why in answer.skipped:
                logging.getLogger("paddle_shard").warning("skipped %s", why)
        with told_of(step, "joining the rows of several workers"):
            found = joined(step, chunks, self._places, self._even)
            if step.parts and step.parts[0].whole_items:
                self._own_batches.complete(found, step.parts[0])
        return found


_OTHER_THREAD = (
    "another thread than the main one reads without workers. While a sample is read, the CPU is Paddle's current place "
    "for all threads, so what the main thread computes meanwhile may be on the CPU. Iterate over the loader where you "
    "train (it reads ahead by itself), or use workers (num_workers=)."
)


def on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Make the CPU the current place, as it is in workers: so samples draw the same numbers, from the same generator.

    All threads of a process have the same current place, so only the caller's thread may do this.
    """
    if isinstance(_current_expected_place_(), core.CPUPlace):
        return contextlib.nullcontext()
    if threading.current_thread() is not threading.main_thread():
        say_once(_OTHER_THREAD)
    guard: contextlib.AbstractContextManager[Any] = _dygraph_place_guard(core.CPUPlace())
    return guard


class InlineExecutor(_Reads):
    """Reads in this process, when a batch is taken."""

    def __init__(self, reader: Reader) -> None:
        """Begin a pass; a single reader has all parts of a step."""
        super().__init__()
        self._reader = reader

    @property
    def runs_free(self) -> bool:
        """See `Executor`. In another thread the CPU cannot be the current place.

        So tensors that samples make would go to the device one by one, and wait for what it has to compute.
        """
        stays = not self._reader.makes_tensors or isinstance(_current_expected_place_(), core.CPUPlace)
        return self._reader.runs_free and stays

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        self._steps.append(step)

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        if not self._steps:
            raise StopIteration
        step, reader = self._steps[0], self._reader
        asked = step.parts[0] if step.parts else step
        if beside:
            answer: Chunk | ReadFailure = reader.read_beside(asked)
        else:
            with on_cpu():
                answer = reader.read(asked, None)
        found = self._batch([answer])
        found.owned = reader.owns_arrays
        return found

    def close(self, *, ended: bool = False) -> None:
        """Drop what is open."""
        self._steps.clear()
        self._reader.close()


class WorkerExecutor(_Reads):
    """Reads in worker processes, ahead of the caller.

    Request i of a pass is read by worker i modulo their number, and answers are taken in the order of their requests.
    So each worker's channel is a queue, nothing needs to be sorted, and two numbers tell which requests are where.
    """

    _pool: WorkerPool | None = None  # for `__del__`, as a signal handler may raise in the constructor

    def __init__(
        self,
        pool: WorkerPool,
        idle: list[WorkerPool],
        places: Sequence[Rows] = (),
        even: Even | None = None,
    ) -> None:
        """Start a pass.

        Args:
            pool: The workers.
            idle: Takes the pool when the pass has ended, if its workers are persistent.
            places: See `_Reads`.
            even: See `_Reads`.
        """
        super().__init__(places, even)
        self._pool, self._idle, self._num_parts = pool, idle, len(places) or 1
        self._num_taken = self._num_sent = 0
        self._unsent: deque[Any] = deque()
        """Requests that follow those that were sent."""
        self._failures: dict[int, ReadFailure] = {}
        """Number of a request -> why it could not be sent."""
        try:
            pool.start()
        except BaseException:
            self.close()
            raise

    @property
    def depth(self) -> int:
        """See `Executor`."""
        pool = self._pool
        return 1 if pool is None else max(1, pool.num_workers * pool.num_ahead // self._num_parts)

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        self._steps.append(step)
        self._unsent.extend(step.parts or (step.to_read(),))
        if self._pool is not None:
            self._send(self._pool)

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        pool = self._pool
        if pool is None or not self._steps:
            raise StopIteration
        try:
            answers = [self._answer(pool) for _ in range(self._num_parts)]
        except WorkersLostError as lost:
            if pool.interrupted:
                raise StopIteration from None
            self.close()
            failure = ReadFailure.of(lost, what="reading", worker=lost.worker)
            raise failure.error(self._steps[0]) from None
        return self._batch(answers)

    def _answer(self, pool: WorkerPool) -> Chunk | ReadFailure:
        """Return the answer to the next request."""
        self._send(pool)
        answer = self._failures.get(self._num_taken)
        if answer is None:
            with at(TRANSPORT) as mine:
                answer = pool.receive(self._num_taken % pool.num_workers)
            mine.blame(getattr(answer, "spent", None))
        self._num_taken += 1
        self._send(pool)
        return answer

    def _send(self, pool: WorkerPool) -> None:
        """Send as many requests as the workers may have, in their order."""
        # Of the requests that were sent and not taken, one in `num_workers` is with the worker of the next one.
        while self._unsent and (self._num_sent - self._num_taken) // pool.num_workers < pool.num_ahead:
            request = self._unsent[0]
            try:
                with at(TRANSPORT):
                    pool.send(self._num_sent % pool.num_workers, request)
            except BlockingIOError:  # the worker is busy with earlier messages
                return
            except ConnectionError:  # told when the answer is due
                pass
            except Exception as error:
                indices = tuple(getattr(request, "indices", ()))
                self._failures[self._num_sent] = ReadFailure.of(error, what="sending the request", indices=indices)
            self._unsent.popleft()
            self._num_sent += 1

    def ready(self) -> bool:
        """See `Executor`."""
        pool, first = self._pool, self._num_taken
        if pool is None or not self._steps:
            return True
        # Of each worker, only the next answer can be seen.
        return all(
            number in self._failures or (number < self._num_sent and pool.has_answer(number % pool.num_workers))
            for number in range(first, first + min(self._num_parts, pool.num_workers))
        )

    def interrupt(self) -> None:
        """End the connections to the workers, so that a waiting call of `take` returns."""
        pool = self._pool
        if pool is not None:
            pool.interrupt()

    def stop(self) -> None:
        """Let workers that are not persistent end by themselves, so that closing need not wait for them."""
        if self._pool is not None and not self._pool.persistent and not self._steps:
            self._pool.let_go()

    def close(self, *, ended: bool = False) -> None:
        """End the workers, also persistent ones if they may be in the middle of a batch."""
        pool = self._pool
        if pool is not None:
            stays = ended and pool.persistent
            with contextlib.suppress(WorkersLostError):
                while stays and self._num_taken < self._num_sent + len(self._unsent):  # it cannot be taken back
                    self._answer(pool)
            if stays and self._num_taken == self._num_sent and not pool.interrupted:
                self._idle.append(pool)
            else:
                with at(STARTING):  # ending them, too, is spared by persistent workers
                    pool.shut_down()
        self._pool = None  # only now, as a signal handler may raise before this line

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # else the interpreter has ended the workers already
            self.close()


class Wrapper(Executor):
    """An executor around another one; a subclass changes what is different."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    @property
    def depth(self) -> int:
        """See `Executor`."""
        return self._inner.depth

    @property
    def runs_free(self) -> bool:
        """See `Executor`."""
        return self._inner.runs_free

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        self._inner.submit(step)

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        return self._inner.take(beside=beside)

    def ready(self) -> bool:
        """See `Executor`."""
        return self._inner.ready()

    def interrupt(self) -> None:
        """See `Executor`."""
        self._inner.interrupt()

    def stop(self) -> None:
        """See `Executor`."""
        self._inner.stop()

    def close(self, *, ended: bool = False) -> None:
        """See `Executor`."""
        self._inner.close(ended=ended)


_MAKING, _TENSORS = "making tensors of the batch", (TENSORS, "")
ToTensors = Callable[[Sequence[Any], bool], Callable[[], Sequence[Any]]]
"""Begins to convert arrays and tensors to tensors, and returns a function that returns them. If nothing else refers to
the arrays (True), the tensors may share their memory."""


class Tensors(Wrapper):
    """Makes tensors of the arrays of each batch, on the loader's place.

    A batch that another thread takes is ready but for what is the caller's to do (`complete`): its copy to a device.
    """

    def __init__(self, inner: Executor, to_tensors: ToTensors, look: Callable[[Batch], None] | None = None) -> None:
        """Wrap an executor.

        Args:
            inner: The executor.
            to_tensors: Makes the tensors of one pass.
            look: Is shown each batch before.
        """
        super().__init__(inner)
        self._to_tensors, self._look = to_tensors, look
        self._any_taken = False

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        found = self._inner.take(beside=beside)
        found.is_first, self._any_taken = not self._any_taken, True
        if self._look is not None:
            self._look(found)
        mine = clock()
        before = mine.to(_TENSORS)  # also if it raises: the account of the batch ends then
        with no_fork, told_of(found.step, _MAKING):
            rest = begin_tensors(found.value, self._to_tensors, found.owned)
            if not beside:
                found.value = rest()
        mine.to(before)
        if beside:
            found.num_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in arrays_of(found.value))
            found.value, found.completed = None, rest
        return found


def complete(batch: Batch) -> None:
    """Do the rest of making a batch's tensors, on the thread that computes with them."""
    if batch.completed is not None:
        with no_fork, at(TENSORS), told_of(batch.step, _MAKING):
            batch.value, batch.completed = batch.completed(), None


def begin_tensors(value: Any, begin: ToTensors, owned: bool) -> Callable[[], Any]:
    """Begin to make tensors of every array of a batch that can be one, and of every tensor.

    Args:
        value: The batch.
        begin: Begins to convert arrays and tensors, all at once.
        owned: True if nothing else refers to the arrays.

    Returns:
        A function that returns the batch with tensors in their places.

    Raises:
        TypeError: An array has a dtype or a byte order that Paddle does not have.
    """
    found = []
    for path, leaf in named_leaves(value):
        if becomes_tensor(leaf):
            _check_dtype(leaf, path)
            found.append(leaf)
    made, converted = begin(found, owned), set(map(id, found))

    def finished() -> Any:
        tensors = iter(made())
        return mapped(value, lambda leaf, _: next(tensors) if id(leaf) in converted else leaf)

    return finished


def _check_dtype(array: Any, path: str) -> None:
    """Refuse an array of numbers that Paddle cannot hold; a tensor is fine.

    Raises:
        TypeError: Paddle does not have its dtype or its byte order.
    """
    if not isinstance(array, np.ndarray):
        return
    kind, size = array.dtype.kind, array.dtype.itemsize
    at = f" at field {path}" if path else ""
    if (kind == "u" and size > 2) or (kind == "f" and size > 8) or size > 16:
        raise TypeError(
            f"Paddle has no tensors of dtype {array.dtype}{at}; convert it, for instance with .astype('int64')."
        )
    if not array.dtype.isnative:
        raise TypeError(
            f"array of dtype {array.dtype!r}{at} is in another byte order than this machine's; convert it with "
            f".astype({array.dtype.name!r})."
        )
