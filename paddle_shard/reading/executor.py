"""Who runs the readers of a pass?

An executor takes steps and gives back their batches, in the same order. Two of them read: in this process
(`InlineExecutor`), and in worker processes (`WorkerExecutor`). The others wrap an executor, with the same methods.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence

from paddle_shard.errors import DifferentDataError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.step import Step
from paddle_shard.reading.batch import Batch, Chunk
from paddle_shard.reading.chunk import Even, as_they_are, joined
from paddle_shard.reading.failure import ReadFailure, log_skipped
from paddle_shard.reading.local_batch import OwnRows
from paddle_shard.reading.parcel import ToTensors, map_leaves
from paddle_shard.reading.reader import IdReader, Reader
from paddle_shard.reading.worker_guards import in_use
from paddle_shard.reading.workers import WorkerPool, WorkersLostError
from paddle_shard.samplers.randomness import Generator


class Executor:
    """Reads the steps that are submitted."""

    @property
    def depth(self) -> int:
        """Number of steps that should be submitted and not taken, so that it need not wait for more."""
        return 1

    @property
    def owns_arrays(self) -> bool:
        """True if nothing else refers to the arrays of a batch, so that tensors may share their memory."""
        return True

    @property
    def runs_free(self) -> bool:
        """True if another thread than the caller's may take: reading draws no random numbers in this process."""
        return True

    @property
    def draws_from(self) -> Sequence[Generator]:
        """The generators of this process that reading might begin to draw from."""
        return ()

    def submit(self, step: Step) -> None:
        """Ask for a step."""
        raise NotImplementedError

    def take(self, *, beside: bool = False) -> Batch:
        """Return the batch of the first step that was not taken yet.

        Args:
            beside: True if another thread than the caller's takes.

        Raises:
            DataReadError: Reading it failed.
            DrewBesideError: `beside`, and something drew random numbers: the caller's thread must take it.
        """
        raise NotImplementedError

    def ready(self) -> bool:
        """Return whether `take` need not wait."""
        return False

    def interrupt(self) -> None:
        """Make a call of `take` that waits in another thread return, if possible. Then it must be closed."""

    def end(self) -> None:
        """Note that all steps of the pass were taken, and no more will be submitted."""

    def stop(self) -> None:
        """Tell the ranks that it reads for, if there are any, that nothing more will come."""

    def finish(self) -> None:
        """End when all ranks have come to the end; persistent workers may stay."""
        self.close()

    def close(self) -> None:
        """End the workers and threads; safe to call again."""


class _Reads(Executor):
    """What the executors that read have in common: they join what several readers have read for a step."""

    def __init__(self, places: Sequence[Rows] | None = None, even: Even = as_they_are) -> None:
        """Set up.

        Args:
            places: For each part of a step, the places of its rows in the batch; None: a step has one part, in order.
            even: Pads the rows of several parts to one length.
        """
        self._places, self._even, self._own_rows = places, even, OwnRows()
        self._steps: deque[Step] = deque()

    def _batch(self, step: Step, answers: Sequence[Chunk | ReadFailure]) -> Batch:
        for answer in answers:
            if isinstance(answer, ReadFailure):
                self.close()
                raise answer.error(step)
        chunks = [Chunk(*answer) for answer in answers]  # type: ignore[misc]
        log_skipped(why for chunk in chunks for _, why in chunk.skipped)
        if any(chunk.digest != chunks[0].digest for chunk in chunks):
            raise DifferentDataError(
                f"step {step.number}: the workers of this rank have read different data, though each reads the same "
                "stream and keeps its own rows. Seed what draws random numbers in it alike in all of them."
            )
        try:
            found = joined(step, chunks, self._places, self._even)
            if step.parts and step.parts[0].local_rows is not None:
                found = self._own_rows.of(found, step.parts[0])
            return found
        except Exception as error:
            raise_if_a_handlers(error)
            what = "joining the rows of several workers"
            raise ReadFailure.of(error, what=what, index=None, worker=None).error(step) from None


