"""How does a `ShardPlan` become the batches of an epoch?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.partition import Rows
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.state import LoaderState


class PlanBatch(NamedTuple):
    """A global batch that computes only the indices that a rank asks for."""

    plan: ShardPlan
    epoch: int
    step: int
    num_rows: int
    """Rows of the global batch, padding included."""
    micro_size: int
    """Rows of each of its micro-batches."""
    num_real: int
    """Positions of the order that the batch serves."""
    all_real: bool
    """True if no row is padding; False also if that is not known."""
    sampler_state: None = None

    def take(self, rows: Rows | range) -> Rows:
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
        """Always True."""
        return True

    def untouched(self) -> PlanBatches:
        """Return itself: an iteration changes nothing."""
        return self

    def __len__(self) -> int:
        return self.plan.num_steps

    def epoch(self, epoch: int, resumed: LoaderState | None = None) -> Iterator[PlanBatch]:
        """Iterate over the global batches of an epoch; any position costs the same to begin at."""
        plan, first = self.plan, 0
        if resumed is not None:
            if resumed.ended:
                return
            plan, first = resumed_plan(plan, resumed), resumed.steps
        known, last, sizes = not plan.ordering.pads_first, plan.num_steps - 1, (0, 0)
        for step in range(first, last + 1):
            if step in (first, last) or step <= plan.alike_from:
                sizes = plan.num_rows(step=step), plan.micro_size(step=step)
            num_rows, micro_size = sizes
            num_real = min(num_rows, plan.num_positions - plan.first_position(step=step))
            yield PlanBatch(plan, epoch, step, num_rows, micro_size, num_real, known and num_real == num_rows)

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order depends on."""
        return self.plan.fingerprint()


def resumed_plan(plan: ShardPlan, resumed: LoaderState) -> ShardPlan:
    """Return the plan of an epoch that resumes from a saved position, perhaps with another batch size."""
    segments = resumed.continued(plan.batch_size)
    if len(segments) < 2:
        return plan
    return replace(plan, segments=segments, ended=resumed.ended and segments[-1][0] == resumed.samples)
