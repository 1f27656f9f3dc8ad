"""Turns the plan, or the user's own sampler, into the batches of indices of an epoch, without Paddle."""

from __future__ import annotations

from paddle_shard.samplers.batches import IndexBatch, IndexBatches
from paddle_shard.samplers.dealt import DealtBatch
from paddle_shard.samplers.plan_batches import PlanBatch, PlanBatches
from paddle_shard.samplers.user_batches import UserBatches

__all__ = ["DealtBatch", "IndexBatch", "IndexBatches", "PlanBatch", "PlanBatches", "UserBatches"]
