"""Which ranks of this host share a reader?"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import paddle.distributed as dist

from paddle_shard.errors import ArgumentError
from paddle_shard.inputs.options import LoaderOptions
from paddle_shard.inputs.source import Source
from paddle_shard.place.field import FieldLayout
from paddle_shard.ranks.rendezvous import hosts_of_ranks
from paddle_shard.ranks.replicas import Replicas


def replicas_of(
    options: LoaderOptions, source: Source, layouts: Sequence[FieldLayout], ranks: Sequence[int]
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
    hosts, me, asked = hosts_of_ranks(), dist.get_rank(), options.replicas == "leader"
    if hosts is None and asked and len(ranks) > 1:
        raise ArgumentError(
            "replicas='leader': which ranks share a host is read from PADDLE_TRAINER_ENDPOINTS, which does not have "
            "one host:port for each rank. Start the ranks with python -m paddle.distributed.launch, or leave replicas "
            "at 'each'."
        )
    if len(ranks) == 1 or hosts is None:
        return Replicas()
    rows = _rows_of(me, source, layouts)
    together = [one for one in sorted(ranks) if hosts[one] == hosts[me] and _rows_of(one, source, layouts) == rows]
    if options.replicas == "each":
        return Replicas(num_alike=len(together))
    return Replicas(
        ranks=tuple(together) if len(together) > 1 else (),
        measured=not asked and source.stream is None and not options.dataloader.num_workers,
    )


def _rows_of(rank: int, source: Source, layouts: Sequence[FieldLayout]) -> Hashable:
    """Return what stands for the rows that a rank reads; equal for ranks that read the same."""
    if source.item_is_batch and not source.split:
        return "whole global batches"
    return tuple(dict.fromkeys(found for layout in layouts if (found := layout.slice_of(rank)) is not None))
