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

Messages are lists that begin with their kind; those to the hub go on with the global rank of the sender. `Hub`,
`Member` and `Iteration` apply a message of the kind "note" by their method `_on_note`.

A rank that ends is reported by its connection. One that is stopped, or held up, is named when the training thread of
another has waited for it until the timeout: the hub then reports it to all ranks, and no further step is agreed on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, TypeAlias

from paddle_shard.errors import PeerLostError
from paddle_shard.ranks.decision import (
    CLOSED,
    NEVER,
    OK,
    OTHER,
    Decision,
    RankProgress,
    decide,
)
from paddle_shard.ranks.progress import ProgressTable
from paddle_shard.ranks.reports import (
    ERRORS,
    AgreementConfig,
    Loss,
    error_of_report,
    known_to_all,
    late_text,
    log,
    loss_of,
)

Message: TypeAlias = list[Any]

WINDOW = 4
"""Steps to announce ahead of the requested one."""
BATCH = 2
"""Steps that a rank announces in one message while it does not wait."""
NOTICE = 5.0
"""Seconds for which a training thread waits for other ranks before it logs that, once per iteration."""
HEARTBEAT = 1.0
"""Seconds after which a rank reports what it has announced, though the others see it on the table."""
ANSWER_SECONDS = 2.0
"""Seconds that the hub has to answer, before it is taken for lost."""


