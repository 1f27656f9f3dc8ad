"""Which ranks of some meshes have which rows of a step, and which samples?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from paddle_shard.plan.mesh import MeshLayout, replica_groups
from paddle_shard.plan.mixture import Mixing
from paddle_shard.plan.partition import slice_rows
from paddle_shard.plan.shard_plan import ShardPlan, step_of_plan
from paddle_shard.plan.skips import Ranges

_T = TypeVar("_T")
Meshes = Sequence[tuple[MeshLayout, Sequence[str]]]
"""Each mesh with its data axes."""


def shapes_of(meshes: Meshes) -> str:
    """Return the axes and sizes of meshes, such as dp=2,mp=4."""
    shapes = (zip(mesh.axes, mesh.shape, strict=True) for mesh, _ in meshes)
    return " and ".join(",".join(f"{axis}={size}" for axis, size in shape) for shape in shapes)


def groups_of(meshes: Meshes) -> Iterator[dict[str, Any]]:
    """Yield the replica groups: {"mesh": its number, "data_rank": .., "ranks": global ranks in mesh order}."""
    for number, (mesh, axes) in enumerate(meshes):
        for data_rank, group in enumerate(replica_groups(mesh, axes)):
            yield {"mesh": number, "data_rank": data_rank, "ranks": group}


def shares_of(meshes: Meshes, share: Callable[[int, int], _T]) -> Iterator[tuple[dict[str, Any], _T]]:
    """Yield each replica group with what a function says of (data rank, number of data ranks of the mesh)."""
    counts = [mesh.num_data_ranks(axes) for mesh, axes in meshes]
    for group in groups_of(meshes):
        yield group, share(group["data_rank"], counts[group["mesh"]])


def readers_of(meshes: Meshes, replicas: str, ranks_per_host: int | None) -> dict[int, int]:
    """Return the ranks that read, each with its host.

    Unless each rank reads for itself, the first of the ranks of a host that get the same rows reads for them.

    Args:
        meshes: The meshes.
        replicas: See `shard_dataloader`.
        ranks_per_host: The ranks of a host, one after the other; None: all ranks are on one host.

    Examples:
        >>> mesh = MeshLayout(shape=(2, 2), axes=("dp", "mp"), process_ids=(0, 1, 2, 3))
        >>> readers_of([(mesh, ["dp"])], "leader", None), readers_of([(mesh, ["dp"])], "leader", 1)
        ({0: 0, 2: 0}, {0: 0, 1: 1, 2: 2, 3: 3})
    """
    ranks = sorted({rank for mesh, _ in meshes for rank in mesh.process_ids})
    hosts = {rank: rank // ranks_per_host if ranks_per_host else 0 for rank in ranks}
    if replicas == "each":
        return hosts
    rows, first = dict[int, tuple[Any, ...]](), dict[Any, int]()
    for group, share in shares_of(meshes, lambda *mine: (mine,)):
        for rank in group["ranks"]:
            rows[rank] = tuple(dict.fromkeys(rows[rank] + share)) if rank in rows else share
    for rank, host in hosts.items():
        first.setdefault((host, rows[rank]), rank)
    return {rank: hosts[rank] for rank in first.values()}


def reads_of_a_row(meshes: Meshes, reading: Collection[int]) -> int:
    """Return how many of the ranks that read, read the same row; the most, where rows differ.

    Args:
        meshes: The meshes. All of them get each row.
        reading: The ranks that read.

    Examples:
        >>> two = [(MeshLayout(shape=(2,), axes=("dp",), process_ids=ids), ["dp"]) for ids in ((0, 1), (2, 3))]
        >>> reads_of_a_row(two, range(4)), reads_of_a_row(two, [0, 1])
        (2, 1)
    """
    count, who = math.lcm(*(mesh.num_data_ranks(axes) for mesh, axes in meshes)), defaultdict[int, set[int]](set)
    for group, (one, of) in shares_of(meshes, lambda *mine: mine):
        readers = [rank for rank in group["ranks"] if rank in reading]
        for at in range(one * count // of, (one + 1) * count // of):
            who[at].update(readers)
    return max(map(len, who.values()))


def rows_of(plan: ShardPlan, meshes: Meshes, step: int) -> Iterator[tuple[dict[str, Any], Sequence[int]]]:
    """Yield each replica group with its rows of the global batch at a step, in the order in which it has them.

    Without meshes, nobody knows who has them: rows were dealt by costs, which a record does not have.
    """
    num_rows, micro_size = plan.num_rows(step=step), plan.micro_size(step=step)
    if not meshes:
        yield {"mesh": None, "data_rank": None, "ranks": None}, range(num_rows)
    yield from shares_of(meshes, lambda one, of: slice_rows(num_rows, of, one, micro_size).tolist())


def samples_at(plan: ShardPlan, epoch: int, step: int, skips: Ranges) -> list[Any]:
    """Return the sample of each row of a step, as users name it; None: a row of padding, or one that is left out."""
    found = step_of_plan(plan, epoch, step, skips)
    if found is None:  # all of it is
        return [None] * plan.num_rows(step=step)
    real = np.ones(len(found.ids), bool) if found.real is None else found.real
    names: list[Any] = np.asarray(found.ids).tolist()
    if isinstance(plan.ordering, Mixing):
        names = [list(plan.ordering.named(sample)) for sample in names]
    return [name if kept else None for name, kept in zip(names, real, strict=True)]


def samples_of(plan: ShardPlan, meshes: Meshes, epoch: int, step: int, skips: Ranges) -> list[dict[str, Any]]:
    """Return each replica group with the samples of its rows at a step."""
    samples = samples_at(plan, epoch, step, skips)
    return [{**group, "samples": [samples[row] for row in rows]} for group, rows in rows_of(plan, meshes, step)]
