"""Parts of tensors: which part a rank holds, and how it is filled from a checkpoint of other parts.

Paddle's `dist.load_state_dict` works on NVIDIA's GPUs only. Here nothing is sent, so no rank waits for one that fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_shard.errors import StateError


class Part(NamedTuple):
    """A part of a tensor."""

    start: list[int]
    """Index of its first element, for each dim."""
    shape: list[int]
    is_first: bool
    """True if this rank is the first of those that hold it."""


class SavedPart(NamedTuple):
    """A part of a tensor in a checkpoint."""

    path: str
    """Path of the tensor in the states."""
    file: Path
    """File that maps paths to values."""
    kind: list[Any]
    """Shape and dtype of the tensor."""
    start: list[int]
    shape: list[int]


def is_dist(leaf: Any) -> bool:
    """Return whether a leaf is a distributed tensor."""
    return isinstance(leaf, paddle.Tensor) and leaf.is_dist()


def kind_of(tensor: Any) -> list[Any]:
    """Return the shape and the dtype of a tensor, as JSON values."""
    return [list(tensor.shape), str(tensor.dtype).removeprefix("paddle.")]


def without_sums(tensor: Any) -> Any:
    """Return a tensor whose ranks hold values, and no terms of a sum; collective over its mesh if they hold terms."""
    if not is_dist(tensor):
        return tensor
    mesh = tensor.process_mesh
    has_sums = any(placement.is_partial() for placement in tensor.placements)
    if not has_sums or dist.get_rank() not in mesh.process_ids:
        return tensor
    return dist.reshard(tensor, mesh, [dist.Replicate()] * len(mesh.shape))


def part_of(tensor: Any) -> Part | None:
    """Return this rank's part of a tensor; None if it has none."""
    start = [0] * len(tensor.shape)
    shape = list(tensor.shape)
    if not is_dist(tensor):
        return Part(start, shape, dist.get_rank() == 0)
    mesh = tensor.process_mesh
    if dist.get_rank() not in mesh.process_ids:
        return None
    coordinate = np.unravel_index(
        list(mesh.process_ids).index(dist.get_rank()), mesh.shape
    )
    # `dist.shard_layer` gives a placement for each dim of a tensor, which may be more or fewer than the mesh has axes.
    placements = [*tensor.placements, *[dist.Replicate()] * len(mesh.shape)]
    is_first = True
    for place, num_parts, placement in zip(
        map(int, coordinate), mesh.shape, placements, strict=False
    ):
        for dim in filter(placement.is_shard, range(len(shape))):
            # The first parts have one more each.
            size, remainder = divmod(shape[dim], num_parts)
            start[dim] += place * size + min(place, remainder)
            shape[dim] = size + (place < remainder)
        is_first = is_first and (place == 0 or placement.is_shard())
    return Part(start, shape, is_first)


def fill(targets: Mapping[str, Any], saved_parts: Iterable[SavedPart]) -> None:
    """Fill this rank's parts of tensors.

    Args:
        targets: The tensors, by path.
        saved_parts: Parts of tensors in the checkpoint, also of others; those of a file one after another.

    Raises:
        StateError: Not all of this rank's parts was saved.
    """
    load = lru_cache(maxsize=1)(
        lambda file: paddle.load(file, return_numpy=True)
    )
    parts = {path: part_of(target) for path, target in targets.items()}
    missing = {
        path: int(np.prod(part.shape)) for path, part in parts.items() if part
    }
    arrays: dict[str, Any] = {}
    for path, file, _, start, shape in saved_parts:
        part = parts.get(path)
        if part is None:
            continue
        # Their overlap, in indices of the whole tensor.
        low = np.maximum(start, part.start)
        high = np.minimum(np.add(start, shape), np.add(part.start, part.shape))
        if (low < high).all():
            values = np.asarray(load(str(file))[path])
            array = arrays.setdefault(path, np.empty(part.shape, values.dtype))
            source = tuple(map(slice, low - start, high - start))
            target = tuple(map(slice, low - part.start, high - part.start))
            array[target] = values[source]
            missing[path] -= int(np.prod(high - low))
    incomplete = sorted(path for path, number in missing.items() if number > 0)
    if incomplete:
        raise StateError(
            f"the checkpoint does not hold all of {incomplete}, of which this rank has a part."
        )
    for path, array in arrays.items():
        tensor = targets[path]
        (tensor._local_value() if is_dist(tensor) else tensor).set_value(array)