class Iteration:
    """One rank's part in one epoch iterator: what it has announced, and what the hub has decided."""

    def __init__(self, member: Member, terms: AgreementConfig) -> None:
        """Start at step 0; all ranks start their iterations in the same order.

        Args:
            member: The member of this rank.
            terms: What the ranks agree on.
        """
        self.number = member.num_opened
        """Number of the iteration, from 0."""
        self.terms = terms
        self.progress = RankProgress()
        self.released = 0
        """Steps before this one may be delivered."""
        self.decision: Decision | None = None
        self.ranks: Mapping[int, RankProgress] = {}
        """Global rank -> its progress, once there is a decision."""
        self.is_closed = False
        self.asked_at = 0.0
        """When the hub was asked for which ranks this one waits."""
        self.waits_since: float | None = None
        """When the training thread began to wait for a step; None: it does not wait."""
        self.table = None if terms.same_data else member.table
        """Table of this rank's announcements; None if data is compared: then the hub decides each step."""
        self._member = member
        self._is_ending: bool | None = None
        """True if the iteration ends on some rank, so that each step is reported; None: it is not open on all."""
        self._notes: dict[int, list[tuple[int, str]]] = defaultdict(list)
        """Step -> (global rank, note) of all ranks."""
        self._num_notes: Counter[int] = Counter()
        """Global rank -> number of its notes that have arrived."""
        self._unconfirmed: list[int] = []
        """Steps of this rank's notes that the hub has not broadcast yet."""
        self._unsent_digests: list[tuple[int, int]] = []
        self._sent = (0, OK)
        member.num_opened += 1
        member.iterations[self.number] = self
        label = {name: str(value) for name, value in terms.label.items()}
        member.outbox.append(["open", self.number, label])
        self._post()

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
            kind: `OK`: it can. `END`: it cannot, and the iteration ends there, or earlier, on all ranks. `FAIL`:
                reading it failed, and all ranks raise the report there, or stop earlier.
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
            self._member.outbox.append(
                ["note", self.number, progress.step, note]
            )
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
        """Return how many steps should be announced before `step` is requested.

        It is one for the first step and two more for each later step, up to `step + WINDOW`. If no step may follow, it
        is the number of steps that are already announced.
        """
        if self.progress.kind != OK or self.decision is not None:
            return self.progress.step
        return min(step + WINDOW, 2 * step + 1)

    # The thread that trains

    def may_deliver(self, step: int) -> bool | None:
        """Return whether all ranks deliver a step; None if it is not known yet."""
        if step >= self.released and self.decision is None:
            self.released = max(self.released, self._announced_by_all())
        if step < self.released:
            return True
        return None if self.decision is None else False

    def take_notes(self, step: int) -> list[tuple[int, str]]:
        """Return (global rank, note) of all ranks, including this one, for a delivered step; only the first call."""
        return self._notes.pop(step, [])

    def close(self) -> None:
        """Leave. The others continue up to the steps that this rank has announced, then learn who left."""
        self.is_closed = True
        if self.progress.kind == OK:
            self.progress.kind = CLOSED

    # Messages

    @property
    def is_due(self) -> bool:
        """True if the hub should learn now what this rank has announced."""
        step, kind = self._sent
        if self.progress.kind != kind:
            return True
        is_ending = self._is_ending or self.progress.is_ending
        if not is_ending and self._announced_by_all() >= 0:
            return bool(self._member.outbox)  # a note
        unsent = self.progress.step - step
        return unsent >= BATCH or (unsent > 0 and self.waits_since is not None)

    def _announced_by_all(self) -> int:
        """Return the number of steps that all ranks have announced on the table; -1 if it does not show them all."""
        # Also while the iteration ends: another rank may hold its interpreter, in a collective of a step that it was
        # delivered, so that it cannot report that step.
        if self._is_ending is None or self.table is None:
            return -1
        return self.table.least(self.number, self._num_notes)

    def _post(self) -> None:
        """Publish on the table what this rank has announced."""
        if self.table is not None:
            # No step of which a note is on its way: this rank may be unable to send it, as above.
            progress = self.progress
            step = min(
                progress.step, progress.exhausted, *self._unconfirmed[:1]
            )
            num_notes = self._num_notes[self._member.rank]
            self.table.post(self.number, step, num_notes)

    def report(self) -> None:
        """Send the hub what it needs in order to know all that this rank has announced."""
        state = (self.progress.step, self.progress.kind)
        if self._sent != state:
            self._sent = state
            self._member.outbox.append(
                [
                    "progress",
                    self.number,
                    self._unsent_digests,
                    *astuple(self.progress),
                ]
            )
            self._unsent_digests = []

    def _on_note(self, ranks: list[int], step: int, note: str) -> None:
        self._num_notes.update(ranks)
        self._notes[step] += [(rank, note) for rank in ranks]
        if self._member.rank in ranks:
            del self._unconfirmed[0]
            self._post()

    def _on_release(self, step: int, is_ending: bool) -> None:
        self.released = max(self.released, step)
        self._is_ending = is_ending
        self._post()  # the first time, the table has just been found

    def _on_decision(self, step: int, kind: int, ranks: list[Message]) -> None:
        self.decision = Decision(step, kind)
        self.released = step
        self.ranks = {
            rank: RankProgress(*progress) for rank, *progress in ranks
        }

    # The training thread waits

    def patience(self, step: int, now: float) -> float:
        """Return for how many seconds the training thread may wait for news.

        Args:
            step: The requested step.
            now: The time.

        Raises:
            PeerLostError: A rank is lost, also because the timeout has expired.
        """
        assert self.waits_since is not None
        member = self._member
        terms = self.terms
        waited = now - self.waits_since
        # Reading on another rank has the same timeout: it gets a moment to report a more precise error.
        limit = terms.timeout + HEARTBEAT
        loss = member.loss
        if loss is None and waited >= limit + ANSWER_SECONDS:
            what = f"did not respond for {terms.timeout:g} s"
            loss = loss_of([member.hub_rank], what, terms.timeout)
        if loss is not None:
            raise known_to_all(
                member.cause_of(loss[1]) or PeerLostError.of(*loss)
            )
        deadline = limit if self.asked_at else min(NOTICE, limit)
        if waited < deadline:
            return deadline - waited
        if now - self.asked_at < HEARTBEAT:
            return HEARTBEAT
        self.asked_at = now
        text = f"global rank {member.rank} has waited {waited:.0f} s for the other ranks to reach {terms.place(step)}"
        timeout = terms.timeout if waited >= limit else None
        member.outbox.append(
            ["late", self.number, step, terms.first_step, timeout, text]
        )
        return HEARTBEAT

    def error(self) -> Exception | None:
        """Return the error that the iteration has ended with; None if it has ended as it should."""
        assert self.decision is not None
        step, kind = self.decision
        error = ERRORS[kind](step, self.ranks, self.terms)
        if error is None:
            return None
        if isinstance(error, PeerLostError):
            error = self._member.cause_of(error.ranks) or error
        return known_to_all(error)


