"""Which samples does a data rank read at a step?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_shard.errors import ArgumentError, BatchSizeError
from paddle_shard.plan.partition import Rows, nearest_multiples, slice_rows
from paddle_shard.plan.shuffle import MAX_SAMPLES, Indices, permutation

TAILS = ("pad", "fill", "drop", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The order of a run over a data set of known length, and who reads which part of it.

    The order is a function of (seed, epoch, position) alone. Batch k holds positions k * batch_size onwards;
    a data rank takes its equal slice of it, so every data rank makes the same number of steps.

    Examples:
        >>> plan = ShardPlan(num_samples=10, batch_size=4, num_data_ranks=2)
        >>> plan.num_steps, plan.padding(step=2)
        (3, 0)
        >>> [plan.indices(epoch=0, step=2, data_rank=r).tolist() for r in range(2)]
        [[8], [9]]
    """

    num_samples: int
    """Length of the data set, at least 1."""
    batch_size: int
    """The global batch: samples that one step consumes over all data ranks."""
    num_data_ranks: int
    """Product of the sizes of the data axes; the least common multiple where meshes differ."""
    shuffle: bool = False
    """False: 0..n-1. True: a keyed permutation, another one each epoch."""
    seed: int = 0
    """Of the shuffle."""
    tail: str = "pad"
    """Where the data does not fill the last global batch. "pad": fill it up to the padding unit with the
    first samples of the same epoch's order; "fill": up to the batch size; "drop": do not serve it;
    "error": refuse such a length."""
    accumulation: int = 1
    """Micro-batches in a global batch (gradient accumulation)."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "batch_size", "num_data_ranks", "accumulation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                hint = " An empty data set cannot be sharded." if name == "num_samples" and value == 0 else ""
                raise ArgumentError(f"{name} must be an int >= 1, got {value!r}.{hint}")
            object.__setattr__(self, name, int(value))
        if self.num_samples > MAX_SAMPLES:
            raise ArgumentError(f"num_samples must be at most 2^62, got {self.num_samples}.")
        if not isinstance(self.shuffle, bool):
            raise ArgumentError(f"shuffle must be True or False, got {self.shuffle!r}.")
        if self.tail not in TAILS:
            raise ArgumentError(f"tail must be one of {', '.join(map(repr, TAILS))}, got {self.tail!r}.")
        check_batch_size(self.batch_size, self.num_data_ranks, self.accumulation)
        if self.tail == "error" and self.num_samples % self.batch_size:
            lengths = nearest_multiples(self.num_samples, self.batch_size)
            raise ArgumentError(
                f"tail='error': {self.num_samples} samples do not fill the last batch of {self.batch_size} "
                f"({self.num_samples % self.batch_size} are left over). Nearest lengths that do: "
                f"{_either(lengths)}; or choose tail='pad', 'fill' or 'drop'."
            )

    @property
    def padding_unit(self) -> int:
        """What the rows of every global batch are a multiple of."""
        return self.num_data_ranks * self.accumulation

    @property
    def num_steps(self) -> int:
        """Steps of an epoch, the same on every rank; 0 where "drop" leaves nothing."""
        full, rest = divmod(self.num_samples, self.batch_size)
        return full + (rest > 0 and self.tail != "drop")

    def num_rows(self, *, step: int) -> int:
        """Return the rows of the global batch at `step`, padding included."""
        return min(self.batch_size, self.num_samples - step * self.batch_size) + self.padding(step=step)

    def padding(self, *, step: int) -> int:
        """Return how many rows of the global batch at `step` are padding; they are its last rows."""
        if not 0 <= step < self.num_steps:
            raise ArgumentError(f"step must be in range({self.num_steps}), got {step}.")
        rest = self.num_samples - step * self.batch_size
        if rest >= self.batch_size:
            return 0
        return self.batch_size - rest if self.tail == "fill" else -rest % self.padding_unit

    def indices(self, *, epoch: int, step: int, data_rank: int) -> Indices:
        """Return the samples that `data_rank` reads at `step`, in the order of its rows.

        Returns:
            int64[num_rows(step) // num_data_ranks]
        """
        num_rows = self.num_rows(step=step)
        rows = slice_rows(num_rows, self.num_data_ranks, data_rank, self.accumulation)
        return self.take(epoch=epoch, step=step, rows=rows)

    def take(self, *, epoch: int, step: int, rows: Rows) -> Indices:
        """Return the samples at some rows of the global batch at `step`.

        Args:
            epoch: Any int; another one gives another order where the plan shuffles.
            step: In `range(num_steps)`.
            rows: int64, in `range(num_rows(step))`.
        """
        if not rows.size:
            return np.empty(0, np.int64)
        positions = step * self.batch_size + rows
        first, last = int(positions[0]), int(positions[-1])
        together = last < self.num_samples and bool((positions[1:] - positions[:-1] == 1).all())
        positions %= self.num_samples
        if not self.shuffle:
            return positions
        order = permutation(self.num_samples, "order", self.seed, epoch)
        return order.between(first, last + 1) if together else order(positions)


def check_batch_size(batch_size: int, num_data_ranks: int, accumulation: int = 1) -> None:
    """Refuse a global batch that cannot be cut into equal slices.

    Raises:
        BatchSizeError: Names both numbers and the nearest sizes that work.
    """
    unit = num_data_ranks * accumulation
    if batch_size % unit:
        over = f"{num_data_ranks} data ranks"
        if accumulation > 1:
            over += f" times {accumulation} accumulation steps"
        raise BatchSizeError(
            f"batch_size: a global batch of {batch_size} cannot be split evenly over {over}. "
            f"Nearest sizes that can: {_either(nearest_multiples(batch_size, unit))}."
        )


def _either(numbers: tuple[int, ...]) -> str:
    return " or ".join(map(str, numbers))
