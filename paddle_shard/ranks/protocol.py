"""Step agreement as a protocol without I/O: announcements, messages and the time in; messages and decisions out.

Each rank has a `Member`, which reports to the `Hub`, on the first rank, how far it can serve each epoch iterator
("iteration"). The hub broadcasts what follows from the reports of all ranks: the steps that may be delivered, how an
iteration ends, and which rank is lost. A step is delivered only when every rank has announced it, so no rank continues
past a step at which another ends or fails.

Connections keep the order of messages. A rank sends its note on a step before it announces the step, and the hub
broadcasts the note before it releases the step, so that all ranks have the note when they deliver the step. Iterations
have numbers, since all ranks open them in the same order. The hub decides nothing about an iteration before all ranks
have opened it; they cannot be mixed up if they overlap (`zip(loader, loader)`) or are closed early.

Ranks of one host share a table on which each posts what it announces. Once all have opened an iteration and none has
ended or failed, a rank delivers what the table shows, and reports only with its heartbeats. A word of the table counts
the notes that were sent before it: a reader trusts it when it has received as many.

Nothing here knows of threads, locks, sockets or clocks: `Coordinator` drives a member, and tests simulate all of them.

Messages are lists that begin with their kind; those to the hub go on with the global rank of the sender. `_HANDLERS` of
`Hub`, `Member` and `Iteration` name the kinds that each applies. Both sides send an empty kind where they would be
silent for a heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, ClassVar, TypeAlias, TypeVar

from paddle_shard.errors import PeerLostError
from paddle_shard.ranks.decision import (
    CLOSED,
    END,
    NEVER,
    OK,
    OTHER_DATA,
    OTHER_LABEL,
    Decision,
    RankProgress,
    decide,
)
from paddle_shard.ranks.progress import ProgressTable
from paddle_shard.ranks.reports import (
    ABSENT,
    NOT_OPENED,
    Loss,
    Terms,
    error_of_another,
    error_of_decision,
    known_to_all,
    loss_of,
    timed_out,
    warn_unequal_exits,
    warn_waits,
)

Message: TypeAlias = list[Any]
Handlers: TypeAlias = dict[str, Callable[..., None]]

WINDOW = 4
"""Steps to announce ahead of the one that is asked for."""
BATCH = 2
"""Steps that a rank announces in one message while it does not wait."""
NOTICE = 5.0
"""Seconds for which a training thread waits for other ranks before it logs that, once per iteration."""
SILENT = 3.0
"""Seconds without a message after which a rank is named as absent."""
MIN_SILENCE = 4.0
"""Least number of seconds of silence after which a rank is lost, for any timeout of an iteration."""
GRACE = 2.0
"""Seconds that the hub has to report who is silent, before it is taken to be silent itself."""


class Iteration:
    """One rank's part in one epoch iterator: what it has announced, and what the hub has decided."""

    def __init__(self, number: int, rank: int, terms: Terms) -> None:
        """Start at step 0.

        Args:
            number: Number of the iteration, from 0.
            rank: Global rank of this process.
            terms: What the ranks agree on.
        """
        self.number = number
        self.terms = terms
        self.progress = RankProgress()
        self.released = 0
        """Steps before this one may be delivered."""
        self.decision: Decision | None = None
        self.ranks: Mapping[int, RankProgress] = {}
        """Global rank -> its progress, once there is a decision."""
        self.is_closed = False
        self.has_warned = False
        """True if it was logged that this rank waits for others, or an error was raised."""
        self.waits_since: float | None = None
        """When the training thread began to wait for a step; None: it does not wait."""
        self.steps_of_ranks: Mapping[int, int] = {}
        """Global rank -> steps that it has announced, as the hub has answered last."""
        self.table: ProgressTable | None = None
        """Where this rank posts what it announces."""
        self._rank = rank
        self._is_ending: bool | None = None
        """True if the iteration ends on some rank, so that each step is reported; None: not all ranks have opened it."""
        self._notes: dict[int, list[tuple[int, str]]] = {}
        """Step -> (global rank, note) of all ranks."""
        self._num_notes: dict[int, int] = {}
        """Global rank -> number of its notes that have arrived."""
        self._unconfirmed: list[int] = []
        """Steps of this rank's notes that the hub has not broadcast yet."""
        self._unsent_notes: list[tuple[int, str]] = []
        self._unsent_digests: list[tuple[int, int]] = []
        self._sent = (0, OK)

    # The thread that reads

    def announce(
        self,
        kind: int = OK,
        *,
        steps: int = 1,
        exhausted: bool = False,
        report: str = "",
        note: str | None = None,
        digest: int | None = None,
    ) -> None:
        """Announce whether the next step can be served.

        Args:
            kind: `OK`: it can. `END`: it cannot, and the iteration ends there, or earlier, on all ranks. `FAIL`: reading
                it failed, and all ranks raise the report there, or stop earlier.
            steps: The next so many steps can be served.
            exhausted: True if this rank has no valid rows from that step on. The iteration ends at the first step that
                all ranks have announced as exhausted.
            report: What the others need in order to raise the error.
            note: A message to all ranks about the step; it arrives before they deliver the step.
            digest: Digest of all that was read up to the end of the step, below 2**62. With `same_data`, no step is
                delivered of which it differs between ranks.
        """
        progress = self.progress
        if progress.kind != OK or self.decision is not None:
            return  # a prefetch thread may be one step behind
        if note is not None:
            self._unsent_notes.append((progress.step, note))
            self._unconfirmed.append(progress.step)
        if digest is not None:
            self._unsent_digests.append((progress.step, digest))
        if exhausted:
            progress.exhausted = min(progress.exhausted, progress.step)
        progress.kind = kind
        progress.report = report
        if kind == OK:
            progress.step += steps
            self._post()

    def announce_unread(self) -> None:
        """Announce that this rank reads no further, because another has stopped, and that nothing is wrong here.

        It announces two steps: enough for the decision, which lies before them.
        """
        self.announce(exhausted=self.progress.exhausted < NEVER, steps=2)

    def wanted(self, step: int) -> int:
        """Return how many steps should be announced before `step` is asked for.

        It is one for the first step and two more for each later step, up to `step + WINDOW`. If no step may follow, it
        is the number of steps that are already announced.
        """
        if self.progress.kind != OK or self.decision is not None:
            return self.progress.step
        return min(step + WINDOW, 2 * step + 1)

    # The thread that trains

    def may_deliver(self, step: int) -> bool | None:
        """Return whether all ranks deliver a step; None if it is not known yet."""
        if step >= self.released and self.decision is None and self._reads_table:
            assert self.table is not None
            self.released = max(
                self.released, self.table.least(self.number, self._num_notes)
            )
        if step < self.released:
            return True
        return None if self.decision is None else False

    def take_notes(self, step: int) -> list[tuple[int, str]]:
        """Return (global rank, note) of all ranks, including this one, for a delivered step; only the first call."""
        return self._notes.pop(step, []) if self._notes else []

    def close(self) -> None:
        """Leave the iteration. The others continue up to the steps that this rank has announced, then learn who left."""
        self.is_closed = True
        if self.progress.kind == OK:
            self.progress.kind = CLOSED
        self._compare_exits()

    def _compare_exits(self) -> None:
        """Warn if this rank has left its loop after more or fewer steps than another.

        A rank that was one step ahead of another when that left has got no error: the step had been announced.
        """
        if self.decision is None or not self.is_closed or self.has_warned:
            return
        steps = {
            rank: progress.delivered
            for rank, progress in self.ranks.items()
            if progress.kind == CLOSED
        }
        steps[self._rank] = self.progress.delivered  # it may have grown since
        if self.decision.kind in (END, CLOSED) and len(set(steps.values())) > 1:
            self.has_warned = True
            warn_unequal_exits(self.terms.name, steps)

    # Messages

    @property
    def is_due(self) -> bool:
        """True if the hub should learn now what this rank has announced."""
        step, kind = self._sent
        if self.progress.kind != kind:
            return True
        if self._reads_table and not self._is_ending and not self.progress.is_ending:
            return bool(self._unsent_notes)
        unsent = self.progress.step - step
        return unsent >= BATCH or (unsent > 0 and self.waits_since is not None)

    @property
    def _reads_table(self) -> bool:
        # Also while the iteration ends: another rank may hold its interpreter, in a collective of a step that it was
        # delivered, so that it cannot report that step.
        return (
            self._is_ending is not None
            and self.table is not None
            and self.table.is_shared
        )

    def share(self, table: ProgressTable | None) -> None:
        """Post this iteration on a table, unless its data is compared: then the hub decides each step."""
        if not self.terms.same_data:
            self.table = table
            self._post()

    def _post(self) -> None:
        """Publish on the table what this rank has announced."""
        if self.table is not None:
            # No step of which a note is on its way: this rank may be unable to send it, as above.
            progress = self.progress
            step = min(progress.step, progress.exhausted, *self._unconfirmed[:1])
            self.table.post(self.number, step, self._num_notes.get(self._rank, 0))

    def take_messages(self) -> list[Message]:
        """Return the messages that the hub needs in order to know all that this rank has announced."""
        messages: list[Message] = [
            ["note", self.number, *note] for note in self._unsent_notes
        ]
        self._unsent_notes = []
        state = (self.progress.step, self.progress.kind)
        if self._sent != state and self.decision is None:
            self._sent = state
            messages.append(
                ["progress", self.number, self._unsent_digests, *astuple(self.progress)]
            )
            self._unsent_digests = []
        return messages

    def apply(self, kind: str, *content: Any) -> None:
        """Apply a message of the hub about this iteration."""
        self._HANDLERS[kind](self, *content)

    def _on_note(self, rank: int, step: int, note: str) -> None:
        self._num_notes[rank] = self._num_notes.get(rank, 0) + 1
        self._notes.setdefault(step, []).append((rank, note))
        if rank == self._rank:
            del self._unconfirmed[0]
            self._post()

    def _on_release(self, step: int, is_ending: bool) -> None:
        self.released = max(self.released, step)
        self._is_ending = is_ending

    def _on_decision(self, step: int, kind: int, ranks: list[Message]) -> None:
        self.decision = Decision(step, kind)
        self.released = step
        self.ranks = {rank: RankProgress(*progress) for rank, *progress in ranks}
        self._compare_exits()

    def _on_status(self, steps: list[tuple[int, int]]) -> None:
        self.steps_of_ranks = dict(steps)

    _HANDLERS: ClassVar[Handlers] = {
        "note": _on_note,
        "release": _on_release,
        "decision": _on_decision,
        "status": _on_status,
    }