class Member:
    """One rank of the group: what it has opened and announced, and what it has received from the hub."""

    def __init__(
        self,
        rank: int,
        *,
        hub_rank: int,
        hub: Hub | None = None,
        table: ProgressTable | None = None,
    ) -> None:
        """Begin without a connection to the hub.

        Args:
            rank: Global rank of this process.
            hub_rank: Global rank that has the hub.
            hub: The hub, on that rank.
            table: Table of the ranks of this host, perhaps of all; found when all ranks have met.
        """
        self.rank = rank
        self.iterations: dict[int, Iteration] = {}
        """Iterations that are opened on this rank and not decided."""
        self.loss: Loss | None = None
        """Why nothing will be agreed on any more."""
        self._hub = hub
        self.table = table
        self.hub_rank = hub_rank
        self.num_opened = 0
        """Number of iterations that were opened on this rank."""
        self.outbox: list[Message] = []
        """Messages for the hub."""
        self._sent_at = 0.0
        self._failed: dict[int, tuple[int, str]] = {}
        """Global rank -> (iteration, report) of a user's call that has failed there."""

    def turn(self, received: Iterable[Message], now: float) -> list[Message]:
        """Take in messages; return the messages to send: to the hub, or from the hub to all other ranks.

        Args:
            received: Messages of the hub; on the hub, of the other ranks.
            now: The time.
        """
        hub = self._hub
        if hub is None:
            for message in received:
                self.receive(message)
            return self.send(now)
        sent: list[Message] = []
        pending = [*received, *self.send(now)]
        while pending:
            # A rank is late only if none of these messages shows that it is not.
            for message in sorted(
                pending, key=lambda message: message[0] == "late"
            ):
                hub.receive(message)
            messages = hub.send()
            for message in messages:
                self.receive(message)
            sent += messages
            # what the hub has sent makes its own rank report
            pending = self.send(now)
        return sent

    def receive(self, message: Message) -> None:
        """Apply a message of the hub."""
        kind, *content = message
        name = f"_on_{kind}"
        if hasattr(self, name):
            getattr(self, name)(*content)
        elif content[0] in self.iterations:
            number, *content = content
            iteration = self.iterations[number]
            getattr(iteration, name)(*content)
            if iteration.decision is not None:
                del self.iterations[number]

    def _on_failed(self, rank: int, number: int, report: str) -> None:
        self._failed[rank] = (number, report)

    def _on_met(self, table_place: str) -> None:
        if self.table is not None:
            self.table.find(table_place)

    def _on_lost(
        self, text: str, ranks: Collection[int], timeout: float | None
    ) -> None:
        """End the agreement, since some ranks are lost; the first loss counts."""
        self.loss = self.loss or (text, ranks, timeout)

    def _on_warn(self, rank: int, text: str) -> None:
        if rank == self.rank:
            log.warning(text)

    def send(self, now: float) -> list[Message]:
        """Return the messages for the hub that are due."""
        is_beat = now - self._sent_at >= HEARTBEAT
        for iteration in self.iterations.values():
            if is_beat or iteration.is_due:
                iteration.report()
        messages = self.outbox
        self.outbox = []
        if messages:
            self._sent_at = now
        return [[kind, self.rank, *content] for kind, *content in messages]

    def cause_of(self, ranks: Iterable[int]) -> Exception | None:
        """Return the error of a call that has failed on one of some ranks, in an iteration that is not decided yet."""
        for rank in ranks:
            number, report = self._failed.get(rank, (-1, ""))
            if number >= self.num_opened or number in self.iterations:
                return error_of_report(rank, report)
        return None


