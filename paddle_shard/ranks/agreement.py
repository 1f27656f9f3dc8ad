"""Drive the step agreement: one background thread a process, and the calls that the other threads make."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from paddle_shard.ranks.decision import FAIL, OK
from paddle_shard.ranks.network import TcpNetwork
from paddle_shard.ranks.protocol import HEARTBEAT, Iteration, Member, Message
from paddle_shard.ranks.reports import AgreementConfig, log

EXIT_SECONDS = 10.0
"""Seconds that a training thread has to learn that a rank is lost, before its process is ended."""
_MIN_PAUSE, _MAX_PAUSE = 1e-4, 5e-3
"""Seconds between two looks at the table of a training thread that waits: half of what it has waited."""
_LEAVE = 1.0
"""Seconds for which a process that ends waits until the others have heard which iterations it has left."""


class Agreement(Iteration):
    """One iteration over the data; all ranks deliver the same steps of it.

    One thread announces, step by step, what this rank can serve. One thread (the same or another) asks before each
    delivery. `Coordinator.open` creates agreements.
    """

    def __init__(
        self, coordinator: Coordinator, terms: AgreementConfig
    ) -> None:
        """Begin; see `Iteration`."""
        super().__init__(coordinator.member, terms)
        self._coordinator = coordinator
        self.name = f"{coordinator.group} {self.number}"
        """Name of the iteration, the same on all ranks and unique in the job."""

    @property
    def is_decided(self) -> bool:
        """True if nothing more need be read: `deliver` raises why, or returns that the iteration has ended."""
        return self.decision is not None or self._coordinator.is_lost

    @property
    def is_over(self) -> bool:
        """True if this rank announces nothing more that it reads."""
        return self.progress.kind != OK or self.is_decided

    def announce(self, kind: int = OK, **details: Any) -> None:
        """See `Iteration`."""
        with self._coordinator.changed:
            super().announce(kind, **details)
            if self.is_due:
                self._coordinator.network.wake()

    def deliver(self, step: int) -> bool:
        """Return whether a step may be delivered; False if the iteration has ended before it, on all ranks.

        Waits only until that is known.

        Args:
            step: The step; ask for the steps in order, from 0.

        Raises:
            PaddleShardError: Reading failed; raised on all ranks at the same step.
            UnequalEndsError: Ends differ and `ends_must_agree`; raised on all ranks at the same step.
            PeerLostError: A rank is gone, did not respond before the timeout expired, or has left the loop early.
        """
        # Most steps are released long before, or are on the table.
        if step >= self.released and not (
            self.may_deliver(step) or self._wait(step)
        ):
            with self._coordinator.changed:
                error = self.error()
            if error is not None:
                raise error
            return False
        self.progress.delivered += 1
        return True

    def exchange(self, payload: str) -> list[str]:
        """Return the payloads of all ranks, by rank. The iteration has one step, of which each rank has a note."""
        try:
            self.announce(note=payload)
            self.deliver(0)
            return [note for _, note in sorted(self.take_notes(0))]
        finally:
            self.close()

    def fail(self, report: str) -> None:
        """Have the others raise why a call of the user's has failed here, in this iteration."""
        self.announce(FAIL, report=report)
        self.close()

    def close(self) -> None:
        """See `Iteration`. Nothing is reported if all ranks leave, or if the iteration ended first. Returns at once."""
        with self._coordinator.changed:
            super().close()
            self._coordinator.network.wake()

    def _wait(self, step: int) -> bool:
        """Wait until it is known whether `step` is delivered, and return whether it is."""
        coordinator = self._coordinator
        start = time.monotonic()
        with coordinator.changed:
            self.waits_since = start
            try:
                while (is_delivered := self.may_deliver(step)) is None:
                    seconds = self.patience(step, time.monotonic())
                    if self.is_due or coordinator.member.outbox:
                        coordinator.network.wake()
                    # the table shows when it changes
                    if self._announced_by_all() >= 0:
                        pause = max(_MIN_PAUSE, (time.monotonic() - start) / 2)
                        seconds = min(seconds, pause, _MAX_PAUSE)
                    coordinator.changed.wait(seconds)
            except Exception:  # perhaps a signal handler's
                coordinator.has_learned = coordinator.is_lost
                coordinator.changed.notify_all()
                raise
            finally:
                self.waits_since = None
        return is_delivered


