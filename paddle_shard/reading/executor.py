"""Executors: run the readers of a pass, in this process or in workers.

An executor takes steps and returns their batches, in the same order. `InlineExecutor` reads in this process,
`WorkerExecutor` in worker processes, and `ranks/replicas.py` takes what another rank has read.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from paddle.base.framework import _current_expected_place_, _dygraph_place_guard
from paddle.framework import core

from paddle_shard.core import forks
from paddle_shard.core.warn_once import caller_level
from paddle_shard.errors import PaddleShardError
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.step import Step
from paddle_shard.reading.batch import Batch, Chunk, Even, joined
from paddle_shard.reading.chunk_reader import OwnBatches
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.reader import DigestRequest, Reader
from paddle_shard.reading.workers import WorkerPool, WorkersLostError

MAKING_TENSORS = "making tensors of the batch"

_log = logging.getLogger("paddle_shard")


class Executor:
    """Reads the steps that are submitted."""

    depth = 1
    """Number of steps that should be submitted and not taken, so that it need not wait for more."""
    reads_elsewhere: ClassVar[bool] = False
    """True if another rank reads. It may be unable to while this rank's training thread waits for a batch."""

    @property
    def runs_in_thread(self) -> bool:
        """True if another thread than the training loop's may take the next batches."""
        return True

    def submit(self, step: Step) -> None:
        """Request a step."""
        raise NotImplementedError

    def take(self, *, in_thread: bool = False) -> Batch:
        """Return the batch of the first step that was not taken yet.

        Args:
            in_thread: True if another thread than that of the training loop calls.

        Raises:
            StopIteration: All steps that were submitted were taken, or the executor was closed, perhaps meanwhile.
            DataReadError: Reading it failed.
        """
        raise NotImplementedError

    def interrupt(self) -> None:
        """Make a call of `take` that waits in another thread return, if possible. Then it must be closed."""

    def stop(self) -> None:
        """Note that nothing more will be submitted or taken."""

    def close(self, *, ended: bool = False) -> None:
        """End the workers; safe to call again.

        Args:
            ended: True if all ranks have come to the end of the epoch; persistent workers may stay.
        """


def read_error(error: Exception, step: Step, action: str) -> Exception:
    """Return the `DataReadError` of a step for an error; errors of this package stay what they are."""
    if isinstance(error, PaddleShardError):
        return error
    return ReadFailure.of(error, what=action).error(step)


class _ReadingExecutor(Executor):
    """Joins what one or several readers have read for a step."""

    def __init__(
        self, places: Sequence[Rows] = (), even: Even | None = None
    ) -> None:
        """Set up.

        Args:
            places: For each part of a step, the places of its rows in the batch; empty: a step has one part, in order.
            even: Pads the rows of several parts to one length; None: they must be alike.
        """
        self._places = places
        self._even = even
        self._own_batches = OwnBatches()
        self._steps: deque[Step] = deque()
        """Steps that were submitted and not taken."""

    def _join(self, answers: Sequence[Chunk | ReadFailure]) -> Batch:
        """Return the batch of the next step, for which the readers have given these answers."""
        step = self._steps.popleft()
        chunks: list[Chunk] = []
        for answer in answers:
            if isinstance(answer, ReadFailure):
                self.close()
                raise answer.error(step)
            for _, reason in answer.skipped:
                _log.warning("skipped %s", reason, stacklevel=caller_level())
            chunks.append(answer)
        try:
            batch = joined(step, chunks, self._places, self._even)
            if step.parts and step.parts[0].whole_items:
                self._own_batches.complete(batch, step.parts[0])
        except Exception as error:
            raise read_error(
                error, step, "joining the rows of several workers"
            ) from None
        return batch


