"""How is a user's own batch sampler read by all ranks alike, and cut evenly?"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.shard_plan import check_batch_size
from paddle_shard.samplers.randomness import Generator, PrivateRandomness


@dataclass(frozen=True, slots=True, kw_only=True)
class UserBatch:
    """A global batch as a user's sampler named it."""

    indices: list[Any]
    """Whatever the data set is indexed with; padding at the end."""
    padding: int

    @property
    def num_rows(self) -> int:
        """Rows of the global batch, padding included."""
        return len(self.indices)

    def take(self, rows: Rows) -> list[Any]:
        """Return the data set's indices at some rows."""
        return [self.indices[row] for row in rows.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserBatches:
    """The batches of a user's batch sampler, which stays in charge of the order.

    Every rank iterates over the whole sampler, under random generators that all ranks seed alike, and takes
    its slice of each batch. A batch may differ in size from the others, as bucketing samplers make them, as
    long as it can be cut evenly; only the last one gets the tail.
    """

    batch_sampler: Iterable[Any]
    """Yields lists of indices; each is a global batch."""
    num_data_ranks: int
    tail: str
    """One of `plan.shard_plan.TAILS`."""
    nominal_size: int | None = None
    """Rows of a full batch, where the sampler says so."""
    num_steps: int | None = None
    """Steps of an epoch where the caller can compute them; else the sampler's own length counts."""
    accumulation: int = 1
    seed: int = 0
    generators: Sequence[Generator] = ()
    """The global generators that the sampler may draw from."""
    takes_epoch: bool = False
    """The sampler's order depends on its attribute `epoch`, as that of Paddle's `DistributedBatchSampler`."""

    def __len__(self) -> int:
        if self.num_steps is not None:
            return self.num_steps
        if not isinstance(self.batch_sampler, Sized):
            raise ArgumentTypeError(
                f"len(): the batch_sampler {type(self.batch_sampler).__name__} has no __len__. "
                "Give it one, or count the steps yourself."
            )
        if self.tail != "drop" or getattr(self.batch_sampler, "drop_last", False):
            try:
                return len(self.batch_sampler)
            except Exception:  # Paddle's WeightedRandomSampler given a list has a __len__ that raises
                pass
        # Whether the last batch is short shows only at the end.
        return sum(1 for _ in self.epoch(0))

    def epoch(self, epoch: int) -> Iterator[UserBatch]:
        """Iterate over the global batches of an epoch.

        Raises:
            BatchSizeError: A batch that is not the last cannot be cut evenly.
            ArgumentError: The tail is "error" and the last batch is short.
        """
        randomness = PrivateRandomness(self.generators, derive_seed("sampler", self.seed, epoch))
        batch_sampler = self.batch_sampler
        if self.takes_epoch:
            batch_sampler = copy.copy(batch_sampler)
            batch_sampler.epoch = epoch  # type: ignore[attr-defined]
        with randomness:
            source = iter(batch_sampler)
        head: list[Any] = []  # the first samples of the order, to pad with
        step, batch = 0, self._next(source, randomness, 0)
        while batch is not None:
            following: list[Any] | None
            if self._is_short(batch):
                following = self._next(source, randomness, step + 1)
                if following is None:
                    yield from self._last(batch, head, step)
                    return
                self._check_size(batch, step)
                yield UserBatch(indices=batch, padding=0)
            else:
                yield UserBatch(indices=batch, padding=0)
                following = self._next(source, randomness, step + 1)
            if len(head) < self._unit:
                head += batch
            step, batch = step + 1, following

    @property
    def _unit(self) -> int:
        return self.nominal_size or self.num_data_ranks * self.accumulation

    def _is_short(self, batch: list[Any]) -> bool:
        unit = self.num_data_ranks * self.accumulation
        return len(batch) % unit != 0 or (self.nominal_size is not None and len(batch) < self.nominal_size)

    def _check_size(self, batch: list[Any], step: int) -> None:
        try:
            check_batch_size(len(batch), self.num_data_ranks, self.accumulation)
        except ValueError as error:
            text = f"step {step} of the batch_sampler {type(self.batch_sampler).__name__}: {error}"
            raise type(error)(text) from None

    def _last(self, batch: list[Any], head: list[Any], step: int) -> Iterator[UserBatch]:
        if self.tail == "drop":
            return
        if self.tail == "error":
            raise ArgumentError(
                f"tail='error': the last batch of the batch_sampler (step {step}) is short with {len(batch)} "
                f"samples. Choose tail='pad', 'fill' or 'drop', or a sampler that ends on a full batch."
            )
        unit = self.num_data_ranks * self.accumulation
        padding = -len(batch) % unit
        if self.tail == "fill" and self.nominal_size is not None:
            padding = self.nominal_size - len(batch) if len(batch) < self.nominal_size else padding
        order = head + batch
        yield UserBatch(indices=batch + [order[i % len(order)] for i in range(padding)], padding=padding)

    def _next(self, source: Iterator[Any], randomness: PrivateRandomness, step: int) -> list[Any] | None:
        with randomness:
            found = next(source, None)
        if found is None:
            return None
        if isinstance(found, np.ndarray):
            found = found.tolist()
        if not isinstance(found, Sequence) or isinstance(found, str | bytes):
            raise ArgumentTypeError(
                f"batch_sampler must yield lists of indices, got {type(found).__name__} at step {step}: "
                f"{found!r}. A sampler of single indices goes into paddle.io.BatchSampler(sampler=...)."
            )
        if len(found) == 0:
            raise ArgumentError(f"batch_sampler yielded an empty batch at step {step}.")
        return [index.item() if isinstance(index, np.integer) else index for index in found]
