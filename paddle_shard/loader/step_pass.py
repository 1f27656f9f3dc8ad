"""Step passes: read the steps of one epoch iterator ahead, agree on them with the other ranks, and deliver them."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from queue import SimpleQueue
from typing import Any

from paddle_shard.core.forks import no_fork
from paddle_shard.core.trees import mapped
from paddle_shard.errors import (
    AgreedFailure,
    ArgumentError,
    DataReadError,
    PeerLostError,
)
from paddle_shard.loader.notes import StepNotes
from paddle_shard.plan.step import Step
from paddle_shard.ranks.agreement import Agreement
from paddle_shard.ranks.decision import END, FAIL
from paddle_shard.ranks.replicas import LeaderStoppedError
from paddle_shard.ranks.reports import error_of_another, report_of
from paddle_shard.reading.batch import NO_STAND_IN, Batch
from paddle_shard.reading.executor import MAKING_TENSORS, Executor, read_errors
from paddle_shard.reading.profile import READING_AHEAD, Profiler
from paddle_shard.reading.worker_guards import signals_held

_JOIN_SECONDS = 1.0
"""Seconds that closing waits for a read that cannot be interrupted. Its thread then ends by itself later."""
_UNLIMITED = 1 << 62
_STOP = object()
_END_OF_PASS = object()


class Feed:
    """Submits the steps of a pass to its executor."""

    def __init__(
        self,
        steps: Iterator[Step],
        executor: Executor,
        num_steps: int | None,
        *,
        on_training_thread: bool,
    ) -> None:
        """Begin.

        Args:
            steps: The steps.
            executor: Reads them.
            num_steps: Their number; None: the end shows when it comes.
            on_training_thread: True if they are made on the thread of the training loop only.
        """
        self._steps: Iterator[Step] | None = steps
        self.executor = executor
        self._num_steps = num_steps
        self._skipped_at_end = (0, 0)
        self.on_training_thread = on_training_thread
        self._made: deque[Step] = deque()
        """Steps that the training thread has made for another thread to submit."""
        self.num_submitted = 0
        self.failure: Exception | None = None
        """The error of the user's sampler, to be raised after the steps before it."""

    def make(self, num_steps: int) -> None:
        """Make steps until so many are made or submitted; for the thread of the training loop."""
        while (
            self.num_submitted + len(self._made) < num_steps
            and (step := self._next()) is not None
        ):
            self._made.append(step)

    def fill(self, num_taken: int, *, in_thread: bool) -> None:
        """Submit as many steps as the executor should have."""
        while self.num_submitted - num_taken < self.executor.depth:
            if self._made:
                step = self._made.popleft()
            elif in_thread and self.on_training_thread:
                return
            else:
                found = self._next()
                if found is None:
                    return
                step = found
            self.num_submitted += 1
            self.executor.submit(step, is_last=self.num_submitted == self._num_steps)

    def _next(self) -> Step | None:
        if self._steps is None:
            return None
        try:
            return next(self._steps)
        except StopIteration as end:
            self._steps = None
            self._skipped_at_end = end.value or (0, 0)
        except Exception as error:
            self._steps = None
            self.failure = error
        return None

    def skipped_at_end(self) -> tuple[int, int]:
        """Return the (steps, samples) skipped after the last step, once the pass has ended."""
        self._next()  # the number of steps may have told the end
        return self._skipped_at_end


