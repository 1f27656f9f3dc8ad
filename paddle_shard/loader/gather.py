"""`gather_valid`: values of the valid rows of a global batch, from all ranks."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist

from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.loader.compat import auto_dp_axis, in_auto_dp_mode
from paddle_shard.placement.field import from_local
from paddle_shard.ranks.agreeing import fails_on_all_ranks, groups
from paddle_shard.ranks.reports import differences
from paddle_shard.run.run import gathered


def _mesh_ranks(
    _values: Any = None, valid: Any = None, *_: Any, **__: Any
) -> list[tuple[int, ...]]:
    """Return the ranks of the mesh of `valid`; if it has none, of all groups of this rank."""
    mesh = getattr(valid, "process_mesh", None)
    return groups() if mesh is None else [tuple(sorted(mesh.process_ids))]


@fails_on_all_ranks(_mesh_ranks)
def gather_valid(values: paddle.Tensor, valid: paddle.Tensor) -> paddle.Tensor:
    """Return a value for each valid row of a global batch, from all ranks, without the padding.

    Collective over the mesh of `valid`. It also works in Paddle's auto-DP mode, where placements are `Replicate`.

    Args:
        values: [rows, ...]; a distributed tensor with a value for each row of the global batch; or a local one, with a
            value for each row that this rank holds, or for all rows of the global batch.
        valid: bool[rows]; the iterator's `valid` for the same batch, a distributed tensor.

    Returns:
        A local tensor [valid rows, ...], the same on every rank of the mesh, in the order of the data ranks.

    Raises:
        ArgumentError: The shapes do not fit together, or `valid` is a local tensor.

    Examples:
        >>> batches = iter(loader)  # doctest: +SKIP
        >>> for images, labels in batches:  # doctest: +SKIP
        ...     predicted = model(images).argmax(-1)
        ...     hits = gather_valid(predicted == labels.reshape(predicted.shape), batches.valid)
        ...     right, total = right + int(hits.sum()), total + len(hits)
    """
    values = _with_all_rows(values, valid)
    form = {
        "shape": str(list(values.shape)),
        "dtype": str(values.dtype),
        "placements": str(values.placements if values.is_dist() else []),
    }
    (ranks,) = _mesh_ranks(values, valid)
    forms = gathered(form, ranks, None, "gather_valid()")
    if any(other != form for other in forms):
        of_ranks = dict(zip(ranks, forms, strict=True))
        raise ArgumentError(
            f"values must be alike on all data ranks, but differ in their {differences(of_ranks)}. Give one number for "
            "each row, or pad the rows to one length."
        )
    # each data rank has rows of its own, though placements say `Replicate`
    if in_auto_dp_mode():
        mesh = valid.process_mesh
        axis = auto_dp_axis(mesh)
        placements = [
            dist.Shard(0) if axis in (number, name) else dist.Replicate()
            for number, name in enumerate(mesh.dim_names)
        ]
        values = from_local(_local(values), mesh, placements)
        valid = from_local(_local(valid), mesh, placements)
    is_valid = _gather(valid)
    if values.size == 0:  # Paddle's reshard would crash
        return paddle.empty(
            [int(is_valid.sum()), *values.shape[1:]], values.dtype
        )
    return _gather(values)[is_valid]


def _with_all_rows(values: Any, valid: Any) -> Any:
    """Return values with a row for each of the global batch: a distributed tensor, or a local one of all rows."""
    for name, tensor in (("values", values), ("valid", valid)):
        if not isinstance(tensor, paddle.Tensor):
            raise ArgumentTypeError(
                f"gather_valid: {name} must be a paddle.Tensor, got {type(tensor).__name__}."
            )
    if not valid.is_dist():
        raise ArgumentError(
            f"valid must be the iterator's `valid`, a distributed tensor, got a local one of {list(valid.shape)}. With "
            "local=True, add up (values * valid).sum() and valid.sum() over the ranks: dist.all_reduce."
        )
    num_rows = int(valid.shape[0])
    num_local = int(valid._local_value().shape[0])
    given_rows = list(values.shape[:1])
    if (
        not values.is_dist()
        and given_rows == [num_local]
        and num_local < num_rows
    ):
        return from_local(values, valid.process_mesh, valid.placements)
    if given_rows != [num_rows]:
        raise ArgumentError(
            f"values must have a row for each of the {num_rows} of the global batch, or for each of the {num_local} "
            f"that this rank holds, got shape {list(values.shape)}."
        )
    return values


def _local(tensor: Any) -> Any:
    return tensor._local_value() if tensor.is_dist() else tensor


def _gather(tensor: Any) -> Any:
    """Return all of a tensor, as a local one; collective over its mesh."""
    if not tensor.is_dist():
        return tensor
    mesh = tensor.process_mesh
    # Paddle 3.0 asks for a launcher's variables even then
    if len(mesh.process_ids) == 1:
        return tensor._local_value()
    replicated = [dist.Replicate() for _ in tensor.placements]
    wider = _WIDER.get(tensor.dtype) if tensor.place.is_cpu_place() else None
    if wider is None:
        return dist.reshard(tensor, mesh, replicated)._local_value()
    gathered_rows = dist.reshard(tensor.astype(wider), mesh, replicated)
    return gathered_rows._local_value().astype(tensor.dtype)


_WIDER = {
    paddle.float16: paddle.float32,
    paddle.bfloat16: paddle.float32,
    paddle.int16: paddle.int32,
}
"""Dtypes that Paddle's collectives on the CPU lack (some end the process) -> one that holds all of their values."""
