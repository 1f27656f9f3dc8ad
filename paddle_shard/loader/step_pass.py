"""Step passes: read the steps of one epoch iterator ahead, agree on them with the other ranks, and deliver them."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from paddle_shard.core.forks import no_fork
from paddle_shard.core.trees import map_leaves
from paddle_shard.errors import (
    ArgumentError,
    DataReadError,
    PaddleShardError,
    PeerLostError,
)
from paddle_shard.loader.step_messages import StepMessages
from paddle_shard.plan.step import Step, Steps
from paddle_shard.ranks.agreement import Agreement
from paddle_shard.ranks.decision import END, FAIL
from paddle_shard.ranks.replicas import LeaderStoppedError
from paddle_shard.ranks.reports import report_of
from paddle_shard.reading.batch import NO_PLACEHOLDER, Batch
from paddle_shard.reading.executor import MAKING_TENSORS, Executor, read_error
from paddle_shard.reading.profile import READING_AHEAD, Profiler
from paddle_shard.reading.worker_guards import signals_held

_JOIN_SECONDS = 1.0
"""Seconds that closing waits for a read that cannot be interrupted. Its thread then ends by itself later."""
_SHORT_STEP = 2e-4
"""Seconds of a training loop's step, up to which it reads by itself: handing over a batch takes about 1e-4."""


_MADE_AT_ONCE = 16
"""Steps of this library's own orders that are made at once: code that runs once a step is slow, as caches are cold."""


class Feed:
    """Submits the steps of an epoch iterator to the executor that reads them."""

    def __init__(
        self,
        steps: Steps,
        executor: Executor,
        num_steps: int | None,
        *,
        on_training_thread: bool,
    ) -> None:
        """Initialize.

        Args:
            steps: The steps.
            executor: Reads them.
            num_steps: Their number; None: the end shows when it comes.
            on_training_thread: True if they are made on the training thread only.
        """
        self._skipped_at_end = (0, 0)
        self._steps = steps
        self.executor = executor
        self.num_steps = num_steps
        self.on_training_thread = on_training_thread
        self._made: deque[Step] = deque()
        """Steps that follow those that were submitted."""
        self.num_submitted = 0
        self.failure: Exception | None = None
        """The error of the user's sampler, raised after the steps before it."""

    def make(self, num_steps: int) -> None:
        """Make steps until `num_steps` are made or submitted, as far as there are any."""
        while self.num_submitted + len(self._made) < num_steps:
            try:
                self._made.append(next(self._steps))
            except StopIteration as end:
                # what is asked again has no value
                self._skipped_at_end = end.value or self._skipped_at_end
                return
            except Exception as error:
                self.failure = error
                return

    def fill(self, num_taken: int, *, in_thread: bool) -> None:
        """Submit as many steps as the executor should have."""
        while self.num_submitted - num_taken < self.executor.depth:
            if not self._made and not (in_thread and self.on_training_thread):
                # A sampler of the user's may follow the loss: it draws as late as it can.
                most = 1 if self.on_training_thread else _MADE_AT_ONCE
                self.make(self.num_submitted + min(num_taken + 1, most))
            if not self._made:
                return
            self.num_submitted += 1
            self.executor.submit(self._made.popleft())

    def skipped_at_end(self) -> tuple[int, int]:
        """Return the (steps, samples) skipped after the last step, once all are delivered."""
        # the end may have been known without it
        self.make(self.num_submitted + 1)
        return self._skipped_at_end


