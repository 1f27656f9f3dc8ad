"""May this step of a pass be delivered on this rank, and so on all ranks?

All ranks take part in one series of rounds, each in one background thread. A round is one `minimum` of
`[passes opened, is any rank asking, has any rank a note]` and seven values per pass. It covers the passes that all
ranks are known to have opened and that are not decided. The results of earlier rounds alone determine these passes, so
the vector has the same layout on every rank, whatever its training thread does meanwhile. Passes cannot be mixed up if
they overlap (`zip(loader, loader)`), are closed early, or are opened by one rank before the others. If the minimum says
that a pass is decided, that a rank has a note or that one asks, all ranks do one `gather`, in which each of them learns
which ranks failed, ended or left, what was noted, and how far each rank is.

A rank enters a round when it has read some steps, when its training thread waits, or after `heartbeat` seconds. So no
rank waits longer than that for a rank that has nothing new.

Ranks that share memory also have a progress table, on which each posts how many steps it can serve. Steps that all of
them have posted are delivered without a round. A round is then needed only to begin a pass, for notes, and to learn why
a rank stopped posting.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from paddle_shard.errors import ArgumentError, PeerLostError
from paddle_shard.ranks.group import Group, ProgressTable
from paddle_shard.ranks.verdict import (
    CLOSED,
    END,
    FAIL,
    NEVER,
    OK,
    OTHER_DATA,
    OTHER_PASS,
    WIDTH,
    Decision,
    Outlook,
    Terms,
    decide,
    error_of,
    error_of_another,
    known_to_all,
)

GRACE = 10.0
"""Seconds that a training thread has to learn that a rank is lost, before its process is ended."""
NOTICE = 5.0
"""Seconds for which a training thread waits for other ranks before it logs that, once per pass."""
LEFT = 30.0
"""Seconds after which a rank that has left its loop logs that others have not. They may save, or end a step."""
WINDOW, TABLE_WINDOW = 8, 2
"""Steps to announce ahead of the one that is asked for. In rounds, one exchange over the network releases half of them.
Ranks that see each other's progress on a table differ by less than a step, and hold fewer batches."""

_SHORTEST_LOOK, _LONGEST_LOOK = 50e-6, 20e-3
"""Seconds between two reads of the progress table, for a rank that waits."""
_LOOKS_FOR = 2e-3
"""Seconds for which a rank only reads the table before it asks for a round."""
_LONGEST_PAUSE = 0.02
"""Most seconds between two rounds without news: the rank has sent all it knows, and waits for the others."""
_LEAVE = 1.0
"""Seconds for which a process that ends waits until the others have heard which passes it has left."""
_FOR_ANY_TIME = 1e6
"""Seconds for which the ranks may take to meet: a rank may start slowly, and who waits has a timeout of its own."""
_SHORTEST = 4.0
"""Least number of seconds that a rank may take to enter a round: several heartbeats, for any timeout of a pass."""


