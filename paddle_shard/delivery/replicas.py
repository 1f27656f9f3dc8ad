"""Which ranks of this host share a reader, and how does a pass share it?"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import paddle.distributed as dist

from paddle_shard.errors import ArgumentError
from paddle_shard.inputs.options import LoaderOptions
from paddle_shard.inputs.source import Source
from paddle_shard.place.field import FieldLayout
from paddle_shard.plan.readers import SharedReader, shared_reader
from paddle_shard.ranks.rendezvous import hosts_of_ranks
from paddle_shard.ranks.replicas import Following, Leading
from paddle_shard.reading.sharing import Sender, Sharing


@dataclass(slots=True)
class Replicas:
    """How a loader shares its reading; one for all its passes."""

    reader: SharedReader | None
    """The ranks that share a reader with this one; None: each reads for itself."""
    measured: bool = False
    """True if the leader looks whether reading costs more than handing on (`replicas="auto"`)."""
    on_each: bool = field(default=False)
    """True if it has found that it does not."""

    @property
    def read_by(self) -> int | None:
        """Global rank that reads for this one; None: it reads itself."""
        reader = self.reader
        return None if reader is None or self.on_each or reader.leader == dist.get_rank() else reader.leader

    @property
    def reads_for(self) -> tuple[int, ...]:
        """Global ranks that this one reads for."""
        reader = self.reader
        return () if reader is None or self.on_each or reader.leader != dist.get_rank() else reader.followers

    def __str__(self) -> str:
        """Who reads for whom; empty if each rank reads for itself, and nothing else was possible."""
        if self.reader is None:
            return ""
        if self.on_each:
            return "each replica reads for itself, as that costs less than handing on"
        if self.read_by is not None:
            return f"read by global rank {self.read_by}"
        return f"reads for global ranks {', '.join(map(str, self.reads_for))} too"

    def open(self, timeout: float) -> Leading | Following | None:
        """Return this rank's end for a new pass; None if it reads for itself only.

        Args:
            timeout: Seconds for which a leader may be silent.
        """
        reader, me = self.reader, dist.get_rank()
        if reader is None:
            return None
        if reader.leader != me:
            if self.on_each:
                return None
            position = reader.followers.index(me)
            return Following(reader.leader, position, timeout=timeout, on_each=self._found)
        leading = Leading(len(reader.followers), measured=self.measured, on_each=self._found)
        if self.on_each:  # a follower may have left the last pass before it was told
            leading.read_yourself()
        return leading

    def sharing(self, end: Leading | Following | None) -> Sharing:
        """Return how a pass uses this rank's end."""
        return Sender(end, active=not self.on_each) if isinstance(end, Leading) else end

    def _found(self) -> None:
        self.on_each = True


def replicas_of(
    options: LoaderOptions, source: Source, layouts: Sequence[FieldLayout], ranks: Sequence[int]
) -> Replicas:
    """Return how a loader shares its reading.

    Args:
        options: The loader's options.
        source: What is read.
        layouts: Of all fields.
        ranks: Global ranks that agree on the steps.

    Raises:
        ArgumentError: replicas="leader", but it is not known who shares a host.
    """
    if options.replicas == "each":
        return Replicas(None)
    hosts, asked = hosts_of_ranks(), options.replicas == "leader"
    if len(ranks) == 1:
        return Replicas(None)
    if hosts is None:
        if asked:
            raise ArgumentError(
                "replicas='leader': which ranks share a host is read from PADDLE_TRAINER_ENDPOINTS, which does not "
                "have one host:port for each rank. Start the ranks with python -m paddle.distributed.launch, or leave "
                "replicas at 'each'."
            )
        return Replicas(None)
    found = shared_reader(dist.get_rank(), {rank: _rows_of(rank, source, layouts) for rank in ranks}, hosts)
    workers = options.dataloader.num_workers > 0
    return Replicas(found, measured=not asked and source.stream is None and not workers)


def _rows_of(rank: int, source: Source, layouts: Sequence[FieldLayout]) -> Hashable:
    """Return what stands for the rows that a rank reads."""
    if _reads_whole(source):
        return "all rows"
    return tuple(dict.fromkeys(found for layout in layouts if (found := layout.slice_of(rank)) is not None))


def _reads_whole(source: Source) -> bool:
    """Return whether each rank reads whole global batches."""
    if source.split:
        return False
    if source.stream is None:
        return source.item_is_batch
    return source.stream.whole_items and source.stream.split_over is None
