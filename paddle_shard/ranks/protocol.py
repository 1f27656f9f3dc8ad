"""Step agreement as a protocol without I/O: announcements, messages and the time in; messages and decisions out.

Each rank is a `Node`. Its `Member` reports to the hub, on the first rank, how far it can serve each epoch iterator
("pass"). The hub broadcasts what follows from the reports of all ranks: the steps that may be delivered, how a pass
ends, and which rank is lost. A step is delivered only when every rank has announced it, so no rank continues past a
step at which another ends or fails.

Connections keep the order of messages. A rank sends its note on a step before it announces the step, and the hub
broadcasts the note before it releases the step, so that all ranks have the note when they deliver the step. Passes have
numbers, since all ranks open them in the same order. The hub decides nothing about a pass before all ranks have opened
it; passes cannot be mixed up if they overlap (`zip(loader, loader)`) or are closed early.

Ranks of one host share a table on which each posts what it announces. Once all have opened a pass and none has ended or
failed, a rank delivers what the table shows, and reports only with its heartbeats. A word of the table counts the notes
that were sent before it: a reader trusts it when it has received as many.

Nothing here knows of threads, locks, sockets or clocks: `Coordinator` drives a node, and tests simulate all of them.

Messages to the hub are lists (kind, global rank, ...): here (introduction), open (pass, label, call, reads_on,
ends_apart), note (pass, step, payload), at (pass, step, kind, exhausted, delivered, report, digests), ask, gone (what
has happened). Messages from the hub are lists (kind, ...): met (introductions, place of the table), release (pass,
step, kind so far, whether it is ending), note (rank, pass, step, payload), verdict (pass, decision, outlooks), failed
(rank, pass, report), status (outlooks, absent ranks), lost (error). Both sides send an empty message where they would
be silent for a heartbeat.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, Protocol, TypeAlias, TypeVar

from paddle_shard.errors import ArgumentError, PeerLostError
from paddle_shard.ranks.verdict import (
    CLOSED,
    END,
    NEVER,
    OK,
    OTHER_DATA,
    OTHER_PASS,
    Decision,
    Outlook,
    Terms,
    decide,
    error_of,
    error_of_another,
    known_to_all,
)

Message: TypeAlias = list[Any]

PASSES = 64
"""Most passes that are on a table at the same time; a rank tells of older ones in messages only."""
WINDOW = 4
"""Steps to announce ahead of the one that is asked for."""
BATCH = 2
"""Steps that a rank announces in one message while it does not wait."""
NOTICE = 5.0
"""Seconds for which a training thread waits for other ranks before it logs that, once per pass."""
LEFT = 30.0
"""Seconds after which a rank that has left its loop logs that others have not. They may save, or end a step."""
SILENT = 3.0
"""Seconds without a message after which a rank is named as absent."""
SHORTEST = 4.0
"""Least number of seconds of silence after which a rank is lost, for any timeout of a pass."""
GRACE = 2.0
"""Seconds that the hub has to report who is silent, before it is taken to be silent itself."""


class Table(Protocol):
    """How far the ranks of a host are; see `ProgressTable`."""

    @property
    def is_shared(self) -> bool:
        """True once all ranks have joined."""
        ...

    def join(self) -> None:
        """Tell the others that this rank posts all that it announces."""

    def post(self, number: int, step: int, num_notes: int) -> None:
        """Publish what this rank has announced of a pass."""

    def least(self, number: int, heard: Mapping[int, Any]) -> int:
        """Return the number of steps of a pass that all ranks have announced; 0 if that is not known."""
        ...


class PassState:
    """One rank's part in one pass: what it has announced, and what the hub has decided."""

    def __init__(self, number: int, terms: Terms) -> None:
        """Start at step 0."""
        assert terms.timeout is not None
        self.number = number
        self.terms = terms
        self.timeout = terms.timeout
        compares_ends = terms.same_data and terms.ends_apart is not None
        self.outlook = Outlook(
            report=terms.name if terms.is_call else "", reads_on=int(compares_ends)
        )
        self.released = 0
        """Steps before this one may be delivered."""
        self.verdict: Decision | None = None
        self.outlooks: Mapping[int, Outlook] = {}
        """Global rank -> its reports, once there is a verdict."""
        self.stops_early = False
        """True if another rank has left the pass before the step that this one announces next."""
        self.noticed = False
        """True if it was logged that this rank waits for others or left at another step, or an error has said it."""
        self.is_waiting = False
        self.is_closed = False
        self._closed_at: float | None = None
        self.table: Table | None = None
        """Where this rank posts what it announces."""
        self._is_open = False
        """True if all ranks have opened the pass."""
        self._is_ending = False
        """True if the pass ends on some rank, so that each step is reported, too."""
        self._notes: dict[int, list[tuple[int, str]]] = {}
        """Step -> (global rank, note) of all ranks."""
        self._num_heard: dict[int, int] = {}
        """Global rank -> number of its notes that have arrived."""
        self.rank = -1
        """Global rank of this process."""
        self._not_heard: list[int] = []
        """Steps of this rank's notes that the hub has not broadcast yet."""
        self._unsent_notes: list[tuple[int, str]] = []
        self._unsent_digests: dict[int, int] = {}
        self._sent = (0, OK)

    @property
    def window(self) -> int:
        """Number of steps that are announced ahead of the one that is asked for."""
        return max(WINDOW, 1 + self.outlook.reads_on)

    @property
    def is_due(self) -> bool:
        """True if the hub should learn now what this rank has announced."""
        step, kind = self._sent
        unsent = self.outlook.step - step
        if self._reads_table and not self._is_ending and self.outlook.kind == kind:
            return bool(self._unsent_notes)
        return (
            unsent >= BATCH
            or (self.is_waiting and unsent > 0)
            or self.outlook.kind != kind
        )

    @property
    def _reads_table(self) -> bool:
        # Also while the pass ends: another rank may hold its interpreter, in a collective of a step that it was
        # delivered, so that it cannot report that step.
        return self._is_open and self.table is not None and self.table.is_shared

    def post(self) -> None:
        """Publish on the table what this rank has announced."""
        if self.table is not None:
            # No step of which a note is on its way: this rank may be unable to send it, as above.
            step = min(self.outlook.step, self.outlook.exhausted, *self._not_heard[:1])
            self.table.post(self.number, step, self._num_heard.get(self.rank, 0))

    def note(self, payload: str) -> None:
        """Send all ranks a note about the step that is announced next; it arrives before they deliver that step."""
        self._unsent_notes.append((self.outlook.step, payload))
        self._not_heard.append(self.outlook.step)

    def note_read(self, digest: int) -> None:
        """Record the digest of all that was read up to the end of the step that is announced next.

        It must be the same on all ranks if the pass was opened with `same_data`; no step is delivered of which it
        differs.

        Args:
            digest: A number below 2**62.
        """
        self._unsent_digests[self.outlook.step] = digest

    def take_notes(self, step: int) -> list[tuple[int, str]]:
        """Return (global rank, note) of all ranks, including this one, for a delivered step; only the first call."""
        return self._notes.pop(step, []) if self._notes else []

    def announce(
        self,
        kind: int = OK,
        *,
        steps: int = 1,
        exhausted: bool = False,
        report: str = "",
    ) -> None:
        """Announce whether the next step can be served.

        Args:
            kind: `OK`: it can. `END`: it cannot, and the pass ends there, or earlier, on all ranks. `FAIL`: reading it
                failed, and all ranks raise the report there, or stop earlier.
            steps: The next so many steps can be served.
            exhausted: True if this rank has no real rows from that step on. The pass ends at the first step that all
                ranks have announced as exhausted.
            report: What the others need in order to raise the error; cut at 64 KB.
        """
        mine = self.outlook
        if mine.kind == CLOSED or self.verdict is not None:
            return  # a prefetch thread may be one step behind
        if mine.kind != OK:
            raise ArgumentError(
                f"step {mine.step} was announced as the last: nothing can be announced after it."
            )
        if exhausted:
            mine.exhausted = min(mine.exhausted, mine.step)
            self._is_ending = True
        elif kind == OK and mine.exhausted < NEVER:
            raise ArgumentError(
                f"step {mine.step} was announced with real rows, but step {mine.exhausted} as exhausted. "
                "Announce every later step as exhausted, too."
            )
        mine.report = report or mine.report
        mine.kind = kind
        if kind == OK:
            mine.step += steps
            self.post()

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
        if self.outlook.kind != OK or self.verdict is not None:
            return self.outlook.step
        return min(step + self.window, 2 * step + 1 + self.outlook.reads_on)

    def may_deliver(self, step: int) -> bool | None:
        """Return whether all ranks deliver a step; None if it is not known yet."""
        if (
            step >= self.released
            and self.verdict is None
            and self._reads_table
            and self.table is not None
        ):
            self.released = max(
                self.released, self.table.least(self.number, self._num_heard)
            )
        if step < self.released:
            return True
        return None if self.verdict is None else False

    def close(self, now: float = 0.0) -> None:
        """Leave the pass. The others continue up to the steps that this rank has announced, then learn who left."""
        self.is_closed = True
        if self.outlook.kind == OK:
            self.outlook.kind = CLOSED
            self._closed_at = now

    def reports(self) -> list[Message]:
        """Return the messages that the hub needs in order to know all that this rank has announced."""
        mine = self.outlook
        found: list[Message] = [
            ["note", self.number, *note] for note in self._unsent_notes
        ]
        self._unsent_notes = []
        if self._sent != (mine.step, mine.kind) and self.verdict is None:
            self._sent = (mine.step, mine.kind)
            digests = list(self._unsent_digests.items())
            self._unsent_digests = {}
            report = mine.short_report if mine.kind != OK else ""
            found.append(
                [
                    "at",
                    self.number,
                    mine.step,
                    mine.kind,
                    mine.exhausted,
                    mine.delivered,
                    report,
                    digests,
                ]
            )
        return found

    def apply(self, kind: str, *content: Any) -> None:
        """Apply a message of the hub about this pass."""
        if kind == "note":
            step, name, payload = content
            self._num_heard[name] = self._num_heard.get(name, 0) + 1
            if name == self.rank:
                del self._not_heard[0]
                self.post()
            self._notes.setdefault(step, []).append((name, payload))
        elif kind == "release":
            step, so_far, is_ending = content
            self.released = max(self.released, step)
            self.stops_early = so_far == CLOSED and step <= self.outlook.step
            self._is_open = True
            self._is_ending = self._is_ending or is_ending
        else:
            decision, outlooks = content
            self.verdict = Decision(*decision)
            self.released = self.verdict.step
            self.outlooks = {rank: Outlook(*outlook) for rank, outlook in outlooks}

    def log_parting(self, rank: int, now: float) -> None:
        """Log if this rank has left its loop and others have not, or have delivered more or fewer steps.

        A rank that was one step ahead of another when that left has got no error: the step had been announced.
        """
        if self.noticed or not self.is_closed:
            return
        if self.verdict is None:
            if self._closed_at is not None and now - self._closed_at > LEFT:
                self.noticed = True
                self.terms.log_left(rank, self.outlook.delivered, LEFT)
        elif self.verdict.kind in (END, CLOSED):
            left = {
                name: o.delivered
                for name, o in self.outlooks.items()
                if o.kind == CLOSED
            }
            left[rank] = self.outlook.delivered  # it may have grown since
            if len(set(left.values())) > 1:
                self.noticed = True
                self.terms.log_parted(left)


