"""Which ranks of this host share a reader?"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import paddle.distributed as dist

from paddle_shard.errors import ArgumentError
from paddle_shard.loader.options import LoaderOptions
from paddle_shard.placement.field import FieldLayout
from paddle_shard.ranks.rendezvous import hosts_of_ranks
from paddle_shard.ranks.replicas import Replicas
from paddle_shard.reading.source import Source


def replicas_of(
    options: LoaderOptions,
    source: Source,
    layouts: Sequence[FieldLayout],
    ranks: Sequence[int],
) -> Replicas:
    """Return how a loader shares its reading: ranks of one host that read the same rows share a reader.

    Args:
        options: The loader's options.
        source: What is read.
        layouts: Of all fields.
        ranks: Global ranks that agree on the steps.

    Raises:
        ArgumentError: replicas="leader", but it is not known who shares a host.
    """
    if options.replicas == "each" or len(ranks) == 1:
        return Replicas()
    hosts = hosts_of_ranks()
    me = dist.get_rank()
    if hosts is None:
        raise ArgumentError(
            "replicas='leader': which ranks share a host is read from PADDLE_TRAINER_ENDPOINTS, which does not have "
            "one host:port for each rank. Start the ranks with python -m paddle.distributed.launch, or leave replicas "
            "at 'each'."
        )
    rows = _rows_of(me, source, layouts)
    together = [
        one
        for one in sorted(ranks)
        if hosts[one] == hosts[me] and _rows_of(one, source, layouts) == rows
    ]
    return Replicas(ranks=tuple(together) if len(together) > 1 else ())


def _rows_of(rank: int, source: Source, layouts: Sequence[FieldLayout]) -> Hashable:
    """Return what stands for the rows that a rank reads; equal for ranks that read the same."""
    if source.item_is_batch and not source.split:
        return "whole global batches"
    return tuple(
        dict.fromkeys(
            found for layout in layouts if (found := layout.slice_of(rank)) is not None
        )
    )
