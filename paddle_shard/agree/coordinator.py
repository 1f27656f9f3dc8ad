"""When do the ranks exchange what they know, and which threads learn the result?

All ranks take part in one series of rounds, each in one background thread. A round is one `minimum` of
`[passes opened, is any rank asking, has any rank a note]` and seven values per pass. It covers the passes that all
ranks are known to have opened and that are not decided. The results of earlier rounds alone determine these passes, so
the vector has the same layout on every rank, whatever its training thread does meanwhile. Passes cannot be mixed up if
they overlap (`zip(loader, loader)`), are closed early, or are opened by one rank before the others. When a pass is
decided, all ranks do one `gather`, in which each of them learns which ranks failed, ended or left.

A rank enters a round when it has read a window of steps, when its training thread waits, or after `heartbeat` seconds.
So no rank waits longer than that for a rank that has nothing new.

Ranks that share memory also have a progress table, on which each posts how many steps it can serve. Steps that all of
them have posted are delivered without a round. A round is then needed only to begin a pass, for notes, and to learn why
a rank stopped posting.
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
"""Seconds that a training thread has to learn that a rank is lost, before its process is ended."""
NOTICE = 5.0
"""Seconds for which a training thread waits for other ranks before it logs that, once per pass."""
_LONGEST_PAUSE = 0.02
_LEAVE = 1.0
_SHORTEST = 4.0
"""Least number of seconds that a rank may take to enter a round: several heartbeats, for any timeout of a pass."""
_NUMBER = struct.Struct("<q")
_NOTE = struct.Struct("<qqq")
"""Pass, step, and number of bytes of the note that follows."""


class Coordinator:
    """Owns the group and its background thread. With one rank there is no thread and no wait."""

    def __init__(
        self,
        group: Group,
        *,
        timeout: float = 1800.0,
        end_process: Callable[[], None] = lambda: os._exit(1),
        join_table: Callable[[Group], ProgressTable | None] = lambda group: None,
        introduction: bytes = b"",
    ) -> None:
        """Set up the coordinator; its thread starts with the first pass.

        Args:
            group: Group of all ranks; nothing else may use it from here on.
            timeout: Default timeout of a pass: seconds for which a rank may be silent while another waits for it.
            end_process: Called if a rank is lost, a pass has `exit_when_lost`, and its training thread has not learned
                of the loss within `GRACE` seconds: it may be stuck in a collective.
            join_table: Returns a progress table, if the ranks can have one; called once on each rank, in the
                background.
            introduction: What this rank tells all others when they first meet.

        Raises:
            ArgumentError: If `timeout` is not positive.
        """
        if not timeout > 0:
            raise ArgumentError(f"timeout must be positive, got {timeout}. Give seconds; the default is 1800.")
        self.group, self.timeout, self._end_process = group, timeout, end_process
        self.heartbeat = min(1.0, timeout / 8)
        self.changed = threading.Condition()
        self._passes: dict[int, Agreement] = {}  # opened on this rank, not decided
        self._common: list[int] = []  # opened on all ranks, not decided: the layout of the next round
        self._opened = self._opened_by_all = 0
        self._asking = False
        self._answer: list[dict[int, Outlook]] | None = None
        self._lost: PeerLostError | None = None
        self._heard = False
        self._closed = False
        self._join_table = join_table
        self.table: ProgressTable | None = None
        self._introduction = introduction
        self.introductions: dict[int, bytes] = {}
        """Global rank -> its introduction; empty until the ranks have met."""
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
        """Start a pass and return at once; all ranks open their passes in the same order.

        Args:
            prefetch: How many steps may be prefetched, at least 1. With 1, ranks cannot agree while training
                continues.
            ends_must_agree: True if ends at different steps are an error.
            label: Text of `facts.described` about the data. It must be equal on all ranks; errors name differences.
            name: Name of the loader, for messages.
            timeout: Seconds for which a rank may be silent while another waits for it; None: the coordinator's.
            same_data: True if all ranks read the same data, and give a digest with each step (`Agreement.note_read`).
            ends_apart: With `same_data`, by how many steps their ends may differ; None: by any number.
            exit_when_lost: True if the process ends when a rank is lost while the pass is open.
            first_step: The epoch's step with which the pass begins, for messages.

        Raises:
            ArgumentError: If `prefetch` is less than 1, or the coordinator is closed.
        """
        if prefetch < 1:
            raise ArgumentError(f"prefetch must be at least 1, got {prefetch}.")
        with self.changed:
            if self._closed:
                raise ArgumentError("this coordinator is closed: create a new one with a new group.")
            limit = self.timeout if timeout is None else timeout
            several = self.group.size > 1
            same, apart = same_data and several, ends_apart if same_data and several else None
            agreement = Agreement(
                self, self._opened, prefetch, ends_must_agree, label, name, limit, same, apart, first_step
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
        """Leave the group and end the thread. Ranks that still need this one learn that it is gone."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        atexit.unregister(self._take_leave)
        self.group.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _take_leave(self) -> None:
        """When the process ends, give the thread a moment to tell the others which passes were left."""
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
        """Decide at once if there are no other ranks; called with the lock held."""
        if self.group.size == 1:
            agreement.advance(decide(agreement.outlook.vector()), [agreement.outlook])
            self.changed.notify_all()

    def wait(self, agreement: Agreement, step: int, start: float, look_again: float | None = None) -> None:
        """Wait for news of a pass; called with the lock held.

        Args:
            agreement: The agreement of the pass.
            step: The step that is asked for.
            start: When the wait began.
            look_again: Most seconds to wait; None: until there is news.

        Raises:
            PeerLostError: The timeout has expired since `start`, or the group has lost a rank.
        """
        if self._lost is not None:
            self._heard = True
            self.changed.notify_all()
            raise PeerLostError.of(str(self._lost), self._lost.ranks, self._lost.timeout) from self._lost
        if self._closed:
            raise ArgumentError(f"step {step} cannot be agreed on: the coordinator was closed.")
        timeout, waited = agreement.timeout, time.monotonic() - start
        # Ask who is late twice: first to log it, and when the timeout expires to raise it.
        told = timeout if agreement.noticed else min(NOTICE, timeout)
        over, grace = waited - told, 2 * self.heartbeat + 1.0  # grace: time for the others to answer
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
            return  # no rank is late: the next round releases the step, or the next answer differs
        longest = -over if over < 0 else max(grace - over, 0.001)
        self.changed.wait(longest if look_again is None else min(longest, look_again))

    def _behind(self, agreement: Agreement, step: int) -> dict[int, str]:
        """Return the global ranks that keep `step` from being agreed on, and how far each is."""
        number = agreement.number
        behind = {} if self._answer else dict.fromkeys(self.group.absent(), "has not reached any loop yet")
        for name, said in zip(self.group.names, self._answer or (), strict=False):
            if number not in said:
                behind[name] = "has not started this loop"
            elif said[number].kind == OK and said[number].step <= step:
                behind[name] = f"has read up to step {agreement.first_step + said[number].step}"
        return behind

    def _exchange_notes(self) -> None:
        """Send this rank's notes to the others; they include the notes of all steps that this round may release."""
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
            self.introductions = dict(zip(self.group.names, self.group.gather(self._introduction), strict=True))
            while True:
                with self.changed:
                    if pause:  # this rank has sent all it knows, and now waits for the others
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
            self.group.close()  # so that no rank waits for this one in the next round
            self._tell(lost)

    def _tell(self, lost: PeerLostError) -> None:
        """Log who is lost, since the training thread may be unable to; end the process if a pass requires it."""
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
    def is_over(self) -> bool:
        """True if a rank is lost or this one has left: nothing will be agreed on any more."""
        return self._closed or self._lost is not None

    @property
    def _name(self) -> int:
        return self.group.names[self.group.rank]

    def _round(self) -> bool:
        """Exchange what the ranks know; return whether there is news."""
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
        """Answer a rank whose timeout has expired: how far is each rank in each pass?"""
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