State = TypeVar("State", bound=PassState)


class Member:
    """What one rank has opened and announced, and what it has received from the hub."""

    def __init__(
        self,
        rank: int,
        *,
        hub: int,
        relay: int | None,
        introduction: str,
        timeout: float,
        find_table: Callable[[str], Table | None] = lambda place: None,
    ) -> None:
        """Begin without a connection to the hub.

        Args:
            rank: Global rank of this process.
            hub: Global rank that has the hub.
            relay: Global rank that relays to it; None: this rank is connected to the hub, or has it.
            introduction: Name by which this rank can be reached.
            timeout: Default timeout of a pass.
            find_table: Returns the table at a place, if it can be reached.
        """
        self.rank = rank
        self.timeout = timeout
        self.heartbeat = min(1.0, timeout / 8)
        self.passes: dict[int, PassState] = {}
        """Passes that are opened on this rank and not decided."""
        self.introductions = {rank: introduction}
        """Global rank -> its introduction; those of the others are known once all ranks have met."""
        self.lost: PeerLostError | None = None
        """Why nothing will be agreed on any more."""
        self.silence: PeerLostError | None = None
        """The error raised last because other ranks were silent for too long."""
        self.opened_at = 0.0
        """When a pass was opened last. No silence is counted before it: an earlier timeout may have been longer."""
        self._find_table = find_table
        self._table: Table | None = None
        self._hub = hub
        self._next = hub if relay is None else relay
        self._num_opened = 0
        self._outbox: list[Message] = [["here", introduction]]
        self._sent_at = 0.0
        self._heard_at: float | None = None
        """When the hub was heard of last; None: this rank is not connected."""
        self._failed: dict[int, tuple[int, str]] = {}
        """Global rank -> (pass, report) of a user's call that has failed there."""
        self.is_asking = False
        """True if the hub should answer how far all ranks are."""
        self._has_asked = False
        self._status: (
            tuple[Mapping[int, Mapping[int, Outlook]], Collection[int]] | None
        ) = None
        """Answer of the hub: global rank -> pass -> reports, and the absent ranks."""

    @property
    def has_met(self) -> bool:
        """True if all ranks have connected."""
        return len(self.introductions) > 1

    @property
    def silence_limit(self) -> float:
        """Seconds of silence after which a rank is lost."""
        in_use = [
            state.timeout
            for state in self.passes.values()
            if state.outlook.kind != CLOSED
        ]
        return max(min(in_use, default=self.timeout), SHORTEST)

    def open(self, make: type[State], terms: Terms, now: float) -> State:
        """Start a pass; all ranks open their passes in the same order.

        Args:
            make: Class of the state.
            terms: What the ranks agree on.
            now: The time in seconds.
        """
        terms = replace(
            terms, timeout=self.timeout if terms.timeout is None else terms.timeout
        )
        state = make(self._num_opened, terms)
        state.rank = self.rank
        self.passes[state.number] = state
        self._num_opened += 1
        older = self.passes.get(state.number - PASSES)
        if older is not None:  # its place on the table is needed
            older.table = None
        self._share(state)
        self.opened_at = now
        reads_on, call = state.outlook.reads_on, state.outlook.report
        ends_apart = terms.ends_apart if terms.same_data else None
        self._outbox.append(
            ["open", state.number, terms.label, call, reads_on, ends_apart]
        )
        return state

    def _share(self, state: PassState) -> None:
        """Post a pass on the table, unless its data is compared: then the hub decides each step."""
        if not state.terms.same_data:
            state.table = self._table
            state.post()

    def connected(self, now: float) -> None:
        """Begin to expect messages of the hub."""
        self._heard_at = now

    def receive(self, kind: str = "", *content: Any, now: float) -> None:
        """Apply a message of the hub; empty: it is alive."""
        self._heard_at = now
        if kind in ("release", "note", "verdict"):
            number, *rest = content
            state = self.passes.get(number)
            if state is not None:
                state.apply(kind, *rest)
            if state is not None and state.verdict is not None:
                del self.passes[number]
                state.log_parting(self.rank, now)
        elif kind == "failed":
            rank, *failure = content
            self._failed[rank] = tuple(failure)
        elif kind == "status":
            said, absent = content
            passes = {
                rank: {number: Outlook(*one) for number, one in outlooks}
                for rank, outlooks in said
            }
            self._status = passes, absent
        elif kind == "met":
            introductions, place = content
            self.introductions = dict(introductions)
            self._table = self._find_table(place)
            if self._table is not None:
                for number, state in self.passes.items():
                    if number > self._num_opened - 1 - PASSES:
                        self._share(state)
                self._table.join()
        elif kind in ("lost", "gone") and self.lost is None:
            self.lost = PeerLostError.of(
                *(content if kind == "lost" else lost_as(*content))
            )

    def send(self, now: float) -> list[Message]:
        """Return the messages for the hub that are due: what is new, and at least one in each heartbeat."""
        is_beat = now - self._sent_at >= self.heartbeat
        found, self._outbox = self._outbox, []
        for state in self.passes.values():
            if state.is_due or is_beat:
                found += state.reports()
            state.log_parting(self.rank, now)
        if self.is_asking:
            found.append(["ask"])
            self.is_asking = False
        if is_beat and not found:
            found.append([""])
        if found:
            self._sent_at = now
        limit = self.silence_limit
        if (
            self._heard_at is not None
            and now - max(self._heard_at, self.opened_at) > limit + GRACE
        ):
            self.lost = PeerLostError.of(
                *lost_as([self._next], f"did not respond for {limit:g} s", limit)
            )
        return [[kind, self.rank, *content] for kind, *content in found]

    # The training thread waits

    def patience(self, state: PassState, step: int, since: float, now: float) -> float:
        """Return for how many seconds the training thread may wait for news.

        Args:
            state: The pass.
            step: The step that is asked for.
            since: When the training thread began to wait.
            now: The time.

        Raises:
            PeerLostError: The timeout has expired, or a rank is lost.
        """
        if self.lost is not None:
            lost = PeerLostError.of(str(self.lost), self.lost.ranks, self.lost.timeout)
            raise known_to_all(self.cause_of(lost.ranks) or lost) from self.lost
        # Ask who is late twice: first to log it, and when the timeout expires to raise it.
        notices = not state.noticed and state.timeout > NOTICE
        # What another rank reads has the same timeout: it has a moment to report an error that says more.
        limit = NOTICE if notices else state.timeout + 2 * self.heartbeat
        over = now - since - limit
        grace = 2 * self.heartbeat + 1.0  # for the answer
        if over < 0:
            self._status = None
            self._has_asked = False
            return -over
        is_cut_off = self._heard_at is None or now - self._heard_at > SILENT
        if self._status is None and over < grace and not is_cut_off:
            self.is_asking = self.is_asking or not self._has_asked
            self._has_asked = True
            return max(grace - over, 0.001)
        behind = self._behind(state, step, [self._next] if is_cut_off else [self._hub])
        self._status = None
        self._has_asked = False
        if [*behind] == [self.rank] and over < grace:
            return self.heartbeat
        if notices:
            state.noticed = True
            if behind:
                state.terms.log_wait(self.rank, step, now - since, behind)
        elif over >= grace or behind:
            self.silence = state.terms.silence(step, behind)
            raise self.silence
        return self.heartbeat  # no rank is late: the next message releases the step, or the next answer differs

    def error(self, state: PassState) -> Exception | None:
        """Return the error that a pass has ended with; None if it has ended as it should."""
        assert state.verdict is not None
        error = error_of(state.verdict, state.outlooks, state.number, state.terms)
        if error is None:
            return None
        state.noticed = True
        left = [rank for rank, one in state.outlooks.items() if one.kind == CLOSED]
        cause = self.cause_of(left) if state.verdict.kind == CLOSED else None
        if cause is not None:
            cause.__cause__ = error
        return known_to_all(cause or error)

    def cause_of(self, ranks: Sequence[int]) -> Exception | None:
        """Return the error of a call that has failed on one of some ranks, in a pass that is not decided yet."""
        for rank, (number, report) in self._failed.items():
            if rank in ranks and (number >= self._num_opened or number in self.passes):
                return error_of_another(rank, report)
        return None

    def _behind(
        self, state: PassState, step: int, absent: Collection[int]
    ) -> dict[int, str]:
        """Return the global ranks that keep `step` from being agreed on, and how far each is.

        Args:
            state: The pass.
            step: The step that is asked for.
            absent: Global ranks that are absent if the hub has not answered.
        """
        unheard = "has not answered: it has made no loader over these meshes yet, is held up or has ended (see its log)"
        if self.has_met:  # each answers in a thread of its own
            unheard = (
                "does not answer: its process is stopped, or is held up in a call that keeps its threads from running, "
                "such as a gather_valid() that this rank does not make (see its log)"
            )
        said, absent = ({}, absent) if self._status is None else self._status
        behind = dict.fromkeys(absent, unheard)
        for name, outlooks in said.items():
            calls = [
                o.report
                for one, o in outlooks.items()
                if one != state.number and o.report and o.kind == OK
            ]
            waits = f", and waits in {calls[0]}" if calls else ""
            outlook = state.outlook if name == self.rank else outlooks.get(state.number)
            if outlook is None:
                behind[name] = (
                    f"has not {'made this call' if state.terms.is_call else 'started this loop'}{waits}"
                )
            elif outlook.kind == OK and outlook.step <= step:
                behind[name] = (
                    f"has read up to step {state.terms.first_step + outlook.step}{waits}"
                )
        return {
            name: f"{text} ({why})" if (why := self.cause_of([name])) else text
            for name, text in behind.items()
        }


