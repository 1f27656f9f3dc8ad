"""What must be the same on all ranks that iterate over a loader, and does the job have the ranks that it names?"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import paddle.distributed as dist

from paddle_shard.errors import ArgumentError
from paddle_shard.inputs.options import LoaderOptions
from paddle_shard.inputs.source import Source
from paddle_shard.place.field import FieldLayout
from paddle_shard.ranks.rendezvous import num_ranks
from paddle_shard.version import VERSION

_SHOWN_RANKS = 32


def facts_of(
    source: Source, layouts: Sequence[FieldLayout], dataset: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is compared when a pass begins: name -> value.

    Args:
        source: The order.
        layouts: Of all fields.
        dataset: The data set.
        options: Arguments of the loader that matter to every rank.
    """
    facts: dict[str, Any] = {"paddle_shard": VERSION, "data set": type(dataset).__name__}
    facts |= {"meshes": _shown(layouts), "global batch": source.batch_size, "accumulation": source.accumulation}
    facts |= {"tail": str(source.tail), "is_dataset_splitted": source.split, **options}
    if source.costs is not None:
        facts["balance"] = source.costs.fact()
    if not source.split:  # else each data rank has an order of its own
        facts |= source.batches.fingerprint()
    return facts


def _shown(layouts: Sequence[FieldLayout]) -> str:
    found = []
    for layout in layouts:
        mesh, ids = layout.layout, layout.layout.process_ids
        ranks = str(list(ids))
        if len(ids) > _SHOWN_RANKS:
            ranks = f"{len(ids)} ranks from {ids[0]} to {ids[-1]} (sum {zlib.crc32(ranks.encode()):08x})"
        axes = dict(zip(mesh.axes, mesh.shape, strict=True))
        split = {mesh.axes[axis]: dim for axis, dim in layout.dims}
        found.append(f"{axes} of {ranks}, dims split {split}")
    return " and ".join(dict.fromkeys(found))


def check_ranks(layouts: Sequence[FieldLayout]) -> None:
    """Check that the job has the ranks that the meshes name; warn where a single process stands for all.

    Raises:
        ArgumentError: It has others only; nobody would read their rows.
    """
    count = num_ranks()
    wanted = sorted({rank for layout in layouts for rank in layout.layout.process_ids})
    if count > 1 and wanted[-1] >= count:
        raise ArgumentError(
            f"meshes names the global rank {wanted[-1]}, but this job has {count} ranks, 0 to {count - 1}: "
            f"the rows of the others would be lost. Start {wanted[-1] + 1} processes (python -m "
            f"paddle.distributed.launch --nproc_per_node {wanted[-1] + 1} script.py), or make the mesh of {count}."
        )
    data_ranks = max(layout.num_data_ranks for layout in layouts)
    if count == 1 and data_ranks > 1:
        here = next((layout.data_rank for layout in layouts if layout.on_mesh), None)
        part = "no rows" if here is None else f"1/{data_ranks} of the rows, those of data rank {here}"
        logging.getLogger("paddle_shard").warning(
            "the mesh has the ranks %s, but this is the only process of its job, and reads %s. Fine for a look at a "
            "program; to train, start all ranks: python -m paddle.distributed.launch --nproc_per_node %d script.py",
            wanted if len(wanted) <= _SHOWN_RANKS else f"{wanted[0]} to {wanted[-1]}",
            part,
            wanted[-1] + 1,
        )


def ranks_of(layouts: Sequence[FieldLayout]) -> tuple[int, ...]:
    """Return the global ranks that keep in step: those of the meshes, and no others; this one, if it is alone."""
    if num_ranks() == 1:
        return (dist.get_rank(),)
    return tuple(sorted({rank for layout in layouts for rank in layout.layout.process_ids}))


def check_agree(options: LoaderOptions, source: Source, layouts: Sequence[FieldLayout]) -> None:
    """Refuse `agree=False`, and ranks that take no part in the agreement, where ranks must agree.

    Raises:
        ArgumentError: This loader cannot be had without the agreement of all ranks.
    """
    own = dist.get_rank()
    if options.pad_to is not None and own not in ranks_of(layouts):
        raise ArgumentError(
            f"pad_to={options.pad_to!r}: global rank {own} is on none of the meshes, so nobody tells it "
            "how long the rows are. Make this loader on the ranks of the meshes only."
        )
    if options.agree:
        return
    if source.stream is not None and not source.batches.knows_length:
        raise ArgumentError(
            "agree=False: nobody knows when this stream ends, so its ranks must agree on it. Give num_batches=, or a "
            "source that is counted."
        )
    if options.pad_to is not None and max(layout.num_data_ranks for layout in layouts) > 1:
        raise ArgumentError(
            f"pad_to={options.pad_to!r} needs the ranks to agree: how long the longest row of a step is, they tell "
            "each other. Leave agree at True, or pad to a fixed length in the collate_fn."
        )
