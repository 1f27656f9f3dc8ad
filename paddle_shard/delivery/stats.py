"""Is the training waiting for its data?"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from paddle.profiler import RecordEvent
from paddle.profiler.utils import in_profiler_mode

from paddle_shard.checks import check_count
from paddle_shard.clock import DEVICE, KINDS, LOADER, Cause, Clock, Spent, Stretch, clock
from paddle_shard.delivery.advice import (
    RECENT,
    TELLING_SECONDS,
    TRAINING_THREAD,
    Summary,
    Taken,
    advice,
    in_ms,
    shown,
    summary_of,
)
from paddle_shard.delivery.memory import LOOK_SECONDS, UNTOLD, Memory, is_short, left_of_host, memory, shortage
from paddle_shard.delivery.metrics import serve
from paddle_shard.place.device import DeviceWatch
from paddle_shard.reading.batch import Batch
from paddle_shard.say_once import say_once
from paddle_shard.shown import as_html

_LOADER, _DEVICE = (LOADER, ""), (DEVICE, "")
_STALL, _STALL_SECONDS, _STALL_AFTER = 10.0, 1.0, 8
"""A wait is a stall if it takes so many times the usual step, and so many seconds, after so many steps."""


@dataclass(slots=True)
class Counts:
    """Counts of what was delivered to this rank in some period, and how the time was spent."""

    batches: int = 0
    samples: int = 0
    """Real rows of this rank's slices."""
    padding: int = 0
    """Padding rows in this rank's slices, which follow the end of the data or of a part of a stream."""
    skipped: int = 0
    """Rows of samples that could not be read (`on_error="skip"`; their ids are in the log)."""
    bytes: int = 0
    """Size in bytes of the rows that this rank reads, of the fields that are delivered."""
    wait_seconds: float = 0.0
    """Seconds spent in the loader: reading (without workers), placing, and waiting for data."""
    causes: dict[Cause, float] = field(default_factory=dict)
    """`wait_seconds` by what they were spent for, and whose it is: ("function", "`augment` in map()") -> seconds."""
    hidden_seconds: float = 0.0
    """Of `wait_seconds`, those that cost nothing: a device was busy, or would have been if data had come at once."""
    step_seconds: float = 0.0
    """Seconds that the user's code spent between two batches."""
    largest_cost: float = 0.0
    """With `balance=`: the cost of the data rank that has most, added up over all micro-batches."""
    mean_cost: float = 0.0
    """With `balance=`: the mean cost of a data rank, added up over all micro-batches."""

    def __add__(self, other: Counts) -> Counts:
        """Return the counts of both periods."""
        names, causes = [one.name for one in fields(self) if one.name != "causes"], dict(self.causes)
        for cause, seconds in list(other.causes.items()):
            causes[cause] = causes.get(cause, 0.0) + seconds
        return Counts(causes=causes, **{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def waits(self) -> dict[str, float]:
        """`wait_seconds` by what they were spent for; they add up to it."""
        found = dict.fromkeys(KINDS, 0.0)
        for (kind, _), seconds in list(self.causes.items()):
            if kind in found:  # else it is not known yet what is waited for
                found[kind] += seconds
        return found

    @property
    def starved(self) -> float:
        """Share of the time that was spent in the loader and not hidden by the device, from 0 to 1; 0.1 is a lot."""
        total = self.wait_seconds + self.step_seconds
        return (self.wait_seconds - self.hidden_seconds) / total if total else 0.0

    @property
    def imbalance(self) -> float:
        """Cost of the data rank that has most, over the mean: 1.0 if all have the same, or costs are not given."""
        return self.largest_cost / self.mean_cost if self.mean_cost else 1.0

    @property
    def samples_per_second(self) -> float:
        """Real rows of this rank, per second of all that was spent in the loader and between two batches."""
        total = self.wait_seconds + self.step_seconds
        return self.samples / total if total else 0.0


DERIVED = ("waits", "starved", "imbalance", "samples_per_second")
"""Properties of `Counts` that `scalars` returns beside its fields."""


OF_COSTS = ("largest_cost", "mean_cost", "imbalance")
"""Those that are measured with `balance=` only."""


class LoaderStats:
    """Counts of what a loader has delivered to this rank: over the run, and in the newest pass.

    `str()` of it tells in two sentences whether the training waits for data, why, and what would help. If there are
    several ranks, they tell each other every few seconds, and all say the same.

    Examples:
        >>> stats = LoaderStats()
        >>> stats.total.batches, stats.scalars()["data/starved"]
        (0, 0.0)
        >>> print(stats)
        Nothing is known yet: it takes some steps of a loop.
    """

    def __init__(
        self,
        who_reads: Callable[[], str] = str,
        num_replicas: int = 1,
        rank: int = 0,
        *,
        most_workers: int | None = None,
        num_ahead: int = 2,
    ) -> None:
        """Begin.

        Args:
            who_reads: Returns what is said of ranks that share a reader; empty if there are none.
            num_replicas: Ranks that read the same rows, each for itself; 1 if one reads for all of them.
            rank: This global rank.
            most_workers: Workers that have something to read: the parts of a stream on this rank; None: any number.
            num_ahead: Batches that a worker reads ahead.
        """
        self.epoch, self._closed, self._who_reads = Counts(), Counts(), who_reads
        self._open = list[Counts]()
        """Of passes that may deliver more."""
        self._about, self._rank, self.num_workers = (num_replicas, most_workers, num_ahead), rank, 0
        self.recent: deque[Taken] = deque(maxlen=RECENT)
        """The newest steps of this rank. The first one of a pass is among them if the pass before was as short as this,
        so that the beginning of a pass is a part of each of its steps."""
        self.short = False
        """True if the pass before was short."""
        self.most_lost = 0.0
        """Largest share of the rows of a pass of which it was logged that they are padding, or were dropped."""
        self.tells_at, self.tells_after = 0.0, TELLING_SECONDS[0]
        """When the first rank asks all to tell each other next, by `time.perf_counter`; and how long after that."""
        self.of_ranks: Mapping[int, Summary] = {}
        """Global rank -> where its time went, when they last told each other: the same on all ranks."""

    @property
    def total(self) -> Counts:
        """Counts of all passes of this rank."""
        return sum(self._open, self._closed)

    def begin_pass(self, num_workers: int) -> Counts:
        """Begin the counts of another pass, and return them."""
        self.short = 0 < self.epoch.batches <= RECENT
        self.epoch, self.num_workers = Counts(), num_workers
        self._open.append(self.epoch)
        return self.epoch

    def end_pass(self, counts: Counts) -> None:
        """Note that a pass delivers no more; safe to call again."""
        still = [one for one in self._open if one is not counts]
        if len(still) < len(self._open):
            self._closed, self._open = self._closed + counts, still

    def summary(self) -> Summary | None:
        """Return where the time of this rank went in its newest steps; None: it is not known yet."""
        return summary_of(self.recent, self.num_workers, *self._about)

    @property
    def memory(self) -> Memory:
        """Whose the memory of this host is now: this rank's, its workers', shared, and what is left; in bytes.

        The loader looks every few seconds, and logs a line before it is full, with what would help.
        """
        return memory()

    @property
    def who_reads(self) -> str:
        """With `replicas=`: which global rank reads for this one, or which others this one reads for; or empty."""
        return self._who_reads()

    def scalars(self, prefix: str = "data/") -> dict[str, float]:
        """Return this rank's counts of the newest pass as numbers by name, for `LogWriter.add_scalar` or TensorBoard.

        They begin at 0 with each pass. `step_seconds` is all that your code does between two batches. Costs and
        imbalance are there with `balance=` only.
        """
        found = asdict(self.epoch) | {name: getattr(self.epoch, name) for name in DERIVED}
        del found["causes"]
        found |= {f"waits/{kind.replace(' ', '_')}": seconds for kind, seconds in found.pop("waits").items()}
        if not self.total.mean_cost:
            found = {name: value for name, value in found.items() if name not in OF_COSTS}
        return {f"{prefix}{name}": float(value) for name, value in found.items()}

    def told(self) -> Mapping[int, Summary]:
        """Return where the time went, by global rank: as the ranks have told each other, or of this one alone."""
        own = self.summary()
        return self.of_ranks or ({} if own is None else {self._rank: own})

    def serve(self, port: int, address: str = "127.0.0.1") -> Any:
        """Serve the statistics to Prometheus, at `http://<address>:<port>/metrics`, from global rank 0.

        On other ranks it does nothing, so a script may call it on all. The totals are those of rank 0. How long a step
        of each rank takes, and what it waits for, is there for all of them.

        Args:
            port: Port to listen at; 0 picks a free one, which is the `server_port` of what is returned.
            address: Address to listen at. "" is all of this host's: then anyone in the network can read them.

        Returns:
            The HTTP server, which ends with the process or by its `shutdown()`; None on other ranks.

        Raises:
            MissingDependencyError: `prometheus_client` is not installed (the extra `metrics`).
            OSError: The port is in use, or the address is none of this host's.

        Examples:
            >>> loader.stats.serve(9400)  # doctest: +SKIP
        """
        check_count("port", port, 0)
        return serve(lambda: (self.total, self.told()), self._rank, port, address) if self._rank == 0 else None

    def __str__(self) -> str:
        return advice(self.told())

    def _repr_html_(self) -> str:
        def facts() -> dict[str, Any]:
            of_epoch = self.epoch
            counts = f"{of_epoch.batches} batches, {of_epoch.samples} samples, {of_epoch.bytes / 1e6:.1f} MB"
            loop = f"{of_epoch.step_seconds:.2f} s in the step, {_waits(of_epoch)}"
            return {"in short": str(self), "newest pass": counts, "its time": loop}

        def causes() -> list[dict[str, Any]]:
            waits = sorted(self.epoch.waits.items(), key=lambda item: -item[1])
            whole = self.epoch.wait_seconds or 1.0
            return [
                {"waits for": kind, "seconds": f"{seconds:.3f}", "share": f"{seconds / whole:.0%}"}
                for kind, seconds in waits
                if seconds
            ]

        return as_html(self, facts, causes)

    def __repr__(self) -> str:
        lines = [
            f"{name}: {c.batches} batches, {c.samples} samples ({c.skipped} skipped, {c.padding} rows of padding), "
            f"{c.bytes / 1e6:.1f} MB, "
            f"{_waits(c)}, {c.step_seconds:.2f} s in the step ({c.starved:.0%} starved)"
            + (f", imbalance {c.imbalance:.3f}" if c.mean_cost else "")
            for name, c in (("newest pass", self.epoch), ("all", self.total))
        ]
        with contextlib.suppress(*UNTOLD):
            lines.append(f"memory: this rank has {self.memory}")
        return "\n".join(lines + [self.who_reads] * bool(self.who_reads))


def _waits(counts: Counts) -> str:
    hidden = counts.hidden_seconds
    beside = f" and {hidden:.2f} s more while the device was busy" if hidden else ""
    return f"{counts.wait_seconds - hidden:.2f} s waiting for data{beside}"


class PassClock:
    """Measures the time of one pass: how much is spent in the loader, for what, and how much in the user's code?"""

    def __init__(self, stats: LoaderStats, num_workers: int = 0, watch: DeviceWatch | None = None) -> None:
        self._stats, self._counts, self._watch = stats, stats.begin_pass(num_workers), watch
        self._spent = Spent()
        self._counts.causes = self._spent.seconds
        self._before: dict[Cause, float] = {}
        """What was booked to each cause when the last batch was delivered: what a batch has cost is known from that if
        anybody asks, and costs no time here."""
        self._left: float | None = None
        self._step = 0.0
        self._told_stall, self._looks_at = False, time.perf_counter() + LOOK_SECONDS
        self._outer = clock().begin(LOADER, self._spent)
        self._began, self._earlier = clock().since, 0.0
        """Seconds in the loader before the next batch is asked for, which belong to it."""

    def begun(self) -> None:
        """Note that the pass has begun, as far as that is done before its first batch is asked for."""
        self._earlier = self._end(self._began)
        ended = self._began + self._earlier
        self._spent.stretches.append(Stretch(TRAINING_THREAD, self._began, ended, dict(self._spent.seconds)))
        self._left = None

    def enter(self, handed: float) -> float:
        """Note that the user asks for a batch; return the time.

        Args:
            handed: When the batch before was handed to the user: a little after `leave`, as the position is noted in
                between.
        """
        if (Clock.spans is not None) != in_profiler_mode():  # to set it would slow down all calls of a clock
            Clock.spans = RecordEvent if Clock.spans is None else None
        mine = clock()
        self._outer = mine.begin(LOADER, self._spent)
        now = mine.since  # its own times, so that the causes add up to the wait
        if self._left is not None:
            self._step, self._earlier = now - handed, handed - self._left
            counts, seconds = self._counts, self._spent.seconds
            counts.step_seconds += self._step
            counts.wait_seconds += self._earlier
            seconds[_LOADER] = seconds.get(_LOADER, 0.0) + self._earlier
            if self._watch is not None:
                self._watch.asked()
        return now

    def leave(self, entered: float, batch: Batch) -> None:
        """Note that a batch is delivered."""
        samples = num_rows = batch.num_rows
        skipped, (largest, mean) = 0, batch.step.load
        if batch.skipped is not None:
            skipped += int(np.count_nonzero(batch.skipped & batch.served()))
        if batch.skipped is not None or not batch.whole:
            samples = int(np.count_nonzero(batch.valid()))
        counts, spent, before, handed = self._counts, self._spent, self._before, self._left
        took, num_bytes = self._end(entered), batch.placed.num_bytes
        wait, left, after = self._earlier + took, entered + took, dict(spent.seconds)
        self._before = after
        hidden = after.get(_DEVICE, 0.0) - before.get(_DEVICE, 0.0)
        if self._watch is not None and handed is not None:
            hidden = max(hidden, self._watch.hidden(self._step, wait, left))
        taken = Taken(
            self._step,
            (entered, left),
            wait,
            hidden,
            (before, after),
            spent.work,
            spent.cpu,
            spent.slowest,
            spent.stretches,
            samples,
            num_bytes,
        )
        spent.begin_anew()
        counts.batches += 1
        counts.samples += samples
        counts.skipped += skipped
        counts.padding += num_rows - samples - skipped
        counts.bytes += num_bytes
        counts.largest_cost += largest
        counts.mean_cost += mean
        counts.hidden_seconds += hidden
        if handed is not None and wait - hidden >= _STALL_SECONDS:
            self._say_if_stalled(taken, batch)
        if handed is not None or self._stats.short:
            self._stats.recent.append(taken)
        if entered >= self._looks_at:
            self._looks_at = entered + LOOK_SECONDS
            with contextlib.suppress(*UNTOLD):
                if is_short(*left_of_host()):
                    self._looks_at = math.inf  # once a pass
                    say_once(shortage(memory()))

    def end(self, entered: float) -> None:
        """Note that there was no further batch."""
        self._end(entered)
        self._left = None

    def close(self) -> None:
        """Note that no more is delivered; safe to call again."""
        self._stats.end_pass(self._counts)

    def _end(self, entered: float) -> float:
        """End booking the time of a batch, and return it; an error may come after that."""
        outer, self._outer = self._outer, None
        if outer is None:
            return 0.0
        mine = clock()
        mine.end(outer)
        self._left = now = mine.since
        self._counts.wait_seconds += now - entered
        return now - entered

    def _say_if_stalled(self, taken: Taken, batch: Batch) -> None:
        """Log a wait of a second or more that is much longer than usual, once a pass."""
        recent = self._stats.recent
        if self._told_stall or len(recent) < _STALL_AFTER:
            return
        usual = sum(one.wait + one.step for one in recent) / len(recent)
        if taken.wait < _STALL * usual:
            return
        self._told_stall = True
        cause, seconds = max(taken.seconds.items(), key=lambda item: item[1])
        slow, name = taken.slowest
        part = "Most of it" if seconds > taken.wait / 2 else "The largest part of it"
        sample = f" The slowest sample, {name}, took {in_ms(slow)}." if slow > taken.wait / 2 else ""
        say_once(
            f"step {batch.step.number} of epoch {batch.step.epoch}: data came after {in_ms(taken.wait)}, and a step "
            f"usually takes {in_ms(usual)}. {part} was {shown(cause)} ({in_ms(seconds)}).{sample}"
        )
