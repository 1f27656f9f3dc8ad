"""Where does the time of a thread go?

The clock of a thread is always at one cause: what it does now. So the times of all causes add up to the time that has
passed. Who hands a batch to another thread or process sends with it where the time of making it went (`Spent`), and who
has waited for it books the wait to the same causes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

Cause = tuple[str, str]
"""(kind, name): what takes the time, and whose it is, such as ("function", "`augment` in map()")."""

READING, FUNCTION, COLLATING, SAMPLER = "reading", "function", "collating", "sampler"
STARTING, TRANSPORT, TENSORS, PLACING = "starting workers", "transport", "tensors", "placing"
RANKS, LEADER, LOADER, DEVICE = "other ranks", "leader", "loader", "device"
KINDS = (READING, FUNCTION, COLLATING, SAMPLER, STARTING, TRANSPORT, TENSORS, PLACING, RANKS, LEADER, LOADER, DEVICE)
"""All kinds of causes; `docs/speed.md` tells what they are."""
MADE_BY_READERS = {READING, FUNCTION, COLLATING}
"""The kinds that more readers would share."""
IDLE, WAITING = "", "waiting"
"""Nothing of ours: the user's loop, or a worker that waits for a request; and a wait until `blame` tells for what."""
_FINE, _FINE_FOR = 100e-6, 32
"""Seconds a sample from which on samples and functions are timed one by one, and for how many batches: looking at a
clock takes a quarter of a microsecond, and quick samples tell nothing."""
SLOW = 1e-3
"""Seconds from which on the slowest sample of a batch is named."""


class Stretch(NamedTuple):
    """A stretch of time in which a worker or a thread has made something; in seconds of `time.perf_counter`."""

    who: str
    began: float
    ended: float
    seconds: dict[Cause, float]


class Spent(NamedTuple):
    """Where the time went in which something was made."""

    seconds: dict[Cause, float]
    """In the thread or process that has made it. Waiting is booked to what it waited for."""
    slowest: tuple[float, str] = (0.0, "")
    """Seconds of the slowest sample that was timed, and its name."""
    work: dict[Cause, float] | None = None
    """Seconds of all readers together, also those that nobody has waited for; None: `seconds`."""
    cpu: float = 0.0
    """Seconds for which readers have computed; the rest they have waited, as for a disk."""
    stretches: tuple[Stretch, ...] = ()
    """Of the workers and threads that took part; the one that has made it is the last."""

    @property
    def made(self) -> dict[Cause, float]:
        """What all readers together have done."""
        return self.seconds if self.work is None else self.work

    def after(self, before: Spent) -> Spent:
        """Return this with what was spent directly before it."""
        return Spent(
            _added(before.seconds, self.seconds),
            max(before.slowest, self.slowest),
            _added(before.made, self.made),
            before.cpu + self.cpu,
            before.stretches + self.stretches,
        )


def _added(one: dict[Cause, float], other: dict[Cause, float]) -> dict[Cause, float]:
    return {cause: one.get(cause, 0.0) + other.get(cause, 0.0) for cause in one | other}


