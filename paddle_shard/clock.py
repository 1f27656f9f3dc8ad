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
_IDLE, _WAITING = (IDLE, ""), (WAITING, "")
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


class Spent:
    """Where the time goes in which something is made: an account to which a clock books."""

    __slots__ = ("cpu", "seconds", "slowest", "stretches", "work")

    def __init__(self) -> None:
        self.seconds: dict[Cause, float] = {}
        """In the thread or process that makes it. Waiting is booked to what it waits for."""
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin the account of the next batch, as far as it is not the sum of all."""
        self.slowest: tuple[float, str] = (0.0, "")
        """Seconds of the slowest sample that was timed, and its name."""
        self.work: dict[Cause, float] = {}
        """Seconds of all other readers together, also those that nobody has waited for."""
        self.cpu = 0.0
        """Seconds for which readers have computed; the rest they have waited, as for a disk."""
        self.stretches: list[Stretch] = []
        """Of the workers and threads that took part."""

    @property
    def made(self) -> dict[Cause, float]:
        """What all readers together have done."""
        return self.work or self.seconds


class Clock:
    """The clock of one thread."""

    __slots__ = ("_cause", "_span", "fine", "since", "spent")

    spans: Callable[[str], Any] | None = None
    """Makes a span of a profiler, with `begin` and `end`, while one is running; set by whoever knows the profiler."""

    def __init__(self) -> None:
        self._span: Any = None
        self._cause, self.since = _IDLE, time.perf_counter()
        """`since`: when it moved to the cause at which it is; in seconds of `time.perf_counter`."""
        self.spent = Spent()
        """The account to which it books."""
        self.fine = _FINE_FOR
        """Not 0 if samples and functions are timed one by one: for so many batches."""

    def to(self, cause: Cause) -> Cause:
        """Move to a cause, and return the one before."""
        now, seconds, before = time.perf_counter(), self.spent.seconds, self._cause
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

    def begin(self, kind: str, spent: Spent | None = None) -> Any:
        """Begin to book to another account, a new one unless it is given; return what `end` needs."""
        before = self.to((kind, ""))
        outer, self.spent = (before, self.since, self.spent), Spent() if spent is None else spent
        return outer

    def end(self, outer: Any, who: str = "") -> Spent:
        """End what `begin` has begun, whose time belongs to the cause before it, too; return the account.

        Args:
            outer: What `begin` has returned.
            who: Name of the worker or thread, whose stretch is noted.
        """
        self.to(_IDLE)
        spent = self.spent
        if _WAITING in spent.seconds:  # what it was waited for has failed
            self.blame(None)
        if who:
            spent.seconds.pop(_IDLE, None)
            # A worker that has waited for a request begins when it no longer does.
            spent.stretches.append(Stretch(who, self.since - sum(spent.seconds.values()), self.since, spent.seconds))
        self._cause, began, self.spent = outer
        seconds = self.spent.seconds
        seconds[self._cause] = seconds.get(self._cause, 0.0) + self.since - began
        return spent

    def blame(self, spent: Spent | None) -> None:
        """Book the time that was spent waiting to what it was waited for."""
        mine = self.spent
        waited, made = mine.seconds.pop(_WAITING, 0.0), {} if spent is None else spent.seconds
        total = sum(made.values())
        for cause, seconds in (made if total else {(TRANSPORT, ""): 1.0}).items():
            mine.seconds[cause] = mine.seconds.get(cause, 0.0) + waited * seconds / (total or 1.0)
        if spent is not None:
            for cause, seconds in spent.made.items():
                mine.work[cause] = mine.work.get(cause, 0.0) + seconds
            self.note(*spent.slowest)
            mine.cpu += spent.cpu
            mine.stretches += spent.stretches

    def read(self, seconds: float, computed: float, num_samples: int) -> None:
        """Note how long the samples of a batch took, and for how much of it this thread has computed."""
        self.fine = _FINE_FOR if seconds >= _FINE * num_samples else max(0, self.fine - 1)
        self.spent.cpu += computed

    def note(self, seconds: float, name: str) -> None:
        """Note how long a sample took, if that matters."""
        if seconds > max(self.spent.slowest[0], SLOW):
            self.spent.slowest = seconds, name


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