class Coordinator:
    """Owns the member of this rank, and the thread that drives it."""

    def __init__(
        self,
        group: str,
        member: Member,
        network: TcpNetwork,
        *,
        end_process: Callable[[], None],
    ) -> None:
        """Set up the coordinator; its thread starts with the first iteration.

        Args:
            group: Name of the ranks that take part.
            member: The member of this rank.
            network: Its connections; not connected yet.
            end_process: Called if a rank is lost, an iteration has `exit_when_lost`, and its training thread has not
                learned of the loss within `EXIT_SECONDS` seconds: it may be stuck in a collective.
        """
        self.changed = threading.Condition()
        """Guards the member, and is notified when it may have changed."""
        self.group = group
        self.member = member
        """The member of this rank."""
        self.network = network
        """The connections; `wake` has the thread take a turn."""
        self._end_process = end_process
        self.has_learned = False
        """True if the training thread has learned that a rank is lost."""
        self._thread = threading.Thread(
            target=self._run, name="paddle_shard-agree", daemon=True
        )

    @property
    def is_lost(self) -> bool:
        """True if a rank is lost, and nothing will be agreed on any more."""
        return self.member.loss is not None

    def open(self, terms: AgreementConfig) -> Agreement:
        """Start an iteration and return at once; all ranks open their iterations in the same order."""
        with self.changed:
            agreement = Agreement(self, terms)
            self.network.wake()
        self.start()
        return agreement

    def start(self) -> None:
        """Begin to connect to the other ranks, if this was not done yet; from then on they learn if this one ends."""
        with self.changed:
            if self._thread.ident is None:
                self._thread.start()
                atexit.register(self._leave)

    def close(self) -> None:
        """End the thread and the connections. Other ranks learn that this one has left."""
        self.network.interrupt()
        if self._thread.is_alive():
            self._thread.join(_LEAVE)

    def _leave(self) -> None:
        """When the process ends, give the thread a moment to report which iterations were left."""
        with self.changed:
            # An iteration that was left is kept until all ranks have heard of it.
            self.changed.wait_for(
                lambda: (
                    self.is_lost
                    or not any(
                        left.is_closed
                        for left in self.member.iterations.values()
                    )
                ),
                _LEAVE,
            )
        # A thread in the store's client, when the interpreter is gone, would abort the process.
        self.close()

    def _run(self) -> None:
        try:
            self.network.connect()
            received: list[Message] = []
            while not self.is_lost:
                with self.changed:
                    messages = self.member.turn(received, time.monotonic())
                    if messages:
                        self.network.send(messages)
                    self.changed.notify_all()
                if not self.is_lost:
                    received = self.network.receive(HEARTBEAT)
        except Exception as error:
            ranks: Collection[int] = getattr(error, "ranks", ())
            timeout = getattr(error, "timeout", None)
            with self.changed:
                self.member.receive(["lost", str(error), ranks, timeout])
                self.changed.notify_all()
        assert self.member.loss is not None
        # so that no rank waits for this one
        self.network.close(self.member.loss)
        self._report(*self.member.loss[:2])

    def _report(self, text: str, ranks: Collection[int]) -> None:
        """Log who is lost, since the training thread may be unable to; end the process if an iteration requires it."""
        with self.changed:
            iterations = self.member.iterations.values()
            terms = [one.terms for one in iterations if not one.is_closed]
            exits = any(open_terms.exit_when_lost for open_terms in terms)
            if terms and self.member.rank not in ranks:
                if exits:
                    text += f" This process ends in {EXIT_SECONDS:g} s (on_lost='exit')."
                log.error(f"global rank {self.member.rank}: {text}")
            if exits and not self.changed.wait_for(
                lambda: self.has_learned, EXIT_SECONDS
            ):
                self._end_process()