class Clock:
    """The clock of one thread."""

    __slots__ = ("_cause", "_seconds", "_slowest", "_span", "_stretches", "_work", "cpu", "fine", "since")

    spans: Callable[[str], Any] | None = None
    """Makes a span of a profiler, with `begin` and `end`, while one is running; set by whoever knows the profiler."""

    def __init__(self) -> None:
        self._span: Any = None
        self._cause, self.since = (IDLE, ""), time.perf_counter()
        """`since`: when it moved to the cause at which it is; in seconds of `time.perf_counter`."""
        self._seconds: dict[Cause, float] = {}
        self._work: dict[Cause, float] = {}
        self._stretches: list[Stretch] = []
        self._slowest, self.cpu = (0.0, ""), 0.0
        """Seconds for which readers have computed."""
        self.fine = _FINE_FOR
        """Not 0 if samples and functions are timed one by one: for so many batches."""

    def to(self, cause: Cause) -> Cause:
        """Move to a cause, and return the one before."""
        now, seconds, before = time.perf_counter(), self._seconds, self._cause
        seconds[before] = seconds.get(before, 0.0) + now - self.since
        self.since, self._cause = now, cause
        if self.spans is not None or self._span is not None:
            self._mark(*cause)
        return before

    def _mark(self, kind: str, name: str) -> None:
        """End the span of a profiler that is open, and begin that of a cause."""
        if self._span is not None:
            self._span.end()
        self._span = None
        if self.spans is not None and kind not in (IDLE, LOADER):  # those go on where the user's code does
            self._span = self.spans(f"paddle_shard: {kind} {name}".rstrip())
            self._span.begin()

    def begin(self, kind: str) -> Any:
        """Begin an account of its own; return what `end` needs."""
        before = self.to((kind, ""))
        outer = (before, self.since, self._seconds, self._work, self._stretches, self._slowest, self.cpu)
        self._seconds, self._work, self._stretches, self._slowest, self.cpu = {}, {}, [], (0.0, ""), 0.0
        return outer

    def end(self, outer: Any, who: str = "") -> Spent:
        """End the account, whose time belongs to the cause before it, too; return it.

        Args:
            outer: What `begin` has returned.
            who: Name of the worker or thread.
        """
        self.to((IDLE, ""))
        self._seconds.pop((IDLE, ""), None)
        if (WAITING, "") in self._seconds:  # what it was waited for has failed
            self.blame(None)
        # A worker that has waited for a request begins when it no longer does.
        mine = Stretch(who, self.since - sum(self._seconds.values()), self.since, self._seconds)
        found = Spent(self._seconds, self._slowest, self._work or None, self.cpu, (*self._stretches, mine))
        self._cause, began, self._seconds, self._work, self._stretches, self._slowest, self.cpu = outer
        self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + self.since - began
        return found

    def blame(self, spent: Spent | None) -> None:
        """Book the time that was spent waiting to what it was waited for."""
        waited = self._seconds.pop((WAITING, ""), 0.0)
        made = {} if spent is None else spent.seconds
        total = sum(made.values())
        for cause, seconds in (made if total else {(TRANSPORT, ""): 1.0}).items():
            self._seconds[cause] = self._seconds.get(cause, 0.0) + waited * seconds / (total or 1.0)
        if spent is not None:
            for cause, seconds in spent.made.items():
                self._work[cause] = self._work.get(cause, 0.0) + seconds
            self.note(*spent.slowest)
            self.cpu += spent.cpu
            self._stretches += spent.stretches

    def read(self, seconds: float, num_samples: int) -> None:
        """Note how long the samples of a batch took."""
        self.fine = _FINE_FOR if seconds >= _FINE * num_samples else max(0, self.fine - 1)

    def note(self, seconds: float, name: str) -> None:
        """Note how long a sample took, if that matters."""
        if seconds > max(self._slowest[0], SLOW):
            self._slowest = seconds, name


class _Clocks(threading.local):
    def __init__(self) -> None:
        self.own = Clock()


_clocks = _Clocks()


def clock() -> Clock:
    """Return the clock of this thread."""
    return _clocks.own


class at:
    """Book the time of a `with` block of this thread to a cause."""

    __slots__ = ("_before", "_cause", "_mine")

    def __init__(self, kind: str, name: str = "") -> None:
        self._cause = kind, name

    def __enter__(self) -> Clock:
        self._mine = _clocks.own
        self._before = self._mine.to(self._cause)
        return self._mine

    def __exit__(self, *error: object) -> None:
        self._mine.to(self._before)


def start_anew() -> Clock:
    """Return a new clock of this thread: in a forked child, its parent's time is not its own."""
    _clocks.own = Clock()
    return _clocks.own


def named(function: Any, where: str = "") -> str:
    """Return the name of the user's function, for a cause."""
    function = getattr(function, "func", function)  # of a `functools.partial`
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"`{name.rpartition('<locals>.')[2]}`{where}"
