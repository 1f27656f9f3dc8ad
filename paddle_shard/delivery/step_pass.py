"""How are the steps of a pass read ahead, placed, agreed on and delivered?"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from paddle_shard.agree import Agreement, AloneAgreement
from paddle_shard.comm.failure_report import failure_of_another, report_of
from paddle_shard.delivery.notes import StepNotes
from paddle_shard.delivery.prefetch import Ahead
from paddle_shard.errors import AgreedFailure, PeerLostError, UnequalEndsError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.tails import Tail
from paddle_shard.reading.chunk import Slice
from paddle_shard.reading.follower import LeaderStoppedError
from paddle_shard.reading.pace import Pace
from paddle_shard.reading.passes import Pass
from paddle_shard.reading.reader import AGAIN
from paddle_shard.reading.worker_guards import in_use


class Readiness(Enum):
    """Whether the data that was read for a step can be delivered."""

    OK = "deliver it"
    EXHAUSTED = "deliver it, but it holds nothing new, and nothing new will come"
    END = "end before it"
    UNEQUAL = "fail: the ends do not agree"


OK, EXHAUSTED, END, UNEQUAL = Readiness
_ENOUGH = 2
"""Number of ready steps after the next one with which a rank does not wait for its workers. Without a progress table,
it is half of the steps to read ahead."""


class StepPass:
    """Reads, places and delivers the steps of one pass. All ranks deliver the same steps and fail at the same step.

    Steps are read ahead on the caller's thread, by workers, or in a prefetch thread. The ranks agree in the background,
    ahead of delivery, on what all of them can serve. A rank that is alone reads ahead in only two cases: in a prefetch
    thread, or if steps are small and quick, since reading several in one go is faster.
    """

    def __init__(
        self,
        reading: Pass,
        agreement: Agreement | AloneAgreement,
        *,
        prepare: Callable[[Any], Any] = lambda found: found,
        readiness: Callable[[Any], Readiness] | None = None,
        num_steps: int | None = None,
        notes: StepNotes | None = None,
        in_bursts: bool = False,
        shares: bool = False,
        follows: bool = False,
        prefetch: int = 0,
        if_worth_it: bool = False,
        draw: Callable[[int], None] = lambda count: None,
        digest: Callable[[Any, Any], int] | None = None,
    ) -> None:
        """Start the pass.

        Args:
            reading: An iterator over this rank's steps.
            agreement: The pass's agreement. Its `prefetch` is the number of steps to read ahead at first; later, quick
                and small steps are read further ahead.
            prepare: Turns what was read into what is delivered. It is called ahead of delivery, so that all ranks learn
                of its failure.
            readiness: Tells whether what was read can be delivered; None: it always can.
            num_steps: Number of steps from here to the end, the same on every rank; None if it is not known.
            notes: What the ranks tell each other about each step.
            in_bursts: True if quick steps are read several at a time. Not with workers, which would wait meanwhile.
            shares: True if ranks share a reader, so that quick steps had better be handed on several at a time.
            follows: True if another rank reads for this one. Then this one waits for the step that it is asked for, but
                never for one that the other rank need not have read: it may be in a step that needs this rank.
            prefetch: Number of steps that a prefetch thread keeps ready; 0: there is no thread.
            if_worth_it: True if the thread is started only if reading a step takes long enough.
            draw: Draws the requests of so many steps, on the caller's thread.
            digest: Returns a digest of (what was read, what was made of it); None unless all ranks must read the same.
        """
        self._reading, self._agreement, self._alone = reading, agreement, isinstance(agreement, AloneAgreement)
        self._prepare, self._readiness, self._num_steps = prepare, readiness, num_steps
        self._prefetch, self._draw, self._notes, self._digest = prefetch, draw, notes, digest
        self._pace = Pace()
        self._ahead: Ahead | None = None
        if prefetch:
            pace = self._pace if if_worth_it else None
            self._ahead = Ahead(self._step, lambda: reading.runs_free, pace, reading.marks)
        self._in_bursts, self._follows, self._least_ahead = in_bursts, follows, agreement.prefetch
        self._shares = shares
        self._direct = self._alone and not prefetch and readiness is None and num_steps is None and notes is None
        """True if each step is read when it is asked for, and nothing has to be announced."""
        self._peeked: list[tuple[Any, Exception | None]] = []
        self._ready: deque[Any] = deque()
        """Steps that can be delivered."""
        self._burst = 0
        """Number of steps to read in one go."""
        self._several: deque[Any] = deque()
        """Steps that were read in one go and are not prepared yet."""
        self._unsaid = 0
        """Number of steps that are ready and not announced yet."""
        self._announced = self._delivered = 0
        self._failure: BaseException | None = None
        self._stopped: LeaderStoppedError | None = None
        self._over = False
        """True if nothing more will be read."""

    def __iter__(self) -> StepPass:
        return self

    def __next__(self) -> Any:
        """Return what `prepare` made of the next step.

        Raises:
            DataReadError: Reading the step failed on this rank or another; raised on every rank.
            UnequalEndsError: The ranks do not end together, but must; raised on every rank.
            PeerLostError: Another rank died or is silent.
            BatchStructureError: The ranks' rows do not fit together; raised on every rank.
        """
        if self._direct:
            return self._prepare(next(self._reading))
        step = self._delivered
        if not self._has_plenty(step):
            self._read_ahead(step)
        try:
            if not self._agreement.deliver(step):
                self._in_order()
                raise StopIteration
        except AgreedFailure as failure:
            self.close()
            mine = self._failure is not None and failure.step == self._announced
            raise (self._failure if mine else failure_of_another(failure)) from None  # type: ignore[misc]
        except PeerLostError as lost:  # it may have timed out because of the failure on this rank
            if self._failure is None or self._announced != step:
                raise
            self.close()
            raise self._failure from lost
        if self._ahead is not None:
            self._ahead.leave()
        if self._stopped is not None and not self._ready:
            self.close()
            raise self._stopped
        self._delivered += 1
        found = self._ready.popleft()
        if self._notes is not None:
            return self._notes.heed(found, self._agreement.take_notes(step))
        return found

    def _has_plenty(self, step: int) -> bool:
        """Return whether enough steps are ready, so that nothing has to be read now."""
        if not self._in_bursts:
            return False
        if self._alone:
            return self._announced > step and self._pace.reads_quickly
        return self._pace.quick and self._announced - step > max(1, self._agreement.prefetch // 2)

    def _read_ahead(self, step: int) -> None:
        agreement, ahead = self._agreement, self._ahead
        if not self._alone:
            self._look_at_the_clock(step)
        count = limit = agreement.wanted(step)
        if ahead is not None and ahead.start():
            self._in_bursts = False
            count, limit = min(count, step + 1), step + 1 + max(self._prefetch, agreement.prefetch)
        elif self._alone and self._in_bursts and count > step and self._several_fit():
            count = limit = step + 1 + self._prefetch
        self._draw(limit)
        if self._in_bursts and (self._pace.quick or self._alone):
            self._burst = limit - self._announced
        if ahead is not None:
            ahead.need(count, limit)
        enough = _ENOUGH if agreement.on_table else max(1, agreement.prefetch // 2)
        if self._follows:
            enough = agreement.reads_on
        while ahead is None and not self._over and self._announced < count:
            if self._announced > step + enough and not self._reading.at_hand():
                break
            self._step()
        if self._in_bursts:  # otherwise the prefetch thread may be about to announce the steps itself
            self._burst = 0
            self._say()

    def _several_fit(self) -> bool:
        return self._pace.reads_quickly and self._pace.stays_cached(1 + self._prefetch)

    def _look_at_the_clock(self, step: int) -> None:
        """Set the number of steps to read ahead by the time and the size of a step."""
        newest = self._ready[-1] if self._ready else None
        self._pace.look(step, 0 if newest is None else newest[1].num_bytes)
        if self._pace.num_bytes:
            ahead = self._pace.steps_ahead(self._least_ahead, on_table=self._agreement.on_table and not self._shares)
            if ahead != self._agreement.prefetch:
                self._agreement.prefetch = ahead

    def _in_order(self) -> None:
        """End a pass after all ranks have reached its end; its workers may serve another pass."""
        self._over = True
        self._agreement.close()
        if self._ahead is not None and not self._ahead.stop():
            self.close()
        else:
            self._reading.finish()

    def peek(self) -> Any:
        """Return the step that will be delivered first, without delivering it and without an agreement.

        Raises:
            StopIteration: There is no step.
        """
        if not self._peeked:
            try:
                self._peeked.append((next(self._reading), None))
            except StopIteration:
                self._num_steps = 0
                raise
            except Exception as failure:  # raised at its own step, on all ranks
                raise_if_a_handlers(failure)
                self._peeked.append((None, failure))
        found, failed = self._peeked[0]
        if failed is not None:
            raise failed
        if self._readiness is not None and self._readiness(found) in (END, UNEQUAL):
            raise StopIteration
        made = self._prepare(found)
        return made if self._notes is None else self._notes.alone(made)

    def close(self) -> None:
        """End the workers and threads, and leave the agreement. It is safe to call this again."""
        self._over = True
        self._agreement.close()
        if self._ahead is not None:
            self._ahead.stop(self._reading.interrupt)
        self._reading.close()

    def _read(self, free: bool) -> Any:
        if not free and self._burst > 1 and not self._several and not self._peeked:
            self._several.extend(self._reading.several(self._burst))
        self._burst = max(0, self._burst - 1)
        if self._several:
            return self._several.popleft()
        if not self._peeked:
            return self._reading.next_free() if free else next(self._reading)
        found, failed = self._peeked.pop()
        if failed is not None:
            raise failed
        return found

    def _say(self) -> None:
        """Announce the ready steps."""
        steps, self._unsaid = self._unsaid, 0
        if steps:
            self._agreement.announce_ok(steps)

    def _step(self, free: bool = False) -> bool:
        """Read the next step and announce whether it can be served; return False if another thread has to read it."""
        say = self._agreement
        if self._over:
            raise StopIteration
        if self._num_steps is not None and self._announced >= self._num_steps:
            return self._end()
        try:
            found = self._read(free)
            if found is AGAIN:
                return False
            ready = OK if self._readiness is None else self._readiness(found)
            if ready is END:
                return self._end()
            if ready is UNEQUAL:
                raise UnequalEndsError(
                    "tail='error': the stream's parts do not end together with a whole batch. Choose tail='pad', "
                    "'drop' or 'repeat', or num_batches=."
                )
            with in_use:
                made = self._prepare(found)
            self._ready.append(made)
            if self._alone and made is not None:
                self._pace.num_bytes = made[1].num_bytes
            if self._digest is not None:
                say.note_read(self._digest(found, made))
            if self._notes is not None and (note := self._notes.say(made)) is not None:
                self._say()
                say.note(note)
        except StopIteration:
            return self._end()
        except LeaderStoppedError as stopped:  # it says why, once this rank has said that nothing is wrong here
            self._over, self._stopped = True, stopped
            self._say()
            say.announce_ok(2)
            return False
        except Exception as failure:  # also if a batch does not fit the meshes
            raise_if_a_handlers(failure)
            self._over, self._failure = True, failure
            self._reading.let_go()
            self._say()
            say.announce_failure(b"" if self._alone else report_of(failure))
            return True
        self._announced += 1
        if ready is OK:
            self._unsaid += 1
            if not self._burst:
                self._say()
        else:
            self._say()
            say.announce_exhausted()
        return True

    def _end(self) -> bool:
        self._over = True
        self._reading.let_go()
        self._say()
        self._agreement.announce_end()
        return True


def stream_readiness(tail: Tail, num_steps: int | None) -> Callable[[Slice], Readiness]:
    """Return the function that tells whether a stream's slice can be delivered.

    Args:
        tail: What to do if the stream's parts end at different times.
        num_steps: Number of steps if the end is known. Then all steps before the end can be delivered.
    """

    def readiness(found: Slice) -> Readiness:
        if num_steps is not None or (found.whole and found.fresh):
            return OK if found.batch is not None or not found.empty else EXHAUSTED
        if tail.pads or tail.repeats:
            return EXHAUSTED if found.empty or not found.fresh else OK
        return UNEQUAL if tail.refuses and not found.empty else END

    return readiness
