"""The plan of a run: which rank reads which sample at which step. Needs only the standard library and numpy."""

from __future__ import annotations

from paddle_shard.plan.blocks import Blocks
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.shard_plan import ShardPlan

__all__ = ["Blocks", "MeshLayout", "ShardPlan"]
