"""How does a pass keep in step with all other ranks?"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from paddle_shard import errors
from paddle_shard.agree import Agreement
from paddle_shard.errors import AgreedFailure, DataReadError, PeerLostError, UnequalEndsError
from paddle_shard.loader.agreeing import QUICK, steps_ahead
from paddle_shard.loader.notes import StepNotes
from paddle_shard.loader.placed_pass import close_reading, read_next
from paddle_shard.loader.prefetch import Ahead
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.tails import Tail
from paddle_shard.reading.chunk import Slice
from paddle_shard.reading.passes import Pass
from paddle_shard.reading.reader import AGAIN
from paddle_shard.reading.worker_guards import in_use


class Outlook(Enum):
    """What can be done with what was read for a step."""

    OK = "deliver it"
    EXHAUSTED = "deliver it, but it holds nothing new, and nothing new will come"
    END = "end before it"
    UNEQUAL = "fail: the ends do not agree"


OK, EXHAUSTED, END, UNEQUAL = Outlook
_ENOUGH = 2
"""Steps ready behind the next, with which no rank waits for its workers; without a board, half of those ahead."""
_LONGEST = 10_000
"""Characters of an error that the other ranks are told."""
_TOLD = ("index", "worker", "step", "epoch", "cause_type")


class AgreedPass:
    """What one pass has read, step by step: all ranks deliver the same steps, and fail at the same one.

    It is read ahead on the caller's thread, by workers, or in a thread of its own; what all ranks can serve is agreed
    on in the background, ahead of delivery.
    """

    def __init__(
        self,
        reading: Pass,
        agreement: Agreement,
        *,
        outlook: Callable[[Any], Outlook] = lambda found: OK,
        prepare: Callable[[Any], Any] = lambda found: found,
        num_steps: int | None = None,
        notes: StepNotes | None = None,
        in_bursts: bool = False,
        prefetch: int = 0,
        worth: float = 0.0,
        draw: Callable[[int], None] = lambda count: None,
        digest: Callable[[Any, Any], int] | None = None,
    ) -> None:
        """Start the pass.

        Args:
            reading: An iterator over this rank's steps, with a `close`.
            agreement: Of this pass; opened with the least steps to read ahead, which are more where they are quick and
                small.
            outlook: Says of what was read whether it can be delivered.
            prepare: Makes of it what is delivered. It is called ahead, so that its failure is every rank's.
            num_steps: Steps from here to the end, if that is known; the same on every rank.
            notes: What the ranks tell each other of each step.
            in_bursts: Quick steps are read several at a time, since the same work over and over takes less. Not with
                workers, which would be left waiting meanwhile.
            prefetch: Steps that a thread of its own keeps ready; 0: there is none.
            worth: Seconds that reading a step must take for that.
            draw: Draws the requests of so many steps, on the caller's thread.
            digest: Of (what was read, what it was made), where all ranks read the same: what stands for it.
        """
        self._reading, self._agreement = reading, agreement
        self._outlook, self._prepare, self._num_steps = outlook, prepare, num_steps
        self._prefetch, self._draw, self._notes, self._digest = prefetch, draw, notes, digest
        self._ahead = Ahead(self._step, lambda: reading.runs_free, worth=worth) if prefetch else None
        self._in_bursts = in_bursts
        self._least_ahead, self._step_seconds = agreement.prefetch, math.inf
        self._looked = (0, 0.0)
        """(step, time) when the clock was looked at."""
        self._peeked: list[tuple[Any, Exception | None]] = []
        self._ready: deque[Any] = deque()
        self._burst = 0
        """Steps that are to be read at once."""
        self._several: deque[Any] = deque()
        """What was, and has yet to be prepared."""
        self._unsaid = 0
        """Steps that are ready, and have yet to be announced."""
        self._announced = self._delivered = 0
        self._failure: BaseException | None = None
        self._over = False
        """Nothing more is to be read."""

    def __iter__(self) -> AgreedPass:
        return self

    def __next__(self) -> Any:
        """Return what was read for the next step.

        Raises:
            DataReadError: Reading it failed, on this rank or another; on every rank.
            UnequalEndsError: The ranks do not end together, and that is not to be; on every rank.
            PeerLostError: Another rank died or is silent.
            BatchStructureError: The ranks' rows do not fit together; on every rank.
        """
        step = self._delivered
        self._read_ahead(step)
        try:
            if not self._agreement.deliver(step):
                self._in_order()
                raise StopIteration
        except AgreedFailure as failure:
            self.close()
            mine = self._failure is not None and failure.step == self._announced
            raise (self._failure if mine else _of_another(failure)) from None  # type: ignore[misc]
        except PeerLostError as lost:  # who may have lost patience with what has failed here
            if self._failure is None or self._announced != step:
                raise
            self.close()
            raise self._failure from lost
        self._delivered += 1
        found = self._ready.popleft()
        if self._notes is not None:
            return self._notes.heed(found, self._agreement.take_notes(step))
        return found

    def _look_at_the_clock(self, step: int) -> None:
        """Read as far ahead as suits the time that a step takes."""
        (before, since), now = self._looked, time.perf_counter()
        self._looked = (step, now)
        if before == 0 or step == before or not self._ready or self._ready[-1] is None:
            return
        took, weight = (now - since) / (step - before), 0.8 ** (step - before)
        known = self._step_seconds < math.inf
        self._step_seconds = weight * self._step_seconds + (1 - weight) * took if known else took
        num_bytes, on_board = self._ready[-1][1].num_bytes, self._agreement.on_board
        ahead = steps_ahead(self._least_ahead, self._step_seconds, num_bytes, on_board=on_board)
        if ahead != self._agreement.prefetch:
            self._agreement.prefetch = ahead

    def _read_ahead(self, step: int) -> None:
        plenty = self._announced - step > max(1, self._agreement.prefetch // 2)
        if plenty and self._in_bursts and self._step_seconds < QUICK:
            return
        self._look_at_the_clock(step)
        count = limit = self._agreement.wanted(step)
        if self._ahead is not None and self._ahead.start():
            self._in_bursts = False
            count, limit = min(count, step + 1), step + 1 + max(self._prefetch, self._agreement.prefetch)
        self._draw(limit)
        if self._in_bursts and self._step_seconds < QUICK:
            self._burst = limit - self._announced
        if self._ahead is not None:
            self._ahead.need(count, limit)
        enough = _ENOUGH if self._agreement.on_board else max(1, self._agreement.prefetch // 2)
        while self._ahead is None and not self._over and self._announced < count:
            if self._announced > step + enough and not self._reading.at_hand():
                break
            self._step()
        if self._in_bursts:  # else another thread may be about to announce what it has made ready
            self._burst = 0
            self._say()

    def _in_order(self) -> None:
        """End a pass that all ranks have come to the end of; its workers may serve another."""
        self._over = True
        self._agreement.close()
        if self._ahead is not None and not self._ahead.stop():
            self.close()
        else:
            self._reading.finish()

    def peek(self) -> Any:
        """Return what is to be delivered first, without delivering it; nothing is agreed on.

        Raises:
            StopIteration: There is nothing.
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
        if self._outlook(found) in (END, UNEQUAL):
            raise StopIteration
        made = self._prepare(found)
        return made if self._notes is None else self._notes.alone(made)

    def close(self) -> None:
        """End the workers and threads, and leave the agreement; safe to call again."""
        self._over = True
        self._agreement.close()
        close_reading(self._reading, self._ahead)

    def _read(self, free: bool) -> Any:
        if not free and self._burst > 1 and not self._several and not self._peeked:
            self._several.extend(self._reading.several(self._burst))
        self._burst = max(0, self._burst - 1)
        if self._several:
            return self._several.popleft()
        if not self._peeked:
            return read_next(self._reading, free)
        found, failed = self._peeked.pop()
        if failed is not None:
            raise failed
        return found

    def _say(self) -> None:
        """Announce what is ready."""
        steps, self._unsaid = self._unsaid, 0
        if steps:
            self._agreement.announce_ok(steps)

    def _step(self, free: bool = False) -> bool:
        """Read the next step, and say what can be served of it; return whether that is done."""
        say = self._agreement
        if self._over:
            raise StopIteration
        if self._num_steps is not None and self._announced >= self._num_steps:
            return self._end()
        try:
            found = self._read(free)
            if found is AGAIN:
                return False
            outlook = self._outlook(found)
            if outlook is END:
                return self._end()
            if outlook is UNEQUAL:
                raise UnequalEndsError(
                    "tail='error': the stream's parts do not end together with a whole batch. Choose tail='pad', "
                    "'drop' or 'repeat', or num_batches=."
                )
            with in_use:
                self._ready.append(self._prepare(found))
            if self._digest is not None:
                say.note_read(self._digest(found, self._ready[-1]))
            if self._notes is not None and (note := self._notes.say(self._ready[-1])) is not None:
                self._say()
                say.note(note)
        except StopIteration:
            return self._end()
        except Exception as failure:  # also of a batch that does not fit the meshes
            raise_if_a_handlers(failure)
            self._over, self._failure = True, failure
            self._say()
            say.announce_failure(_report(failure))
            return True
        self._announced += 1
        if outlook is OK:
            self._unsaid += 1
            if not self._burst:
                self._say()
        else:
            self._say()
            say.announce_exhausted()
        return True

    def _end(self) -> bool:
        self._over = True
        self._say()
        self._agreement.announce_end()
        return True


