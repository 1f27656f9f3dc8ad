"""Statistics: what was delivered to this rank, and how long the training loop waited for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paddle_shard.reading.batch import Batch
from paddle_shard.reading.profile import OTHER_RANKS, Profiler, describe_waits

DERIVED = ("starved", "imbalance", "samples_per_second")
"""Properties of `Counts` that `scalars` returns beside its fields."""


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
    wait_seconds: float = 0.0
    """Seconds for which the training loop waited in `next`."""
    hidden_seconds: float = 0.0
    """Seconds of `wait_seconds` that cost nothing, since the device still computed the step before."""
    step_seconds: float = 0.0
    """Seconds that the user's code spent between two batches."""
    largest_cost: float = 0.0
    """With `balance=`: the cost of the data rank that has most, added up over all micro-batches."""
    mean_cost: float = 0.0
    """With `balance=`: the mean cost of a data rank, added up over all micro-batches."""

    def __add__(self, other: Counts) -> Counts:
        """Return the counts of both periods."""
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__dataclass_fields__
        }
        return Counts(**sums)

    def add(self, batch: Batch) -> None:
        """Count a delivered batch."""
        self.batches += 1
        self.samples += batch.num_valid
        self.skipped += batch.num_skipped
        self.padding += batch.num_padding
        if batch.step.load[0]:
            self.largest_cost += batch.step.load[0]
            self.mean_cost += batch.step.load[1]

    @property
    def starved(self) -> float:
        """Share of the time that was spent waiting for data and not hidden by the device, from 0 to 1; 0.1 is a lot."""
        total = self.wait_seconds + self.step_seconds
        return (
            (self.wait_seconds - self.hidden_seconds) / total if total else 0.0
        )

    @property
    def imbalance(self) -> float | None:
        """Cost of the data rank that has most, over the mean: 1.0 if all have the same. None without `balance=`."""
        return self.largest_cost / self.mean_cost if self.mean_cost else None

    @property
    def samples_per_second(self) -> float:
        """Real rows of this rank, per second of all that was spent in the loader and between two batches."""
        total = self.wait_seconds + self.step_seconds
        return self.samples / total if total else 0.0


WaitSummary = tuple[float, float, float, Mapping[str, float]]
"""(wait, step and hidden seconds of a mean step of the newest iteration; what was waited for, by category)."""


class LoaderStats:
    """Counts of what a loader has delivered to this rank.

    `epoch` are the `Counts` of the newest iteration, `total` those of all iterations. `str()` describes in a sentence
    or two which share of a step waits for data, on which rank, and for what. Ranks exchange that every second; with
    more than 64 ranks, less often.

    Examples:
        >>> stats = LoaderStats()
        >>> stats.total.batches, stats.scalars()["data/starved"]
        (0, 0.0)
        >>> print(stats)
        No step waits for data.
    """

    def __init__(self, rank: int = 0) -> None:
        """Begin; `rank` is this global rank."""
        self.epoch = Counts()
        self._closed = Counts()
        self._open: dict[int, Counts] = {}
        """Of passes that may deliver more, by their id."""
        self.rank = rank
        self.profiler = Profiler()
        self.of_ranks: dict[int, WaitSummary] = {}
        """Global rank -> its summary, when the ranks last exchanged them."""
        self.most_uneven = 0.0
        """Largest share of padding or dropped data that was logged."""

    @property
    def total(self) -> Counts:
        """Counts of all iterations of this rank."""
        return sum(self._open.values(), self._closed)

    def begin_pass(self) -> Counts:
        """Begin the counts of another pass, and return them."""
        self.epoch = Counts()
        self._open[id(self.epoch)] = self.epoch
        return self.epoch

    def end_pass(self, counts: Counts) -> None:
        """Note that a pass delivers no more; safe to call again."""
        if self._open.pop(id(counts), None) is not None:
            self._closed = self._closed + counts
            if not self._open:
                self.profiler.stop()

    def summary(self) -> WaitSummary:
        """Return what the newest iteration of this rank waited for."""
        counts, steps = self.epoch, max(1, self.epoch.batches)
        seconds = (
            counts.wait_seconds / steps,
            counts.step_seconds / steps,
            counts.hidden_seconds / steps,
        )
        return *seconds, dict(self.profiler.counts())

    def __str__(self) -> str:
        summaries = self.of_ranks | {self.rank: self.summary()}
        # The rank that waits longest for something of its own holds the others up.
        slowest = max(summaries, key=lambda rank: _own_wait(summaries[rank]))
        return (
            describe_waits(*summaries[slowest], slowest)
            or "No step waits for data."
        )

    def scalars(self, prefix: str = "data/") -> dict[str, float]:
        """Return the counts of the newest iteration as numbers by name, for `LogWriter.add_scalar` or TensorBoard.

        They begin at 0 with each pass. `step_seconds` is all that your code does between two batches. Without
        `balance=`, costs are 0 and there is no imbalance.
        """
        names = (*Counts.__dataclass_fields__, *DERIVED)
        values = {name: getattr(self.epoch, name) for name in names}
        return {
            f"{prefix}{name}": float(value)
            for name, value in values.items()
            if value is not None
        }

    def __repr__(self) -> str:
        return f"newest iteration: {self.epoch}\nall: {self.total}"


def _own_wait(summary: WaitSummary) -> float:
    wait, _, hidden, counts = summary
    total = sum(counts.values())
    return (wait - hidden) * (
        1.0 - counts.get(OTHER_RANKS, 0.0) / total if total else 0.0
    )
