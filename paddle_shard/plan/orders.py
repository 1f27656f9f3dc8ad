"""The orders that users can choose with `shuffle=`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.blocks import Blocks
from paddle_shard.plan.mixture import Mixing
from paddle_shard.plan.order import (
    Fingerprint,
    Identity,
    Indices,
    Order,
    Ordering,
)
from paddle_shard.plan.shuffle import permutation

Shuffle: TypeAlias = bool | str | Ordering
"""A name in `ORDERINGS`, or an ordering."""


@dataclass(frozen=True)
class Sequential(Ordering):
    """The samples in the order of the data set, in every epoch."""

    name = False

    def order(self, length: int, seed: int, epoch: int, width: int) -> Order:
        """See `Ordering`."""
        return Identity(length)


@dataclass(frozen=True)
class Shuffled(Ordering):
    """A keyed permutation of all samples, a different one for each seed and epoch."""

    name = True

    def order(self, length: int, seed: int, epoch: int, width: int) -> Order:
        """See `Ordering`."""
        return permutation(length, "order", seed, epoch)


class PaddleOrder(Order):
    """The shuffle of Paddle's `DistributedBatchSampler`: a table that `RandomState(seed + epoch)` shuffles."""

    def __init__(self, length: int, seed: int) -> None:
        """Shuffle the table of an epoch.

        Args:
            length: Number of positions, padding included.
            seed: The sampler's seed, plus the epoch; at least 0, as numpy requires.
        """
        super().__init__(length)
        self._table = np.arange(length)
        np.random.RandomState(seed).shuffle(self._table)

    def __call__(self, positions: Indices) -> Indices:
        """Return the sample at each position."""
        return self._table[positions]

    def inverse(self, samples: Indices) -> Indices:
        """Return the position of each sample."""
        return self._inverse[samples]

    @cached_property
    def _inverse(self) -> Indices:
        return np.argsort(self._table)


_paddle_order = lru_cache(maxsize=2)(PaddleOrder)
"""Kept, since a table of all samples takes long to shuffle."""


@dataclass(frozen=True)
class PaddleSequential(Ordering):
    """The order of a `DistributedBatchSampler` that does not shuffle. A loader uses it; users cannot name it."""

    name = "paddle unshuffled"
    pads_first = True

    def order(self, length: int, seed: int, epoch: int, width: int) -> Order:
        """See `Ordering`."""
        return Identity(length)

    def num_positions(self, num_samples: int, num_data_ranks: int) -> int:
        """See `Ordering`: Paddle gives every data rank the same number of samples."""
        return num_samples + -num_samples % num_data_ranks


@dataclass(frozen=True)
class PaddleOrdering(PaddleSequential):
    """The order of `paddle.io.DistributedBatchSampler`, including its padding.

    It depends on the number of data ranks. It does not depend on the loader's seed: Paddle adds the epoch to the
    sampler's own, which versions to 3.3 do not have.
    """

    seed: int = 0
    """The sampler's own seed."""
    name = "paddle"

    def order(self, length: int, seed: int, epoch: int, width: int) -> Order:
        """See `Ordering`."""
        return _paddle_order(length, self.seed + epoch)

    def fingerprint(
        self, *, num_data_ranks: int, accumulation: int
    ) -> Fingerprint:
        """See `Ordering`."""
        fingerprint = {"num_data_ranks": num_data_ranks}
        if self.seed:
            fingerprint["sampler_seed"] = self.seed
        return fingerprint

    @classmethod
    def of_fingerprint(cls, fingerprint: Fingerprint) -> PaddleOrdering:
        """See `Ordering`."""
        return cls(seed=fingerprint.get("sampler_seed", 0))


ORDERINGS: dict[bool | str, Ordering] = {
    ordering.name: ordering
    for ordering in (Sequential(), Shuffled(), Blocks(), PaddleOrdering())
}
"""All named orders, by their name in `shuffle=`."""


def find_ordering(shuffle: Any, dataset: Any = None) -> Ordering:
    """Return the ordering with a name, or the given ordering itself.

    Args:
        shuffle: The user's argument.
        dataset: The data set. If `shuffle` is a name, the ordering follows its layout on disk.

    Raises:
        ArgumentError: There is no such order.

    Examples:
        >>> find_ordering("blocks")
        Blocks(size=1024, window=8)
    """
    if isinstance(shuffle, Ordering):
        return shuffle
    if not isinstance(shuffle, bool | str) or shuffle not in ORDERINGS:
        raise ArgumentError(
            f"shuffle must be one of {', '.join(map(repr, ORDERINGS))}, or a paddle_shard.Blocks, got {shuffle!r}."
        )
    return ORDERINGS[shuffle].for_dataset(dataset)


def ordering_of(fingerprint: Fingerprint) -> Ordering | None:
    """Return the ordering whose fingerprint a saved state or a record has; None if it is of another class.

    Examples:
        >>> ordering_of({"shuffle": "blocks", "block_size": 16, "window": 4, "accumulation": 1})
        Blocks(size=16, window=4)
    """
    kinds: list[type[Ordering]] = [Mixing, PaddleSequential]
    kinds += [type(ordering) for ordering in ORDERINGS.values()]
    for kind in kinds:
        if kind.name == fingerprint["shuffle"]:
            return kind.of_fingerprint(fingerprint)
    return None
