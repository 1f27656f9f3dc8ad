"""What is wrong with a plan on its meshes, and what would help?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.mixture import Mixing, drawn_too_often
from paddle_shard.plan.partition import place_of_rows
from paddle_shard.plan.places import Meshes, readers_of
from paddle_shard.plan.shard_plan import ShardPlan

Hazard = tuple[str, str]
"""What is wrong, and its remedy."""

DATA_AXES = ("dp", "data", "fsdp", "sharding", "batch")
"""What an axis that carries data is usually called."""
_MODEL_AXES = ("mp", "tp", "tensor", "model", "sep", "cp", "sp", "context", "sequence")
"""What an axis is usually called whose ranks wait for each other in every layer."""
MUCH = 0.01
"""Share of the data that is dropped, or of the rows that are padding, which is a hazard."""
_MOST_SHOWN = 8


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
    for mesh, axes in meshes:
        yield from _of_axes(mesh, axes)
        each = len(mesh.process_ids) // mesh.num_data_ranks(axes)
        if replicas == "each" and len(readers_of([(mesh, axes)], "leader", ranks_per_host)) < len(mesh.process_ids):
            what = f"{each} ranks of each replica group all read, transform and collate the same samples"
            yield what, 'replicas="leader" lets one rank on each host read for the others'
    if plan is None:
        return
    few, ranks = plan.num_samples, plan.num_data_ranks
    if few < ranks:
        what = f"{ranks} data ranks share {few} samples: {ranks - few} of them get nothing but padding"
        yield what, f"Use a mesh with at most {few} data ranks"
    elif not dealt and plan.num_steps:
        yield from _starved(plan, epoch)
    dropped = plan.num_positions - plan.num_served
    if dropped > MUCH * few:
        what = f"tail={plan.tail!r} drops {dropped} of {few} samples in each epoch"
        yield (
            what + " and leaves no step" * (not plan.num_steps),
            "tail='pad' serves them, and a smaller batch drops fewer",
        )
    if (advice := plan.ordering.advice(few, ranks, max(1, plan.batch_size // plan.accumulation))) is not None:
        what, _, way_out = advice.partition(". The order")
        yield what, f"The order{way_out}"
    if isinstance(plan.ordering, Mixing):
        yield from drawn_too_often(plan.ordering, few)


def _of_axes(mesh: MeshLayout, axes: Sequence[str]) -> Iterator[Hazard]:
    """Yield axes that look as if they should carry data, and axes of a model whose ranks are far apart."""
    sizes, apart = dict(zip(mesh.axes, mesh.shape, strict=True)), _distances(mesh)
    for axis, size in sizes.items():
        if axis in DATA_AXES and axis not in axes and size > 1:
            remedy = f"shard_dims={[*axes, axis]!r} splits the rows over it, too"
            if others := [other for other in axes if other not in DATA_AXES]:
                alone = f"shard_dims={[axis]!r} splits the rows over it instead of {', '.join(map(repr, others))}"
                remedy = f"{alone}; {[*axes, axis]!r} over both"
            yield f"axis {axis!r} of {size} ranks carries no data: all of them get the same rows", remedy
    inner = [axis for axis in sizes if axis in _MODEL_AXES and axis not in axes]
    for axis in filter(apart.__contains__, inner):
        if nearer := [one for one in axes if one in apart and apart[one][0] < apart[axis][0]]:
            (_, a, b), (_, c, d) = apart[axis], apart[nearer[0]]
            what = f"axis {axis!r} is further apart than {nearer[0]!r}: ranks {a} and {b} share the work on the same"
            better = ",".join(f"{one}={sizes[one]}" for one in [*(o for o in sizes if o not in inner), *inner])
            remedy = f"Ranks in a row are usually on one host, and {axis!r} sends in every layer: --mesh {better}"
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


def _starved(plan: ShardPlan, epoch: int) -> Iterator[Hazard]:
    """Yield whether data ranks have no real row in the last step."""
    step, ranks = plan.num_steps - 1, plan.num_data_ranks
    rows = np.arange(num_rows := plan.num_rows(step=step))
    if num_rows % ranks:  # another mesh has read it
        return
    data_ranks, _ = place_of_rows(rows, num_rows, ranks, plan.micro_size(step=step))
    real = np.bincount(data_ranks[plan.valid(epoch=epoch, step=step, rows=rows)], minlength=ranks)
    if none := np.flatnonzero(real == 0).tolist():
        what = f"the last step of the epoch, {step}, has {num_rows - real.sum()} of {num_rows} rows of padding"
        shown = f"{', '.join(map(str, none[:_MOST_SHOWN]))}{', ..' * (len(none) > _MOST_SHOWN)}"
        what += f", and nothing else on {len(none)} of its data ranks: {shown}"
        remedy = "A mean over the valid rows of such a rank divides by 0: divide the sum of all ranks by their count"
        yield what, f"{remedy}. tail='drop' leaves such a step out"
