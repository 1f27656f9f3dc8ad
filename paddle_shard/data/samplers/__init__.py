"""Turns the plan, or the user's own sampler, into the batches of indices of an epoch, without Paddle."""

from __future__ import annotations

from paddle_shard.data.samplers.plan_batches import (
    Batches,
    IndexBatches,
    PlanBatches,
)
from paddle_shard.data.samplers.user_batches import UserBatches

__all__ = ["Batches", "IndexBatches", "PlanBatches", "UserBatches"]
