"""How is a metric over padded batches made exact?"""

from __future__ import annotations

from typing import Any

import paddle.distributed as dist

from paddle_shard.errors import ArgumentError


def gather_valid(values: Any, valid: Any) -> Any:
    """Return a value for each real row of a global batch, from all ranks, without the padding.

    Collective over the mesh of the tensors.

    Args:
        values: [rows, ...]; a distributed tensor with a value for each row, or a local one.
        valid: bool[rows]; the iterator's `valid` for the same batch.

    Returns:
        A local tensor [real rows, ...], the same on every rank of the mesh, in the order of the data ranks.

    Examples:
        >>> batches = iter(loader)  # doctest: +SKIP
        >>> for images, labels in batches:
        ...     hits = gather_valid(model(images).argmax(-1) == labels, batches.valid)
        ...     right, total = right + int(hits.sum()), total + len(hits)
    """
    if list(values.shape[:1]) != list(valid.shape):
        raise ArgumentError(
            f"values must have a row for each of the {valid.shape} of valid, got shape {list(values.shape)}."
        )
    return _whole(values)[_whole(valid)]


def _whole(tensor: Any) -> Any:
    if not tensor.is_dist():
        return tensor
    replicated = [dist.Replicate() for _ in tensor.placements]
    return dist.reshard(tensor, tensor.process_mesh, replicated)._local_value()