class _Tally:
    """Reports of the ranks about one iteration."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankProgress] = {}
        self.notes: dict[tuple[int, str], list[int]] = defaultdict(list)
        """(step, note) -> global ranks that have sent it; broadcast when all ranks have opened the iteration."""
        self.compared: dict[int, dict[int, Any]] = defaultdict(dict)
        """Step -> global rank -> digest, for the steps that were not compared yet; at -1, the labels."""
        self.released = (-1, False)
        """Step and whether the iteration is ending, as they were broadcast."""

    def decide(self) -> Decision:
        """Return the decision that follows from the reports of all ranks."""
        decision = decide(self.ranks.values())
        for step in sorted(
            step for step in self.compared if step < decision.step
        ):
            values = self.compared.pop(step)
            first, *others = values.values()
            if any(value != first for value in others):
                for rank, value in values.items():
                    self.ranks[rank].report = value
                return Decision(step, OTHER)
        return decision


class Hub:
    """Decides for all ranks what follows from their reports."""

    def __init__(
        self, ranks: Sequence[int], table_place: str | None = ""
    ) -> None:
        """Begin without connections.

        Args:
            ranks: Global ranks that take part.
            table_place: Where ranks of this host find the table.
        """
        self._ranks = ranks
        self._table_place = table_place
        """None once it was broadcast, when all ranks had met."""
        self._outbox: list[Message] = []
        """Messages for all ranks."""
        self._tallies: dict[int, _Tally] = {}
        self._is_over = False

    def receive(self, message: Message) -> None:
        """Apply a message of a rank."""
        kind, *content = message
        getattr(self, f"_on_{kind}")(*content)

    def send(self) -> list[Message]:
        """Return the new messages for all ranks."""
        self._decide()
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
        tally.compared[-1][rank] = label
        if "failed" in label:
            self._outbox.append(["failed", rank, number, label["failed"]])

    def _on_progress(
        self,
        rank: int,
        number: int,
        digests: list[tuple[int, int]],
        *values: Any,
    ) -> None:
        if number not in self._tallies:  # it was decided
            return
        tally = self._tallies[number]
        tally.ranks[rank] = RankProgress(*values)
        for step, digest in digests:
            tally.compared[step][rank] = digest

    def _on_note(self, rank: int, number: int, step: int, note: str) -> None:
        if number in self._tallies:
            self._tallies[number].notes[step, note].append(rank)

    def _on_lost(self, *loss: Any) -> None:
        """Broadcast that some ranks are lost; nothing is decided after that."""
        self._decide()
        self._is_over = True
        self._outbox.append(["lost", *loss])

    def _decide(self) -> None:
        """Broadcast what has changed in the iterations that all ranks have opened."""
        if self._is_over:
            return
        for number, tally in list(self._tallies.items()):
            if len(tally.ranks) == len(self._ranks):
                if self._table_place is not None:
                    self._outbox.append(["met", self._table_place])
                    self._table_place = None
                # In the order of the steps, so that the notes of each rank stay in theirs.
                for note, senders in sorted(tally.notes.items()):
                    self._outbox.append(["note", number, senders, *note])
                tally.notes.clear()
                self._broadcast(number, tally)

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

    def _on_late(
        self,
        rank: int,
        number: int,
        step: int,
        first_step: int,
        timeout: float | None,
        text: str,
    ) -> None:
        """Have a rank that waits for a step log which ranks keep it from being delivered; or lose them.

        Args:
            rank: Global rank that waits.
            number: Number of the iteration.
            step: The step, counted from the beginning of the iteration.
            first_step: The epoch's step with which the iteration begins.
            timeout: The timeout if it has expired.
            text: What the rank waits for.
        """
        self._decide()
        if number not in self._tallies:  # it was decided
            return
        late = {}
        for other in self._ranks:
            progress = self._tallies[number].ranks.get(other)
            if progress is None:
                late[other] = (
                    "did not begin this loop or call, or stopped responding"
                )
            elif progress.kind == OK and progress.step <= step:
                newest = first_step + progress.step
                later = self._later_iteration(number, other)
                late[other] = f"read up to step {newest}{later}"
        text = late_text(text, late)
        if late and timeout is None:
            self._outbox.append(["warn", rank, text])
        elif late:
            self._on_lost(text, [*late], timeout)

    def _later_iteration(self, number: int, rank: int) -> str:
        """Return what a rank has begun after an iteration, for messages: other ranks may wait because of it."""
        for later, tally in self._tallies.items():
            label = tally.compared.get(-1, {}).get(rank)
            if later > number and label is not None:
                name = (
                    label.get("call") or f"a loop over {label.get('data set')}"
                )
                return f", then began {name}"
        return ""
