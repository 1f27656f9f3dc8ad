"""The stages of a stream between its source and the batch."""

from paddle_shard.stages.cut import RoundRobin, Stripe
from paddle_shard.stages.pack import Pack
from paddle_shard.stages.steps import Batch, Filter, Map, Repeat, Shuffle, Unbatch

__all__ = ["Batch", "Filter", "Map", "Pack", "Repeat", "RoundRobin", "Shuffle", "Stripe", "Unbatch"]
