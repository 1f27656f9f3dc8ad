"""The stages of a stream between its source and the batch."""

from paddle_shard.data.stages.cut import Stripe
from paddle_shard.data.stages.pack import Pack
from paddle_shard.data.stages.steps import (
    Filter,
    Group,
    Map,
    Repeat,
    Shuffle,
    Unbatch,
)

__all__ = [
    "Filter",
    "Group",
    "Map",
    "Pack",
    "Repeat",
    "Shuffle",
    "Stripe",
    "Unbatch",
]
