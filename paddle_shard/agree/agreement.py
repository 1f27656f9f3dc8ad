"""May this step of a pass be delivered on this rank, and so on all ranks?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from paddle_shard.agree.history import ReadHistory
from paddle_shard.agree.outlook import CLOSED, END, FAIL, NEVER, OK, Decision, Outlook
from paddle_shard.agree.progress_table import ProgressTable
from paddle_shard.agree.rounds import Rounds
from paddle_shard.agree.verdict import data_differs, ended_unequally, error_of
from paddle_shard.errors import ArgumentError, PaddleShardError

_SHORTEST_LOOK, _LONGEST_LOOK = 50e-6, 20e-3
"""Seconds between two reads of the progress table, for a rank that waits."""
_LOOKS_FOR = 2e-3
"""Seconds for which a rank only reads the table before it asks for a round."""


class Agreement:
    """One pass over the data; all ranks deliver the same steps of it.

    One thread announces, step by step, what this rank can serve. One thread (the same or another) asks before each
    delivery. A step is delivered only when every rank has announced it, so no rank continues past a step at which
    another ends or fails. `Coordinator.open` creates agreements.
    """

    def __init__(
        self,
        coordinator: Rounds,
        number: int,
        prefetch: int,
        ends_must_agree: bool,
        label: str,
        name: str,
        timeout: float,
        same_data: bool = False,
        ends_apart: int | None = None,
        first_step: int = 0,
    ) -> None:
        """Start at step 0; see `Coordinator.open`."""
        self._coordinator, self._changed = coordinator, coordinator.changed
        self.number, self.first_step = number, first_step
        self._prefetch, self._ends_must_agree = prefetch, ends_must_agree
        self.label, self.name, self.timeout, self.exit_when_lost = label, name, timeout, False
        self.noticed = False
        """True if it was logged that this rank waits for others."""
        self.outlook = Outlook(tag=coordinator.tag(label))
        self._released = 0
        """Steps that rounds have released."""
        self._on_table = 0
        """Steps that the progress table has released."""
        self._confirmed = False
        """True if all ranks refer to the same pass, so what they post belongs to it."""
        self._held, self._rounds_to_hear = NEVER, 0
        self._verdict: Decision | None = None
        self._outlooks: Sequence[Outlook] = ()
        self._window, self._size = 1, 1  # end and size of the window that is being read
        self._waiting = self._closed = False
        self.unsent: list[tuple[int, bytes]] = []
        """(step, note) for each note of this rank that was not sent to the others yet."""
        self._notes: dict[int, list[tuple[int, bytes]]] = {}
        self._same_data, self._ends_apart, self._history = same_data, ends_apart, ReadHistory()
        self._differing: tuple[int, list[int]] | None = None
        """The first step at which the ranks have read different data, and each rank's digest."""
        self._posts = True
        """True while this rank may post its progress on the table."""
        self.outlook.reads_on = 0 if ends_apart is None else 1
        self._compared = 0
        """Number of released steps for which all ranks are known to have read the same data."""
        self.waited = 0.0
        """Total seconds for which `deliver` has waited."""

    @property
    def prefetch(self) -> int:
        """Number of steps that may be prefetched. Each rank may change its own number at any time."""
        return self._prefetch

    @prefetch.setter
    def prefetch(self, steps: int) -> None:
        with self._changed:
            self._prefetch = max(1, steps)

    @property
    def reads_on(self) -> int:
        """Number of steps that every rank reads beyond the step that it asks for."""
        return self.outlook.reads_on

    @property
    def is_decided(self) -> bool:
        """True if the ranks have agreed how the pass ends, or a rank is lost: `deliver` tells what has happened."""
        return self._verdict is not None or self._closed or self._coordinator.is_over

    def introduction_of(self, rank: int) -> bytes | None:
        """Return what a global rank has told all others when they met; None if they have not met yet."""
        return self._coordinator.introductions.get(rank)

    @property
    def announced(self) -> int:
        """Number of steps that this rank has said it can serve."""
        return self.outlook.step

    def note(self, payload: bytes) -> None:
        """Send all ranks a note about the step that is announced next; it arrives before they deliver that step.

        Args:
            payload: A short text. Each note costs all ranks an exchange, so send only what is new.
        """
        with self._changed:
            step = self.outlook.step
            self._held = min(self._held, step)
            if self._coordinator.group.size == 1:
                self.hear_note(self._coordinator.group.names[0], step, payload)
            else:
                self.unsent.append((step, payload))

    def note_read(self, digest: int) -> None:
        """Record the digest of all that was read up to the end of the step that is announced next.

        It must be the same on all ranks if the pass was opened with `same_data`. The ranks learn of a difference before
        the first step is delivered; later, within a heartbeat or at the end.

        Args:
            digest: A number below 2**62.
        """
        with self._changed:
            self._history.note(digest)

    def report_read(self) -> None:
        """Put the digests of the steps into the report, for a gather; called with the lock held.

        From here on, this rank does not post: when all ranks have gathered, all see the same progress table.
        """
        self._posts = False
        if self._same_data and self.outlook.kind != FAIL:
            self.outlook.report = self._history.report()

    def send_notes(self) -> list[tuple[int, bytes]]:
        """Return (step, note) for the notes that were not sent yet; called with the lock held.

        All ranks have received them when they take part in the round after the one that sends them.
        """
        found, self.unsent = self.unsent, []
        if found:
            self._rounds_to_hear = 2
        return found

    def hear_note(self, name: int, step: int, payload: bytes) -> None:
        """Store a rank's note; called with the lock held."""
        self._notes.setdefault(step, []).append((name, payload))

    def take_notes(self, step: int) -> list[tuple[int, bytes]]:
        """Return (global rank, note) of all ranks, including this one, for a delivered step; only the first call."""
        if not self._notes:  # the notes of a step arrive before it is released
            return []
        with self._changed:
            return self._notes.pop(step, [])

    def announce_ok(self, steps: int = 1) -> None:
        """Announce that the next step, or the next `steps`, can be served with real rows."""
        self._announce(OK, steps=steps)

    def announce_exhausted(self) -> None:
        """Announce that the next step can be served, but that this rank has no real rows from that step on.

        The pass ends at the first step that all ranks have announced as exhausted.
        """
        self._announce(OK, exhausted=True)

    def announce_end(self) -> None:
        """Announce that the next step cannot be served. The pass ends there, or earlier, on all ranks."""
        self._announce(END)

    def announce_failure(self, report: bytes) -> None:
        """Announce that reading the next step failed. All ranks raise the report there, or stop earlier.

        Args:
            report: What the others need in order to raise the error; cut at 64 KB.
        """
        self._announce(FAIL, report=report)

    def wanted(self, step: int) -> int:
        """Return how many steps should be announced before `step` is asked for.

        It is one for the first step and two more for each later step, up to `step + prefetch`; one more if ends are
        compared. If no step may follow, it is the number of steps that are already announced.
        """
        if self.outlook.kind != OK or self._verdict is not None:
            return self.outlook.step
        on = self.outlook.reads_on
        return min(step + max(self._prefetch, 1 + on), 2 * step + 1 + on)

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
        if self._may_deliver(step) and step == self.outlook.delivered and not self._closed:
            self.outlook.delivered += 1
            return True
        with self._changed:
            if step != self.outlook.delivered or self._closed:
                state = "the pass is closed" if self._closed else f"{self.outlook.delivered} comes next"
                raise ArgumentError(f"step={step} cannot be delivered: {state}. Ask for the steps in order.")
            if self._may_deliver(step) or self._wait(step):
                self.outlook.delivered += 1
                return True
            assert self._verdict is not None
            if (
                self._verdict.kind == END
                and self._verdict.same
                and not (self._ends_must_agree and ended_unequally(self._verdict, self._outlooks))
            ):
                return False
            raise self._error(self._verdict)

    def close(self) -> None:
        """Leave the pass. The others continue up to the steps that this rank has announced, then learn who left.

        No rank is told if all ranks leave, or if the pass ended first. Returns at once.
        """
        with self._changed:
            self._closed = True
            if self.outlook.kind == OK:
                self.outlook.kind = CLOSED
                self._coordinator.hear(self)
                self._changed.notify_all()

    def due(self) -> bool:
        """Return whether this rank should tell the others about this pass now; called with the lock held."""
        if self._verdict is not None:
            return False
        released = max(self._released, self._on_table)
        while self._window <= released:
            self._size = min(2 * self._size, max(1, self._prefetch // 2))
            self._window += self._size
        if self.outlook.kind != OK:
            return True
        if self._same_data and self._compared < self._released and (self._waiting or not self.on_table):
            return True
        if self._waiting:
            return self.outlook.step > released
        return self.outlook.step >= self._window and not self.on_table

    def advance(self, decision: Decision, outlooks: Sequence[Outlook] = ()) -> bool:
        """Apply what all ranks have agreed on, and return whether it is news; called with the lock held."""
        news = decision.step > self._released or decision.kind != OK
        table = self._table
        released, self._released = self._released, max(decision.step, self._released)
        # The table releases steps without a round, so use it only after the first steps were compared.
        compared = not self._same_data or self.outlook.read != 0
        self._confirmed = decision.matches and decision.same and compared
        if self._same_data and decision.kind == OK:
            if self.outlook.read:  # what was read before `released` has been compared
                news = news or released > self._compared
                self._compared = released
                self._history.forget(released)
            self.outlook.read = self._history.before(self._released) or self.outlook.read
        self._rounds_to_hear = max(0, self._rounds_to_hear - 1)
        if not self._rounds_to_hear:
            self._held = min((step for step, _ in self.unsent), default=NEVER)
        self._post()
        if decision.kind != OK:
            if self._same_data and (decision.kind == END or not decision.same):
                self._differing = data_differs(outlooks, self._ends_apart)
                decision = replace(decision, same=decision.same and self._differing is None)
                if table is not None:  # what any rank may have delivered, all ranks deliver
                    self._compared = max(self._compared, table.least(self.number))
            self._released, self._verdict, self._outlooks = decision.step, decision, outlooks
        return news

    def _announce(self, kind: int, exhausted: bool = False, report: bytes = b"", steps: int = 1) -> None:
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
            mine.kind, mine.report = kind, report
            mine.step += steps if kind == OK else 0
            self._post()
            self._coordinator.hear(self)
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
        known = not self._same_data or (self._verdict is not None and self._verdict.same)
        if (self._released if known else self._compared) > step or self._on_table > step:
            return True
        table = self._table
        if table is None:
            return False
        self._on_table = table.least(self.number)
        return self._on_table > step

    def _wait(self, step: int) -> bool:
        """Wait until it is known whether `step` is delivered, and return whether it is."""
        start = time.monotonic()
        try:
            while not self._may_deliver(step) and self._verdict is None:
                waited, look_again = time.monotonic() - start, None
                if self._table is not None:
                    look_again = min(max(waited / 64, _SHORTEST_LOOK), _LONGEST_LOOK)
                if not self._waiting and (not self.on_table or waited > _LOOKS_FOR):
                    self._waiting = True
                    self._changed.notify_all()
                self._coordinator.wait(self, step, start, look_again)
        finally:
            self._waiting = False
            self.waited += time.monotonic() - start
        return self._may_deliver(step)

    def _error(self, verdict: Decision) -> PaddleShardError:
        ranks = dict(zip(self._coordinator.group.names, self._outlooks, strict=True))
        return error_of(verdict, ranks, self.number, self.name, self.first_step, self._differing)
