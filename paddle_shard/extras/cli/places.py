"""Rows and samples of a step for each replica group of some meshes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paddle_shard.extras.cli.answer import Json
from paddle_shard.plan.mesh import MeshLayout, replica_groups
from paddle_shard.plan.mixture import Mixing
from paddle_shard.plan.partition import slice_rows
from paddle_shard.plan.shard_plan import ShardPlan, global_batches
from paddle_shard.plan.skips import Ranges, is_in

Meshes = Sequence[tuple[MeshLayout, Sequence[str]]]
"""Each mesh with its data axes."""


def shapes_of(meshes: Meshes) -> str:
    """Return the axes and sizes of meshes, such as dp=2,mp=4."""
    shapes = (mesh.sizes.items() for mesh, _ in meshes)
    return " and ".join(
        ",".join(f"{axis}={size}" for axis, size in shape) for shape in shapes
    )


def groups_of(meshes: Meshes) -> Iterator[Json]:
    """Yield the replica groups: {"mesh": its number, "data_rank": .., "ranks": global ranks in mesh order}."""
    for number, (mesh, axes) in enumerate(meshes):
        for data_rank, group in enumerate(replica_groups(mesh, axes)):
            yield {"mesh": number, "data_rank": data_rank, "ranks": group}


def rows_of(
    plan: ShardPlan, meshes: Meshes, step: int
) -> Iterator[tuple[Json, Sequence[int]]]:
    """Yield each replica group with its rows of the global batch at a step, in its own order.

    Without meshes, it is not known who has which rows: they were balanced by costs that a record does not hold.
    """
    num_rows = plan.num_rows(step=step)
    micro_size = plan.micro_size(step=step)
    if not meshes:
        yield {"mesh": None, "data_rank": None, "ranks": None}, range(num_rows)
    for group in groups_of(meshes):
        mesh, axes = meshes[group["mesh"]]
        yield (
            group,
            slice_rows(
                num_rows,
                mesh.num_data_ranks(axes),
                group["data_rank"],
                micro_size,
            ).tolist(),
        )


def samples_at(
    plan: ShardPlan, epoch: int, step: int, skips: Ranges
) -> list[Any]:
    """Return the sample of each row of a step, as users name it; None for padding and skipped rows."""
    num_rows = plan.num_rows(step=step)
    if is_in(skips, step):
        return [None] * num_rows
    [batch] = global_batches(plan, epoch, [step])
    names = np.asarray(batch.take(range(num_rows))).tolist()
    if isinstance(plan.ordering, Mixing):
        names = [list(plan.ordering.named(sample)) for sample in names]
    if batch.valid is not None:
        valid = batch.valid(np.arange(num_rows))
        valid_names = zip(names, valid, strict=True)
        names = [name if is_valid else None for name, is_valid in valid_names]
    return list(names)


def samples_of(
    plan: ShardPlan, meshes: Meshes, epoch: int, step: int, skips: Ranges
) -> list[Json]:
    """Return each replica group with the samples of its rows at a step."""
    samples = samples_at(plan, epoch, step, skips)
    return [
        {**group, "samples": [samples[row] for row in rows]}
        for group, rows in rows_of(plan, meshes, step)
    ]
