"""Is the training waiting for its data?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from paddle_shard.reading.batch import Batch


@dataclass(slots=True)
class Counts:
    """Counts of what was delivered to this rank in some period, and how the time was spent."""

    batches: int = 0
    samples: int = 0
    """Real rows of this rank's slices."""
    padding: int = 0
    """Padding rows in this rank's slices, which follow the end of the data or of a part of a stream."""
    skipped: int = 0
    """Rows of samples that could not be read (`on_error="skip"`; their ids are in the log), or that you leave out
    (`loader.skip`)."""
    bytes: int = 0
    """Size in bytes of the rows that this rank reads, of the fields that are delivered."""
    wait_seconds: float = 0.0
    """Seconds spent in the loader: reading (without workers), placing, and waiting for data."""
    step_seconds: float = 0.0
    """Seconds that the user's code spent between two batches."""
    largest_cost: float = 0.0
    """With `balance=`: the cost of the data rank that has most, added up over all micro-batches."""
    mean_cost: float = 0.0
    """With `balance=`: the mean cost of a data rank, added up over all micro-batches."""

    @property
    def starved(self) -> float:
        """Share of the time that was spent in the loader, from 0 to 1; 0.1 is a lot."""
        total = self.wait_seconds + self.step_seconds
        return self.wait_seconds / total if total else 0.0

    @property
    def imbalance(self) -> float:
        """Cost of the data rank that has most, over the mean: 1.0 if all have the same, or costs are not given."""
        return self.largest_cost / self.mean_cost if self.mean_cost else 1.0

    @property
    def samples_per_second(self) -> float:
        """Real rows of this rank, per second of all that was spent in the loader and between two batches."""
        total = self.wait_seconds + self.step_seconds
        return self.samples / total if total else 0.0


DERIVED = ("starved", "imbalance", "samples_per_second")
"""Properties of `Counts` that `scalars` returns beside its fields."""


OF_COSTS = ("largest_cost", "mean_cost", "imbalance")
"""Those that are measured with `balance=` only."""


class LoaderStats:
    """Counts of what a loader has delivered to this rank: over the run, and in the newest pass.

    Examples:
        >>> stats = LoaderStats()
        >>> stats.total.batches, stats.scalars()["data/starved"]
        (0, 0.0)
    """

    def __init__(self, who_reads: Callable[[], str] = str) -> None:
        """Begin.

        Args:
            who_reads: Returns what is said of ranks that share a reader; empty if there are none.
        """
        self.total, self.epoch, self._who_reads = Counts(), Counts(), who_reads

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
        if not self.total.mean_cost:
            found = {name: value for name, value in found.items() if name not in OF_COSTS}
        return {f"{prefix}{name}": float(value) for name, value in found.items()}

    def __repr__(self) -> str:
        lines = [
            f"{name}: {c.batches} batches, {c.samples} samples ({c.skipped} skipped, {c.padding} rows of padding), "
            f"{c.bytes / 1e6:.1f} MB, "
            f"{c.wait_seconds:.2f} s waiting for data, {c.step_seconds:.2f} s in the step ({c.starved:.0%} starved)"
            + (f", imbalance {c.imbalance:.3f}" if c.mean_cost else "")
            for name, c in (("newest pass", self.epoch), ("all", self.total))
        ]
        return "\n".join(lines + [self.who_reads] * bool(self.who_reads))


class PassClock:
    """Measures the time of one pass: how much is spent in the loader, and how much in the user's code?"""

    def __init__(self, stats: LoaderStats) -> None:
        stats.epoch = Counts()
        self._counts = (stats.epoch, stats.total)
        self._left: float | None = None

    def enter(self) -> float:
        """Note that the user asks for a batch; return the time."""
        now = time.perf_counter()
        if self._left is not None:
            for counts in self._counts:
                counts.step_seconds += now - self._left
        return now

    def leave(self, entered: float, batch: Batch) -> None:
        """Note that a batch is delivered."""
        num_rows, skipped, (largest, mean) = batch.num_rows, batch.num_skipped(), batch.step.load
        whole = batch.real is None and batch.skipped is None
        samples = num_rows if whole else int(np.count_nonzero(batch.valid()))
        self._left = now = time.perf_counter()
        for counts in self._counts:
            counts.batches += 1
            counts.samples += samples
            counts.skipped += skipped
            counts.padding += num_rows - samples - skipped
            counts.bytes += batch.placed.num_bytes
            counts.wait_seconds += now - entered
            counts.largest_cost += largest
            counts.mean_cost += mean

    def end(self, entered: float) -> None:
        """Note that there was no further batch."""
        now = time.perf_counter()
        for counts in self._counts:
            counts.wait_seconds += now - entered
        self._left = None