class _Ballot:
    """What the ranks have reported about one pass."""

    def __init__(self, ends_apart: int | None) -> None:
        self.outlooks: dict[int, Outlook] = {}
        self.notes: list[Message] = []
        """Notes that are broadcast when all ranks have opened the pass."""
        self.digests: dict[int, dict[int, int]] = {}
        """Step -> global rank -> digest; for the steps that were not compared yet."""
        self.told: tuple[int, int, bool] | None = None
        """Step, kind so far and whether the pass is ending, as they were broadcast."""
        self._ends_apart = ends_apart

    def decide(self) -> Decision:
        """Return the decision that follows from the reports of all ranks."""
        if len({o.label for o in self.outlooks.values()}) > 1:
            return Decision(0, OTHER_PASS)
        decision = decide(self.outlooks.values())
        for step in sorted(step for step in self.digests if step < decision.step):
            digests = self.digests.pop(step)
            if len(set(digests.values())) > 1:
                return self._differs(step, step, digests)
        if decision.kind == END and self._ends_apart is not None:
            ends = {rank: o.exhausted for rank, o in self.outlooks.items()}
            if max(ends.values()) == NEVER:
                ends = {rank: o.step for rank, o in self.outlooks.items()}
            first = min(ends.values())
            if max(ends.values()) - first > self._ends_apart:
                return self._differs(
                    decision.step,
                    first,
                    {rank: int(end > first) for rank, end in ends.items()},
                )
        return decision

    def _differs(
        self, step: int, differs_at: int, digests: Mapping[int, int]
    ) -> Decision:
        for rank, outlook in self.outlooks.items():
            outlook.read = digests.get(rank, 0)
        return Decision(step, OTHER_DATA, differs_at=differs_at)