AnyIteration = TypeVar("AnyIteration", bound=Iteration)


class Member:
    """One rank of the group: what it has opened and announced, and what it has received from the hub."""

    def __init__(
        self,
        rank: int,
        *,
        parent: int,
        timeout: float,
        hub: Hub | None = None,
        find_table: Callable[[str], ProgressTable | None] = lambda place: None,
    ) -> None:
        """Begin without a connection to the hub.

        Args:
            rank: Global rank of this process.
            parent: Global rank that this one is connected to: the hub, or one that relays to it.
            timeout: Seconds of silence after which another rank is lost while no iteration is open.
            hub: The hub, on the first rank.
            find_table: Returns the table at a place, if it can be reached.
        """
        self.rank = rank
        self.timeout = timeout
        self.heartbeat = min(1.0, timeout / 8)
        self.iterations: dict[int, Iteration] = {}
        """Iterations that are opened on this rank and not decided."""
        self.has_met = False
        """True if all ranks have connected."""
        self.loss: Loss | None = None
        """Why nothing will be agreed on any more."""
        self.opened_at = 0.0
        """When an iteration was opened last. No silence is counted before it: an earlier timeout may have been longer."""
        self._hub = hub
        self._find_table = find_table
        self._table: ProgressTable | None = None
        self._parent = parent
        self._num_opened = 0
        self._outbox: list[Message] = [[""]]
        self._sent_at = 0.0
        self._received_at = -1.0
        """When the hub has sent something last; negative: this rank is not connected."""
        self._failed: dict[int, tuple[int, str]] = {}
        """Global rank -> (iteration, report) of a user's call that has failed there."""

    @property
    def silence_limit(self) -> float:
        """Seconds of silence after which a rank is lost."""
        timeouts = [iteration.terms.timeout for iteration in self.open_iterations()]
        return max(min(timeouts, default=self.timeout), MIN_SILENCE)

    def open_iterations(self) -> list[Iteration]:
        """Return the iterations that this rank has not left."""
        return [
            iteration
            for iteration in self.iterations.values()
            if iteration.progress.kind != CLOSED
        ]

    def open(
        self,
        terms: Terms,
        now: float,
        make: Callable[[int, int, Terms], AnyIteration],
    ) -> AnyIteration:
        """Start an iteration; all ranks open their iterations in the same order.

        Args:
            terms: What the ranks agree on.
            now: The time in seconds.
            make: Returns the iteration, given its number, this rank and the terms.
        """
        number = self._num_opened
        iteration = make(number, self.rank, terms)
        self.iterations[number] = iteration
        self._num_opened += 1
        self.opened_at = now
        iteration.share(self._table)
        label = {name: str(value) for name, value in terms.label.items()}
        self._outbox.append(["open", number, label])
        return iteration

    def turn(self, received: Iterable[Message], now: float) -> list[Message]:
        """Take in messages; return the messages to send: to the hub, or from the hub to all other ranks.

        Args:
            received: Messages of the hub; on the hub, of the other ranks.
            now: The time.
        """
        hub = self._hub
        if hub is None:
            for message in received:
                self.receive(message, now)
            return self.send(now)
        sent: list[Message] = []
        pending = [*received, *self.send(now)]
        while True:
            for message in pending:
                hub.receive(message, now)
            messages = hub.send(now, self.heartbeat, self.silence_limit, self.opened_at)
            for message in messages:
                self.receive(message, now)
            sent += messages
            pending = self.send(now)  # what the hub has sent makes its own rank report
            if not pending:
                return sent

    def receive(self, message: Message, now: float) -> None:
        """Apply a message of the hub."""
        kind, *content = message
        self._received_at = now
        handler = self._HANDLERS.get(kind)
        if handler is not None:
            handler(self, *content)
        elif content[0] in self.iterations:
            number, *content = content
            iteration = self.iterations[number]
            iteration.apply(kind, *content)
            if iteration.decision is not None:
                del self.iterations[number]

    def _on_failed(self, rank: int, number: int, report: str) -> None:
        self._failed[rank] = (number, report)

    def _on_met(self, table_place: str) -> None:
        self.has_met = True
        self._table = self._find_table(table_place)
        if self._table is not None:
            for iteration in self.iterations.values():
                iteration.share(self._table)
            self._table.join()

    def lose(self, text: str, ranks: Collection[int], timeout: float | None) -> None:
        """End the agreement, since some ranks are lost; the first loss counts."""
        if self.loss is None:
            self.loss = (text, ranks, timeout)

    _HANDLERS: ClassVar[Handlers] = {
        "": lambda self: None,
        "failed": _on_failed,
        "met": _on_met,
        "lost": lose,
    }

    def send(self, now: float) -> list[Message]:
        """Return the messages for the hub that are due: what is new, and at least one in each heartbeat."""
        if self._received_at < 0:
            self._received_at = now  # it is connected from now on
        is_beat = now - self._sent_at >= self.heartbeat
        messages = self._outbox
        self._outbox = []
        for number, iteration in self.iterations.items():
            if iteration.is_due or is_beat:
                messages += iteration.take_messages()
            since = iteration.waits_since
            if is_beat and since is not None and now - since >= self.heartbeat:
                messages.append(["ask", number])
        if is_beat and not messages:
            messages.append([""])
        if messages:
            self._sent_at = now
        limit = self.silence_limit
        if now - max(self._received_at, self.opened_at) > limit + GRACE:
            what = f"did not respond for {limit:g} s"
            self.lose(*loss_of([self._parent], what, limit))
        return [[kind, self.rank, *content] for kind, *content in messages]

    # The training thread waits

    def patience(self, iteration: Iteration, step: int, now: float) -> float:
        """Return for how many seconds the training thread may wait for news.

        Args:
            iteration: In which it waits.
            step: The step that is asked for.
            now: The time.

        Raises:
            PeerLostError: The timeout has expired, or a rank is lost. Then the others learn the same.
        """
        assert iteration.waits_since is not None
        if self.loss is not None:
            raise known_to_all(
                self._cause_of(self.loss[1]) or PeerLostError.of(*self.loss)
            )
        waited = now - iteration.waits_since
        # What another rank reads has the same timeout: it has a moment to report an error that says more.
        limit = iteration.terms.timeout + 2 * self.heartbeat
        notice = min(NOTICE, limit)
        if waited < notice:
            return notice - waited
        late = self._late(iteration, step, now)
        if waited >= limit and (late or waited >= limit + GRACE):
            loss = timed_out(iteration.terms, self.rank, step, late)
            self._outbox.append(["lost", *loss])
            raise known_to_all(PeerLostError.of(*loss))
        if late and not iteration.has_warned:
            iteration.has_warned = True
            warn_waits(iteration.terms, self.rank, step, waited, late)
        return self.heartbeat

    def _late(self, iteration: Iteration, step: int, now: float) -> dict[int, int]:
        """Return the global ranks that keep `step` from being agreed on, and how far each is."""
        if now - self._received_at > SILENT:
            return {self._parent: ABSENT}
        steps = dict(iteration.steps_of_ranks)
        if iteration.progress.kind == OK:
            steps[self.rank] = iteration.progress.step
        return {rank: count for rank, count in steps.items() if count <= step}

    def error(self, iteration: Iteration) -> Exception | None:
        """Return the error that an iteration has ended with; None if it has ended as it should."""
        assert iteration.decision is not None
        error = error_of_decision(iteration.decision, iteration.ranks, iteration.terms)
        if error is None:
            return None
        iteration.has_warned = True
        if iteration.decision.kind == CLOSED:
            assert isinstance(error, PeerLostError)
            error = self._cause_of(error.ranks) or error
        return known_to_all(error)

    def _cause_of(self, ranks: Iterable[int]) -> Exception | None:
        """Return the error of a call that has failed on one of some ranks, in an iteration that is not decided yet."""
        for rank in ranks:
            number, report = self._failed.get(rank, (-1, ""))
            if number >= self._num_opened or number in self.iterations:
                return error_of_another(rank, report)
        return None


