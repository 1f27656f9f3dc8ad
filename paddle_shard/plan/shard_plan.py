"""Which samples does a data rank read at a step, and at which step and rank is a sample read?"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.core.checks import check_count
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.mixture import Mixing, MixtureOrder
from paddle_shard.plan.order import Indices, Order, Ordering
from paddle_shard.plan.orders import Shuffle, find_ordering
from paddle_shard.plan.partition import (
    Rows,
    check_batch_size,
    nearest_multiples,
    place_of_rows,
    slice_rows,
)
from paddle_shard.plan.shuffle import MAX_SAMPLES
from paddle_shard.plan.skips import Ranges, is_in
from paddle_shard.plan.step import Deal, GlobalBatch, RowsOf, Step, all_rows, rank_steps
from paddle_shard.plan.tails import Tail, find_tail

# The steps of an epoch, if the batch size changes on the way


class Stretches:
    """The steps of an epoch, in stretches of batches of one size.

    Examples:
        >>> stretches = Stretches(((0, 4), (8, 3)), end=15)
        >>> [stretches.step(number) for number in range(5)], stretches.step_and_row(13)
        ([(0, 4), (4, 4), (8, 3), (11, 3), (14, 3)], (3, 2))
        >>> stretches.num_full, stretches.rest
        (4, 1)
    """

    def __init__(self, segments: tuple[tuple[int, int], ...], end: int) -> None:
        """Set up.

        Args:
            segments: (first position, batch size) of each stretch.
            end: Position after the last that is served or padded.
        """
        self._segments, self._steps = segments, [0]
        """The stretches, and the step at which each begins."""
        for (first, size), (stop, _) in pairwise(segments):
            self._steps.append(self._steps[-1] + -(-(stop - first) // size))
        first, size = segments[-1]
        full, self.rest = divmod(max(0, end - first), size)
        """`rest`: positions that are left for a short last batch."""
        self.num_full = self._steps[-1] + full
        """Steps without a short last batch."""

    def step(self, number: int) -> tuple[int, int]:
        """Return the position of the first row of a step, and the rows of a full batch there."""
        at = bisect_right(self._steps, number, 1) - 1
        first, size = self._segments[at]
        return first + (number - self._steps[at]) * size, size

    def step_and_row(self, position: int) -> tuple[int, int]:
        """Return the step that holds a position, and the row in its batch."""
        at = bisect_right(self._segments, position, key=lambda segment: segment[0]) - 1
        first, size = self._segments[at]
        step, row = divmod(position - first, size)
        return self._steps[at] + step, row


def check_segments(
    segments: tuple[tuple[int, int], ...], batch_size: int, num_positions: int
) -> None:
    """Refuse segments that do not describe an epoch.

    Raises:
        ArgumentError: They do not begin at 0, a batch of theirs is cut, or the last one has another batch size.
    """
    fine = segments[0][0] == 0 and segments[-1][1] == batch_size
    for (first, size), (end, _) in pairwise(segments):
        fine &= (
            size >= 1
            and end >= first
            and not ((end - first) % size and end != num_positions)
        )
    if not fine:
        raise ArgumentError(
            "segments must begin at 0, hold whole batches only, and end with this batch size "
            f"{batch_size}, got {segments}."
        )


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The global batch of each stretch of a run.

    A batch is never cut: a new size holds from the first batch that begins at the given sample or after it. What is
    left of an epoch is its short last batch, and the next epoch begins with the size that is due by then.

    Examples:
        >>> sizes = BatchSizes(((0, 4), (10, 6)))
        >>> sizes.segments(origin=0, at=0, end=30), sizes.segments(origin=30, at=0, end=30)
        (((0, 4), (12, 6)), ((0, 6),))
    """

    entries: tuple[tuple[int, int], ...]
    """(sample of the run, rows of a global batch from there on); the first sample is 0, and they ascend."""

    def __post_init__(self) -> None:
        firsts = [first for first, _ in self.entries]
        if firsts[:1] != [0] or any(one >= other for one, other in pairwise(firsts)):
            raise ArgumentError(
                f"batch_size: the schedule must begin at sample 0 and ascend, got {firsts}."
            )

    def segments(
        self, *, origin: int, at: int, end: int
    ) -> tuple[tuple[int, int], ...]:
        """Return (first position, batch size) for each stretch of an epoch.

        Args:
            origin: The sample of the run with which the epoch begins.
            at: Position in the epoch at which the first of the stretches begins.
            end: Position after the last.
        """
        due = [size for first, size in self.entries if first <= origin + at]
        found = [(at, due[-1])]
        for first, size in self.entries[len(due) :]:
            begun, before = found[-1]
            switch = begun + max(0, -(-(first - origin - begun) // before)) * before
            if switch >= end:
                break
            if switch == begun:
                found.pop()
            if not found or found[-1][1] != size:
                found.append((switch, size))
        return tuple(found)


# The plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The place in an epoch at which a sample is delivered."""

    step: int
    """The step of the epoch, from 0."""
    data_rank: int | None
    """The data rank; None if the batch of that step cannot be split evenly over these data ranks."""
    row: int | None
    """The row in that data rank's slice: `indices(epoch=, step=, data_rank=)[row]` is the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The order of a run over a data set of known length, and the data rank that reads each sample.

    The order is a function of (seed, epoch, position) alone; an order of blocks also depends on the rows of a
    micro-batch. Batch k begins at position k * batch_size. Every data rank takes an equal slice of it, so all data
    ranks make the same number of steps.

    Examples:
        >>> plan = ShardPlan(num_samples=10, batch_size=4, num_data_ranks=2)
        >>> plan.num_steps, plan.padding(step=2)
        (3, 0)
        >>> [plan.indices(epoch=0, step=2, data_rank=r).tolist() for r in range(2)]
        [[8], [9]]
        >>> plan.where(epoch=0, sample=6)
        Where(step=1, data_rank=1, row=0)
    """

    num_samples: int
    """Length of the data set, at least 1."""
    batch_size: int
    """The global batch: samples that one step consumes over all data ranks."""
    num_data_ranks: int
    """Product of the sizes of the data axes; the least common multiple if meshes differ."""
    shuffle: Shuffle = field(default=False, compare=False)
    """False: 0..n-1. True: a keyed permutation, a different one in each epoch. A `Blocks`: a shuffle that opens each
    block on disk on one data rank. "blocks": `Blocks()`. "paddle": the order of Paddle's
    `DistributedBatchSampler(shuffle=True)`, including its padding; it depends on `num_data_ranks`."""
    seed: int = 0
    """Seed of the keyed permutations."""
    tail: str = "pad"
    """What to do if the data does not fill the last global batch. "pad": fill it up to the padding unit with the
    first samples of the same epoch's order. "fill": fill it up to the batch size. "drop": do not serve it.
    "error": refuse such a length."""
    accumulation: int = 1
    """Micro-batches in a global batch (gradient accumulation)."""
    segments: tuple[tuple[int, int], ...] = ()
    """(first position, batch size) of each stretch of this epoch with one batch size, if the run was resumed with
    another batch size. The last entry is the stretch of `batch_size`."""
    ended: bool = False
    """True if the epoch ended at the start of the last segment: samples that the tail dropped there stay dropped."""
    ordering: Ordering = field(init=False, repr=False)
    """The ordering that `shuffle` names or is."""
    ending: Tail = field(init=False, repr=False, compare=False)
    """The tail that `tail` names."""
    num_steps: int = field(init=False, repr=False, compare=False)
    """Steps of an epoch, the same on every rank; 0 if "drop" leaves nothing."""
    num_positions: int = field(init=False, repr=False, compare=False)
    """Positions of an epoch: the samples; with "paddle", rounded up to a multiple of the data ranks."""
    num_served: int = field(init=False, repr=False, compare=False)
    """Positions that the steps of an epoch serve: all except those that "drop" drops."""
    _stretches: Stretches = field(init=False, repr=False, compare=False)
    _last_rows: int = field(init=False, repr=False, compare=False)
    """Rows of a short last batch; 0 if there is none, or if it is dropped."""

    def __post_init__(self) -> None:
        if isinstance(self.num_samples, int) and self.num_samples == 0:
            raise ArgumentError(
                f"num_samples must be an int >= 1, got {self.num_samples!r}. An empty data set cannot be sharded."
            )
        found: dict[str, Any] = {
            name: check_count(name, getattr(self, name))
            for name in ("num_samples", "batch_size", "num_data_ranks", "accumulation")
        }
        if self.num_samples > MAX_SAMPLES:
            raise ArgumentError(
                f"num_samples must be at most 2^62, got {self.num_samples}."
            )
        found["ordering"], found["ending"] = ordering, ending = (
            find_ordering(self.shuffle),
            find_tail(self.tail),
        )
        check_batch_size(self.batch_size, self.num_data_ranks, self.accumulation)
        found["num_positions"] = positions = ordering.num_positions(
            self.num_samples, self.num_data_ranks
        )
        segments = self.segments or ((0, self.batch_size),)
        end = segments[-1][0] if self.ended else positions
        check_segments(segments, self.batch_size, end)
        found["_stretches"] = stretches = Stretches(segments, end)
        unit = self.num_data_ranks * (1 if ordering.pads_first else self.accumulation)
        last_rows = (
            ending.num_rows(stretches.rest, self.batch_size, unit)
            if stretches.rest
            else 0
        )
        found["_last_rows"], found["num_steps"] = (
            last_rows,
            stretches.num_full + (last_rows > 0),
        )
        found["num_served"] = min(
            positions, end, stretches.step(stretches.num_full)[0] + last_rows
        )
        for (
            name,
            value,
        ) in found.items():  # what is derived is kept, as it is asked for at each step
            object.__setattr__(self, name, value)
        if self.ending.refuses and stretches.rest:
            lengths = nearest_multiples(self.num_samples, self.batch_size)
            raise ArgumentError(
                f"tail='error': {self.num_samples} samples do not fill the last batch of {self.batch_size} "
                f"({stretches.rest} are left over). Nearest lengths that do: {' or '.join(map(str, lengths))}; "
                "or choose tail='pad', 'fill' or 'drop'."
            )

    def first_position(self, *, step: int) -> int:
        """Return the position of the first row of a step; `num_positions` or more after the last step.

        Args:
            step: Step of the epoch, from 0.
        """
        return self._stretches.step(step)[0]

    def num_rows(self, *, step: int) -> int:
        """Return the rows of the global batch at `step`, padding included.

        Args:
            step: Step of the epoch, from 0.
        """
        return self._extent(step)[1]

    def micro_size(self, *, step: int) -> int:
        """Return the rows of a micro-batch of the global batch at `step`; the last one may have fewer.

        Args:
            step: Step of the epoch, from 0.
        """
        return self._extent(step)[2]

    def _extent(self, step: int) -> tuple[int, int, int]:
        """Return the first position of a step, its rows, and the rows of a micro-batch."""
        if not 0 <= step < self.num_steps:
            raise ArgumentError(f"step must be in range({self.num_steps}), got {step}.")
        first, num_rows = self._stretches.step(step)
        if step >= self._stretches.num_full:
            num_rows = self._last_rows
        whole = self.batch_size if self.ordering.pads_first else num_rows
        return first, num_rows, max(1, whole // self.accumulation)

    def padding(self, *, step: int) -> int:
        """Return how many rows, the last ones, of the global batch at `step` are padding; refused for "paddle".

        Args:
            step: Step of the epoch, from 0.
        """
        if self.ordering.pads_first:
            raise ArgumentError(
                "padding: the padding of Paddle's order depends on the epoch; use valid(epoch=, step=, rows=)."
            )
        return self._past_the_end(step)

    def _past_the_end(self, step: int) -> int:
        """Return how many rows of the global batch at `step` lie past the last position of the epoch."""
        first, num_rows, _ = self._extent(step)
        return max(0, first + num_rows - self.num_positions)

    def valid(self, *, epoch: int, step: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which rows of the global batch at `step` are real: one bool per row.

        Args:
            epoch: The epoch.
            step: Step of the epoch, from 0.
            rows: Rows of the global batch, from 0.
        """
        return self._real(
            self.order(epoch=epoch), self.first_position(step=step) + rows
        )

    def _real(self, order: Order, positions: Indices) -> npt.NDArray[np.bool_]:
        real = positions < self.num_positions
        if self.ordering.pads_first:
            real &= order(positions % self.num_positions) < self.num_samples
        return real

    def indices(self, *, epoch: int, step: int, data_rank: int) -> Indices:
        """Return the samples that `data_rank` reads at `step`, in the order of its rows.

        Args:
            epoch: The epoch.
            step: Step of the epoch, from 0.
            data_rank: The data rank, in `range(num_data_ranks)`.

        Returns:
            int64[num_rows(step) // num_data_ranks]
        """
        _, num_rows, micro_size = self._extent(step)
        rows: Rows | range = slice_rows(
            num_rows, self.num_data_ranks, data_rank, micro_size
        )
        if micro_size >= num_rows and len(rows):  # a range is faster
            rows = range(int(rows[0]), int(rows[-1]) + 1)
        return self.take(epoch=epoch, step=step, rows=rows)

    def take(self, *, epoch: int, step: int, rows: Rows | range) -> Indices:
        """Return the samples at some rows of the global batch at `step`.

        Args:
            epoch: Any int. If the plan shuffles, each epoch has its own order.
            step: The step, in `range(num_steps)`.
            rows: int64, in `range(num_rows(step))`; or a range of rows, which is faster.
        """
        return self._at(self.order(epoch=epoch), epoch, self._extent(step)[0], rows)

    def _at(self, order: Order, epoch: int, start: int, rows: Rows | range) -> Indices:
        """Return the samples at some rows of the global batch that begins at position `start`."""
        end = self.num_positions
        if isinstance(rows, range) and rows.step == 1 and start + rows.stop <= end:
            found = order.between(start + rows.start, start + rows.stop)
        elif len(rows):
            positions = start + np.asarray(rows, np.int64)
            first = self.ordering.padding_from(epoch, end)
            # Rows of padding lie past the end of the epoch: they hold its samples from `first` on.
            found = order(
                np.where(
                    positions < end,
                    positions,
                    first + (positions - end) % (end - first),
                )
            )
        else:
            found = np.empty(0, np.int64)
        # In Paddle's order, padding has numbers past the last sample.
        return found % self.num_samples if self.ordering.pads_first else found

    def samples(self, *, epoch: int, first: int, end: int) -> Indices:
        """Return the real samples at positions [first, end) of the epoch's order.

        Args:
            epoch: The epoch.
            first: The first position.
            end: The position after the last.
        """
        found = self.order(epoch=epoch).between(first, end)
        return found[found < self.num_samples] if self.ordering.pads_first else found

    def where(
        self, *, epoch: int, sample: int | tuple[str, int]
    ) -> Where | list[Where] | None:
        """Return where a sample is delivered, as a real row; None if the tail drops it.

        It takes O(1); with "paddle", O(n) once per epoch. Of a mixture, a sample may be delivered several times in an
        epoch, or not at all: it is a list of places then, in their order.

        Args:
            epoch: The epoch.
            sample: Its index in the data set; of a mixture, (name of the source, index in it).
        """
        return places_of(self, epoch, sample, ())

    def step_of(self, *, position: int) -> int:
        """Return the step that holds a position of an epoch; `num_steps` or more if the tail drops it.

        Args:
            position: The position, in `range(num_positions)`.
        """
        return self._stretches.step_and_row(position)[0]

    def fingerprint(self) -> dict[str, Any]:
        """Return what a saved state must match to resume in this order: JSON-able, without the batch size."""
        order = self.ordering
        found = {
            "num_samples": self.num_samples,
            "shuffle": order.name,
            "seed": self.seed,
            "tail": str(self.tail),
        }
        return found | order.fingerprint(
            num_data_ranks=self.num_data_ranks, accumulation=self.accumulation
        )

    def order(self, *, epoch: int) -> Order:
        """Return the epoch's order: which sample is at each of the `num_positions` positions, and the inverse.

        Args:
            epoch: The epoch.
        """
        # An order of blocks keeps the micro-batches with which the epoch began.
        width = (
            self.segments[0][1] if self.segments else self.batch_size
        ) // self.accumulation
        return self.ordering.order(self.num_positions, self.seed, epoch, max(1, width))


def facts_of_plan(plan: ShardPlan) -> dict[str, int]:
    """Return numbers of an epoch, by what they count."""
    last = plan.num_steps - 1
    padding = plan._past_the_end(last) if plan.num_steps else 0
    if plan.ordering.pads_first:  # Paddle's order repeats samples before the tail does
        padding += plan.num_positions - plan.num_samples
    return {
        "samples of an epoch": plan.num_samples,
        "steps of an epoch": plan.num_steps,
        "rows of a step": plan.batch_size,
        "rows of a data rank": plan.batch_size // plan.num_data_ranks,
        "rows of the last step": plan.num_rows(step=last) if plan.num_steps else 0,
        "rows of padding in an epoch": padding,
        "samples dropped in an epoch": plan.num_positions - plan.num_served,
    }


def global_batch(plan: ShardPlan, epoch: int, step: int) -> GlobalBatch:
    """Return the global batch of a plan at a step of an epoch, of which a rank takes its rows."""
    first, num_rows, micro_size = plan._extent(step)
    num_real, order = min(num_rows, plan.num_positions - first), plan.order(epoch=epoch)
    all_real = num_real == num_rows and not plan.ordering.pads_first
    return GlobalBatch(
        number=step,
        num_rows=num_rows,
        micro_size=micro_size,
        num_real=num_real,
        take=partial(plan._at, order, epoch, first),
        valid=None if all_real else lambda rows: plan._real(order, first + rows),
    )


def positions_of(plan: ShardPlan, epoch: int, sample: Any) -> list[int]:
    """Return the positions of an epoch at which a sample is, in ascending order; see `ShardPlan.where`."""
    order = plan.order(epoch=epoch)
    if isinstance(order, MixtureOrder):
        return order.occurrences(*order.mixing.numbers_of(sample))
    if (
        isinstance(sample, bool)
        or not isinstance(sample, int | np.integer)
        or not 0 <= sample < plan.num_samples
    ):
        raise ArgumentError(
            f"sample must be an int in range({plan.num_samples}), got {sample!r}."
        )
    return [int(order.inverse(np.array([sample], np.int64))[0])]


def steps_of_plan(
    plan: ShardPlan,
    epoch: int,
    steps: Sequence[int],
    rows_of: RowsOf,
    skips: Ranges,
    deal: Deal | None = None,
) -> Iterator[Step]:
    """Yield what a rank reads at some steps of a plan, one after the other; see `rank_steps`."""
    return rank_steps(
        (global_batch(plan, epoch, step) for step in steps),
        epoch,
        rows_of,
        skips=skips,
        deal=deal,
    )


def step_of_plan(
    plan: ShardPlan, epoch: int, step: int, skips: Ranges, deal: Deal | None = None
) -> Step | None:
    """Return a step of a plan with all its rows; None if it is skipped."""
    return next(steps_of_plan(plan, epoch, [step], all_rows, skips, deal), None)


def num_skipped(num_steps: int, skips: Ranges, since: int = 0) -> int:
    """Return how many of the steps [since, num_steps) of an epoch are skipped."""
    return sum(max(0, min(end, num_steps) - max(first, since)) for first, end in skips)


def skipped_positions(plan: ShardPlan, skips: Ranges) -> Ranges:
    """Return the positions of an epoch that its skipped steps hold."""
    last = plan.num_steps
    ranges = [(min(first, last), min(end, last)) for first, end in skips]
    positions = [
        (plan.first_position(step=first), plan.first_position(step=end))
        for first, end in ranges
    ]
    return tuple(
        (first, min(end, plan.num_served)) for first, end in positions if first < end
    )


def rows_of_sample(
    plan: ShardPlan, epoch: int, sample: Any, skips: Ranges, deal: Deal | None = None
) -> Iterator[tuple[int, int]]:
    """Yield (step, row of its global batch) for each delivery of a sample in an epoch; see `places_of`."""
    order = plan.order(epoch=epoch)
    for position in positions_of(plan, epoch, sample):
        step, row = plan._stretches.step_and_row(position)
        ids = order(np.array([position]))
        if step >= plan.num_steps or is_in(skips, step):
            continue
        if deal is not None:
            dealt = step_of_plan(plan, epoch, step, skips, deal)
            assert dealt is not None  # it holds this row
            mine = np.asarray(dealt.ids) == ids
            row = int((mine if dealt.real is None else mine & dealt.real).argmax())
        yield step, row


def places_of(
    plan: ShardPlan, epoch: int, sample: Any, skips: Ranges, deal: Deal | None = None
) -> Where | list[Where] | None:
    """Return where a sample is delivered, with skipped steps and balanced rows; see `ShardPlan.where`."""
    found = []
    for step, row in rows_of_sample(plan, epoch, sample, skips, deal):
        _, num_rows, micro_size = plan._extent(step)
        if num_rows % plan.num_data_ranks or micro_size % plan.num_data_ranks:
            found.append(Where(step=step, data_rank=None, row=None))
        else:
            data_rank, local = place_of_rows(
                np.array(row), num_rows, plan.num_data_ranks, micro_size
            )
            found.append(Where(step=step, data_rank=int(data_rank), row=int(local)))
    return found if isinstance(plan.ordering, Mixing) else next(iter(found), None)
