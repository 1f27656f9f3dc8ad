"""Which rank has which row of a step that a run has delivered, and where was a sample?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.mixture import Mixing, source_and_index
from paddle_shard.plan.partition import Rows, slice_rows
from paddle_shard.plan.shard_plan import ShardPlan, Where, places_of, step_of_plan
from paddle_shard.plan.skips import Skips
from paddle_shard.record.timeline import Leg, Timeline


@dataclass(frozen=True, kw_only=True)
class Share:
    """The rows of a global batch that some ranks of a mesh have."""

    mesh: int
    """Number of the mesh, from 0."""
    data_rank: int
    ranks: tuple[int, ...]
    """Global ranks: the replica group."""
    rows: tuple[int, ...]
    """Rows of the global batch, in the order in which the ranks have them."""


def shares_of(meshes: list[tuple[MeshLayout, list[str]]], num_rows: int, micro_size: int) -> list[Share]:
    """Return which ranks have which rows of a global batch, on each of some meshes."""
    found = []
    for number, (mesh, axes) in enumerate(meshes):
        count, groups = mesh.num_data_ranks(axes), groups_of(mesh, axes)
        for data_rank in range(count):
            rows = tuple(slice_rows(num_rows, count, data_rank, micro_size).tolist())
            found.append(Share(mesh=number, data_rank=data_rank, ranks=groups[data_rank], rows=rows))
    return found


def groups_of(mesh: MeshLayout, axes: list[str]) -> list[tuple[int, ...]]:
    """Return the global ranks of each data rank, in mesh order."""
    found: list[list[int]] = [[] for _ in range(mesh.num_data_ranks(axes))]
    data_axes = mesh.axis_indices(axes)
    numbers = np.arange(len(mesh.process_ids)).reshape(mesh.shape)
    for place, rank in zip(np.ndindex(*numbers.shape), mesh.process_ids, strict=True):
        sizes, at = [mesh.shape[axis] for axis in data_axes], [place[axis] for axis in data_axes]
        found[int(np.ravel_multi_index(at, sizes)) if at else 0].append(rank)
    return list(map(tuple, found))


def samples_at(plan: ShardPlan, epoch: int, step: int, skips: Skips) -> list[Any]:
    """Return the sample of each row of a step, as users name it; None: a row of padding, or one that is left out."""
    found = step_of_plan(plan, epoch, step, skips)
    if found is None:  # all of it is
        return [None] * plan.num_rows(step=step)
    real = np.ones(len(found.ids), bool) if found.real is None else found.real
    return [name_of(plan, one) if kept else None for one, kept in zip(found.ids, real, strict=True)]


def places_in(run: Timeline, sample: Any) -> Iterator[tuple[Leg, int, int, list[Share]]]:
    """Yield (what has delivered it, step, row of the global batch, who has that row) for each delivery of a sample."""
    for leg in run.legs:
        plan = leg.plan
        for step, row in rows_in(plan, leg.epoch, sample, leg.skips):
            if leg.start.steps <= step < leg.steps:
                shares = shares_of(leg.job.meshes, plan.num_rows(step=step), plan.micro_size(step=step))
                yield leg, step, row, [share for share in shares if row in share.rows]


def rows_in(plan: ShardPlan, epoch: int, sample: Any, skips: Skips) -> Iterator[tuple[int, int]]:
    """Yield (step, row of the global batch) of a sample in an epoch, in ascending order."""
    found = places_of(plan, epoch, sample, skips)
    for one in [found] if isinstance(found, Where) else found or []:
        if one.data_rank is None or one.row is None:  # a short last batch that cannot be split: it was never delivered
            continue
        mine = rows_of(plan, one.step, one.data_rank)
        yield one.step, int(mine[one.row])


def rows_of(plan: ShardPlan, step: int, data_rank: int) -> Rows:
    """Return the rows of a data rank of a plan."""
    return slice_rows(plan.num_rows(step=step), plan.num_data_ranks, data_rank, plan.micro_size(step=step))


def name_of(plan: ShardPlan, sample: Any) -> Any:
    """Return what users call a sample: its index; of a mixture, [source, index]."""
    if not isinstance(plan.ordering, Mixing):
        return int(sample)
    source, index = source_and_index(int(sample))
    return [plan.ordering.names[source], index]