class StepPass:
    """Delivers the steps of one pass. All ranks deliver the same steps and fail at the same step.

    Each rank announces what it can deliver, some steps ahead, and delivers a step once all ranks have announced it. A
    thread reads, places and announces ahead, wherever the executor allows it; the training thread only takes batches.
    """

    def __init__(
        self,
        feed: Feed,
        agreement: Agreement | None,
        *,
        prepare: Callable[[Batch], Batch],
        num_steps: int | None = None,
        notes: StepNotes | None = None,
        compares: bool = False,
        num_ahead: int = 2,
        profiler: Profiler | None = None,
    ) -> None:
        """Start the pass.

        Args:
            feed: Submits its steps to the executor that reads them.
            agreement: The agreement of the ranks; None: this rank is alone.
            prepare: Returns the placed batch; it raises `StopIteration` if the pass ends before it.
            num_steps: Steps of the pass; None: the end shows when it comes.
            notes: What the ranks tell each other about each step; None: nothing.
            compares: True if the ranks compare digests of what they have read or drawn.
            num_ahead: Batches that a thread keeps ready; 0: no thread reads.
            profiler: Samples what is waited for; None: nothing does.
        """
        self._feed = feed
        self._executor = feed.executor
        self._agreement = agreement
        self._prepare = prepare
        self._num_steps = num_steps
        self._notes = notes
        self._compares = compares and agreement is not None
        self._num_ahead = num_ahead
        self._profiler = Profiler() if profiler is None else profiler
        self._process = os.getpid()
        # One step more than is needed, so that the ranks agree on it while the model computes.
        self._reads_on = int(agreement is not None and num_ahead > 0)
        self._ready: SimpleQueue[Any] = SimpleQueue()
        """Batches that can be delivered, then what the pass ends with: `_END_OF_PASS`, or an error."""
        self._room: SimpleQueue[Any] = SimpleQueue()
        """An entry for each batch that the thread may read, or `_STOP`."""
        self._thread: threading.Thread | None = None
        self._has_room = 0
        """Steps before which the thread has room to read."""
        self._allowed = 0
        """Steps before which it is given room when the next step is delivered."""
        self._thread_until = 0
        """The thread reads the steps before this one."""
        self._peeked: Batch | Exception | None = None
        """The first batch, or why it could not be read, if it was looked at."""
        self._taken = 0
        self._announced = 0
        self._delivered = 0
        self._failure: BaseException | None = None
        self._over = False
        """True if nothing more will be read."""

    def __iter__(self) -> StepPass:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; it is not placed if nothing could be read for it.

        Raises:
            StopIteration: The pass has ended, on all ranks.
            PaddleShardError: Reading failed on this or another rank; all ranks raise it at this step.
        """
        if self._process != os.getpid():
            raise ArgumentError(
                f"this iterator was made by process {self._process}, whose workers and ranks know it; a forked child "
                "makes one of its own: iter(loader)."
            )
        step = self._delivered
        if self._thread is not None:
            self._allow_until(step + 1)
        if step + 1 > self._thread_until:
            self._read_here(step)
        if self._agreement is not None and not self._agree(self._agreement, step):
            self._end()
        found = self._ready.get()
        if not isinstance(found, Batch):
            if found is _END_OF_PASS:
                self._end()
            self.close()
            raise found
        self._delivered = step + 1
        if self._thread is not None:
            self._make_room()
        if found.finish is not None:
            self._finish(found)
        if self._notes is not None and self._agreement is not None:
            found = self._notes.heed(found, self._agreement.take_notes(step))
        return found

    def _finish(self, found: Batch) -> None:
        """Do the rest of placing a batch, which belongs to the thread that computes with it."""
        assert found.finish is not None
        try:
            with no_fork, read_errors(found.step, MAKING_TENSORS):
                found.value = found.finish()
        except Exception as error:
            if self._agreement is not None:
                self._agreement.fail(report_of(error))
            self.close()
            raise
        found.finish = None

    def _end(self) -> None:
        self._over = True
        if self._agreement is not None:
            self._agreement.close()
        stopped = self._stop_thread(interrupt=False)
        self._executor.close(ended=stopped)
        raise StopIteration

    def _agree(self, agreement: Agreement, step: int) -> bool:
        """Return whether all ranks deliver a step; False if the pass has ended."""
        try:
            return agreement.deliver(step)
        except AgreedFailure as failure:
            own = self._own_failure(failure.step)
            self.close()
            raise own or error_of_another(*failure.reports[0]) from None
        except (
            PeerLostError
        ) as lost:  # it may have timed out because of the failure on this rank
            own = self._own_failure(step)
            if own is None:
                raise
            self.close()
            raise own from lost

    def _own_failure(self, step: int) -> BaseException | None:
        """Return this rank's failure, if it is of a step, and let go of it: it holds its callers' variables."""
        if self._announced != step:
            return None
        found, self._failure = self._failure, None
        return found

    def skipped_at_end(self) -> tuple[int, int]:
        """Return the (steps, samples) skipped after the last step, once the pass has ended."""
        return self._feed.skipped_at_end()

    def peek(self) -> Any:
        """Return the value of the batch that will be delivered first, without delivering it, or without an agreement.

        Raises:
            StopIteration: There is none.
            DataReadError: Reading it failed; it will fail again when it is delivered.
        """
        if self._peeked is None:
            try:
                self._peeked = self._prepare(self._take(in_thread=False))
            except StopIteration:
                self._num_steps = 0
                raise
            except Exception as failure:  # raised at its own step, on all ranks
                self._peeked = failure
        if isinstance(self._peeked, Exception):
            raise self._peeked
        found = self._peeked
        if found.placed is None:
            raise DataReadError(
                NO_STAND_IN.format("the run was resumed past the end of the stream")
            )
        if found.finish is not None:
            self._finish(found)
        value = found.value if self._notes is None else self._notes.alone(copy(found))
        return mapped(value, lambda leaf, _: leaf)  # Paddle changes the containers

    def close(self) -> None:
        """End the workers and threads, and leave the agreement. It is safe to call this again."""
        self._over = True
        if (
            self._process == os.getpid()
        ):  # in a forked child, a lock of the other threads may stay locked
            if self._agreement is not None:
                self._agreement.close()
            self._stop_thread(interrupt=True)
            self._executor.close()

    # Reading

    def _read_here(self, step: int) -> None:
        """Read on the caller's thread until a step can be delivered, or start the thread that reads ahead."""
        if self._thread is not None:
            self._thread.join()  # it has read the steps that it may
        wanted = min(step + 1 + self._reads_on, 2 * step + 1)
        while not self._over and self._announced < wanted:
            if self._may_start_thread():
                break
            self._read(in_thread=False)
        if self._may_start_thread():
            self._start_thread()

    def _read(self, *, in_thread: bool) -> None:
        """Read the next step, and announce whether it can be delivered."""
        agreement = self._agreement
        note: str | None = None
        try:
            if self._num_steps is not None and self._announced >= self._num_steps:
                raise StopIteration
            found = self._peeked
            self._peeked = None
            if isinstance(found, Exception):
                raise found
            if found is None:
                found = self._prepare(self._take(in_thread=in_thread))
            if agreement is None:
                if found.exhausted:
                    raise StopIteration
                if self._notes is not None:
                    self._notes.alone(found)
            elif self._notes is not None:
                note = self._notes.say(found)
        except StopIteration:
            self._over = True
            self._executor.stop()
            if agreement is None:
                self._ready.put(_END_OF_PASS)
            else:
                agreement.announce(END)
        except (
            LeaderStoppedError
        ) as stopped:  # it says why, once this rank has said that nothing is wrong here
            self._over = True
            self._ready.put(stopped)
            assert agreement is not None
            agreement.announce_unread()
        except BaseException as failure:  # also if a batch does not fit the meshes
            self._over = True
            if not in_thread and not isinstance(failure, Exception):
                raise
            self._executor.stop()
            if agreement is None:
                self._ready.put(failure)
            else:
                self._failure = failure
                agreement.announce(FAIL, report=report_of(failure))
        else:
            self._ready.put(found)
            self._announced += 1
            if agreement is not None:
                agreement.announce(
                    exhausted=found.exhausted,
                    note=note,
                    digest=found.digest if self._compares else None,
                )

    def _take(self, *, in_thread: bool) -> Batch:
        """Return the batch of the next step.

        Raises:
            StopIteration: There is none.
        """
        feed = self._feed
        feed.fill(self._taken, in_thread=in_thread)
        if feed.failure is not None and feed.num_submitted == self._taken:
            raise feed.failure
        found = self._executor.take(in_thread=in_thread)
        self._profiler.merge(found.profile)
        found.is_first = self._taken == 0
        self._taken += 1
        return found

    # The thread that reads ahead

    def _may_start_thread(self) -> bool:
        return (
            self._thread is None
            and not self._over
            and self._num_ahead > 0
            and self._executor.runs_in_thread
        )

    def _start_thread(self) -> None:
        self._thread_until = _UNLIMITED
        if self._executor.reads_last_here and self._num_steps is not None:
            self._thread_until = self._num_steps - 1
        self._has_room = self._announced
        self._allow_until(self._delivered + 1)
        self._make_room()
        thread = threading.Thread(
            target=self._run, name="paddle_shard-ahead", daemon=True
        )
        with (
            signals_held()
        ):  # a handler may raise only once the thread is stored and can be stopped
            self._thread = thread
            try:
                thread.start()
            except BaseException:  # nobody would say that it has ended
                self._thread = None
                self._thread_until = 0
                raise
            _open.add(self)

    def _allow_until(self, step: int) -> None:
        """Settle how far the thread may read before a step is asked for, and make the steps up to there."""
        wanted = 0 if self._agreement is None else self._agreement.wanted(step)
        self._allowed = max(self._allowed, step + self._num_ahead, wanted)
        if self._feed.on_training_thread:
            self._feed.make(self._allowed + self._executor.depth)

    def _make_room(self) -> None:
        while self._has_room < self._allowed:
            self._has_room += 1
            self._room.put(None)

    def _run(self) -> None:
        self._profiler.watch(threading.get_ident(), READING_AHEAD)
        while (
            not self._over
            and self._announced < self._thread_until
            and self._room.get() is not _STOP
        ):
            if self._over:
                return
            self._read(in_thread=True)

    def _stop_thread(self, *, interrupt: bool) -> bool:
        """End the thread; return whether it has ended before a second was over. Safe from any thread."""
        self._over = True
        self._room.put(_STOP)
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        if interrupt and thread.is_alive():
            self._executor.interrupt()
        with contextlib.suppress(RuntimeError):  # it has not been started
            thread.join(_JOIN_SECONDS)
        _open.discard(self)
        return not thread.is_alive()


_open: weakref.WeakSet[StepPass] = weakref.WeakSet()
"""Passes whose thread may run."""


@atexit.register
def _stop_threads() -> None:
    """End the threads before the interpreter shuts down, since they would continue to work during the shutdown."""
    for step_pass in list(_open):
        step_pass._stop_thread(interrupt=False)