class StepPass:
    """Delivers the steps of one epoch iterator. All ranks deliver the same steps and fail at the same step.

    Each rank announces what it can deliver, some steps ahead, and delivers a step once all ranks have announced it. A
    thread reads, places and announces ahead, wherever the executor allows it; the training thread only takes batches.
    While a loop does nothing else, it reads by itself: handing each batch over would take as long as a small batch. It
    never waits there for what another rank reads, which may wait in a collective of the step before.
    """

    def __init__(
        self,
        feed: Feed,
        agreement: Agreement | None,
        *,
        place: Callable[[Batch], Batch],
        messages: StepMessages,
        compares: bool = False,
        num_ahead: int,
        profiler: Profiler,
    ) -> None:
        """Initialize; reading begins with the first batch.

        Args:
            feed: Submits the steps to the executor that reads them.
            agreement: The agreement of the ranks; None: this rank is alone.
            place: Returns the placed batch; it raises `StopIteration` if the epoch ends before it.
            messages: What the ranks send each other with a step.
            compares: True if the ranks compare digests of what they have read or drawn.
            num_ahead: Batches that a thread keeps ready; 0: no thread reads.
            profiler: Samples what is waited for.
        """
        self.feed = feed
        self._executor = feed.executor
        self._agreement = agreement
        self._place = place
        self._messages = messages
        self._compares = compares
        self._num_ahead = num_ahead
        self._profiler = profiler
        self._process = os.getpid()
        # One step more than is needed, so that the ranks agree on it while the model computes.
        self._most_ahead = int(agreement is not None and num_ahead > 0)

        self._ready: SimpleQueue[Batch | BaseException] = SimpleQueue()
        """Batches that can be delivered, then what ends them: a `StopIteration`, or another error."""
        self._first: Batch | BaseException | None = None
        """The first batch, or why there is none, while it is peeked at."""
        self._taken = 0
        self._announced = 0
        self._delivered = 0
        self._failure: BaseException | None = None
        self._is_over = False
        """True if nothing more will be read."""

        self._delivered_at = time.perf_counter()
        self._longest_step = 2 * _SHORT_STEP
        """Seconds of the longest recent step of the training loop; each further step halves it."""
        self._thread: threading.Thread | None = None
        self._room: SimpleQueue[None] = SimpleQueue()
        """An entry for each batch that the thread may read, and one to end it."""
        self._room_until = 0
        """The thread has room for the steps before this one; what it has no room for, the training thread may read."""

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child of the process that made it."""
        return self._process == os.getpid()

    def __next__(self) -> Batch:
        """Return the next batch; it is not placed if nothing could be read for it.

        Raises:
            StopIteration: The epoch has ended, on all ranks.
            PaddleShardError: Reading failed on this or another rank; all ranks raise it at this step.
        """
        if self._process != os.getpid():
            raise ArgumentError(
                f"this iterator was made by process {self._process}, whose workers and ranks know it; a forked child "
                "makes one of its own: iter(loader)."
            )
        step = self._delivered
        seconds = time.perf_counter() - self._delivered_at
        self._longest_step = max(seconds, self._longest_step / 2)
        if self._room_until <= step:  # no other thread reads
            self._read_here(step)
        if self._agreement is not None and not self._agree(
            self._agreement, step
        ):
            self._end()
        batch = self._ready.get()
        if isinstance(batch, BaseException):
            if isinstance(batch, StopIteration):
                self._end()
            self.close()
            raise batch
        self._first = None
        self._delivered = step + 1
        is_long = self._longest_step > _SHORT_STEP
        if self._thread is not None and (
            is_long or self._executor.reads_elsewhere
        ):
            self._make_room(step + 1)
        if batch.finish is not None:
            self._finish(batch)
        if self._agreement is not None:
            batch = self._messages.apply(
                batch, self._agreement.take_notes(step)
            )
        self._delivered_at = time.perf_counter()
        return batch

    def _finish(self, batch: Batch) -> None:
        """Do the rest of placing a batch, which belongs to the training thread."""
        assert batch.finish is not None
        try:
            with no_fork:
                batch.value = batch.finish()
        except Exception as error:
            failure = read_error(error, batch.step, MAKING_TENSORS)
            if self._agreement is not None:
                self._agreement.fail(report_of(failure))
            self.close()
            raise failure from None
        batch.finish = None

    def _end(self) -> None:
        self._is_over = True
        if self._agreement is not None:
            self._agreement.close()
        has_stopped = self._stop_thread(interrupt=False)
        self._executor.close(ended=has_stopped)
        raise StopIteration

    def _agree(self, agreement: Agreement, step: int) -> bool:
        """Return whether all ranks deliver a step; False if the epoch has ended."""
        try:
            return agreement.deliver(step)
        except PaddleShardError:  # perhaps because of the failure on this rank
            failure = self._failure
            self._failure = None  # it holds its callers' variables
            if failure is None or self._announced != step:
                raise
            self.close()
            raise failure from None

    def peek(self) -> Any:
        """Return the value of the batch that will be delivered first, without delivering it.

        Raises:
            StopIteration: There is none.
            DataReadError: Reading it failed; it will fail again when it is delivered.
        """
        if self._first is None:
            self._first = self._read(in_thread=False)
        batch = self._first
        if isinstance(batch, BaseException):
            raise batch
        if batch.placed is None:
            raise past_end_error()
        if batch.finish is not None:
            self._finish(batch)
        value = self._messages.finish_alone(batch)
        # Paddle changes the containers
        return map_leaves(value, lambda leaf, _: leaf)

    def close(self) -> None:
        """End the workers and threads, and leave the agreement; safe to call again, and from any thread."""
        self._is_over = True
        if self.is_of_this_process:  # in a forked child, locks may stay locked
            if self._agreement is not None:
                self._agreement.close()
            self._stop_thread(interrupt=True)
            self._executor.close()
            self._ready.put(StopIteration())  # for a `next` that waits

    # Reading

    def _read_here(self, step: int) -> None:
        """Read on the caller's thread until a step can be delivered, or start the thread that reads ahead."""
        wanted = min(step + 1 + self._most_ahead, 2 * step + 1)
        while not self._is_over:
            if (
                self._thread is None
                and self._num_ahead > 0
                and self._executor.runs_in_thread
            ):
                self._start_thread()
                return
            if self._announced >= wanted:
                return
            self._read(in_thread=False)

    def _read(self, *, in_thread: bool) -> Batch | BaseException:
        """Read the next step, announce whether it can be delivered, and return its batch, or why there is none."""
        agreement = self._agreement
        message = None
        try:
            batch = self._place(self._take(in_thread=in_thread))
            if agreement is not None:
                message = self._messages.compose(batch)
            elif batch.exhausted:
                raise StopIteration
        except BaseException as error:
            self._is_over = True
            if not in_thread and not isinstance(error, Exception):
                raise
            self._announce_end(error)
            return error
        # First: once the batch can be taken, the other thread may read the next one.
        self._announced += 1
        self._ready.put(batch)
        if agreement is not None:
            digest = batch.digest if self._compares else None
            agreement.announce(
                exhausted=batch.exhausted, note=message, digest=digest
            )
        return batch

    def _take(self, *, in_thread: bool) -> Batch:
        """Return the batch of the next step.

        Raises:
            StopIteration: There is none.
        """
        if self._taken == self.feed.num_steps:
            raise StopIteration
        feed = self.feed
        feed.fill(self._taken, in_thread=in_thread)
        if feed.failure is not None and feed.num_submitted == self._taken:
            raise feed.failure
        batch = self._executor.take(in_thread=in_thread)
        if batch.profile:
            self._profiler.merge(batch.profile)
        batch.is_first = self._taken == 0
        self._taken += 1
        return batch

    def _announce_end(self, error: BaseException) -> None:
        """Announce that no further step can be delivered: the end, or why."""
        agreement = self._agreement
        if isinstance(error, LeaderStoppedError):
            # Raised only if the leader has announced a step and was killed before it had sent the batch.
            self._ready.put(PeerLostError.of(str(error), error.ranks))
            assert agreement is not None
            agreement.announce_unread()
            return
        self._executor.stop()
        if agreement is None:
            # Its traceback refers to the frames of `__next__`, which refer to it.
            self._ready.put(error.with_traceback(None))
        elif isinstance(error, StopIteration):
            agreement.announce(END)
        else:
            self._failure = error
            agreement.announce(FAIL, report=report_of(error))

    # The thread that reads ahead

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=self._read_ahead, name="paddle_shard-ahead", daemon=True
        )
        # a handler may raise only once the thread can be stopped
        with signals_held():
            thread.start()
            self._thread = thread
            _open.add(self)
        self._make_room(self._delivered + 1)

    def _make_room(self, step: int) -> None:
        """Let the thread read ahead of a step that is delivered next."""
        until = step + self._num_ahead
        if self._agreement is not None:
            until = max(until, self._agreement.wanted(step))
        if self.feed.on_training_thread:
            self.feed.make(until + self._executor.depth)
        self._room_until = max(self._room_until, self._announced)
        while self._room_until < until:
            self._room_until += 1
            self._room.put(None)

    def _read_ahead(self) -> None:
        self._profiler.watch(threading.get_ident(), READING_AHEAD)
        while not self._is_over:
            self._room.get()
            if self._is_over:
                return
            self._read(in_thread=True)

    def _stop_thread(self, *, interrupt: bool) -> bool:
        """End the thread; return whether it has ended within a second. Safe from any thread."""
        self._is_over = True
        self._room.put(None)
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        if interrupt and thread.is_alive():
            self._executor.interrupt()
        thread.join(_JOIN_SECONDS)
        _open.discard(self)
        return not thread.is_alive()


def past_end_error() -> DataReadError:
    """Return the error of a batch for which nothing could be read."""
    reason = "the run was resumed past the end of the stream"
    return DataReadError(NO_PLACEHOLDER.format(reason))


_open: weakref.WeakSet[StepPass] = weakref.WeakSet()
"""Objects whose thread may run."""


@atexit.register
def _stop_threads() -> None:
    """End the threads before the interpreter shuts down, since they would continue to work during the shutdown."""
    for step_pass in list(_open):
        step_pass._stop_thread(interrupt=False)
