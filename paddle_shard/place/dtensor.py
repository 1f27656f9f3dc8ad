"""How does a local tensor become a distributed one, on this rank's mesh or on another?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import paddle
from paddle.distributed.auto_parallel.api import dtensor_from_local

from paddle_shard.errors import BatchStructureError
from paddle_shard.place.field import FieldLayout
from paddle_shard.plan.partition import Rows, nearest_multiples


def take_rows(tensor: Any, positions: Rows) -> Any:
    """Return the rows of a tensor at ascending positions; the tensor itself if these are all its rows."""
    if len(positions) == tensor.shape[0]:
        return tensor
    first, last = int(positions[0]), int(positions[-1])
    if last - first == len(positions) - 1:
        return tensor[first : last + 1]
    return paddle.gather(tensor, paddle.to_tensor(positions, place=tensor.place))


def split_sequence(tensor: Any, layout: FieldLayout, path: str) -> Any:
    """Return this process's part of a tensor, cut along the dims that the layout splits, except the first dim.

    Raises:
        BatchStructureError: The tensor lacks such a dim, or the dim cannot be cut evenly.
    """
    for dim, parts, part, balanced in layout.sequence_splits:
        _check_dim(tensor, dim, parts * (1 + balanced), path)
        chunks = [part, 2 * parts - 1 - part] if balanced else [part]
        size = tensor.shape[dim] // (parts * (1 + balanced))
        pieces = [paddle.slice(tensor, axes=[dim], starts=[c * size], ends=[(c + 1) * size]) for c in chunks]
        tensor = pieces[0] if len(pieces) == 1 else paddle.concat(pieces, axis=dim)
    return tensor


def place(local: Any, layout: FieldLayout) -> Any:
    """Return the distributed tensor of which this process holds `local` (about 5 us)."""
    # Paddle's reshard sends the memory of a local tensor as it lies there: of a view it sends other numbers.
    local = local if local.is_contiguous() else local.contiguous()
    return dtensor_from_local(local, layout.mesh, layout.placements)


def place_elsewhere(local: Any, read_rows: int, num_rows: int, layout: FieldLayout, path: str) -> Any:
    """Return the metadata of a distributed tensor on a mesh that this process is not on.

    Args:
        local: Some rows of the field, or the whole field if it has no rows. It gives the dtype and the other dims.
        read_rows: Number of rows that were read.
        num_rows: Number of rows of the global batch.
        layout: The field's layout.
        path: The field's path, for errors.
    """
    shape = list(local.shape)
    if shape and shape[0] == read_rows:
        shape[0] = num_rows // layout.num_data_ranks
    for dim, parts, _, balanced in layout.sequence_splits:
        _check_dim(local, dim, parts * (1 + balanced), path)
        shape[dim] //= parts
    return place(paddle.empty(shape, local.dtype), layout)


def place_mask(mask: np.ndarray[Any, Any], layout: FieldLayout) -> Any:
    """Return this process's mask as a distributed tensor: one bool per row, split as the layout splits rows."""
    tensor = paddle.to_tensor(mask)
    rows_only = tuple((axis, dim) for axis, dim in layout.dims if dim == 0)
    return place(tensor, replace(layout, dims=rows_only))


def _check_dim(tensor: Any, dim: int, unit: int, path: str) -> None:
    if len(tensor.shape) <= dim:
        raise BatchStructureError(f"field {path} has {len(tensor.shape)} dims, so its dim {dim} cannot be split.")
    if tensor.shape[dim] % unit:
        sizes = " or ".join(map(str, nearest_multiples(tensor.shape[dim], unit)))
        raise BatchStructureError(
            f"field {path}: dim {dim} has size {tensor.shape[dim]}, which cannot be cut into {unit} equal "
            f"chunks. Nearest sizes that can: {sizes}."
        )