class _Tally:
    """What the ranks have reported about one iteration."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankProgress] = {}
        self.labels: dict[int, Mapping[str, str]] = {}
        self.notes: list[Message] = []
        """Notes that are broadcast when all ranks have opened the iteration."""
        self.digests: dict[int, dict[int, int]] = {}
        """Step -> global rank -> digest; for the steps that were not compared yet."""
        self.released = (-1, False)
        """Step and whether the iteration is ending, as they were broadcast."""

    def decide(self) -> Decision:
        """Return the decision that follows from the reports of all ranks."""
        if self._differ(self.labels):
            return Decision(0, OTHER_LABEL)
        decision = decide(self.ranks.values())
        for step in sorted(step for step in self.digests if step < decision.step):
            if self._differ(self.digests.pop(step)):
                return Decision(step, OTHER_DATA)
        return decision

    def _differ(self, values: Mapping[int, Any]) -> bool:
        """Return whether the ranks have different values, and report these if they do."""
        first = next(iter(values.values()))
        if all(value == first for value in values.values()):
            return False
        for rank, value in values.items():
            self.ranks[rank].report = value
        return True


class Hub:
    """Decides for all ranks what follows from their"""

    def __init__(
        self, ranks: Sequence[int], parents: Mapping[int, int], table_place: str = ""
    ) -> None:
        """Begin without connections.

        Args:
            ranks: Global ranks that take part.
            parents: Global rank -> global rank that it is connected to.
            table_place: Where ranks of this host find the table.
        """
        self._ranks = tuple(ranks)
        self._parents = parents
        self._table_place = table_place
        self._outbox: list[Message] = []
        """Messages for all ranks."""
        self._received_at: dict[int, float] = {}
        self._has_met = False
        self._tallies: dict[int, _Tally] = {}
        self._changed: set[int] = set()
        """Iterations whose decision may have changed."""
        self._asked: set[int] = set()
        """Iterations of which a rank asks how far the others are."""
        self._sent_at = 0.0
        self._is_over = False

    def receive(self, message: Message, now: float) -> None:
        """Apply a message of a rank."""
        kind, rank, *content = message
        self._received_at[rank] = now
        if kind:
            self._HANDLERS[kind](self, rank, *content)

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
        if not self._has_met and len(self._received_at) == len(self._ranks):
            self._has_met = True
            self._outbox.append(["met", self._table_place])
        self._decide()
        silent = [
            rank
            for rank, received in self._received_at.items()
            if now - max(received, since) > limit
        ]
        if silent:
            ranks = self._blamed(silent, now)
            self._lose(loss_of(ranks, f"did not respond for {limit:g} s", limit))
        for number in self._asked & self._tallies.keys():
            self._outbox.append(["status", number, self._status(number, now)])
        self._asked = set()
        if not self._outbox and now - self._sent_at >= heartbeat:
            self._outbox.append([""])
        if self._outbox:
            self._sent_at = now
        messages = self._outbox
        self._outbox = []
        return messages

    def _on_open(
        self,
        rank: int,
        number: int,
        label: Mapping[str, str],
    ) -> None:
        tally = self._tallies.setdefault(number, _Tally())
        tally.ranks[rank] = RankProgress()
        tally.labels[rank] = label
        self._changed.add(number)
        if "failed" in label:
            self._outbox.append(["failed", rank, number, label["failed"]])

    def _on_progress(
        self, rank: int, number: int, digests: list[tuple[int, int]], *values: Any
    ) -> None:
        tally = self._tallies.get(number)
        if tally is None:  # it was decided
            return
        before = tally.ranks[rank]
        progress = RankProgress(*values)
        tally.ranks[rank] = progress
        for step, digest in digests:
            tally.digests.setdefault(step, {})[rank] = digest
        # A rank that was further than the slowest one and can serve more changes nothing.
        step, is_ending = tally.released
        if before.step <= step or is_ending or progress.is_ending:
            self._changed.add(number)

    def _on_note(self, rank: int, number: int, step: int, note: str) -> None:
        if number in self._tallies:
            self._tallies[number].notes.append(["note", number, rank, step, note])
            self._changed.add(number)

    def _on_ask(self, rank: int, number: int) -> None:
        self._asked.add(number)

    def _on_gone(self, rank: int, what: str) -> None:
        self._lose(loss_of([rank], what))

    def _on_lost(self, rank: int, *loss: Any) -> None:
        text, ranks, timeout = loss
        self._lose((text, ranks, timeout))

    _HANDLERS: ClassVar[Handlers] = {
        "open": _on_open,
        "progress": _on_progress,
        "note": _on_note,
        "ask": _on_ask,
        "gone": _on_gone,
        "lost": _on_lost,
    }

    def _lose(self, loss: Loss) -> None:
        """Broadcast that some ranks are lost; nothing is decided after that."""
        if not self._is_over:
            self._decide()
            self._is_over = True
            self._outbox.append(["lost", *loss])

    def _decide(self) -> None:
        """Broadcast what has changed in the iterations that all ranks have opened."""
        for number in () if self._is_over else sorted(self._changed):
            tally = self._tallies[number]
            if len(tally.ranks) == len(self._ranks):
                self._outbox += tally.notes
                tally.notes = []
                self._broadcast(number, tally)
        self._changed = set()

    def _broadcast(self, number: int, tally: _Tally) -> None:
        decision = tally.decide()
        if decision.kind != OK:
            del self._tallies[number]
            ranks = [
                [rank, *astuple(progress)]
                for rank, progress in sorted(tally.ranks.items())
            ]
            self._outbox.append(["decision", number, *decision, ranks])
            return
        released = (
            decision.step,
            any(progress.is_ending for progress in tally.ranks.values()),
        )
        if tally.released != released:
            tally.released = released
            self._outbox.append(["release", number, *released])

    def _is_silent(self, rank: int, now: float, seconds: float) -> bool:
        return now - self._received_at.get(rank, -NEVER) > seconds

    def _blamed(self, silent: Iterable[int], now: float) -> list[int]:
        """Return the ranks to name for those that are silent: of those behind a silent relay, only the relay."""
        blamed = set()
        for rank in silent:
            parent = self._parents.get(rank, rank)
            blamed.add(parent if self._is_silent(parent, now, GRACE) else rank)
        return sorted(blamed)

    def _status(self, number: int, now: float) -> list[tuple[int, int]]:
        """Return (global rank, steps that it has announced) of the ranks that may announce more."""
        absent = {rank for rank in self._ranks if self._is_silent(rank, now, SILENT)}
        ranks = self._tallies[number].ranks
        steps = dict.fromkeys(self._blamed(absent, now), ABSENT)
        for rank in self._ranks:
            if rank in absent:
                continue
            if rank not in ranks:
                steps[rank] = NOT_OPENED
            elif ranks[rank].kind == OK:
                steps[rank] = ranks[rank].step
        return list(steps.items())
