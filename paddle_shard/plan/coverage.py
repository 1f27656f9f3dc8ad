"""How often does a plan deliver each sample?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.partition import slice_rows

EXACT_MAX = 1 << 22
"""Up to this many positions, a plan's deliveries are counted one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Counts of how often a plan delivers each sample in an epoch, without padding rows."""

    num_samples: int
    delivered: int
    """Real rows over all steps and data ranks."""
    missed: int
    """Samples that no data rank delivers, including those that "drop" drops."""
    repeated: int
    """Deliveries beyond the first of a sample."""
    padding: int
    """Rows of padding."""
    counted: bool
    """True if each delivery was counted. False for long data sets: only the first, the last and some other steps were
    checked. At these steps, the slices are disjoint and complete, and the inverse undoes the order."""


class Plan(Protocol):
    """The part of `ShardPlan` that is used here."""

    @property
    def num_samples(self) -> int:
        """See `ShardPlan`."""

    @property
    def num_positions(self) -> int:
        """See `ShardPlan`."""

    @property
    def num_steps(self) -> int:
        """See `ShardPlan`."""

    @property
    def num_data_ranks(self) -> int:
        """See `ShardPlan`."""

    def order(self, *, epoch: int) -> Any:
        """See `ShardPlan`."""

    def first_position(self, *, step: int) -> int:
        """See `ShardPlan`."""

    def num_rows(self, *, step: int) -> int:
        """See `ShardPlan`."""

    def micro_size(self, *, step: int) -> int:
        """See `ShardPlan`."""

    def take(self, *, epoch: int, step: int, rows: Any) -> npt.NDArray[np.int64]:
        """See `ShardPlan`."""

    def valid(self, *, epoch: int, step: int, rows: Any) -> npt.NDArray[np.bool_]:
        """See `ShardPlan`."""


def coverage(plan: Plan, epoch: int) -> Coverage:
    """Return how often all data ranks of a plan together deliver each sample."""
    if plan.num_positions <= EXACT_MAX:
        served, padding = [np.empty(0, np.int64)], 0
        for step in range(plan.num_steps):
            for indices, real in _deliveries(plan, epoch, step):
                served.append(indices[real])
                padding += int((~real).sum())
        delivered = sum(map(len, served))
        different = len(np.unique(np.concatenate(served)))
        missed, repeated = plan.num_samples - different, delivered - different
        return Coverage(
            num_samples=plan.num_samples,
            delivered=delivered,
            missed=missed,
            repeated=repeated,
            padding=padding,
            counted=True,
        )
    steps = sorted({step for step in (0, 1, plan.num_steps // 2, plan.num_steps - 1) if 0 <= step < plan.num_steps})
    order, repeated = plan.order(epoch=epoch), 0
    for step in steps:
        parts = list(_deliveries(plan, epoch, step))
        real = np.concatenate([indices[valid] for indices, valid in parts])
        first, rows = plan.first_position(step=step), np.arange(plan.num_rows(step=step))
        wanted = plan.take(epoch=epoch, step=step, rows=rows)[plan.valid(epoch=epoch, step=step, rows=rows)]
        if sorted(real.tolist()) != sorted(wanted.tolist()):
            raise AssertionError(f"the slices of step {step} (positions from {first}) are not its global batch")
        positions = (first + rows) % plan.num_positions
        if (order.inverse(order(positions)) != positions).any():
            raise AssertionError(f"the order of epoch {epoch} is not undone by its inverse at step {step}")
        repeated += len(real) - len(np.unique(real))
    last = plan.num_steps - 1
    end = plan.first_position(step=last) + plan.num_rows(step=last) if plan.num_steps else 0
    delivered = min(end, plan.num_samples)
    padding = max(0, end - plan.num_positions) + plan.num_positions - plan.num_samples
    return Coverage(
        num_samples=plan.num_samples,
        delivered=delivered,
        missed=plan.num_samples - delivered,
        repeated=repeated,
        padding=padding,
        counted=False,
    )


def _deliveries(plan: Plan, epoch: int, step: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
    num_rows, micro_size = plan.num_rows(step=step), plan.micro_size(step=step)
    for data_rank in range(plan.num_data_ranks):
        rows = slice_rows(num_rows, plan.num_data_ranks, data_rank, micro_size)
        yield plan.take(epoch=epoch, step=step, rows=rows), plan.valid(epoch=epoch, step=step, rows=rows)