class InlineExecutor(_Reads):
    """Reads in this process, when a batch is taken."""

    def __init__(
        self,
        reader: Reader,
        places: Sequence[Rows] | None = None,
        even: Even = as_they_are,
    ) -> None:
        """Set up; see `_Reads`."""
        super().__init__(places, even)
        self._reader = reader

    @property
    def owns_arrays(self) -> bool:
        """See `Executor`."""
        return self._reader.owns_arrays

    @property
    def runs_free(self) -> bool:
        """See `Executor`."""
        return self._reader.draws is False

    @property
    def draws_from(self) -> Sequence[Generator]:
        """See `Executor`."""
        return self._reader.generators

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        self._steps.append(step)

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        step = self._steps[0]
        if isinstance(self._reader, IdReader):
            answers = [self._reader.read(step, None, beside=beside)]
        else:
            answers = [self._reader.read(part, None) for part in step.parts]
        self._steps.popleft()
        return self._batch(step, answers)

    def close(self) -> None:
        """Drop what is open."""
        self._steps.clear()
        getattr(self._reader, "close", lambda: None)()


class WorkerExecutor(_Reads):
    """Reads in worker processes, ahead of the caller."""

    def __init__(
        self,
        pool: WorkerPool,
        idle: list[WorkerPool],
        places: Sequence[Rows] | None = None,
        even: Even = as_they_are,
    ) -> None:
        """Start a pass.

        Args:
            pool: The workers.
            idle: Takes the pool when the pass has ended, if its workers are persistent.
            places: See `_Reads`.
            even: See `_Reads`.
        """
        super().__init__(places, even)
        self._pool: WorkerPool | None = pool
        self._idle, self._num_parts = idle, 1 if places is None else len(places)
        try:
            pool.start()
        except BaseException:
            self.close()
            raise

    @property
    def depth(self) -> int:
        """See `Executor`."""
        return 1 if self._pool is None else max(1, self._pool.depth // self._num_parts)

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        self._steps.append(step)
        if self._pool is not None:
            for part in step.parts or (step.to_read(),):
                self._pool.ask(part)

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        pool = self._pool
        if pool is None:
            raise StopIteration
        step = self._steps[0]
        try:
            answers = [pool.take() for _ in step.parts or (step,)]
        except WorkersLostError as lost:
            if pool.interrupted:
                raise StopIteration from None
            self.close()
            raise ReadFailure.of(lost, what="reading", index=None, worker=lost.worker).error(step) from None
        self._steps.popleft()
        return self._batch(step, answers)

    def ready(self) -> bool:
        """See `Executor`."""
        return self._pool is None or not self._steps or self._pool.ready(self._num_parts)

    def interrupt(self) -> None:
        """End the connections to the workers, so that a waiting call of `take` returns."""
        pool = self._pool
        if pool is not None:
            pool.interrupt()

    def end(self) -> None:
        """Let workers that are not persistent end by themselves, so that closing need not wait for them."""
        if self._pool is not None and not self._pool.persistent:
            self._pool.let_go()

    def finish(self) -> None:
        """See `Executor`."""
        pool = self._pool
        if pool is None or not pool.persistent or pool.interrupted:
            self.close()
            return
        try:
            while pool.pending:  # what was sent cannot be taken back
                pool.take()
        except WorkersLostError:
            self.close()
            return
        except BaseException:
            self.close()
            raise
        self._idle.append(pool)
        self._pool = None

    def close(self) -> None:
        """End the workers, also persistent ones: they may be in the middle of a batch."""
        if self._pool is not None:
            self._pool.shut_down()
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
    def owns_arrays(self) -> bool:
        """See `Executor`."""
        return self._inner.owns_arrays

    @property
    def runs_free(self) -> bool:
        """See `Executor`."""
        return self._inner.runs_free

    @property
    def draws_from(self) -> Sequence[Generator]:
        """See `Executor`."""
        return self._inner.draws_from

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

    def end(self) -> None:
        """See `Executor`."""
        self._inner.end()

    def stop(self) -> None:
        """See `Executor`."""
        self._inner.stop()

    def finish(self) -> None:
        """See `Executor`."""
        self._inner.finish()

    def close(self) -> None:
        """See `Executor`."""
        self._inner.close()


class Tensors(Wrapper):
    """Makes tensors of the arrays of each batch, on the loader's place."""

    def __init__(self, inner: Executor, copied: ToTensors, zero_copy: ToTensors) -> None:
        """Wrap an executor.

        Args:
            inner: The executor.
            copied: Converts arrays to tensors.
            zero_copy: The same for arrays that only the batch holds, perhaps without a copy.
        """
        super().__init__(inner)
        self._copied, self._zero_copy = copied, zero_copy

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        found = self._inner.take(beside=beside)
        try:
            with in_use:
                found.value = map_leaves(found.value, self._zero_copy if self._inner.owns_arrays else self._copied)
        except Exception as error:
            raise_if_a_handlers(error)
            what = "making tensors of the batch"
            raise ReadFailure.of(error, what=what, index=None, worker=None).error(found.step) from None
        return found
