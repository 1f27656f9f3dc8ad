"""How are the steps of a pass read ahead, placed, agreed on and delivered?"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy

from paddle_shard.clock import PLACING, SAMPLER, clock
from paddle_shard.delivery.notes import StepNotes
from paddle_shard.errors import AgreedFailure, ArgumentError, PeerLostError
from paddle_shard.forks import no_fork
from paddle_shard.plan.step import Step
from paddle_shard.ranks.agreement import Agreement, AloneAgreement
from paddle_shard.ranks.replicas import LeaderStoppedError
from paddle_shard.ranks.verdict import END, FAIL, error_of_another, report_of
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.executor import Executor

_SAMPLER, _PLACING = (SAMPLER, ""), (PLACING, "")


class Feed:
    """Submits the steps of a pass to its executor, on the caller's thread: the user's sampler may run."""

    def __init__(self, steps: Iterator[Step]) -> None:
        """Begin; `executor` is set before the first call."""
        self._steps: Iterator[Step] | None = steps
        self.executor: Executor = Executor()
        self.num_submitted = 0
        self.failure: Exception | None = None
        """The error of the user's sampler, to be raised after the steps before it."""

    def fill(self, num_taken: int) -> None:
        """Submit as many steps as the executor should have."""
        while self.num_submitted - num_taken < self.executor.depth and self.more():
            pass

    def more(self) -> bool:
        """Submit the next step; return False if there is none."""
        if self._steps is None:
            return False
        try:
            step = next(self._steps)
        except StopIteration:
            self._steps = None
            return False
        except Exception as error:
            self._steps, self.failure = None, error
            return False
        self.executor.submit(step)
        self.num_submitted += 1
        return True


class StepPass:
    """Reads, places and delivers the steps of one pass. All ranks deliver the same steps and fail at the same step.

    Each rank announces what it can deliver, some steps ahead, and delivers a step once all ranks have announced it.
    """

    def __init__(
        self,
        feed: Feed,
        agreement: Agreement,
        *,
        place: Callable[[Batch], Batch],
        num_steps: int | None = None,
        notes: StepNotes | None = None,
        compares: bool = False,
        ahead: bool = True,
    ) -> None:
        """Start the pass.

        Args:
            feed: Submits its steps to the executor that reads them.
            agreement: The agreement of the ranks; that of a single rank never waits.
            place: Returns the placed batch; it raises `StopIteration` if the pass ends before it.
            num_steps: Steps of the pass; None: the end shows when it comes.
            notes: What the ranks tell each other about each step; None: nothing.
            compares: True if the ranks compare digests of what they have read or drawn.
            ahead: False if a step is read when it is asked for, and not before.
        """
        self._feed, self._executor, self._agreement = feed, feed.executor, agreement
        self._alone = isinstance(agreement, AloneAgreement)
        self._place, self._num_steps = place, num_steps
        self._notes, self._compares, self._process = notes, compares and not self._alone, os.getpid()
        # One step more than is needed, so that the ranks agree on it while the model computes.
        self._reads_on = 0 if self._alone else max(int(ahead), agreement.outlook.reads_on)
        self._peeked: Batch | Exception | None = None
        """The first batch, or why it could not be read, if it was looked at."""
        self._ready: deque[Batch] = deque()
        """Batches that can be delivered."""
        self._taken = self._announced = self._delivered = 0
        self._failure: BaseException | None = None
        self._stopped: LeaderStoppedError | None = None
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
        step, agreement = self._delivered, self._agreement
        least = step + self._reads_on
        while not self._over and self._announced < agreement.wanted(step):
            # What the other ranks want to know further ahead is only read if it costs no wait: this step is due now.
            if self._announced > least and not self._executor.ready():
                break
            self._read()
        try:
            if not agreement.deliver(step):
                self._over = True
                agreement.close()
                self._executor.close(ended=True)
                raise StopIteration
        except AgreedFailure as failure:
            self.close()
            raise self._own(failure.step) or error_of_another(*failure.reports[0]) from None
        except PeerLostError as lost:  # it may have timed out because of the failure on this rank
            own = self._own(step)
            if own is None:
                raise
            self.close()
            raise own from lost
        if self._stopped is not None and not self._ready:
            self.close()
            raise self._stopped
        self._delivered += 1
        found = self._ready.popleft()
        return found if self._notes is None else self._notes.heed(found, agreement.take_notes(step))

    def _own(self, step: int) -> BaseException | None:
        """Return this rank's failure, if it is of a step, and let go of it: it holds its callers' variables."""
        if self._announced != step:
            return None
        found, self._failure = self._failure, None
        return found

    def peek(self) -> Batch:
        """Return the batch that will be delivered first, without delivering it and without an agreement.

        Raises:
            StopIteration: There is none.
            DataReadError: Reading it failed; it will fail again when it is delivered.
        """
        if self._peeked is None:
            try:
                self._peeked = self._take()
            except StopIteration:
                self._num_steps = 0
                raise
            except Exception as failure:  # raised at its own step, on all ranks
                self._peeked = failure
        if isinstance(self._peeked, Exception):
            raise self._peeked
        made = self._place(copy(self._peeked))
        return made if self._notes is None else self._notes.alone(made)

    def close(self) -> None:
        """End the workers and threads, and leave the agreement. It is safe to call this again."""
        self._over = True
        if self._process == os.getpid():  # in a forked child, a lock of the other threads may stay locked
            self._agreement.close()
            self._executor.close()

    def _take(self) -> Batch:
        """Return the batch of the next step.

        Raises:
            StopIteration: There is none.
        """
        peeked, self._peeked = self._peeked, None
        if isinstance(peeked, Exception):
            raise peeked
        if peeked is not None:
            return peeked
        feed = self._feed
        mine = clock()
        before = mine.to(_SAMPLER)  # also if it raises: the account of the batch ends then
        feed.fill(self._taken)
        mine.to(before)
        if feed.failure is not None and feed.num_submitted == self._taken:
            raise feed.failure
        found = self._executor.take()
        self._taken += 1
        return found

    def _read(self) -> None:
        """Read the next step, and announce whether it can be delivered."""
        agreement = self._agreement
        try:
            if self._num_steps is not None and self._announced >= self._num_steps:
                raise StopIteration
            found = self._take()
            read = found.digest
            mine = clock()
            before = mine.to(_PLACING)
            with no_fork:
                made = self._place(found)
            mine.to(before)
            self._ready.append(made)
            if self._compares:
                agreement.note_read(read)
            if self._notes is not None and (note := self._notes.say(made)) is not None:
                agreement.note(note)
        except StopIteration:
            self._over = True
            self._executor.stop()
            agreement.announce(END)
        except LeaderStoppedError as stopped:  # it says why, once this rank has said that nothing is wrong here
            self._over, self._stopped = True, stopped
            agreement.announce_unread()
        except Exception as failure:  # also if a batch does not fit the meshes
            self._over, self._failure = True, failure
            self._executor.stop()
            agreement.announce(FAIL, report="" if self._alone else report_of(failure))
        else:
            self._announced += 1
            agreement.announce(exhausted=made.exhausted)
