"""Drive the step agreement: one background thread a process, and the calls that the other threads make."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

from paddle_shard.errors import ArgumentError, PeerLostError
from paddle_shard.ranks.network import TcpNetwork
from paddle_shard.ranks.protocol import Member, Message, Node, PassState
from paddle_shard.ranks.verdict import CLOSED, FAIL, OK, Terms

GRACE = 10.0
"""Seconds that a training thread has to learn that a rank is lost, before its process is ended."""
_LEAST_PAUSE, _MOST_PAUSE = 1e-4, 5e-3
"""Seconds between two looks at the table of a training thread that waits: half of what it has waited."""
_LEAVE = 1.0
"""Seconds for which a process that ends waits until the others have heard which passes it has left."""


class Agreement(PassState):
    """One pass over the data; all ranks deliver the same steps of it.

    One thread announces, step by step, what this rank can serve. One thread (the same or another) asks before each
    delivery. `Coordinator.open` creates agreements.
    """

    _coordinator: Coordinator
    _changed: threading.Condition
    waited = 0.0
    """Total seconds for which `deliver` has waited."""

    def name_of(self, rank: int) -> str | None:
        """Return by which name a global rank can be reached in this pass; None if the ranks have not met yet."""
        name = self._coordinator.member.introductions.get(rank)
        return None if name is None else f"{name}-{self.number}"

    @property
    def is_decided(self) -> bool:
        """True if this rank need read nothing more: `deliver` tells how the pass has ended, or which rank is lost."""
        is_over = self.stops_early or self.is_closed or self.verdict is not None
        return is_over or self._coordinator.member.lost is not None

    def note(self, payload: str) -> None:
        """See `PassState`."""
        with self._changed:
            super().note(payload)

    def note_read(self, digest: int) -> None:
        """See `PassState`."""
        with self._changed:
            super().note_read(digest)

    def announce(
        self,
        kind: int = OK,
        *,
        steps: int = 1,
        exhausted: bool = False,
        report: str = "",
    ) -> None:
        """See `PassState`."""
        with self._changed:
            super().announce(kind, steps=steps, exhausted=exhausted, report=report)
            if self.is_due:
                self._coordinator.wake()

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
        if step != self.outlook.delivered or self.is_closed:
            state = (
                "the pass is closed"
                if self.is_closed
                else f"{self.outlook.delivered} comes next"
            )
            raise ArgumentError(
                f"step={step} cannot be delivered: {state}. Ask for the steps in order."
            )
        # Most steps are released long before, or are on the table.
        if step >= self.released and not (self.may_deliver(step) or self._wait(step)):
            with self._changed:
                error = self._coordinator.member.error(self)
            if error is not None:
                raise error
            return False
        self.outlook.delivered += 1
        return True

    def exchange(self, payload: str) -> list[str]:
        """Return what all ranks say, by rank. The pass consists of this: it has one step, of which each has a note."""
        try:
            self.note(payload)
            self.announce()
            self.deliver(0)
            return [said for _, said in sorted(self.take_notes(0))]
        finally:
            self.close()

    def fail(self, report: str) -> None:
        """Have the others raise why a call of the user's has failed here, in this pass or one that this rank leaves."""
        with self._changed:
            self.announce(FAIL, report=report)
            self.close()

    def close(self, now: float = 0.0) -> None:
        """See `PassState`. No rank is told if all ranks leave, or if the pass ended first. Returns at once."""
        with self._changed:
            super().close(time.monotonic())
            self.log_parting(self._coordinator.member.rank, time.monotonic())
            self._coordinator.wake()

    def _wait(self, step: int) -> bool:
        """Wait until it is known whether `step` is delivered, and return whether it is."""
        start = time.monotonic()
        with self._changed:
            self.is_waiting = True
            try:
                while (found := self.may_deliver(step)) is None:
                    seconds = self._coordinator.patience(self, step, start)
                    if self.table is not None:  # nobody says when it has changed
                        seconds = min(
                            seconds,
                            max(_LEAST_PAUSE, (time.monotonic() - start) / 2),
                            _MOST_PAUSE,
                        )
                    self._changed.wait(seconds)
            finally:
                self.is_waiting = False
                self.waited += time.monotonic() - start
        return found


