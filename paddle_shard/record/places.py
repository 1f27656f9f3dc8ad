"""Which rank has which row of a step, and where was a sample?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.mixture import Mixing, source_and_index
from paddle_shard.plan.partition import slice_rows
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.plan.shard_plan import ShardPlan, Where, places_of, step_of_plan
from paddle_shard.plan.skips import Skips
from paddle_shard.record.timeline import Leg, Timeline

Meshes = Sequence[tuple[MeshLayout, Sequence[str]]]
"""Each mesh with its data axes."""


def groups_of(meshes: Meshes) -> Iterator[dict[str, Any]]:
    """Yield the replica groups: {"mesh": its number, "data_rank": .., "ranks": global ranks in mesh order}."""
    for number, (mesh, axes) in enumerate(meshes):
        of_axes, at = list(mesh.axis_indices(axes)), np.indices(mesh.shape).reshape(len(mesh.shape), -1)
        sizes = [1, *(mesh.shape[axis] for axis in of_axes)]
        data_ranks = np.ravel_multi_index((0 * at[0], *at[of_axes]), sizes)
        ranks = np.array(mesh.process_ids)[np.argsort(data_ranks, kind="stable")].reshape(math.prod(sizes), -1)
        for data_rank, group in enumerate(ranks.tolist()):
            yield {"mesh": number, "data_rank": data_rank, "ranks": group}


def shares_of(meshes: Meshes, num_rows: int, micro_size: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield each replica group with its rows of a global batch, in the order in which it has them.

    Without meshes, nobody knows who has them: rows were dealt by costs, which a record does not have.
    """
    if not meshes:
        yield {"mesh": None, "data_rank": None, "ranks": None}, list(range(num_rows))
    for group in groups_of(meshes):
        mesh, axes = meshes[group["mesh"]]
        yield group, slice_rows(num_rows, mesh.num_data_ranks(axes), group["data_rank"], micro_size).tolist()


def parts_of(meshes: Meshes, plan: PartsPlan) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield each replica group with the parts of a stream that it holds."""
    for group in groups_of(meshes):
        mesh, axes = meshes[group["mesh"]]
        yield group, list(plan.parts_of(group["data_rank"], mesh.num_data_ranks(axes)))


def samples_at(plan: ShardPlan, epoch: int, step: int, skips: Skips) -> list[Any]:
    """Return the sample of each row of a step, as users name it; None: a row of padding, or one that is left out."""
    found = step_of_plan(plan, epoch, step, skips)
    if found is None:  # all of it is
        return [None] * plan.num_rows(step=step)
    real = np.ones(len(found.ids), bool) if found.real is None else found.real
    return [_name_of(plan, one) if kept else None for one, kept in zip(found.ids, real, strict=True)]


def _name_of(plan: ShardPlan, sample: Any) -> Any:
    """Return what users call a sample: its index; of a mixture, [source, index]."""
    if not isinstance(plan.ordering, Mixing):
        return int(sample)
    source, index = source_and_index(int(sample))
    return [plan.ordering.names[source], index]


def samples_of(plan: ShardPlan, meshes: Meshes, epoch: int, step: int, skips: Skips) -> list[dict[str, Any]]:
    """Return each replica group with the samples of its rows at a step."""
    samples = samples_at(plan, epoch, step, skips)
    shares = shares_of(meshes, plan.num_rows(step=step), plan.micro_size(step=step))
    return [{**group, "samples": [samples[row] for row in rows]} for group, rows in shares]


def places_in(run: Timeline, sample: Any) -> Iterator[tuple[Leg, int, int]]:
    """Yield (what has delivered it, step, row of the global batch) for each delivery of a sample.

    The newest pass may have delivered it after the newest line, too: at a step that is not before `leg.steps`.
    """
    for leg, end_step in run.passes:
        plan = leg.plan
        found = places_of(plan, leg.epoch, sample, leg.skips)
        for one in [found] if isinstance(found, Where) else found or []:
            # A short last batch that cannot be split has no data ranks: it was never delivered.
            if leg.start.steps <= one.step < end_step and one.data_rank is not None:
                num_rows, micro_size = plan.num_rows(step=one.step), plan.micro_size(step=one.step)
                yield leg, one.step, int(slice_rows(num_rows, plan.num_data_ranks, one.data_rank, micro_size)[one.row])
