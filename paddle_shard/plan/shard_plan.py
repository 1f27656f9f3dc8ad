"""`ShardPlan`: which samples a data rank reads at a step, and where a sample is delivered."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from paddle_shard.core.checks import check_count
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.mixture import Mixing, MixtureOrder
from paddle_shard.plan.order import Fingerprint, Indices, Order, Ordering
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
from paddle_shard.plan.step import (
    GlobalBatch,
    Mask,
)
from paddle_shard.plan.tails import Tail, find_tail

Segments = tuple[tuple[int, int], ...]
"""(first position, batch size) of each stretch of an epoch with batches of one size."""

# Batch sizes that change


class StepTable:
    """The steps of an epoch, in segments of batches of one size.

    Examples:
        >>> table = StepTable(((0, 4), (8, 3)), end=15)
        >>> [table.step(number) for number in range(5)], table.step_and_row(13)
        ([(0, 4), (4, 4), (8, 3), (11, 3), (14, 3)], (3, 2))
        >>> table.num_full, table.rest
        (4, 1)
    """

    def __init__(self, segments: Segments, end: int) -> None:
        """Set up.

        Args:
            segments: The segments; all but the last hold whole batches.
            end: Position after the last that is served or padded.
        """
        self._segments = segments
        counts = [
            -(-(stop - first) // size)
            for (first, size), (stop, _) in pairwise(segments)
        ]
        self._first_steps = [*accumulate(counts, initial=0)]
        first, size = segments[-1]
        num_full, self.rest = divmod(max(0, end - first), size)
        """`rest`: positions for a short last batch."""
        self.num_full = self._first_steps[-1] + num_full
        """Steps without a short last batch."""

    def step(self, number: int) -> tuple[int, int]:
        """Return the position of the first row of a step, and the rows of a full batch there."""
        segment = bisect_right(self._first_steps, number) - 1
        first, size = self._segments[segment]
        return first + (number - self._first_steps[segment]) * size, size

    def step_and_row(self, position: int) -> tuple[int, int]:
        """Return the step that holds a position, and the row in its batch."""
        number = (
            bisect_right(
                self._segments, position, key=lambda segment: segment[0]
            )
            - 1
        )
        first, size = self._segments[number]
        step, row = divmod(position - first, size)
        return self._first_steps[number] + step, row


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The global batch of each stretch of a run.

    A batch is never cut: a new size holds from the first batch that begins at the given sample or after it. What is
    left of an epoch is its short last batch, and the next epoch begins with the size that is due by then.

    Examples:
        >>> sizes = BatchSizes(((0, 4), (10, 6)))
        >>> sizes.segments(origin=0, position=0, end=30), sizes.segments(origin=30, position=0, end=30)
        (((0, 4), (12, 6)), ((0, 6),))
    """

    entries: tuple[tuple[int, int], ...]
    """(sample of the run, rows of a global batch from there on); the first sample is 0, and they ascend."""

    def __post_init__(self) -> None:
        firsts = [first for first, _ in self.entries]
        if firsts[:1] != [0] or firsts != sorted(set(firsts)):
            raise ArgumentError(
                f"batch_size: the schedule must begin at sample 0 and ascend, got {firsts}."
            )

    def segments(self, *, origin: int, position: int, end: int) -> Segments:
        """Return the segments of an epoch.

        Args:
            origin: The sample of the run with which the epoch begins.
            position: Position in the epoch at which the first segment begins.
            end: Position after the last.
        """
        begin_of_run = origin + position
        due = [size for first, size in self.entries if first <= begin_of_run]
        segments = [(position, due[-1])]
        for first, size in self.entries[len(due) :]:
            begin, size_before = segments[-1]
            num_samples = max(0, first - origin - begin)
            num_batches = -(-num_samples // size_before)
            switch = begin + num_batches * size_before
            if switch >= end:
                break
            if switch == begin:
                segments.pop()
            if not segments or segments[-1][1] != size:
                segments.append((switch, size))
        return tuple(segments)


# The plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The place in an epoch at which a sample is delivered."""

    step: int
    """The step of the epoch, from 0."""
    data_rank: int | None = None
    """The data rank; None if the batch of that step cannot be split evenly over these data ranks, or if `balance=`
    assigns its rows."""
    row: int | None = None
    """The row in that data rank's slice: `indices(epoch=, step=, data_rank=)[row]` is the sample."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The order of a run over a data set of known length, and the data rank that reads each sample.

    The order is a function of (seed, epoch, position) alone; an order of blocks also depends on the rows of a
    micro-batch. Batch k begins at position k * batch_size. Every data rank takes an equal slice of it, so all data
    ranks make the same number of steps.

    Attributes:
        num_samples: Length of the data set, at least 1.
        batch_size: The global batch: samples that one step consumes over all data ranks.
        num_data_ranks: Product of the sizes of the data axes; the least common multiple if meshes differ.
        shuffle: False: 0..n-1. True: a keyed permutation, a different one in each epoch. A `Blocks`: a shuffle that
            opens each block on disk on one data rank. "blocks": `Blocks()`. "paddle": the order of Paddle's
            `DistributedBatchSampler(shuffle=True)`, including its padding; it depends on `num_data_ranks`.
        seed: Seed of the keyed permutations.
        tail: What to do if the data does not fill the last global batch. "pad": fill it up to the padding unit with the
            first samples of the same epoch's order. "fill": fill it up to the batch size. "drop": do not serve it.
            "error": raise an error.
        accumulation: Micro-batches in a global batch (gradient accumulation).
        segments: The segments of this epoch, if the run was resumed with another batch size. The last one has
            `batch_size`.
        ended: True if the epoch ended at the start of the last segment: samples that the tail dropped there stay
            dropped.

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
    batch_size: int
    num_data_ranks: int
    shuffle: Shuffle = field(default=False, compare=False)
    seed: int = 0
    tail: str = "pad"
    accumulation: int = 1
    segments: Segments = ()
    ended: bool = False
    ordering: Ordering = field(init=False, repr=False)
    """The ordering that `shuffle` names or is."""

    def __post_init__(self) -> None:
        for name, most in (
            ("num_samples", MAX_SAMPLES),
            ("batch_size", None),
            ("num_data_ranks", None),
            ("accumulation", None),
        ):
            value = check_count(name, getattr(self, name), most=most)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "ordering", find_ordering(self.shuffle))
        check_batch_size(
            self.batch_size, self.num_data_ranks, self.accumulation
        )
        if self.ending.refuses and self._table.rest:
            lengths = nearest_multiples(self.num_samples, self.batch_size)
            raise ArgumentError(
                f"tail='error': {self.num_samples} samples do not fill the last batch of {self.batch_size} "
                f"({self._table.rest} are left over). Nearest lengths that do: {' or '.join(map(str, lengths))}; "
                "or choose tail='pad', 'fill' or 'drop'."
            )

    @property
    def ending(self) -> Tail:
        """The remainder policy that `tail` names."""
        return find_tail(self.tail)

    @cached_property
    def num_positions(self) -> int:
        """Positions of an epoch: the samples; with "paddle", rounded up to a multiple of the data ranks."""
        return self.ordering.num_positions(
            self.num_samples, self.num_data_ranks
        )

    @property
    def _segments(self) -> Segments:
        return self.segments or ((0, self.batch_size),)

    @property
    def _end(self) -> int:
        return self._segments[-1][0] if self.ended else self.num_positions

    @cached_property
    def _table(self) -> StepTable:
        return StepTable(self._segments, self._end)

    @cached_property
    def _last_rows(self) -> int:
        """Rows of a short last batch; 0 if there is none, or if it is dropped."""
        if self._table.rest == 0:
            return 0
        unit = self.num_data_ranks
        if not self.ordering.pads_first:
            unit *= self.accumulation
        return self.ending.num_rows(self._table.rest, self.batch_size, unit)

    @cached_property
    def num_steps(self) -> int:
        """Steps of an epoch, the same on every rank; 0 if "drop" leaves nothing."""
        return self._table.num_full + (self._last_rows > 0)

    @cached_property
    def num_served(self) -> int:
        """Positions that the steps of an epoch serve: all except those that "drop" drops."""
        first, _ = self._table.step(self._table.num_full)
        return min(self._end, first + self._last_rows)

    def first_position(self, *, step: int) -> int:
        """Return the position of the first row of a step; `num_positions` or more after the last step.

        Args:
            step: Step of the epoch, from 0.
        """
        return self._table.step(step)[0]

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
            raise ArgumentError(
                f"step must be in range({self.num_steps}), got {step}."
            )
        first, num_rows = self._table.step(step)
        if step >= self._table.num_full:
            num_rows = self._last_rows
        whole = self.batch_size if self.ordering.pads_first else num_rows
        return first, num_rows, max(1, whole // self.accumulation)

    def padding(self, *, step: int) -> int:
        """Return how many rows, the last ones, the tail adds to the global batch at `step`.

        With "paddle", the order itself has padding as well (`GlobalBatch.valid`).

        Args:
            step: Step of the epoch, from 0.
        """
        first, num_rows, _ = self._extent(step)
        return max(0, first + num_rows - self.num_positions)

    def _are_valid(self, order: Order, first: int, rows: Rows) -> Mask:
        """Return which rows of the global batch that begins at position `first` are valid."""
        positions = first + rows
        valid = positions < self.num_positions
        if self.ordering.pads_first:
            valid &= order(positions % self.num_positions) < self.num_samples
        return valid

    def indices(self, *, epoch: int, step: int, data_rank: int) -> Indices:
        """Return the samples that `data_rank` reads at `step`, in the order of its rows.

        Args:
            epoch: Any int. If the plan shuffles, each epoch has its own order.
            step: Step of the epoch, from 0.
            data_rank: The data rank, in `range(num_data_ranks)`.

        Returns:
            int64[num_rows(step) // num_data_ranks]
        """
        first, num_rows, micro_size = self._extent(step)
        rows = slice_rows(num_rows, self.num_data_ranks, data_rank, micro_size)
        return self._samples_at_rows(
            self.order(epoch=epoch), epoch, first, rows
        )

    def _samples_at_rows(
        self, order: Order, epoch: int, start: int, rows: Rows | range
    ) -> Indices:
        """Return the samples at some rows of the global batch that begins at position `start`."""
        end = self.num_positions
        if isinstance(rows, range) and start + rows.stop <= end:
            samples = order.between(start + rows.start, start + rows.stop)
        else:
            positions = start + np.asarray(rows, np.int64)
            # Rows of padding lie past the end of the epoch: they hold its samples from `first` on.
            first = self.ordering.padding_from(epoch, end)
            wrapped = first + (positions - end) % (end - first)
            samples = order(np.where(positions < end, positions, wrapped))
        # In Paddle's order, padding has numbers past the last sample.
        return (
            samples % self.num_samples if self.ordering.pads_first else samples
        )

    def samples(self, *, epoch: int, first: int, end: int) -> Indices:
        """Return the samples at positions [first, end) of the epoch's order, without padding.

        Args:
            epoch: The epoch.
            first: The first position.
            end: The position after the last.
        """
        samples = self.order(epoch=epoch).between(first, end)
        if self.ordering.pads_first:
            samples = samples[samples < self.num_samples]
        return samples

    def where(
        self, *, epoch: int, sample: int | tuple[str, int]
    ) -> Where | list[Where] | None:
        """Return where a sample is delivered, as a valid row; None if the tail drops it.

        It takes O(1); with "paddle", O(n) once per epoch. A mixture may deliver a sample several times in an epoch, or
        not at all: the result is a list of places then, in their order.

        Args:
            epoch: The epoch.
            sample: Its index in the data set; for a mixture, (name of the source, index in it).
        """
        return places_of(self, epoch, sample, ())

    def fingerprint(self) -> Fingerprint:
        """Return what a saved state must match to resume in this order: JSON-able, without the batch size."""
        return {
            "num_samples": self.num_samples,
            "shuffle": self.ordering.name,
            "seed": self.seed,
            "tail": str(self.tail),
            **self.ordering.fingerprint(
                num_data_ranks=self.num_data_ranks,
                accumulation=self.accumulation,
            ),
        }

    def order(self, *, epoch: int) -> Order:
        """Return the epoch's order: which sample is at each of the `num_positions` positions, and the inverse.

        Args:
            epoch: The epoch.
        """
        # An order of blocks keeps the micro-batches with which the epoch began.
        width = max(1, self._segments[0][1] // self.accumulation)
        return self.ordering.order(self.num_positions, self.seed, epoch, width)


# Steps and places


def global_batches(
    plan: ShardPlan, epoch: int, steps: Iterable[int]
) -> Iterator[GlobalBatch]:
    """Yield the global batches of a plan at some steps of an epoch, of which a rank takes its rows."""
    order = plan.order(epoch=epoch)
    for step in steps:
        first, num_rows, micro_size = plan._extent(step)
        num_positions = min(num_rows, plan.num_positions - first)
        valid = None
        if num_positions < num_rows or plan.ordering.pads_first:
            valid = partial(plan._are_valid, order, first)
        yield GlobalBatch(
            step,
            num_rows,
            micro_size,
            num_positions,
            take=partial(plan._samples_at_rows, order, epoch, first),
            valid=valid,
        )


def num_skipped_steps(num_steps: int, skips: Ranges, since: int = 0) -> int:
    """Return how many of the steps [since, num_steps) of an epoch are skipped."""
    return sum(
        max(0, min(end, num_steps) - max(first, since)) for first, end in skips
    )


def skipped_positions(plan: ShardPlan, skips: Ranges) -> Ranges:
    """Return the positions of an epoch that its skipped steps hold."""
    positions = []
    for skip in skips:
        steps = [min(step, plan.num_steps) for step in skip]
        firsts = [plan.first_position(step=step) for step in steps]
        first, end = (min(position, plan.num_served) for position in firsts)
        if first < end:
            positions.append((first, end))
    return tuple(positions)


def rows_of_sample(
    plan: ShardPlan,
    epoch: int,
    sample: Any,
    skips: Ranges,
) -> Iterator[tuple[int, int]]:
    """Yield (step, row of its global batch) for each delivery of a sample in an epoch, without `balance=`."""
    order = plan.order(epoch=epoch)
    if isinstance(order, MixtureOrder):
        positions = order.occurrences(*order.mixing.numbers_of(sample))
    else:
        check_count("sample", sample, 0, plan.num_samples - 1)
        positions = order.inverse(np.array([sample])).tolist()
    for position in positions:
        step, row = plan._table.step_and_row(position)
        if step < plan.num_steps and not is_in(skips, step):
            yield step, row


def places_of(
    plan: ShardPlan,
    epoch: int,
    sample: Any,
    skips: Ranges,
    *,
    is_balanced: bool = False,
) -> Where | list[Where] | None:
    """Return where a sample is delivered, apart from skipped steps; only the step if `balance=` assigns the rows."""
    places = []
    ranks = plan.num_data_ranks
    for step, row in rows_of_sample(plan, epoch, sample, skips):
        _, num_rows, micro_size = plan._extent(step)
        place = Where(step=step)
        is_even = num_rows % ranks == 0 and micro_size % ranks == 0
        if is_even and not is_balanced:
            rows = np.array(row)
            data_rank, own_row = place_of_rows(
                rows, num_rows, ranks, micro_size
            )
            place = Where(step=step, data_rank=int(data_rank), row=int(own_row))
        places.append(place)
    return (
        places
        if isinstance(plan.ordering, Mixing)
        else next(iter(places), None)
    )
