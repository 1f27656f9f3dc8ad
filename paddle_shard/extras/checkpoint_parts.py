"""Which part of a distributed tensor has this rank, and how is it filled from what was split otherwise?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_shard.errors import StateError


def is_dist(leaf: Any) -> bool:
    """Return whether a leaf is a distributed tensor."""
    return isinstance(leaf, paddle.Tensor) and leaf.is_dist()


def is_split(leaf: Any) -> bool:
    """Return whether a leaf is a tensor that `dist.save_state_dict` can save in parts."""
    if not is_dist(leaf):
        return False
    # `dist.shard_layer` gives a placement for each dim of a tensor, which may be more or fewer than the mesh has axes.
    kinds = zip(leaf.process_mesh.shape, leaf.placements, strict=False)
    over = [kind for size, kind in kinds if size > 1 and not kind.is_replicated()]
    # Not sums; and Paddle 3.3 fails for a dim that two axes split, whose kind does not tell its dim.
    return bool(over) and all(hasattr(kind, "get_dim") for kind in over)


def kind_of(tensor: Any) -> list[Any]:
    """Return the shape and the dtype of a tensor, as JSON values."""
    return [list(tensor.shape), str(tensor.dtype).removeprefix("paddle.")]


def fill(targets: Mapping[str, Any], whole: Mapping[str, Any], directory: Path) -> None:
    """Fill what this rank has of tensors: from whole ones, and from the files of `dist.save_state_dict`.

    Paddle's `load_state_dict` does so on NVIDIA's GPUs only: elsewhere it fails, or leaves zeros where a slice of a
    tensor is a copy of it (`FLAGS_use_stride_kernel=0`). Nothing is sent here, so no rank waits for one that fails.

    Raises:
        StateError: Not all of them was saved.
    """
    own = {path: part for path, target in targets.items() if (part := _own_part(target)) is not None}
    missing = {path: int(np.prod(part.shape)) for path, (_, part) in own.items()}
    wanted = defaultdict[Path | None, list[tuple[str, Any, Any]]](list)
    for path, first, shape, file in _saved(whole, directory):
        if path in own:
            start, part = own[path]
            low, high = np.maximum(first, start), np.minimum(np.add(first, shape), start + part.shape)
            if (low < high).all():
                into, out_of = (tuple(map(slice, low - at, high - at)) for at in (start, first))
                wanted[file].append((path, into, out_of))
                missing[path] -= int(np.prod(high - low))
    if lacking := sorted(path for path, number in missing.items() if number > 0):
        raise StateError(f"the checkpoint does not hold all of {lacking}, of which this rank has a part.")
    filled: dict[str, Any] = {}
    for file, pieces in wanted.items():
        saved = whole if file is None else paddle.load(str(file), return_numpy=True)
        for path, into, out_of in pieces:
            values = np.asarray(saved[path])
            filled.setdefault(path, np.empty(own[path][1].shape, values.dtype))[into] = values[out_of]
    for path, values in filled.items():
        own[path][1].set_value(values)


def _saved(whole: Mapping[str, Any], directory: Path) -> Iterator[tuple[str, Any, Sequence[int], Path | None]]:
    """Yield (path, index at which it begins, shape, file) of each saved part of a tensor; no file for whole ones."""
    for path, leaf in whole.items():
        if isinstance(leaf, paddle.Tensor):
            yield path, np.zeros(leaf.ndim, int), leaf.shape, None
    if (metadata := directory / "0.metadata").exists():
        told = paddle.load(str(metadata))
        starts = {(part.tensor_key, part.global_offset): file for part, file in told.storage_metadata.items()}
        for path, parts in told.state_dict_metadata.items():
            for one in parts:
                yield path, np.array(one.global_offset), one.local_shape, directory / starts[path, one.global_offset]


def _own_part(tensor: Any) -> tuple[Any, Any] | None:
    """Return where in a tensor this rank's part begins (an index for each dim) and the part; None if it has none."""
    start, size = [0] * len(tensor.shape), list(tensor.shape)
    if not is_dist(tensor):
        return np.array(start, int), tensor
    ranks, shape = list(tensor.process_mesh.process_ids), tensor.process_mesh.shape
    if dist.get_rank() not in ranks:
        return None
    place = map(int, np.unravel_index(ranks.index(dist.get_rank()), shape))
    for at, number, kind in zip(place, shape, tensor.placements, strict=False):  # see `is_split`
        if kind.is_shard():  # the first parts have one more each, if they are not even
            dim = next(dim for dim in range(len(size)) if kind.is_shard(dim))
            each, more = divmod(size[dim], number)
            start[dim], size[dim] = start[dim] + at * each + min(at, more), each + (at < more)
    return np.array(start, int), tensor._local_value()
