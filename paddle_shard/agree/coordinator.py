"""When do the ranks exchange what they know, and who hears of it?

All ranks take part in one series of rounds, in one background thread each. A round is one `minimum` of
`[passes opened, is anybody asking, has anybody noted anything]` and five values a pass, for the passes that all ranks
are known to have opened and that are not decided. Which these are follows from the results of earlier rounds alone, so
every rank lays the vector out alike, whatever its training thread does meanwhile: passes that overlap (`zip(loader,
loader)`), that are given up, or that one rank has reached before the others can not be mixed up. A decided pass is
followed by one `gather` on all ranks, in which everybody learns who failed, ended or left.

A round is entered by a rank when a window of steps has been read, when its training thread waits, or after
`heartbeat` seconds; so nobody waits longer for a rank that has nothing to say.

Ranks that share memory have a table, too, on which each posts how many steps it can serve. What all of them have
posted is delivered without a round, which is then only needed to begin a pass, for notes, and to learn why somebody
posts no more.
"""

from __future__ import annotations

import atexit
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable

from paddle_shard.agree.agreement import Agreement
from paddle_shard.agree.group import Group
from paddle_shard.agree.outlook import CLOSED, OK, SIZE, WIDTH, Outlook, decide
from paddle_shard.agree.progress_table import ProgressTable
from paddle_shard.agree.waiting import say_who_is_waited_for, silence
from paddle_shard.errors import ArgumentError, PeerLostError

GRACE = 10.0
"""Seconds for which a training thread may take to hear that a rank is lost, before its process is ended."""
NOTICE = 5.0
"""Seconds for which a training thread waits for other ranks before it says so, once a pass."""
_LONGEST_PAUSE = 0.02
_LEAVE = 1.0
_SHORTEST = 4.0
"""Seconds that a rank may take to enter a round, at least: several heartbeats, whatever a pass has for a timeout."""
_NUMBER = struct.Struct("<q")
_NOTE = struct.Struct("<qqq")
"""Pass, step, bytes of the note that follows."""