def stream_outlook(tail: Tail, num_steps: int | None) -> Callable[[Slice], Outlook]:
    """Return what says of a stream's slice whether it can be delivered.

    Args:
        tail: Where the stream's parts end at different times.
        num_steps: Whether the end is known; then all before it is.
    """

    def outlook(found: Slice) -> Outlook:
        if num_steps is not None or (found.whole and found.fresh):
            return OK if found.batch is not None or not found.empty else EXHAUSTED
        if tail.pads or tail.repeats:
            return EXHAUSTED if found.empty or not found.fresh else OK
        return UNEQUAL if tail.refuses and not found.empty else END

    return outlook


def _report(failure: Any) -> bytes:
    told = {name: getattr(failure, name, None) for name in _TOLD}
    text = errors.text_of(failure)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ... [cut]"
    return json.dumps({"kind": type(failure).__name__, "text": text, **told}, default=repr).encode()


def _of_another(failure: AgreedFailure) -> Exception:
    """Return the error of the rank that failed, as every other rank raises it."""
    rank, report = failure.reports[0]
    try:
        told = json.loads(report)
    except ValueError:  # cut off for its length
        told = {"kind": "DataReadError", "text": report.decode(errors="replace")}
    text = f"global rank {rank}: {told['text']}"
    kind = getattr(errors, told["kind"], None)
    if kind is not None and kind is not DataReadError:
        found: Exception = kind(text)
        return found
    error = DataReadError(text if kind is DataReadError else f"{told['kind']}: {text}")
    for name in _TOLD:
        value = told.get(name)
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error