class Hub:
    """Decides for all ranks what follows from their reports."""

    def __init__(
        self, ranks: Sequence[int], relays: Mapping[int, int], table_place: str = ""
    ) -> None:
        """Begin without connections.

        Args:
            ranks: Global ranks that take part.
            relays: Global rank -> global rank that relays its messages, where it is not connected to the hub itself.
            table_place: Where ranks of this host find the table.
        """
        self.outbox: list[Message] = []
        """Messages for all ranks."""
        self._ranks = tuple(ranks)
        self._relays = relays
        self._table_place = table_place
        self._introductions: dict[int, str] = {}
        self._heard_at: dict[int, float] = {}
        self._passes: dict[int, _Ballot] = {}
        self._changed: set[int] = set()
        """Passes whose decision may have changed."""
        self._sent_at = 0.0
        self._is_over = False

    def receive(self, kind: str, rank: int, *content: Any, now: float) -> None:
        """Apply a message of a rank; an empty kind: it is alive."""
        self._heard_at[rank] = now
        if kind == "at":
            self._take_report(rank, *content)
        elif kind == "note":
            self._take_note(rank, *content)
        elif kind == "open":
            number, label, call, reads_on, ends_apart = content
            ballot = self._passes.setdefault(number, _Ballot(ends_apart))
            ballot.outlooks[rank] = Outlook(label=label, report=call, reads_on=reads_on)
            self._changed.add(number)
        elif kind == "ask":
            self._tell_status(now)
        elif kind == "here":
            self._introductions[rank] = content[0]
            if len(self._introductions) == len(self._ranks):
                self.outbox.append(
                    ["met", list(self._introductions.items()), self._table_place]
                )
        elif kind == "gone":
            self.lose([rank], *content)

    def send(
        self, now: float, heartbeat: float, limit: float, since: float
    ) -> list[Message]:
        """Return the messages for all ranks: what is new, and at least one in each heartbeat.

        Args:
            now: The time.
            heartbeat: Seconds without news after which an empty message is sent.
            limit: Seconds of silence after which a rank is lost.
            since: No silence is counted before this time.
        """
        self._decide()
        silent = [
            rank
            for rank, heard in self._heard_at.items()
            if now - max(heard, since) > limit
        ]
        if silent:
            self.lose(
                self._blamed(silent, now), f"did not respond for {limit:g} s", limit
            )
        if not self.outbox and now - self._sent_at >= heartbeat:
            self.outbox.append([""])
        if self.outbox:
            self._sent_at = now
        found, self.outbox = self.outbox, []
        return found

    def lose(
        self, ranks: Sequence[int], what: str, timeout: float | None = None
    ) -> None:
        """Broadcast that some ranks are lost; nothing is decided after that."""
        if not self._is_over:
            self._decide()
            self._is_over = True
            self.outbox.append(["lost", *lost_as(ranks, what, timeout)])

    def _take_report(self, rank: int, number: int, *report: Any) -> None:
        ballot = self._passes.get(number)
        if ballot is None:  # it was decided
            return
        outlook = ballot.outlooks[rank]
        before = outlook.step
        (
            outlook.step,
            outlook.kind,
            outlook.exhausted,
            outlook.delivered,
            text,
            digests,
        ) = report
        outlook.report = text or outlook.report
        for step, digest in digests:
            ballot.digests.setdefault(step, {})[rank] = digest
        if outlook.failed_call:
            self.outbox.append(["failed", rank, number, outlook.failed_call])
        # A rank that was further than the slowest one and can serve more changes nothing.
        step, _, is_ending = ballot.told or (0, OK, True)
        if before <= step or is_ending or outlook.is_ending:
            self._changed.add(number)

    def _take_note(self, rank: int, number: int, step: int, payload: str) -> None:
        if number in self._passes:
            self._passes[number].notes.append(["note", number, step, rank, payload])
            self._changed.add(number)

    def _decide(self) -> None:
        """Broadcast what has changed in the passes that all ranks have opened."""
        changed, self._changed = self._changed, set()
        for number in () if self._is_over else sorted(changed):
            ballot = self._passes[number]
            if len(ballot.outlooks) < len(self._ranks):
                continue
            self.outbox += ballot.notes
            ballot.notes = []
            decision = ballot.decide()
            if decision.kind != OK:
                del self._passes[number]
                outlooks = [
                    [rank, self._told(one, decision)]
                    for rank, one in sorted(ballot.outlooks.items())
                ]
                self.outbox.append(["verdict", number, astuple(decision), outlooks])
            else:
                told = (
                    decision.step,
                    decision.so_far,
                    any(one.is_ending for one in ballot.outlooks.values()),
                )
                if ballot.told != told:
                    ballot.told = told
                    self.outbox.append(["release", number, *told])

    def _told(self, outlook: Outlook, decision: Decision) -> Message:
        return list(
            astuple(
                outlook if decision.kind == OTHER_PASS else replace(outlook, label="")
            )
        )

    def _is_silent(self, rank: int, now: float, seconds: float) -> bool:
        return now - self._heard_at.get(rank, -NEVER) > seconds

    def _blamed(self, silent: Iterable[int], now: float) -> list[int]:
        """Return the ranks to name for those that are silent: of those behind a silent relay, only the relay."""
        relays = {
            rank: relay
            for rank, relay in self._relays.items()
            if self._is_silent(relay, now, GRACE)
        }
        return sorted({relays.get(rank, rank) for rank in silent})

    def _tell_status(self, now: float) -> None:
        absent = {rank for rank in self._ranks if self._is_silent(rank, now, SILENT)}
        said: dict[int, list[Any]] = {
            rank: [] for rank in self._ranks if rank not in absent
        }
        for number, ballot in self._passes.items():
            for rank, outlook in ballot.outlooks.items():
                if rank in said:
                    said[rank].append([number, astuple(replace(outlook, label=""))])
        self.outbox.append(["status", list(said.items()), self._blamed(absent, now)])