class Coordinator:
    """Owns the node of this rank, and the thread that drives it."""

    def __init__(
        self, node: Node, network: TcpNetwork, *, end_process: Callable[[], None]
    ) -> None:
        """Set up the coordinator; its thread starts with the first pass.

        Args:
            node: The node of this rank.
            network: Connections of its own; not connected yet.
            end_process: Called if a rank is lost, a pass has `exit_when_lost`, and its training thread has not learned
                of the loss within `GRACE` seconds: it may be stuck in a collective.

        Raises:
            ArgumentError: If the timeout is not positive.
        """
        self.member: Member = node.member
        if not self.member.timeout > 0:
            timeout = self.member.timeout
            raise ArgumentError(
                f"timeout must be positive, got {timeout}. Give seconds; the default is 1800."
            )
        self.changed = threading.Condition()
        self._node = node
        self._network = network
        self._end_process = end_process
        self._is_awake = False
        """True if the thread will take a turn without being woken."""
        self._has_heard = False
        """True if the training thread has learned that a rank is lost."""
        self._leaves = False
        """True if the process ends before the ranks have met, so that nobody need be told who is lost."""
        self._thread: threading.Thread | None = None

    def open(self, terms: Terms) -> Agreement:
        """Start a pass and return at once; all ranks open their passes in the same order."""
        with self.changed:
            agreement = self.member.open(Agreement, terms, time.monotonic())
            agreement._coordinator = self
            agreement._changed = self.changed
            self.wake()
        self.start()
        return agreement

    def start(self) -> None:
        """Begin to connect to the other ranks, if this was not done yet; from then on they learn if this one ends."""
        with self.changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="paddle_shard-agree", daemon=True
                )
                self._thread.start()
                atexit.register(self._take_leave)

    def wake(self) -> None:
        """Have the thread take a turn; called with the lock held."""
        if not self._is_awake:
            self._is_awake = True
            self._network.wake()

    def patience(self, agreement: Agreement, step: int, since: float) -> float:
        """Return for how many seconds the training thread may wait; called with the lock held. See `Member`."""
        if agreement.is_due:
            self.wake()
        try:
            return self.member.patience(agreement, step, since, time.monotonic())
        finally:
            if self.member.is_asking:
                self.wake()
            if self.member.lost is not None:
                self._has_heard = True
                self.changed.notify_all()

    def close(self) -> None:
        """End the thread and the connections. Other ranks learn that this one has left."""
        self._leaves = True
        silence = self.member.silence
        if silence is not None and self._node.hub is not None:
            # The others raise whom this rank has waited for in vain, instead of naming this rank.
            with self.changed:
                self._node.hub.outbox.append(
                    ["lost", str(silence), silence.ranks, silence.timeout]
                )
                self._network.wake()
                self.changed.wait_for(lambda: self.member.lost, _LEAVE)
        self._network.interrupt()
        if self._thread is not None:
            self._thread.join(_LEAVE)

    def _take_leave(self) -> None:
        """When the process ends, give the thread a moment to tell the others which passes were left."""
        member = self.member
        with self.changed:
            # A pass that was left is in `passes` until all ranks have heard of it.
            passes = member.passes.values()
            self.changed.wait_for(
                lambda: (
                    member.lost or all(one.outlook.kind != CLOSED for one in passes)
                ),
                _LEAVE,
            )
            self.changed.wait_for(
                lambda: member.lost or not (self._is_awake and member.has_met), _LEAVE
            )
        if not member.has_met:
            # A thread in the store's client, when the interpreter is gone, would abort the process.
            self.close()

    def _run(self) -> None:
        try:
            self._network.connect()
            self._turn([], is_first=True)
            while self.member.lost is None:
                self._turn(self._network.receive(self.member.heartbeat))
            lost = self.member.lost
        except Exception as error:
            lost = (
                error
                if isinstance(error, PeerLostError)
                else PeerLostError.of(f"Agreement failed: {error!r}", [])
            )
        with self.changed:
            self.member.lost = lost
            self.changed.notify_all()
        self._network.close(lost)  # so that no rank waits for this one
        self._report(lost)

    def _turn(self, received: list[Message], *, is_first: bool = False) -> None:
        """Have the node take in messages, and send what it returns."""
        with self.changed:
            self._is_awake = False
            now = time.monotonic()
            if is_first:
                self.member.connected(now)
            messages = self._node.turn(received, now)
            if messages:
                self._network.send(messages)
            self.changed.notify_all()

    def _report(self, lost: PeerLostError) -> None:
        """Log who is lost, since the training thread may be unable to; end the process if a pass requires it."""
        with self.changed:
            in_use = [
                one.terms
                for one in self.member.passes.values()
                if one.outlook.kind != CLOSED
            ]
            exits = any(terms.exit_when_lost for terms in in_use)
            then = (
                f" This process ends in {GRACE:g} s (on_lost='exit')." if exits else ""
            )
            if in_use and not self._leaves:
                logging.getLogger("paddle_shard").error(
                    "global rank %s: %s%s", self.member.rank, lost, then
                )
            heard = self.changed.wait_for(lambda: self._has_heard or not exits, GRACE)
        if not heard:
            self._end_process()
