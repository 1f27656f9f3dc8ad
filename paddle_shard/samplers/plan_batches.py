"""How does a `ShardPlan` become the batches of an epoch?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.order import PADDLE
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.state import LoaderState


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBatch:
    """A global batch that computes only the indices that a rank asks for."""

    plan: ShardPlan
    epoch: int
    step: int
    num_rows: int
    """Rows of the global batch, padding included."""
    sampler_state: None = None

    @property
    def micro_size(self) -> int:
        """Rows of each of its micro-batches."""
        return self.plan.micro_size(step=self.step)

    @property
    def num_real(self) -> int:
        """Positions of the order that it serves."""
        return min(self.num_rows, self.plan.num_positions - self.plan.first_position(step=self.step))

    @property
    def all_real(self) -> bool:
        """Whether no row is padding; False also where that is not known."""
        return self.plan.shuffle not in PADDLE and self.num_real == self.num_rows

    def take(self, rows: Rows) -> Rows:
        """Return the data set's indices at some rows."""
        return self.plan.take(epoch=self.epoch, step=self.step, rows=rows)

    def valid(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of some rows are real."""
        return self.plan.valid(epoch=self.epoch, step=self.step, rows=rows)


@dataclass(frozen=True, slots=True)
class PlanBatches:
    """The batches of a plan."""

    plan: ShardPlan

    @property
    def knows_length(self) -> bool:
        """Always."""
        return True

    def untouched(self) -> PlanBatches:
        """Return itself: looking changes nothing."""
        return self

    def __len__(self) -> int:
        return self.plan.num_steps

    def epoch(self, epoch: int, resumed: LoaderState | None = None) -> Iterator[PlanBatch]:
        """Iterate over the global batches of an epoch; beginning anywhere costs nothing."""
        plan, first = self.plan, 0
        if resumed is not None:
            if resumed.ended:
                return
            plan, first = resumed_plan(plan, resumed), resumed.steps
        for step in range(first, plan.num_steps):
            yield PlanBatch(plan=plan, epoch=epoch, step=step, num_rows=plan.num_rows(step=step))

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order depends on."""
        return self.plan.fingerprint()


def resumed_plan(plan: ShardPlan, resumed: LoaderState) -> ShardPlan:
    """Return the plan of an epoch that goes on from a saved position, perhaps with another batch size."""
    segments = resumed.continued(plan.batch_size)
    return plan if len(segments) < 2 else replace(plan, segments=segments)
