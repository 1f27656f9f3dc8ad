"""The stages of a stream between its source and the batch, one stage per file."""

from paddle_shard.stages.batch import Batch, Unbatch
from paddle_shard.stages.filter import Filter
from paddle_shard.stages.map import Map
from paddle_shard.stages.pack import Pack
from paddle_shard.stages.repeat import Repeat
from paddle_shard.stages.round_robin import RoundRobin
from paddle_shard.stages.shuffle import Shuffle
from paddle_shard.stages.stripe import Stripe

__all__ = ["Batch", "Filter", "Map", "Pack", "Repeat", "RoundRobin", "Shuffle", "Stripe", "Unbatch"]
