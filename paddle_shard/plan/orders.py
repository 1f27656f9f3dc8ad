"""Which orders can a user choose?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.blocks import Blocks
from paddle_shard.plan.order import Identity, Order, Ordering
from paddle_shard.plan.paddle_order import PaddleOrdering
from paddle_shard.plan.shuffle import permutation

Shuffle: TypeAlias = bool | str | Ordering
"""A name in `ORDERINGS`, or an ordering."""


@dataclass(frozen=True)
class Sequential(Ordering):
    """The samples in the order of the data set, in every epoch."""

    name: ClassVar[bool | str] = False
    shuffles: ClassVar[bool] = False

    def order(self, length: int, seed: int, epoch: int, width: int) -> Order:
        """See `Ordering`."""
        return Identity()


@dataclass(frozen=True)
class Shuffled(Ordering):
    """A keyed permutation of all samples, a different one for each seed and epoch."""

    name: ClassVar[bool | str] = True

    def order(self, length: int, seed: int, epoch: int, width: int) -> Order:
        """See `Ordering`."""
        return permutation(length, "order", seed, epoch)


ORDERINGS: dict[bool | str, Ordering] = {
    False: Sequential(),
    True: Shuffled(),
    "blocks": Blocks(),
    "paddle": PaddleOrdering(),
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
    known = isinstance(shuffle, bool | str) and shuffle in ORDERINGS
    if not known:
        names = ", ".join(map(repr, ORDERINGS))
        raise ArgumentError(f"shuffle must be one of {names}, or a paddle_shard.Blocks, got {shuffle!r}.")
    return ORDERINGS[shuffle].for_dataset(dataset)
