"""How does a `ShardPlan` become the batches of an epoch?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paddle_shard.plan.partition import Rows
from paddle_shard.plan.shard_plan import ShardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBatch:
    """A global batch that computes only the indices that a rank asks for."""

    plan: ShardPlan
    epoch: int
    step: int

    @property
    def num_rows(self) -> int:
        """Rows of the global batch, padding included."""
        return self.plan.num_rows(step=self.step)

    @property
    def padding(self) -> int:
        """How many of the last rows are padding."""
        return self.plan.padding(step=self.step)

    def take(self, rows: Rows) -> list[Any]:
        """Return the data set's indices at some rows, as Python ints."""
        indices: list[Any] = self.plan.take(epoch=self.epoch, step=self.step, rows=rows).tolist()
        return indices


@dataclass(frozen=True, slots=True)
class PlanBatches:
    """The batches of a plan."""

    plan: ShardPlan

    def __len__(self) -> int:
        return self.plan.num_steps

    def epoch(self, epoch: int) -> Iterator[PlanBatch]:
        """Iterate over the global batches of an epoch."""
        for step in range(self.plan.num_steps):
            yield PlanBatch(plan=self.plan, epoch=epoch, step=step)
