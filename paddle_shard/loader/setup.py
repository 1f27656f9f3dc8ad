"""The setup of a loader: the objects that all its epoch iterators share, and the checks of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import paddle.distributed as dist
import paddle.io

from paddle_shard.core.warn_once import warn_once
from paddle_shard.errors import ArgumentError
from paddle_shard.loader.rows import LoaderRows
from paddle_shard.loader.stats import LoaderStats
from paddle_shard.placement.field import FieldLayout, describe_layouts
from paddle_shard.placement.placer import BatchPlacer
from paddle_shard.ranks.rendezvous import hosts_of_ranks, num_ranks
from paddle_shard.ranks.replicas import Replicas
from paddle_shard.reading.reading import Reading
from paddle_shard.reading.source import Source
from paddle_shard.run.run import Run
from paddle_shard.version import VERSION


# Without slots, since a cached property is kept in `__dict__`.
@dataclass(frozen=True, kw_only=True)
class LoaderSetup:
    """The objects that all epoch iterators of a loader share."""

    dataloader: paddle.io.DataLoader
    """The user's, or one made for the given stream; it is never changed."""
    source: Source
    placer: BatchPlacer
    row_layout: FieldLayout
    """Layout of the field whose rows this rank reads."""
    rows: LoaderRows
    reading: Reading
    run: Run
    stats: LoaderStats
    ranks: tuple[int, ...]
    """Global ranks that agree on the steps: those of the meshes, or this one alone."""
    config: Mapping[str, Any]
    """Settings that must be the same on all ranks."""
    verify: Literal["first"] | int | None
    replicas: Replicas
    """How reading is shared with other ranks."""
    timeout: float
    exit_when_lost: bool
    prefetch: int
    """Batches that a thread keeps ready; 0: there is no thread."""

    @property
    def is_alone(self) -> bool:
        """True if there are no other ranks to agree with."""
        return len(self.ranks) == 1

    @cached_property
    def compared_ranks(self) -> Mapping[int, Any] | None:
        """Global rank -> its slice of the rows, for ranks that compare what they have read; None: this rank does not.

        It is empty if the data is not split already: then ranks are compared that have read the same samples.
        """
        if self.verify is None or self.is_alone:
            return None
        if not self.source.split:
            return {}
        row_layout = self.row_layout
        return {
            rank: row_layout.slice_of(rank)
            for rank in row_layout.layout.process_ids
        }

    @property
    def sliced_layout(self) -> FieldLayout | None:
        """Layout of the rows of which this rank delivers a slice; None: it reads only rows of its own."""
        is_own = self.source.split or self.source.stream is not None
        return None if is_own else self.row_layout


def config_of(
    source: Source, placer: BatchPlacer, name: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what must be the same on all ranks: name -> value.

    Args:
        source: What is read.
        placer: Where it goes.
        name: Name of the class of the data set, or of what the user gave.
        arguments: Arguments of the user that must be the same as they are.
    """
    config: dict[str, Any] = {
        "data set": name,
        "paddle_shard": VERSION,
        "meshes": describe_layouts(placer.layouts),
        "global batch": source.batch_size,
        "accumulation": source.accumulation,
        "tail": str(source.tail),
        "is_dataset_splitted": source.split,
        **arguments,
    }
    # else each data rank has an order and files of its own
    if not source.split:
        config |= source.batches.fingerprint()
    return config


def ranks_of(layouts: Sequence[FieldLayout]) -> tuple[int, ...]:
    """Return the global ranks of all meshes, ascending.

    Raises:
        ArgumentError: The job does not have these ranks; no process would read their rows.
    """
    ranks = tuple(
        sorted(
            {rank for layout in layouts for rank in layout.layout.process_ids}
        )
    )
    num_processes = num_ranks()
    start = f"python -m paddle.distributed.launch --nproc_per_node {ranks[-1] + 1} script.py"
    if num_processes > 1:
        if ranks[-1] >= num_processes:
            raise ArgumentError(
                f"meshes names the global rank {ranks[-1]}, but this job has {num_processes} ranks, "
                f"0 to {num_processes - 1}: the rows of the others would be lost. Start {ranks[-1] + 1} processes "
                f"({start}), or make the mesh of {num_processes}."
            )
        return ranks
    this_rank = dist.get_rank()
    if this_rank not in ranks and dist.get_world_size() == 1:
        raise ArgumentError(
            f"meshes names the global ranks {list(ranks)}, but this process is rank {this_rank}, the only one of its "
            f"job, and would get no data. Start all ranks ({start}), or make the mesh of [{this_rank}]."
        )
    num_data_ranks = max(layout.num_data_ranks for layout in layouts)
    if num_data_ranks > 1 and dist.get_world_size() == 1:
        warn_once(
            "the mesh has %d ranks, but this is the only process of its job, and reads at most 1/%d of the rows. "
            "Fine for a look at a program; to train, start all ranks: %s",
            len(ranks),
            num_data_ranks,
            start,
        )
    return (this_rank,)


def warn_if_unsplit(layout: FieldLayout) -> None:
    """Log that the ranks of a data axis get the same rows, which is seldom meant."""
    if (
        layout.num_data_ranks > 1
        or layout.global_rank != layout.layout.process_ids[0]
    ):
        return
    for axis, size in layout.layout.sizes.items():
        if axis in ("dp", "data") and size > 1:
            warn_once(
                f"shard_dims is None: all ranks of the mesh's axis {axis!r} get the same rows, the whole of each "
                f"batch. shard_dims={axis!r} gives each of them rows of its own."
            )


def replicas_of(
    replicas: str,
    source: Source,
    layouts: Sequence[FieldLayout],
    ranks: Sequence[int],
) -> Replicas:
    """Return which ranks of this host read the same rows and share a reader.

    Args:
        replicas: "each": no ranks share a reader. "leader": the first of them reads.
        source: What is read.
        layouts: Layouts of all fields.
        ranks: Global ranks that agree on the steps.

    Raises:
        ArgumentError: It is not known which ranks share a host.
    """
    if replicas == "each" or len(ranks) == 1:
        return Replicas()
    hosts = hosts_of_ranks()
    if not hosts:
        raise ArgumentError(
            "replicas='leader': which ranks share a host is read from PADDLE_TRAINER_ENDPOINTS, which does not have "
            "one host:port for each rank. Start the ranks with python -m paddle.distributed.launch, or leave replicas "
            "at 'each'."
        )

    def rows_of(rank: int) -> set[Any]:
        if source.item_is_batch and not source.split:
            return set()  # each rank reads whole global batches
        return {layout.slice_of(rank) for layout in layouts} - {None}

    this_rank = dist.get_rank()
    sharing = [
        rank
        for rank in sorted(ranks)
        if hosts[rank] == hosts[this_rank]
        and rows_of(rank) == rows_of(this_rank)
    ]
    return Replicas(ranks=tuple(sharing) if len(sharing) > 1 else ())