class Node:
    """One rank of the group: its member and, on the first rank, the hub."""

    def __init__(self, member: Member, hub: Hub | None) -> None:
        """Compose both."""
        self.member = member
        self.hub = hub

    def turn(self, received: Iterable[Message], now: float) -> list[Message]:
        """Take in messages; return the messages to send: to the hub, or from the hub to all other ranks.

        Args:
            received: Messages of the hub; on the hub, of the other ranks.
            now: The time.
        """
        member, hub = self.member, self.hub
        if hub is None:
            for message in received:
                member.receive(*message, now=now)
            return member.send(now)
        found: list[Message] = []
        while True:
            for message in [*received, *member.send(now)]:
                hub.receive(*message, now=now)
            messages = hub.send(
                now, member.heartbeat, member.silence_limit, member.opened_at
            )
            for message in messages:
                member.receive(*message, now=now)
            found += messages
            if not any(state.is_due for state in member.passes.values()):
                return found
            received = ()  # what the hub has said makes its own rank report


def lost_as(
    ranks: Sequence[int], what: str, timeout: float | None = None
) -> tuple[str, list[int], float | None]:
    """Return the arguments of `PeerLostError.of` for ranks that are lost."""
    named = (
        f"Global rank {ranks[0]}"
        if len(ranks) == 1
        else f"Each of the global ranks {list(ranks)}"
    )
    return f"{named} {what}; its own log may say why.", list(ranks), timeout


def encoded(message: Message) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