def on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Make the CPU the current place, as it is in workers: so samples draw the same numbers, from the same generator.

    All threads of a process have the same current place, so only the main thread may do this.
    """
    if isinstance(_current_expected_place_(), core.CPUPlace):
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[Any] = _dygraph_place_guard(
        core.CPUPlace()
    )
    return guard


class InlineExecutor(_ReadingExecutor):
    """Reads in this process, when a batch is taken."""

    has_static_program: ClassVar[bool] = False
    """True if the training thread runs static programs, for which it switches the whole process to static mode."""

    def __init__(self, reader: Reader) -> None:
        """Begin; a single reader has all parts of a step."""
        super().__init__()
        self._reader = reader
        self._lock = forks.reader_lock()
        self._is_first = True
        """True until the first batch is read."""

    @property
    def runs_in_thread(self) -> bool:
        """See `Executor`: the first batch shows whether the global generators are used.

        Another thread cannot make the CPU the current place. So tensors that samples make would go to the device one by
        one, and wait for what it has to compute. Nor can it make tensors while the process is in static mode.
        """
        reader = self._reader
        if self.has_static_program and reader.uses_paddle is not False:
            return False
        if reader.rng.seeds:
            return False
        return not reader.makes_tensors or isinstance(
            _current_expected_place_(), core.CPUPlace
        )

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        self._steps.append(step)
        num_threads = self._reader.num_threads
        if num_threads:
            # Enough steps that all threads are busy while one step is taken.
            self.depth = 1 + -(-num_threads // max(1, len(step.ids)))
            self._reader.begin(step)

    def take(self, *, in_thread: bool = False) -> Batch:
        """See `Executor`."""
        if not self._steps:
            raise StopIteration
        step = self._steps[0]
        is_first = self._is_first
        self._is_first = False
        request = step.parts[0] if step.parts else step
        with self._lock if in_thread else on_cpu():
            answer = self._reader.read(request, None, is_first=is_first)
            if is_first:
                for other in list(self._steps)[1:]:
                    self._reader.begin(other)
        if not self._steps:  # closed meanwhile
            raise StopIteration
        batch = self._join([answer])
        batch.owned = self._reader.owns_arrays
        return batch

    def close(self, *, ended: bool = False) -> None:
        """Drop what is open."""
        self._steps.clear()
        self._reader.close()


class WorkerExecutor(_ReadingExecutor):
    """Reads in worker processes, ahead of the caller.

    Request i of an epoch iterator is read by worker i modulo their number, and answers are taken in the order of their
    requests. So each worker's channel is a queue, nothing needs to be sorted, and two numbers tell which requests are
    where.
    """

    def __init__(
        self,
        pool: WorkerPool,
        idle: list[WorkerPool],
        places: Sequence[Rows] = (),
        even: Even | None = None,
    ) -> None:
        """Start.

        Args:
            pool: The workers.
            idle: Takes the pool at the end of the epoch, if its workers are persistent.
            places: See `_ReadingExecutor`.
            even: See `_ReadingExecutor`.
        """
        super().__init__(places, even)
        self._pool: WorkerPool | None = pool
        self._idle = idle
        self._num_parts = len(places) or 1
        self._most_sent = pool.num_workers * pool.num_ahead
        self._num_taken = 0
        self._num_sent = 0
        self._unsent: deque[Any] = deque()
        """Requests that follow those that were sent."""
        self.depth = max(1, self._most_sent // self._num_parts)
        # A request wakes a worker that has none, which takes 0.1 ms. So several of those for a share are sent at once.
        self._num_at_once = 1 if self._num_parts == 1 else self._most_sent // 2
        pool.start()

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        self._steps.append(step)
        self._unsent.extend(step.parts or (step.to_read(),))
        if self._pool is not None:
            self._send(self._pool)

    def digests(self, samples: Sequence[Any]) -> Sequence[int]:
        """See `IdReader.digests`. The first worker reads: the parent may have to leave files unopened before a fork."""
        assert self._pool is not None
        self._pool.send(0, DigestRequest(samples))
        digests: Sequence[int] | ReadFailure
        try:
            digests = self._pool.receive(0)
        except WorkersLostError as lost:
            digests = lost.failure()
        if isinstance(digests, ReadFailure):
            self.close()
            raise digests.error(
                Step(
                    epoch=0,
                    number=0,
                    num_rows=0,
                    micro_size=0,
                    num_positions=0,
                    ids=samples,
                )
            )
        return digests

    def take(self, *, in_thread: bool = False) -> Batch:
        """See `Executor`."""
        pool = self._pool
        if pool is None or not self._steps:
            raise StopIteration
        try:
            answers = [self._answer(pool) for _ in range(self._num_parts)]
        except WorkersLostError as lost:
            answers = [lost.failure()]
        except Exception:
            if not pool.interrupted:
                raise
        if pool.interrupted:  # closed meanwhile
            raise StopIteration
        return self._join(answers)

    def _answer(self, pool: WorkerPool) -> Chunk | ReadFailure:
        """Return the answer to the next request."""
        self._send(pool)
        answer: Chunk | ReadFailure = pool.receive(
            self._num_taken % pool.num_workers
        )
        self._num_taken += 1
        self._send(pool)
        return answer

    def _send(self, pool: WorkerPool) -> None:
        """Send as many requests as the workers may have, in their order."""
        if (
            self._num_sent - self._num_taken
            > self._most_sent - self._num_at_once
        ):
            return
        # One in `num_workers` of the requests that were sent and not taken is with the worker of the next one.
        while (
            self._unsent and self._num_sent - self._num_taken < self._most_sent
        ):
            request = self._unsent[0]
            is_first = self._num_sent < pool.num_workers
            try:
                number = self._num_sent % pool.num_workers
                pool.send(number, request, is_first=is_first)
            except BlockingIOError:  # the worker is busy with earlier messages
                return
            except ConnectionError:  # reported when the answer is due
                pass
            self._unsent.popleft()
            self._num_sent += 1

    def interrupt(self) -> None:
        """End the connections to the workers, so that a waiting call of `take` returns."""
        if self._pool is not None:
            self._pool.interrupt()

    def stop(self) -> None:
        """Let workers that are not persistent end by themselves, so that closing need not wait for them."""
        if (
            self._pool is not None
            and not self._pool.persistent
            and not self._steps
        ):
            self._pool.let_go()

    def close(self, *, ended: bool = False) -> None:
        """End the workers, also persistent ones if they may be in the middle of a batch."""
        pool = self._pool
        if pool is None:
            return
        stays = ended and pool.persistent
        with contextlib.suppress(WorkersLostError):
            # Requests cannot be taken back.
            while stays and self._num_taken < self._num_sent + len(
                self._unsent
            ):
                self._answer(pool)
        if stays and self._num_taken == self._num_sent and not pool.interrupted:
            self._idle.append(pool)
        else:
            pool.interrupted = True
            pool.shut_down()
        # only now, as a signal handler may raise before this line
        self._pool = None
