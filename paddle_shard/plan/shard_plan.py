"""Which samples does a data rank read at a step, and at which step and rank is a sample read?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.mixture import Mixing
from paddle_shard.plan.order import Order, Ordering
from paddle_shard.plan.orders import Shuffle, find_ordering
from paddle_shard.plan.partition import Rows, check_batch_size, nearest_multiples, place_of_row, slice_rows
from paddle_shard.plan.parts import check_count
from paddle_shard.plan.shuffle import MAX_SAMPLES, Indices
from paddle_shard.plan.stretches import Stretches, check_segments
from paddle_shard.plan.tails import Tail, find_tail


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
    _stretches: Stretches = field(init=False, repr=False, compare=False)
    num_steps: int = field(init=False, repr=False, compare=False)
    """Steps of an epoch, the same on every rank; 0 if "drop" leaves nothing."""
    num_positions: int = field(init=False, repr=False, compare=False)
    """Positions of an epoch: the samples; with "paddle", rounded up to a multiple of the data ranks."""
    num_served: int = field(init=False, repr=False, compare=False)
    """Positions that the steps of an epoch serve: all except those that "drop" drops."""
    _width: int = field(init=False, repr=False, compare=False)
    """Rows of a micro-batch when the epoch began; an order of blocks keeps this width until the epoch ends."""

    def __post_init__(self) -> None:
        if isinstance(self.num_samples, int) and self.num_samples == 0:
            raise ArgumentError(
                f"num_samples must be an int >= 1, got {self.num_samples!r}. An empty data set cannot be sharded."
            )
        for name in ("num_samples", "batch_size", "num_data_ranks", "accumulation"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        if self.num_samples > MAX_SAMPLES:
            raise ArgumentError(f"num_samples must be at most 2^62, got {self.num_samples}.")
        object.__setattr__(self, "ordering", find_ordering(self.shuffle))
        object.__setattr__(self, "ending", find_tail(self.tail))
        check_batch_size(self.batch_size, self.num_data_ranks, self.accumulation)
        positions = self.ordering.num_positions(self.num_samples, self.num_data_ranks)
        object.__setattr__(self, "num_positions", positions)
        segments = self.segments or ((0, self.batch_size),)
        check_segments(segments, self.batch_size, positions)
        end = segments[-1][0] if self.ended else positions
        stretches = Stretches(segments=segments, end=end)
        object.__setattr__(self, "_stretches", stretches)
        object.__setattr__(self, "_width", max(1, segments[0][1] // self.accumulation))
        last_rows = self._rows_for(stretches.rest)
        object.__setattr__(self, "num_steps", stretches.num_full + (last_rows > 0))
        served = stretches.first_position(stretches.num_full) + last_rows
        object.__setattr__(self, "num_served", min(positions, served))
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
        return self._stretches.first_position(step)

    def num_rows(self, *, step: int) -> int:
        """Return the rows of the global batch at `step`, padding included.

        Args:
            step: Step of the epoch, from 0.
        """
        self._check_step(step)
        if step < self._stretches.num_full:
            return self._stretches.batch_size(step)
        return self._rows_for(self._stretches.rest)

    def _rows_for(self, rest: int) -> int:
        """Return with how many rows a last batch of `rest` samples is served; 0 if it is dropped."""
        unit = self.num_data_ranks if self.ordering.pads_first else self.num_data_ranks * self.accumulation
        return self.ending.num_rows(rest, self.batch_size, unit) if rest else 0

    def micro_size(self, *, step: int) -> int:
        """Return the rows of a micro-batch of the global batch at `step`; the last one may have fewer.

        Args:
            step: Step of the epoch, from 0.
        """
        if self.ordering.pads_first:
            return self.batch_size // self.accumulation
        return max(1, self.num_rows(step=step) // self.accumulation)

    def padding(self, *, step: int) -> int:
        """Return how many rows, the last ones, of the global batch at `step` are padding; refused for "paddle".

        Args:
            step: Step of the epoch, from 0.
        """
        if self.ordering.pads_first:
            raise ArgumentError(
                "padding: the padding of Paddle's order depends on the epoch; use valid(epoch=, step=, rows=)."
            )
        rows = self.num_rows(step=step)
        return max(0, self.first_position(step=step) + rows - self.num_positions)

    def valid(self, *, epoch: int, step: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which rows of the global batch at `step` are real: one bool per row.

        Args:
            epoch: The epoch.
            step: Step of the epoch, from 0.
            rows: Rows of the global batch, from 0.
        """
        positions = self.first_position(step=step) + rows
        real = positions < self.num_positions
        if self.ordering.pads_first:
            real &= self.order(epoch=epoch)(positions % self.num_positions) < self.num_samples
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
        num_rows, micro_size = self.num_rows(step=step), self.micro_size(step=step)
        start = self.first_position(step=step)
        if micro_size >= num_rows and start + num_rows <= self.num_positions and 0 <= data_rank < self.num_data_ranks:
            share = num_rows // self.num_data_ranks  # one stretch of the order
            first = start + data_rank * share
            return self._samples(self.order(epoch=epoch).between(first, first + share))
        rows = slice_rows(num_rows, self.num_data_ranks, data_rank, micro_size)
        return self.take(epoch=epoch, step=step, rows=rows)

    def take(self, *, epoch: int, step: int, rows: Rows | range) -> Indices:
        """Return the samples at some rows of the global batch at `step`.

        Args:
            epoch: Any int. If the plan shuffles, each epoch has its own order.
            step: The step, in `range(num_steps)`.
            rows: int64, in `range(num_rows(step))`; or a range of rows, which is faster.
        """
        self._check_step(step)
        start, order = self.first_position(step=step), self.order(epoch=epoch)
        if isinstance(rows, range):
            if rows.step == 1 and start + rows.stop <= self.num_positions:
                return self._samples(order.between(start + rows.start, start + rows.stop))
            rows = np.asarray(rows, np.int64)
        if not rows.size:
            return np.empty(0, np.int64)
        positions, end = start + rows, self.num_positions
        first = self.ordering.padding_from(epoch, end)
        # Rows of padding lie past the end of the epoch: they hold its samples from `first` on.
        return self._samples(order(np.where(positions < end, positions, first + (positions - end) % (end - first))))

    def _samples(self, found: Indices) -> Indices:
        """Return samples for entries of the order, in which Paddle's padding has numbers past the last sample."""
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

    def where(self, *, epoch: int, sample: int | tuple[str, int]) -> Where | list[Where] | None:
        """Return where a sample is delivered, as a real row; None if the tail drops it.

        It takes O(1); with "paddle", O(n) once per epoch. Of a mixture, a sample may be delivered several times in an
        epoch, or not at all: it is a list of places then, in their order.

        Args:
            epoch: The epoch.
            sample: Its index in the data set; of a mixture, (name of the source, index in it).
        """
        if isinstance(self.ordering, Mixing):
            order = self.ordering.order(self.num_positions, self.seed, epoch, self._width)
            return [place for position in order.occurrences(sample) if (place := self._place_of(position)) is not None]
        if isinstance(sample, bool) or not isinstance(sample, int | np.integer) or not 0 <= sample < self.num_samples:
            raise ArgumentError(f"sample must be an int in range({self.num_samples}), got {sample!r}.")
        return self._place_of(int(self.order(epoch=epoch).inverse(np.array([sample], np.int64))[0]))

    def step_of(self, *, position: int) -> int:
        """Return the step that holds a position of an epoch; `num_steps` or more if the tail drops it.

        Args:
            position: The position, in `range(num_positions)`.
        """
        return self._stretches.step_and_row(position)[0]

    def _place_of(self, position: int) -> Where | None:
        """Return where the sample at a position of an epoch is delivered, as a real row; None if the tail drops it."""
        step, row = self._stretches.step_and_row(position)
        if step >= self.num_steps:
            return None
        rows = self.num_rows(step=step)
        if rows % self.num_data_ranks or (self.micro_size(step=step) % self.num_data_ranks):
            return Where(step=step, data_rank=None, row=None)
        data_rank, local = place_of_row(row, rows, self.num_data_ranks, self.micro_size(step=step))
        return Where(step=step, data_rank=data_rank, row=local)

    def fingerprint(self) -> dict[str, Any]:
        """Return what a saved state must match to resume in this order: JSON-able, without the batch size."""
        order = self.ordering
        found = {"num_samples": self.num_samples, "shuffle": order.name, "seed": self.seed, "tail": str(self.tail)}
        return found | order.fingerprint(num_data_ranks=self.num_data_ranks, accumulation=self.accumulation)

    def order(self, *, epoch: int) -> Order:
        """Return the epoch's order: which sample is at each of the `num_positions` positions, and the inverse.

        Args:
            epoch: The epoch.
        """
        return self.ordering.order(self.num_positions, self.seed, epoch, self._width)

    def _check_step(self, step: int) -> None:
        if not 0 <= step < self.num_steps:
            raise ArgumentError(f"step must be in range({self.num_steps}), got {step}.")
