"""What is wrong with a plan on its meshes, and what would help?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from paddle_shard.checks import listed
from paddle_shard.extras.cli.places import Meshes, readers_of
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.mixture import Mixing, drawn_too_often
from paddle_shard.plan.partition import place_of_rows
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.plan.shard_plan import ShardPlan

Hazard = tuple[str, str]
"""What is wrong, and its remedy."""

_DATA_AXES = ("dp", "data", "fsdp", "sharding", "batch")
"""What an axis that carries data is usually called."""
_MODEL_AXES = ("mp", "tp", "tensor", "model", "sep", "cp", "sp", "context", "sequence")
"""What an axis is usually called whose ranks wait for each other in every layer."""
MUCH = 0.01
"""Share of the data that is dropped, or of the rows that are padding, which is a hazard."""


def hazards_of(
    plan: ShardPlan | None, meshes: Meshes, replicas: str, ranks_per_host: int | None, epoch: int, *, dealt: bool
) -> Iterator[Hazard]:
    """Yield what is wrong with a plan, and what would help.

    Args:
        plan: The order; None if it is not known.
        meshes: Each mesh with its data axes.
        replicas: See `shard_dataloader`.
        ranks_per_host: The ranks of a host, one after the other; None: all ranks are on one host.
        epoch: The epoch whose last step is looked at.
        dealt: Whether rows are dealt by costs (`balance=`), so that nobody knows here who has which.
    """
    for number, (mesh, axes) in enumerate(meshes):
        which = f"mesh {number}: " * (len(meshes) > 1)
        yield from ((which + what, remedy) for what, remedy in _of_axes(mesh, axes, ranks_per_host))
        each = len(mesh.process_ids) // mesh.num_data_ranks(axes)
        if replicas == "each" and len(readers_of([(mesh, axes)], "leader", ranks_per_host)) < len(mesh.process_ids):
            what = f"{each} ranks of each replica group all read, transform and collate the same samples"
            yield which + what, 'replicas="leader" lets one rank on each host read for the others'
    if plan is None:
        return
    few, ranks = plan.num_samples, plan.num_data_ranks
    if few < ranks and plan.num_steps:
        real = None if dealt else _real_rows(plan, epoch, 0)
        none = ranks - few if real is None else int((real.sum(axis=0) == 0).sum())
        what = f"{ranks} data ranks share {few} samples: {none} of them get nothing but padding"
        yield what, f"Use a mesh with at most {few} data ranks" + ", and tail='pad'" * (plan.tail == "fill")
    elif not dealt and plan.num_steps:
        yield from _starved(plan, epoch)
    dropped = plan.num_positions - plan.num_served
    if dropped > MUCH * few:
        what = f"tail={plan.tail!r} drops {dropped} of {few} samples in each epoch"
        what += " and leaves no step" * (not plan.num_steps)
        yield what, "tail='pad' serves them, and a smaller batch drops fewer"
    if (advice := plan.ordering.advice(few, ranks, max(1, plan.batch_size // plan.accumulation))) is not None:
        what, _, way_out = advice.partition(". The order")
        yield what, f"The order{way_out}"
    if isinstance(plan.ordering, Mixing):
        yield from drawn_too_often(plan.ordering, few)


def hazards_of_parts(plan: PartsPlan, sizes: Sequence[int], where: str = "") -> Iterator[Hazard]:
    """Yield whether parts of a stream differ in size.

    Args:
        plan: The plan of the stream.
        sizes: Bytes of each part's files, which are not counted.
        where: Which files differ; it follows what is wrong.
    """
    if plan.ending.refuses and len(set(sizes)) > 1:
        what = f"tail='error' is refused unless all parts end together, and they differ in size{where}"
        yield what, "Use tail='pad', or count the samples (counts=True; for tars paddle-shard index)"
    elif (lost := plan.ending.lost(sizes)) > MUCH:
        what = f"about {lost:.0%} {'of the data is dropped' if plan.ending.drops else 'of all rows are padding'}"
        what = f"the parts differ in size: {what}, since files that are not counted are not cut{where}"
        yield what, "Count the samples (counts=True; for tars paddle-shard index), or use more files"


def carries_data(axis: str) -> bool:
    """Return whether an axis is called like one that carries data: dp, or dp_shard."""
    return axis.partition("_")[0] in _DATA_AXES


def _of_axes(mesh: MeshLayout, axes: Sequence[str], ranks_per_host: int | None) -> Iterator[Hazard]:
    """Yield axes that look as if they should carry data, and axes of a model whose ranks are far apart."""
    sizes, apart = dict(zip(mesh.axes, mesh.shape, strict=True)), _distances(mesh)
    for axis, size in sizes.items():
        if carries_data(axis) and axis not in axes and size > 1:
            remedy = f"shard_dims={[*axes, axis]!r} splits the rows over it, too"
            if others := [other for other in axes if not carries_data(other)]:
                alone = f"shard_dims={[axis]!r} splits the rows over it instead of {', '.join(map(repr, others))}"
                remedy = f"{alone}; {[*axes, axis]!r} over both"
            yield f"axis {axis!r} of {size} ranks carries no data: all of them get the same rows", remedy
    inner = [axis for axis in sizes if axis in _MODEL_AXES and axis not in axes]
    ids = np.array(mesh.process_ids).reshape(mesh.shape)
    for axis in filter(apart.__contains__, inner):
        if ranks_per_host is not None and not np.diff(ids // ranks_per_host, axis=mesh.axes.index(axis)).any():
            continue  # each of its groups is on one host
        if nearer := [one for one in axes if one in apart and apart[one][0] < apart[axis][0]]:
            (_, a, b), (_, c, d) = apart[axis], apart[nearer[0]]
            what = f"axis {axis!r} is further apart than {nearer[0]!r}: ranks {a} and {b} share the work on the same"
            better = ",".join(f"{one}={sizes[one]}" for one in [*(o for o in sizes if o not in inner), *inner])
            ranks = sorted(mesh.process_ids)
            where = "" if ranks == [*range(ids.size)] else f"@{','.join(map(str, ranks))}"
            remedy = (
                f"Ranks in a row are usually on one host, and {axis!r} sends in every layer: --mesh {better}{where}"
            )
            yield f"{what} rows, and ranks {c} and {d}, which are nearer, do not", remedy


def _distances(mesh: MeshLayout) -> dict[str, tuple[float, int, int]]:
    """Return how far apart ranks next to each other along an axis are in the median, and the first two of them.

    Axes of one rank are left out.

    Examples:
        >>> _distances(MeshLayout(shape=(2, 1, 2), axes=("mp", "pp", "dp"), process_ids=(0, 1, 2, 3)))
        {'mp': (2.0, 0, 2), 'dp': (1.0, 0, 1)}
    """
    ids, found = np.array(mesh.process_ids).reshape(mesh.shape), dict[str, tuple[float, int, int]]()
    for at, (axis, size) in enumerate(zip(mesh.axes, mesh.shape, strict=True)):
        if size > 1:
            first, second = ids.swapaxes(0, at).reshape(size, -1)[:2, 0].tolist()
            found[axis] = float(np.median(np.abs(np.diff(ids, axis=at)))), first, second
    return found


def _real_rows(plan: ShardPlan, epoch: int, step: int) -> npt.NDArray[np.int64] | None:
    """Return how many real rows each data rank has at a step: int64[micro-batch, data rank].

    It is None for a step that these data ranks cannot share: another mesh has read it.
    """
    rows, micro_size = np.arange(plan.num_rows(step=step)), plan.micro_size(step=step)
    if len(rows) % plan.num_data_ranks:
        return None
    data_ranks, _ = place_of_rows(rows, len(rows), plan.num_data_ranks, micro_size)
    valid = plan.valid(epoch=epoch, step=step, rows=rows)
    found = np.zeros((-(-len(rows) // micro_size), plan.num_data_ranks), np.int64)
    np.add.at(found, (rows[valid] // micro_size, data_ranks[valid]), 1)
    return found


def _starved(plan: ShardPlan, epoch: int) -> Iterator[Hazard]:
    """Yield whether data ranks have no real row in the last step."""
    step = plan.num_steps - 1
    if (real := _real_rows(plan, epoch, step)) is None:
        return
    num_rows = plan.num_rows(step=step)
    what = f"the last step of the epoch, {step}, has {num_rows - real.sum()} of {num_rows} rows of padding"
    leaves_out = "tail='drop' leaves such a step out"
    if none := np.flatnonzero(real.sum(axis=0) == 0).tolist():
        what += f", and nothing else on {len(none)} of its data ranks: {listed(none)}"
        remedy = "A mean over the valid rows of such a rank divides by 0: divide the sum of all ranks by their count"
        yield what, f"{remedy}. {leaves_out}"
    elif few := int((real == 0).sum()):
        what += f", and nothing else in {few} micro-batches of its data ranks"
        remedy = "A mean over the valid rows of one divides by 0: divide the sum over all of them and all ranks"
        yield what, f"{remedy} by their count. {leaves_out}"