class Agreement:
    """One pass over the data; all ranks deliver the same steps of it.

    One thread announces, step by step, what this rank can serve. One thread (the same or another) asks before each
    delivery. A step is delivered only when every rank has announced it, so no rank continues past a step at which
    another ends or fails. `Coordinator.open` creates agreements.
    """

    def __init__(self, coordinator: Coordinator, number: int, terms: Terms) -> None:
        """Start at step 0."""
        self._coordinator, self._changed = coordinator, coordinator.changed
        self.timeout = coordinator.timeout if terms.timeout is None else terms.timeout
        self.number, self.terms = number, replace(terms, timeout=self.timeout)
        self.noticed = False
        """True if it was logged that this rank waits for others or left at another step, or an error has said it."""
        compared = terms.same_data and terms.ends_apart is not None
        self.outlook = Outlook(tag=zlib.crc32(terms.label.encode()), reads_on=int(compared))
        self.outlook.report = terms.name if terms.is_call else ""
        self._released = 0
        """Steps that rounds have released."""
        self._on_table = 0
        """Steps that the progress table has released."""
        self._compared = 0
        """Number of released steps for which all ranks are known to have read the same data."""
        self._confirmed = False
        """True if all ranks refer to the same pass, so what they post belongs to it."""
        self._held, self._rounds_to_hear = NEVER, 0
        self._left = False
        """True if another rank has left the pass before the step that this one announces next."""
        self._verdict: Decision | None = None
        self._outlooks: Sequence[Outlook] = ()
        self._waiting = self._closed = False
        self._closed_at = 0.0
        self.unsent: list[tuple[int, str]] = []
        """(step, note) for each note of this rank that was not sent to the others yet."""
        self._notes: dict[int, list[tuple[int, str]]] = {}
        self._read: dict[int, int] = {}
        """Step -> digest of all that this rank has read up to its end; of the steps that were not compared yet."""
        self._posts = True
        """True while this rank may post its progress on the table."""
        self.waited = 0.0
        """Total seconds for which `deliver` has waited."""

    @property
    def window(self) -> int:
        """Number of steps that are announced ahead of the one that is asked for."""
        return max(TABLE_WINDOW if self.on_table else WINDOW, 1 + self.outlook.reads_on)

    @property
    def is_decided(self) -> bool:
        """True if this rank need read nothing more: `deliver` tells how the pass has ended, or which rank is lost."""
        return self._left or self._closed or self._verdict is not None or self._coordinator.lost is not None

    def name_of(self, rank: int) -> str | None:
        """Return by which name a global rank can be reached in this pass; None if the ranks have not met yet."""
        name = self._coordinator.introductions.get(rank)
        return None if name is None else f"{name}-{self.number}"

    def note(self, payload: str) -> None:
        """Send all ranks a note about the step that is announced next; it arrives before they deliver that step.

        Args:
            payload: A short text. Each note costs all ranks an exchange, so send only what is new.
        """
        with self._changed:
            self._held = min(self._held, self.outlook.step)
            self.unsent.append((self.outlook.step, payload))

    def note_read(self, digest: int) -> None:
        """Record the digest of all that was read up to the end of the step that is announced next.

        It must be the same on all ranks if the pass was opened with `same_data`. The ranks learn of a difference before
        the first step is delivered; later, within a heartbeat or at the end.

        Args:
            digest: A number below 2**62.
        """
        with self._changed:
            self._read[self.outlook.step] = digest

    def report(self, decision: Decision) -> None:
        """Put what the others need to know of a decision into the report; called with the lock held."""
        if decision.kind == OTHER_PASS:
            if not self.outlook.failed_call:
                self.outlook.report = self.terms.label
            return
        # From here on, this rank does not post: when all ranks have gathered, all see the same progress table.
        self._posts = False
        if self.terms.same_data and self.outlook.kind != FAIL:
            self.outlook.report_read(self._read)

    def send_notes(self) -> list[tuple[int, str]]:
        """Return (step, note) for the notes that were not sent yet; called with the lock held.

        All ranks have received them when they take part in the round after the one that sends them.
        """
        found, self.unsent = self.unsent, []
        if found:
            self._rounds_to_hear = 2
        return found

    def hear_note(self, name: int, step: int, payload: str) -> None:
        """Store a rank's note; called with the lock held."""
        self._notes.setdefault(step, []).append((name, payload))

    def take_notes(self, step: int) -> list[tuple[int, str]]:
        """Return (global rank, note) of all ranks, including this one, for a delivered step; only the first call."""
        if not self._notes:  # the notes of a step arrive before it is released
            return []
        with self._changed:
            return self._notes.pop(step, [])

    def exchange(self, payload: str) -> list[str]:
        """Return what all ranks say, by rank. The pass consists of this: it has one step, of which each has a note."""
        try:
            self.note(payload)
            self.announce()
            self.deliver(0)
            return [said for _, said in sorted(self.take_notes(0))]
        finally:
            self.close()

    def announce(self, kind: int = OK, *, steps: int = 1, exhausted: bool = False, report: str = "") -> None:
        """Announce whether the next step can be served.

        Args:
            kind: `OK`: it can. `END`: it cannot, and the pass ends there, or earlier, on all ranks. `FAIL`: reading it
                failed, and all ranks raise the report there, or stop earlier.
            steps: The next so many steps can be served.
            exhausted: True if this rank has no real rows from that step on. The pass ends at the first step that all
                ranks have announced as exhausted.
            report: What the others need in order to raise the error; cut at 64 KB.
        """
        with self._changed:
            mine = self.outlook
            if mine.kind == CLOSED or self._verdict is not None:
                return  # a prefetch thread may be one step behind
            if mine.kind != OK:
                raise ArgumentError(f"step {mine.step} was announced as the last: nothing can be announced after it.")
            if exhausted:
                mine.exhausted = min(mine.exhausted, mine.step)
            elif kind == OK and mine.exhausted < NEVER:
                raise ArgumentError(
                    f"step {mine.step} was announced with real rows, but step {mine.exhausted} as exhausted. "
                    "Announce every later step as exhausted, too."
                )
            mine.kind, mine.report = kind, report or mine.report
            mine.step += steps if kind == OK else 0
            self._tell()

    def announce_unread(self) -> None:
        """Announce that this rank reads no further, because another has stopped, and that nothing is wrong here.

        That is said of two steps: enough for the verdict, which lies before them.
        """
        self.announce(exhausted=self.outlook.exhausted < NEVER, steps=2)

    def wanted(self, step: int) -> int:
        """Return how many steps should be announced before `step` is asked for.

        It is one for the first step and two more for each later step, up to `step + window`; one more if ends are
        compared. If no step may follow, it is the number of steps that are already announced.
        """
        if self.outlook.kind != OK or self._verdict is not None:
            return self.outlook.step
        return min(step + self.window, 2 * step + 1 + self.outlook.reads_on)

    def deliver(self, step: int) -> bool:
        """Return whether a step may be delivered; False if the pass has ended before it, on all ranks.

        Waits only until that is known.

        Args:
            step: The step; ask for the steps in order, from 0.

        Raises:
            AgreedFailure: Reading failed; raised on all ranks at the same step.
            UnequalEndsError: Ends differ and `ends_must_agree`; raised on all ranks at the same step.
            PeerLostError: A rank is gone, did not respond before the timeout expired, or has left the loop early.
        """
        if step != self.outlook.delivered or self._closed:
            state = "the pass is closed" if self._closed else f"{self.outlook.delivered} comes next"
            raise ArgumentError(f"step={step} cannot be delivered: {state}. Ask for the steps in order.")
        if not self._may_deliver(step):  # looked at without the lock: most steps are released long before
            with self._changed:
                self._wait(step)
            if not self._may_deliver(step):
                assert self._verdict is not None
                ranks = dict(zip(self._coordinator.group.names, self._outlooks, strict=True))
                error = error_of(self._verdict, ranks, self.number, self.terms)
                if error is None:
                    return False
                self.noticed = True
                left = [rank for rank, one in ranks.items() if one.kind == CLOSED]
                cause = self._coordinator.cause_of(left) if self._verdict.kind == CLOSED else None
                if cause is None:
                    raise known_to_all(error)
                raise known_to_all(cause) from error
        self.outlook.delivered += 1
        return True

    def fail(self, report: str) -> None:
        """Have the others raise why a call of the user's has failed here, in this pass or one that this rank leaves."""
        with self._changed:
            self.announce(FAIL, report=report)
            self.close()
            self._coordinator.untold = True

    def close(self) -> None:
        """Leave the pass. The others continue up to the steps that this rank has announced, then learn who left.

        No rank is told if all ranks leave, or if the pass ended first. Returns at once.
        """
        with self._changed:
            self._closed = True
            if self.outlook.kind == OK:
                self.outlook.kind, self._closed_at = CLOSED, time.monotonic()
                self._changed.notify_all()
            self._say_if_parted()

    def due(self) -> bool:
        """Return whether this rank should tell the others about this pass now; called with the lock held."""
        if self._verdict is not None:
            return False
        if self.outlook.kind != OK:
            return True
        if self.terms.same_data and self._compared < self._released and (self._waiting or not self.on_table):
            return True
        ready = self.outlook.step - max(self._released, self._on_table)
        if self._waiting:
            return ready > 0
        # Half a window, so that a round is over when the other half is needed; less at the beginning of a pass.
        return not self.on_table and ready >= min(1 + self._released, WINDOW // 2)

    def advance(self, decision: Decision, outlooks: Sequence[Outlook] = ()) -> bool:
        """Apply what all ranks have agreed on, and return whether it is news; called with the lock held."""
        news = decision.step > self._released or decision.kind != OK
        same_data, table = self.terms.same_data, self._table
        released, self._released = self._released, max(decision.step, self._released)
        # The table releases steps without a round, so use it only after the first steps were compared.
        compared = not same_data or self.outlook.read != 0
        self._confirmed = decision.kind not in (OTHER_PASS, OTHER_DATA) and compared
        if same_data and decision.kind == OK:
            if self.outlook.read:  # what was read before `released` has been compared
                news = news or released > self._compared
                self._compared = released
                self._read = {step: digest for step, digest in self._read.items() if step >= released}
            if (digest := self._read.get(self._released - 1)) is not None:
                self.outlook.read = 1 + digest
        self._left = decision.so_far == CLOSED and decision.step <= self.outlook.step
        self._rounds_to_hear = max(0, self._rounds_to_hear - 1)
        if not self._rounds_to_hear:
            self._held = min((step for step, _ in self.unsent), default=NEVER)
        self._post()
        if decision.kind != OK:
            if same_data and decision.kind in (END, OTHER_DATA):
                if self.terms.first_difference(outlooks) is not None:
                    decision = replace(decision, kind=OTHER_DATA)
                if table is not None:  # what any rank may have delivered, all ranks deliver
                    self._compared = max(self._compared, table.least(self.number))
            self._released, self._verdict, self._outlooks = decision.step, decision, outlooks
            self._say_if_parted()
        elif self.outlook.kind == CLOSED and not self.noticed and time.monotonic() - self._closed_at > LEFT:
            self.noticed = True
            self.terms.log_left(self._coordinator.name, self.outlook.delivered, LEFT)
        return news

    def _say_if_parted(self) -> None:
        """Log if a rank that has left is known to have delivered more or fewer steps; called with the lock held.

        A rank that was one step ahead of another when that left has got no error: the step had been announced.
        """
        if self.noticed or not self._closed or self._verdict is None or self._verdict.kind not in (END, CLOSED):
            return
        said = zip(self._coordinator.group.names, self._outlooks, strict=True)
        left = {name: one.delivered for name, one in said if one.kind == CLOSED}  # of others it may have grown since
        left[self._coordinator.name] = self.outlook.delivered
        if len(set(left.values())) > 1:
            self.noticed = True
            self.terms.log_parted(left)

    def _tell(self) -> None:
        """Tell the others, on the table and by the coordinator, what was announced; called with the lock held."""
        self._post()
        if self.due():
            self._changed.notify_all()

    @property
    def on_table(self) -> bool:
        """True if the others see this rank's progress on the table, so that no round is needed for it."""
        return self._table is not None and self._held == self.outlook.exhausted == NEVER

    @property
    def _table(self) -> ProgressTable | None:
        """The progress table, as soon as its entries are known to belong to this pass; None before."""
        return self._coordinator.table if self._confirmed else None

    def _post(self) -> None:
        """Post this rank's progress on the table, but not past an unsent note or past its last real row."""
        if self._coordinator.table is not None and self._posts:
            step = min(self.outlook.step, self.outlook.exhausted, self._held)
            self._coordinator.table.post(self.number, step)

    def _may_deliver(self, step: int) -> bool:
        known = not self.terms.same_data or (self._verdict is not None and self._verdict.kind != OTHER_DATA)
        if (self._released if known else self._compared) > step or self._on_table > step:
            return True
        if (table := self._table) is not None:
            self._on_table = table.least(self.number)
        return self._on_table > step

    def _wait(self, step: int) -> None:
        """Wait until it is known whether `step` is delivered; called with the lock held."""
        start = time.monotonic()
        try:
            while not self._may_deliver(step) and self._verdict is None:
                waited = time.monotonic() - start
                if not self._waiting and (not self.on_table or waited > _LOOKS_FOR):
                    self._waiting = True
                    self._changed.notify_all()
                longest = self._coordinator.patience(self, step, waited)
                if self._table is not None:  # who posts there wakes nobody
                    longest = min(longest, max(waited / 64, _SHORTEST_LOOK), _LONGEST_LOOK)
                self._changed.wait(longest)
        finally:
            self._waiting = False
            self.waited += time.monotonic() - start


class Coordinator:
    """Owns the group, and the background thread that takes part in the rounds."""

    def __init__(
        self,
        group: Group,
        *,
        timeout: float = 1800.0,
        end_process: Callable[[], None],
        meet: Callable[[Group], tuple[ProgressTable | None, dict[int, str]]] = lambda group: (None, {}),
        introduction: str = "",
    ) -> None:
        """Set up the coordinator; its thread starts with the first pass.

        Args:
            group: Group of all ranks; nothing else may use it from here on.
            timeout: Default timeout of a pass: seconds for which a rank may be silent while another waits for it.
            end_process: Called if a rank is lost, a pass has `exit_when_lost`, and its training thread has not learned
                of the loss within `GRACE` seconds: it may be stuck in a collective.
            meet: Returns a progress table, if the ranks can have one, and the introduction of each global rank; called
                once on each rank, in the background.
            introduction: Name by which this rank can be reached.

        Raises:
            ArgumentError: If `timeout` is not positive.
        """
        if not timeout > 0:
            raise ArgumentError(f"timeout must be positive, got {timeout}. Give seconds; the default is 1800.")
        self.group, self.timeout, self._end_process = group, timeout, end_process
        self.name = group.names[group.rank]
        self.heartbeat = min(1.0, timeout / 8)
        self.changed = threading.Condition()
        self._passes: dict[int, Agreement] = {}  # opened on this rank, not decided
        self._common: list[int] = []  # opened on all ranks, not decided: the layout of the next round
        self._opened = self._opened_by_all = 0
        self._asking = False
        self._answer: list[dict[int, Outlook]] | None = None
        self.lost: PeerLostError | None = None
        """Why nothing will be agreed on any more."""
        self.untold = False
        """True if a call has failed here since the ranks have told each other how far they are."""
        self._failed: dict[int, tuple[int, str]] = {}
        """Global rank -> (pass, report) of a call that has failed there, as they have told."""
        self._silence: PeerLostError | None = None
        """What was raised last because other ranks were silent for too long."""
        self._leaves = False
        """True if the process ends before the ranks have met, so that nobody need be told who is lost."""
        self._heard = False
        """True if the training thread has learned that a rank is lost."""
        self._meet = meet
        self.table: ProgressTable | None = None
        self.introductions: dict[int, str] = {self.name: introduction}
        """Global rank -> its introduction; those of the others are known once the ranks have met."""
        self._thread: threading.Thread | None = None

    def open(self, terms: Terms) -> Agreement:
        """Start a pass and return at once; all ranks open their passes in the same order."""
        with self.changed:
            agreement = self._passes[self._opened] = Agreement(self, self._opened, terms)
            self._opened += 1
            self.changed.notify_all()
        self.start()
        return agreement

    def start(self) -> None:
        """Begin to connect to the other ranks, if this was not done yet; from then on they learn if this one ends."""
        with self.changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paddle_shard-agree", daemon=True)
                self._thread.start()
                atexit.register(self._take_leave)

    def _take_leave(self) -> None:
        """When the process ends, give the thread a moment to tell the others which passes were left."""
        with self.changed:
            # A pass that was left is in `_passes` until all ranks have heard of it.
            passes = self._passes.values()
            self.changed.wait_for(lambda: self.lost or all(one.outlook.kind != CLOSED for one in passes), _LEAVE)
            told = self.heartbeat + _LEAVE
            self.changed.wait_for(lambda: self.lost or not self.untold or self.group.absent(), told)
        if self.group.absent() and self._thread is not None:
            self._leaves = True
            # A thread in the store's client, when the interpreter is gone, would abort the process.
            self.group.close(self._silence)
            self._thread.join(_LEAVE)

    def cause_of(self, ranks: Sequence[int]) -> Exception | None:
        """Return the error of a call that has failed on one of some ranks, in a pass that is not decided yet."""
        for rank, (number, report) in self._failed.items():
            if rank in ranks and (number >= self._opened or number in self._passes):
                return error_of_another(rank, report)
        return None

    def patience(self, agreement: Agreement, step: int, waited: float) -> float:
        """Return for how many seconds the training thread may wait for news; called with the lock held.

        Args:
            agreement: The agreement of the pass.
            step: The step that is asked for.
            waited: Seconds for which it was waited for.

        Raises:
            PeerLostError: The timeout has expired, or the group has lost a rank.
        """
        if self.lost is not None:
            self._heard = True
            self.changed.notify_all()
            lost = PeerLostError.of(str(self.lost), self.lost.ranks, self.lost.timeout)
            raise known_to_all(self.cause_of(lost.ranks) or lost) from self.lost
        # Ask who is late twice: first to log it, and when the timeout expires to raise it.
        told = agreement.timeout if agreement.noticed else min(NOTICE, agreement.timeout)
        over, grace = waited - told, 2 * self.heartbeat + 1.0  # grace: time for the others to answer
        if over < 0:
            return -over
        if not self._asking:
            self._asking, self._answer = True, None
            self.changed.notify_all()
        if self._answer is None and over < grace and not self.group.absent():
            return max(grace - over, 0.001)
        behind = self._behind(agreement, step)
        self._asking = False
        if told < agreement.timeout:
            agreement.noticed = True
            if behind:
                agreement.terms.log_wait(self.name, step, waited, behind)
        elif over >= grace or behind:
            self._silence = agreement.terms.silence(step, behind)
            raise self._silence
        return 0.0  # no rank is late: the next round releases the step, or the next answer differs

    def _behind(self, agreement: Agreement, step: int) -> dict[int, str]:
        """Return the global ranks that keep `step` from being agreed on, and how far each is."""
        number = agreement.number
        unheard = "has not answered: it has made no loader over these meshes yet, is held up or has ended (see its log)"
        if len(self.introductions) > 1:  # they have met, and each answers in a thread of its own
            unheard = (
                "does not answer: its process is stopped, or is held up in a call that keeps its threads from running, "
                "such as a gather_valid() that this rank does not make (see its log)"
            )
        behind = {} if self._answer else dict.fromkeys(self.group.absent(), unheard)
        for name, said in zip(self.group.names, self._answer or (), strict=False):
            calls = [o.report for one, o in said.items() if one != number and o.report and o.kind == OK]
            waits = f", and waits in {calls[0]}" if calls else ""
            if number not in said:
                behind[name] = f"has not {'made this call' if agreement.terms.is_call else 'started this loop'}{waits}"
            elif said[number].kind == OK and said[number].step <= step:
                behind[name] = f"has read up to step {agreement.terms.first_step + said[number].step}{waits}"
        return {name: f"{text} ({why})" if (why := self.cause_of([name])) else text for name, text in behind.items()}

    def _run(self) -> None:
        pause = 0.0
        try:
            self.group.timeout = _FOR_ANY_TIME
            self.table, self.introductions = self._meet(self.group)
            while True:
                with self.changed:
                    if pause:  # this rank has sent all it knows, and now waits for the others
                        self.changed.wait(pause)
                    self.changed.wait_for(self._due, self.heartbeat)
                pause = 0.0 if self._round() else min(max(2 * pause, 0.001), _LONGEST_PAUSE)
        except Exception as error:
            lost = error if isinstance(error, PeerLostError) else PeerLostError.of(f"Agreement failed: {error!r}", [])
            with self.changed:
                self.lost = lost
                self.changed.notify_all()
            self.group.close()  # so that no rank waits for this one in the next round
            self._report(lost)

    def _due(self) -> bool:
        return (
            self._opened > self._opened_by_all
            or (self._asking and self._answer is None)
            or self.untold
            or any(self._passes[number].due() for number in self._common)
        )

    def _report(self, lost: PeerLostError) -> None:
        """Log who is lost, since the training thread may be unable to; end the process if a pass requires it."""
        with self.changed:
            in_use = [a.terms for a in self._passes.values() if a.outlook.kind != CLOSED]
            exits = any(terms.exit_when_lost for terms in in_use)
            then = f" This process ends in {GRACE:g} s (on_lost='exit')." if exits else ""
            if in_use and not self._leaves:
                logging.getLogger("paddle_shard").error("global rank %s: %s%s", self.name, lost, then)
            heard = self.changed.wait_for(lambda: self._heard or not exits, GRACE)
        if not heard:
            self._end_process()

    def _round(self) -> bool:
        """Exchange what the ranks know; return whether there is news."""
        with self.changed:
            noted = any(self._passes[number].unsent for number in self._common)
            in_use = [a.timeout for a in self._passes.values() if a.outlook.kind != CLOSED]
            self.group.timeout = max(min(in_use, default=self.timeout), _SHORTEST)
            asks = self.untold or (self._asking and self._answer is None)
            vector = [self._opened, -int(asks), -int(noted)]
            for number in self._common:
                vector += self._passes[number].outlook.vector()
        opened, asking, noting, *least = self.group.minimum(vector)
        decisions = {n: decide(least[WIDTH * i : WIDTH * (i + 1)]) for i, n in enumerate(self._common)}
        decided = [number for number, decision in decisions.items() if decision.kind != OK]
        heard: list[dict[int, Outlook]] = []
        if asking or noting or decided:  # the minima are the same on all ranks, so all of them gather or none does
            heard = self._gather({number: decisions[number] for number in decided})
        with self.changed:
            news = opened > self._opened_by_all
            for number, decision in decisions.items():
                outlooks = [said[number] for said in heard] if number in decided else ()
                news = self._passes[number].advance(decision, outlooks) or news
            if asking:
                self._answer = heard
            for number in decided:
                del self._passes[number]
            self._common = [n for n in self._common if n not in decided] + [*range(self._opened_by_all, opened)]
            self._opened_by_all = opened
            self.changed.notify_all()
        return news

    def _gather(self, decided: dict[int, Decision]) -> list[dict[int, Outlook]]:
        """Tell the others how far this rank is in each pass, and its notes; return each rank's outlook on each pass.

        The notes include those of all steps that this round may release.
        """
        with self.changed:
            for number, decision in decided.items():
                self._passes[number].report(decision)
            told = [(number, agreement.outlook.told()) for number, agreement in self._passes.items()]
            self.untold = False
            notes = [
                (number, step, payload)
                for number in self._common
                for step, payload in self._passes[number].send_notes()
            ]
        said = self.group.gather(json.dumps([told, notes]).encode())
        found = []
        for name, (outlooks, their_notes) in zip(self.group.names, map(json.loads, said), strict=True):
            found.append({number: Outlook(*one) for number, one in outlooks})
            failed = [(number, one.report) for number, one in found[-1].items() if one.failed_call]
            with self.changed:
                if failed:
                    self._failed[name] = failed[-1]
                for number, step, payload in their_notes:
                    self._passes[number].hear_note(name, step, payload)
        return found
