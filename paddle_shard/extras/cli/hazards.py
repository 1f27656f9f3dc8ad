"""Hazards of a plan on its meshes, each with a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from paddle_shard.checks import listed
from paddle_shard.extras.cli.answer import Hazard
from paddle_shard.extras.cli.places import Meshes
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.mixture import Mixing, drawn_too_often
from paddle_shard.plan.partition import place_of_rows
from paddle_shard.plan.shard_plan import ShardPlan

_DATA_AXES = ("dp", "data", "fsdp", "sharding", "batch")
"""Usual names of axes that carry data."""
_MUCH = 0.01
"""Share of the samples above which dropping them is a hazard."""


def carries_data(axis: str) -> bool:
    """Return whether an axis has a usual name of data axes, such as dp or dp_shard."""
    return axis.partition("_")[0] in _DATA_AXES


def hazards_of_meshes(meshes: Meshes) -> Iterator[Hazard]:
    """Yield the axes of meshes that are named like data axes and do not split the rows."""
    for number, (mesh, axes) in enumerate(meshes):
        prefix = f"mesh {number}: " if len(meshes) > 1 else ""
        for hazard in _idle_axes(mesh, axes):
            yield Hazard(prefix + hazard.what, hazard.remedy)


def _idle_axes(mesh: MeshLayout, axes: Sequence[str]) -> Iterator[Hazard]:
    others = [axis for axis in axes if not carries_data(axis)]
    for axis, size in zip(mesh.axes, mesh.shape, strict=True):
        if not carries_data(axis) or axis in axes or size == 1:
            continue
        remedy = f"shard_dims={[*axes, axis]!r} splits the rows over it, too"
        if others:
            alone = f"shard_dims={[axis]!r} splits the rows over it instead of {', '.join(map(repr, others))}"
            remedy = f"{alone}; {[*axes, axis]!r} over both"
        yield Hazard(f"axis {axis!r} of {size} ranks carries no data: all of them get the same rows", remedy)


def hazards_of_plan(plan: ShardPlan, epoch: int) -> Iterator[Hazard]:
    """Yield the hazards of a plan; of its steps, the last one of an epoch is examined."""
    if plan.num_steps:
        yield from _ranks_without_samples(plan, epoch, plan.num_steps - 1)
    dropped = plan.num_positions - plan.num_served
    if dropped > _MUCH * plan.num_samples:
        what = f"tail={plan.tail!r} drops {dropped} of {plan.num_samples} samples in each epoch"
        if not plan.num_steps:
            what += " and leaves no step"
        yield Hazard(what, "tail='pad' serves them, and a smaller batch drops fewer")
    micro_rows = max(1, plan.batch_size // plan.accumulation)
    advice = plan.ordering.advice(plan.num_samples, plan.num_data_ranks, micro_rows)
    if advice is not None:
        what, _, remedy = advice.partition(". ")
        yield Hazard(what, remedy)
    if isinstance(plan.ordering, Mixing):
        for what, remedy in drawn_too_often(plan.ordering, plan.num_samples):
            yield Hazard(what, remedy)


def _ranks_without_samples(plan: ShardPlan, epoch: int, step: int) -> Iterator[Hazard]:
    """Yield whether data ranks have no valid row at a step."""
    rows = np.arange(plan.num_rows(step=step))
    valid = plan.valid(epoch=epoch, step=step, rows=rows)
    data_ranks, _ = place_of_rows(rows[valid], len(rows), plan.num_data_ranks, plan.micro_size(step=step))
    idle = np.setdiff1d(np.arange(plan.num_data_ranks), data_ranks).tolist()
    if idle:
        what = (
            f"the last step of the epoch, {step}, has {len(rows) - valid.sum()} of {len(rows)} rows of padding, and "
            f"nothing else on {len(idle)} of its data ranks: {listed(idle)}"
        )
        remedy = (
            "A mean over the valid rows of such a rank divides by 0: divide the sum of all ranks by their count. "
            "tail='drop' leaves such a step out"
        )
        yield Hazard(what, remedy)
