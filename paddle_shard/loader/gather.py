"""`gather_valid`: values of the valid rows of a global batch, from all ranks."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist

from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.loader.compat import auto_dp_axis, in_auto_dp_mode
from paddle_shard.placement.field import from_local
from paddle_shard.ranks.agreeing import fails_on_all_ranks, groups
from paddle_shard.run.run import gathered


def _ranks_of(
    values: Any = None, valid: Any = None, *_: Any, **__: Any
) -> list[tuple[int, ...]]:
    """Return the ranks of the mesh of `valid`; if it has none, all that this one makes a loader with."""
    mesh = getattr(valid, "process_mesh", None)
    return groups() if mesh is None else [tuple(sorted(mesh.process_ids))]


@fails_on_all_ranks(_ranks_of)
def gather_valid(values: Any, valid: Any) -> Any:
    """Return a value for each real row of a global batch, from all ranks, without the padding.

    Collective over the mesh of `valid`. In Paddle's auto-DP mode, too, where placements say `Replicate`.

    Args:
        values: [rows, ...]; a distributed tensor with a value for each row of the global batch; or a local one, with a
            value for each row that this rank holds, or for all rows of the global batch.
        valid: bool[rows]; the iterator's `valid` for the same batch, a distributed tensor.

    Returns:
        A local tensor [real rows, ...], the same on every rank of the mesh, in the order of the data ranks.

    Raises:
        ArgumentError: The shapes do not fit together, or `valid` is a local tensor.

    Examples:
        >>> batches = iter(loader)  # doctest: +SKIP
        >>> for images, labels in batches:  # doctest: +SKIP
        ...     predicted = model(images).argmax(-1)
        ...     hits = gather_valid(predicted == labels.reshape(predicted.shape), batches.valid)
        ...     right, total = right + int(hits.sum()), total + len(hits)
    """
    values = _rows_of(values, valid)
    placed = [str(one) for one in values.placements] if values.is_dist() else "none"
    said = {
        "shape": list(values.shape),
        "dtype": str(values.dtype),
        "placements": placed,
    }
    found = gathered(said, _ranks_of(values, valid)[0], None, "gather_valid()")
    for name in said:
        if any(one[name] != said[name] for one in found):
            raise ArgumentError(
                f"values must have the same {name} on all data ranks, got {[one[name] for one in found]}: give one "
                "number for each row, or pad the rows to one length."
            )
    if (
        in_auto_dp_mode()
    ):  # placements say `Replicate` there, though each data rank has rows of its own
        mesh, axis = valid.process_mesh, auto_dp_axis(valid.process_mesh)
        split = [
            dist.Shard(0) if axis in (at, name) else dist.Replicate()
            for at, name in enumerate(mesh.dim_names)
        ]
        parts = [
            one._local_value() if one.is_dist() else one for one in (values, valid)
        ]
        values, valid = (from_local(one, mesh, split) for one in parts)
    return _whole(values)[_whole(valid)]


def _rows_of(values: Any, valid: Any) -> Any:
    """Return values with a row for each of the global batch: a distributed tensor, or a local one of all rows."""
    for name, given in (("values", values), ("valid", valid)):
        if not isinstance(given, paddle.Tensor):
            raise ArgumentTypeError(
                f"gather_valid: {name} must be a paddle.Tensor, got {type(given).__name__}."
            )
    if not valid.is_dist():
        raise ArgumentError(
            f"valid must be the iterator's `valid`, a distributed tensor, got a local one of {list(valid.shape)}: it "
            "is not known which rows of the other ranks are real."
        )
    rows, own = int(valid.shape[0]), int(valid._local_value().shape[0])
    if not values.is_dist() and list(values.shape[:1]) == [own] and own < rows:
        values = from_local(values, valid.process_mesh, valid.placements)
    if list(values.shape[:1]) != [rows]:
        raise ArgumentError(
            f"values must have a row for each of the {rows} of the global batch, or for each of the {own} that this "
            f"rank holds, got shape {list(values.shape)}."
        )
    return values


def _whole(tensor: Any) -> Any:
    """Return all of a tensor, as a local one; collective over its mesh."""
    if not tensor.is_dist():
        return tensor
    if (
        len(tensor.process_mesh.process_ids) == 1
    ):  # Paddle 3.0 asks for a launcher's variables even then
        return tensor._local_value()
    return dist.reshard(
        tensor, tensor.process_mesh, [dist.Replicate() for _ in tensor.placements]
    )._local_value()
