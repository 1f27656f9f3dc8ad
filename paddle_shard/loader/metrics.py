"""How is a metric over padded batches made exact?"""

from __future__ import annotations

from typing import Any

import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

from paddle_shard.errors import ArgumentError


def gather_valid(values: Any, valid: Any) -> Any:
    """Return a value for each real row of a global batch, from all ranks, without the padding.

    Collective over the mesh of `valid`.

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
        >>> for images, labels in batches:
        ...     hits = gather_valid(model(images).argmax(-1) == labels, batches.valid)
        ...     right, total = right + int(hits.sum()), total + len(hits)
    """
    if not valid.is_dist():
        raise ArgumentError(
            f"valid must be the iterator's `valid`, a distributed tensor, got a local one of {list(valid.shape)}: it "
            "is not known which rows of the other ranks are real."
        )
    rows, own = int(valid.shape[0]), int(valid._local_value().shape[0])
    if not values.is_dist() and list(values.shape[:1]) == [own] and own < rows:
        values = dtensor_from_local(values.contiguous(), valid.process_mesh, valid.placements)
    if list(values.shape[:1]) != [rows]:
        raise ArgumentError(
            f"values must have a row for each of the {rows} of the global batch, or for each of the {own} that this "
            f"rank holds, got shape {list(values.shape)}."
        )
    whole = [
        dist.reshard(one, one.process_mesh, [dist.Replicate() for _ in one.placements])._local_value()
        if one.is_dist()
        else one
        for one in (values, valid)
    ]
    return whole[0][whole[1]]
