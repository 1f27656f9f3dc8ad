"""Who runs the readers of a pass?

An executor takes steps and gives back their batches, in the same order. Two of them read: in this process
(`InlineExecutor`), and in worker processes (`WorkerExecutor`). The others wrap an executor, with the same methods.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from paddle_shard.errors import DifferentDataError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import Permutation
from paddle_shard.plan.step import Step
from paddle_shard.reading.batch import Batch, Chunk
from paddle_shard.reading.chunk import Even, as_they_are, joined, take_rows
from paddle_shard.reading.dispatch import Dispatcher
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

    def __init__(
        self, places: Sequence[Rows] | None = None, even: Even = as_they_are, dispatcher: Dispatcher | None = None
    ) -> None:
        """Set up.

        Args:
            places: For each part of a step, the places of its rows in the batch; None: a step has one part, in order.
            even: Pads the rows of several parts to one length.
            dispatcher: Reads the samples that are dispatched to the readers, if there are such.
        """
        self._places, self._even, self._dispatcher, self._own_rows = places, even, dispatcher, OwnRows()
        self._steps: deque[tuple[Step, Exception | None]] = deque()

    def _dispatched(self, step: Step) -> Step | None:
        """Note a step, and return it with the samples that are dispatched; None if they cannot be read."""
        failure = None
        if self._dispatcher is not None and not (self._steps and self._steps[-1][1]):
            try:
                step = self._dispatcher.filled(step)
            except Exception as error:  # raised when the step is taken
                raise_if_a_handlers(error)
                failure = error
        self._steps.append((step, failure))
        return None if failure else step

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
        dispatcher: Dispatcher | None = None,
    ) -> None:
        """Set up; see `_Reads`."""
        super().__init__(places, even, dispatcher)
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
        self._dispatched(step)

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        step, failure = self._steps[0]
        if failure is not None:
            raise failure
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
        dispatcher: Dispatcher | None = None,
    ) -> None:
        """Start a pass.

        Args:
            pool: The workers.
            idle: Takes the pool when the pass has ended, if its workers are persistent.
            places: See `_Reads`.
            even: See `_Reads`.
            dispatcher: See `_Reads`.
        """
        super().__init__(places, even, dispatcher)
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
        filled = self._dispatched(step)
        if filled is not None and self._pool is not None:
            for part in filled.parts or (filled.to_read(),):
                self._pool.ask(part)

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        pool = self._pool
        if pool is None:
            raise StopIteration
        step, failure = self._steps[0]
        if failure is not None:
            self.close()
            raise failure
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


class Mixed(Wrapper):
    """Mixes the rows of several batches at a time, in the main process (`local_shuffle`).

    A window of batches is permuted by a key and its number. A pass that is resumed begins to read at the beginning of a
    window, and passes over what was delivered before.
    """

    def __init__(
        self,
        inner: Executor,
        *,
        window: int,
        first_window: int,
        skip: int,
        num_steps: int | None,
        key: bytes,
        even: Even,
    ) -> None:
        """Wrap an executor.

        Args:
            inner: The executor.
            window: Batches of a window.
            first_window: Number of the first window.
            skip: Batches of it that were delivered before; they are submitted again.
            num_steps: Batches to read, those included; None: the end shows when it comes.
            key: The key; each window has its own.
            even: Pads the rows of several batches to one length.
        """
        super().__init__(inner)
        self._window, self._number, self._skip, self._extra = window, first_window, skip, skip
        self._left = -1 if num_steps is None else num_steps  # below 0: the end is not known
        self._key, self._even = key, even
        self._mixed: deque[Batch] = deque()
        self._behind: Batch | None = None

    @property
    def depth(self) -> int:
        """A window, those that are passed over, and what keeps the readers busy."""
        return self._window + self._extra + self._inner.depth

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        while not self._mixed:
            self._fill()
            while self._skip and self._mixed:  # the whole last window may have been delivered before
                self._mixed.popleft()
                self._skip -= 1
        return self._mixed.popleft()

    def ready(self) -> bool:
        """See `Executor`."""
        return bool(self._mixed) and not self._skip

    def _fill(self) -> None:
        held: list[Batch] = []
        while len(held) < self._window and (self._left != 0 or self._behind is not None):
            found, self._behind = self._behind, None
            if found is None:
                self._left -= 1
                found = self._inner.take()
            if found.value is None or found.empty or (self._left < 0 and not found.fresh):  # it is after the end
                if held:
                    self._behind = found
                else:
                    self._mixed.append(found)
                break
            held.append(found)
        number, self._number = self._number, self._number + 1
        if not held:
            if not self._mixed:
                raise StopIteration
            return
        real = np.concatenate([one.served() for one in held])
        # Missing rows stay in their places, so that each batch has as many real rows as without mixing.
        order, own = np.arange(len(real)), np.flatnonzero(real)
        order[own] = own[Permutation(len(own), derive_key(self._key, number, size=64))(np.arange(len(own)))]
        sizes = [len(one.served()) for one in held]
        lost = np.concatenate([np.zeros_like(o.served()) if o.skipped is None else o.skipped for o in held])
        try:
            values = self._even([one.value for one in held])
            mixed = [
                take_rows(values, sizes, order[end - size : end])
                for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True)
            ]
        except Exception as error:
            raise_if_a_handlers(error)
            what = "mixing the rows of several batches"
            raise ReadFailure.of(error, what=what, index=None, worker=None).error(held[0].step) from None
        for value, end, size, one in zip(mixed, np.cumsum(sizes).tolist(), sizes, held, strict=True):
            rows = order[end - size : end]
            one.value = value
            one.skipped = lost[rows] if lost.any() else None
            self._mixed.append(one)