class Coordinator:
    """Owns the group and its background thread. With one rank there is no thread, and nothing is waited for."""

    def __init__(
        self,
        group: Group,
        *,
        timeout: float = 1800.0,
        end_process: Callable[[], None] = lambda: os._exit(1),
        join_table: Callable[[Group], ProgressTable | None] = lambda group: None,
    ) -> None:
        """Start nothing yet: the thread starts with the first pass.

        Args:
            group: Of all ranks; used by nobody else from here on.
            timeout: Seconds for which a rank may be silent while another waits for it, where a pass does not say.
            end_process: What is done where a rank is lost, a pass is to end the process then, and its training thread
                has not heard of it within `GRACE` seconds: it may be stuck in a collective.
            join_table: Returns a table, if the ranks can have one; called once, on all of them, in the background.

        Raises:
            ArgumentError: If `timeout` is not positive.
        """
        if not timeout > 0:
            raise ArgumentError(f"timeout must be positive, got {timeout}. Give seconds; the default is 1800.")
        self.group, self.timeout, self._end_process = group, timeout, end_process
        self.heartbeat = min(1.0, timeout / 8)
        self.changed = threading.Condition()
        self._passes: dict[int, Agreement] = {}  # opened here, not decided
        self._common: list[int] = []  # opened by all, not decided: the layout of the next round
        self._opened = self._opened_by_all = 0
        self._asking = False
        self._answer: list[dict[int, Outlook]] | None = None
        self._lost: PeerLostError | None = None
        self._heard = False
        self._closed = False
        self._join_table = join_table
        self.table: ProgressTable | None = None
        self._thread: threading.Thread | None = None

    def open(
        self,
        prefetch: int,
        *,
        ends_must_agree: bool = False,
        label: str = "",
        name: str = "the data",
        timeout: float | None = None,
        same_data: bool = False,
        ends_apart: int | None = None,
        exit_when_lost: bool = False,
        first_step: int = 0,
    ) -> Agreement:
        """Start a pass; all ranks open theirs in the same order. Waits for nothing.

        Args:
            prefetch: How many steps may be read ahead of the one delivered; from 1, which leaves no room to
                agree while training goes on.
            ends_must_agree: Whether ends at different steps are an error.
            label: What is iterated over, of `facts.described`. Must be equal on all ranks; what differs is named.
            name: Of the loader, for messages.
            timeout: Seconds for which a rank may be silent while another waits for it; None: the coordinator's.
            same_data: Whether all ranks read the same, and say with each step what (`Agreement.note_read`).
            ends_apart: By how many steps their ends may differ then; None: by any number.
            exit_when_lost: Whether the process ends when a rank is lost while the pass is open.
            first_step: The epoch's step with which the pass begins, for messages.

        Raises:
            ArgumentError: If `prefetch` is less than 1, or the coordinator is closed.
        """
        if prefetch < 1:
            raise ArgumentError(f"prefetch must be at least 1, got {prefetch}.")
        with self.changed:
            if self._closed:
                raise ArgumentError("this coordinator is closed: make a new one, over a new group.")
            patience = self.timeout if timeout is None else timeout
            several = self.group.size > 1
            same, apart = same_data and several, ends_apart if same_data and several else None
            agreement = Agreement(
                self, self._opened, prefetch, ends_must_agree, label, name, patience, same, apart, first_step
            )
            agreement.exit_when_lost = exit_when_lost
            if self.group.size > 1:
                self._passes[self._opened] = agreement
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="paddle_shard-agree", daemon=True)
                    self._thread.start()
                    atexit.register(self._take_leave)
            self._opened += 1
            self.changed.notify_all()
        return agreement

    def close(self) -> None:
        """Leave the group and end the thread. Ranks that still need this one are told that it is gone."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        atexit.unregister(self._take_leave)
        self.group.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _take_leave(self) -> None:
        """Give the thread a moment, when the process ends, to tell the others of passes that were given up."""
        deadline = time.monotonic() + _LEAVE
        with self.changed:
            while self._lost is None and any(p.outlook.kind == CLOSED for p in self._passes.values()):
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self.changed.wait(left)

    @staticmethod
    def tag(label: str) -> int:
        """Return the number that stands for a label in a round."""
        return zlib.crc32(label.encode())

    def hear(self, agreement: Agreement) -> None:
        """Decide at once, where there are no others to ask; called with the lock held."""
        if self.group.size == 1:
            agreement.advance(decide(agreement.outlook.vector()), [agreement.outlook])
            self.changed.notify_all()

    def wait(self, agreement: Agreement, step: int, start: float, look_again: float | None = None) -> None:
        """Wait for news of a pass; called with the lock held.

        Args:
            agreement: Of the pass.
            step: That is asked for.
            start: When that began.
            look_again: Seconds after which to return at the latest; None: until there is news.

        Raises:
            PeerLostError: If the wait began at `start` and is over, or the group has lost a rank.
        """
        if self._lost is not None:
            self._heard = True
            self.changed.notify_all()
            raise PeerLostError.of(str(self._lost), self._lost.ranks, self._lost.timeout) from self._lost
        if self._closed:
            raise ArgumentError(f"step {step} cannot be agreed on: the coordinator was closed.")
        timeout, waited = agreement.timeout, time.monotonic() - start
        # To be told who is waited for, first to say so and at the timeout to raise it.
        told = timeout if agreement.noticed else min(NOTICE, timeout)
        over, grace = waited - told, 2 * self.heartbeat + 1.0  # for the others to say how far they are
        if over >= 0 and not self._asking:
            self._asking, self._answer = True, None
            self.changed.notify_all()
        if over >= grace or (over >= 0 and self._answer is not None):
            behind = self._behind(agreement, step)
            self._asking = False
            if told < timeout:
                agreement.noticed = True
                say_who_is_waited_for(self._name, agreement, step, waited, behind)
            elif over >= grace or behind:
                raise silence(agreement, step, behind)
            return  # nobody is: the next round brings it, or the next question is answered otherwise
        longest = -over if over < 0 else max(grace - over, 0.001)
        self.changed.wait(longest if look_again is None else min(longest, look_again))

    def _behind(self, agreement: Agreement, step: int) -> dict[int, str]:
        """Return the global ranks that keep `step` from being agreed on, and how far each is."""
        number = agreement.number
        behind = {} if self._answer else dict.fromkeys(self.group.absent(), "has not come to any loop yet")
        for name, said in zip(self.group.names, self._answer or (), strict=False):
            if number not in said:
                behind[name] = "has not started this loop"
            elif said[number].kind == OK and said[number].step <= step:
                behind[name] = f"has read up to step {agreement.first_step + said[number].step}"
        return behind

    def _exchange_notes(self) -> None:
        """Tell the others what this rank has noted; that of all steps which this round may release is among it."""
        with self.changed:
            mine = []
            for number in self._common:
                mine += [(number, step, payload) for step, payload in self._passes[number].send_notes()]
            said = b"".join(_NOTE.pack(number, step, len(payload)) + payload for number, step, payload in mine)
        for name, theirs in zip(self.group.names, self.group.gather(said), strict=True):
            at = 0
            while at < len(theirs):
                number, step, length = _NOTE.unpack_from(theirs, at)
                at += _NOTE.size + length
                with self.changed:
                    self._passes[number].hear_note(name, step, theirs[at - length : at])

    def _due(self) -> bool:
        return (
            self._opened > self._opened_by_all
            or (self._asking and self._answer is None)
            or any(self._passes[number].due() for number in self._common)
        )

    def _run(self) -> None:
        pause = 0.0
        try:
            self.table = self._join_table(self.group)
            while True:
                with self.changed:
                    if pause:  # this rank has said all it knows, and now waits for the others
                        self.changed.wait(pause)
                    deadline = time.monotonic() + self.heartbeat
                    while not (self._closed or self._due()) and (left := deadline - time.monotonic()) > 0:
                        self.changed.wait(left)
                    if self._closed:
                        return
                pause = 0.0 if self._round() else min(max(2 * pause, 0.001), _LONGEST_PAUSE)
        except Exception as error:
            lost = error if isinstance(error, PeerLostError) else PeerLostError.of(f"Agreement failed: {error!r}", [])
            with self.changed:
                self._lost = lost
                self.changed.notify_all()
            self.group.close()  # so that nobody waits for this rank's part in the next round
            self._tell(lost)

    def _tell(self, lost: PeerLostError) -> None:
        """Say who is lost, where the training thread may not be able to; end the process if that is wanted."""
        with self.changed:
            in_use = [a for a in self._passes.values() if a.outlook.kind != CLOSED]
            if self._closed or not in_use:
                return
            exits = any(agreement.exit_when_lost for agreement in in_use)
            then = f" This process ends in {GRACE:g} s (on_lost='exit')." if exits else ""
            logging.getLogger("paddle_shard").error("global rank %s: %s%s", self._name, lost, then)
            deadline = time.monotonic() + GRACE
            while exits and not (self._heard or self._closed) and (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)
            exits = exits and not self._heard and not self._closed
        if exits:
            self._end_process()

    @property
    def _name(self) -> int:
        return self.group.names[self.group.rank]

    def _round(self) -> bool:
        """Exchange what the ranks know; return whether that brought news."""
        with self.changed:
            noted = any(self._passes[number].unsent for number in self._common)
            in_use = [a.timeout for a in self._passes.values() if a.outlook.kind != CLOSED]
            self.group.timeout = max(min(in_use, default=self.timeout), _SHORTEST)
            vector = [self._opened, -int(self._asking and self._answer is None), -int(noted)]
            for number in self._common:
                vector += self._passes[number].outlook.vector()
        opened, asking, noting, *least = self.group.minimum(vector)
        if noting:
            self._exchange_notes()
        news, undecided = opened > self._opened_by_all, []
        for i, number in enumerate(self._common):
            decision, agreement = decide(least[WIDTH * i : WIDTH * (i + 1)]), self._passes[number]
            outlooks = []
            if decision.kind == OK:
                undecided.append(number)
            else:
                with self.changed:
                    if not decision.matches:
                        agreement.outlook.report = agreement.label.encode()
                    else:
                        agreement.report_read()
                    payload = agreement.outlook.pack()
                outlooks = [Outlook.unpack(said) for said in self.group.gather(payload)]
            with self.changed:
                news = agreement.advance(decision, outlooks) or news
                self.changed.notify_all()
        if asking:
            self._tell_all()
        with self.changed:
            for number in set(self._common) - set(undecided):
                del self._passes[number]
            self._common = [*undecided, *range(self._opened_by_all, opened)]
            self._opened_by_all = opened
            self.changed.notify_all()
        return news

    def _tell_all(self) -> None:
        """Take part in the answer to somebody whose patience is over: how far is each rank in each pass?"""
        with self.changed:
            mine = [(number, agreement.outlook) for number, agreement in self._passes.items()]
            payload = b"".join(_NUMBER.pack(number) + outlook.pack_numbers() for number, outlook in mine)
        answer = []
        for said in self.group.gather(payload):
            parts = [said[i : i + _NUMBER.size + SIZE] for i in range(0, len(said), _NUMBER.size + SIZE)]
            answer.append({_NUMBER.unpack_from(p)[0]: Outlook.unpack(p[_NUMBER.size :]) for p in parts})
        with self.changed:
            self._answer = answer
            self.changed.notify_all()
