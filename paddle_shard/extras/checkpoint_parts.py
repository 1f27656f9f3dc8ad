"""Parts of distributed tensors: which part a rank holds, and how it is filled from a checkpoint of other parts.

Paddle's `dist.load_state_dict` works on NVIDIA's GPUs only. Here nothing is sent, so no rank waits for one that fails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
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
    is_first: bool = True
    """Whether this rank is the first of those that hold it."""


class SavedPart(NamedTuple):
    """A part of a tensor in a checkpoint."""

    path: str
    """Path of the tensor in the states."""
    start: list[int]
    shape: list[int]
    file: Path | None
    """File that maps paths to values; None for a tensor that was saved whole."""


def is_dist(leaf: Any) -> bool:
    """Return whether a leaf is a distributed tensor."""
    return isinstance(leaf, paddle.Tensor) and leaf.is_dist()


def kind_of(tensor: Any) -> list[Any]:
    """Return the shape and the dtype of a tensor, as JSON values."""
    return [list(tensor.shape), str(tensor.dtype).removeprefix("paddle.")]


def without_sums(tensor: Any) -> Any:
    """Return a distributed tensor whose ranks hold values, and no terms of a sum; collective if they hold terms."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    mesh = tensor.process_mesh
    return dist.reshard(tensor, mesh, [dist.Replicate()] * len(mesh.shape))


def part_of(tensor: Any) -> Part | None:
    """Return this rank's part of a tensor; None if it has none."""
    start = [0] * len(tensor.shape)
    shape = list(tensor.shape)
    if not is_dist(tensor):
        return Part(start, shape)
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
        if not placement.is_shard():
            is_first = is_first and place == 0
            continue
        dim = next(dim for dim in range(len(shape)) if placement.is_shard(dim))
        quotient, remainder = divmod(
            shape[dim], num_parts
        )  # the first parts have one more each
        start[dim] += place * quotient + min(place, remainder)
        shape[dim] = quotient + (place < remainder)
    return Part(start, shape, is_first)


def fill(
    targets: Mapping[str, Any],
    whole: Mapping[str, Any],
    saved_parts: Iterable[SavedPart],
) -> None:
    """Fill this rank's parts of tensors.

    Args:
        targets: The tensors, by path.
        whole: Tensors that were saved whole, by path.
        saved_parts: Parts of tensors in the checkpoint, also of others.

    Raises:
        StateError: Not all of this rank's parts was saved.
    """
    own = {
        path: part
        for path, target in targets.items()
        if (part := part_of(target)) is not None
    }
    missing = {path: int(np.prod(part.shape)) for path, part in own.items()}
    whole_parts = [
        SavedPart(path, [0] * whole[path].ndim, whole[path].shape, None)
        for path in own
        if path in whole
    ]
    # Where the saved parts overlap with this rank's, in the indices of both.
    pieces = defaultdict[Path | None, list[tuple[str, Any, Any]]](list)
    for saved in (*whole_parts, *saved_parts):
        if saved.path not in own:
            continue
        part = own[saved.path]
        low = np.maximum(saved.start, part.start)
        high = np.minimum(
            np.add(saved.start, saved.shape), np.add(part.start, part.shape)
        )
        if (low < high).all():
            target = tuple(map(slice, low - part.start, high - part.start))
            source = tuple(map(slice, low - saved.start, high - saved.start))
            pieces[saved.file].append((saved.path, target, source))
            missing[saved.path] -= int(np.prod(high - low))
    incomplete = sorted(path for path, number in missing.items() if number > 0)
    if incomplete:
        raise StateError(
            f"the checkpoint does not hold all of {incomplete}, of which this rank has a part."
        )
    arrays: dict[str, Any] = {}
    for file, of_file in pieces.items():
        tensors = whole if file is None else paddle.load(str(file), return_numpy=True)
        for path, target, source in of_file:
            values = np.asarray(tensors[path])
            arrays.setdefault(path, np.empty(own[path].shape, values.dtype))[target] = (
                values[source]
            )
    for path, array in arrays.items():
        local = (
            targets[path]._local_value() if is_dist(targets[path]) else targets[path]
        )
        local.set_value(array)
