"""What must be the same on all ranks that iterate over a loader, and does the job have the ranks that it names?"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.inputs.source import Source
from paddle_shard.place.field import FieldLayout
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


def check_ranks(layouts: Sequence[FieldLayout], num_ranks: int) -> None:
    """Check that the job has the ranks that the meshes name; warn where a single process stands for all.

    Raises:
        ArgumentError: It has others only; nobody would read their rows.
    """
    wanted = sorted({rank for layout in layouts for rank in layout.layout.process_ids})
    if num_ranks > 1 and wanted[-1] >= num_ranks:
        raise ArgumentError(
            f"meshes names the global rank {wanted[-1]}, but this job has {num_ranks} ranks, 0 to {num_ranks - 1}: "
            f"the rows of the others would be lost. Start {wanted[-1] + 1} processes (python -m "
            f"paddle.distributed.launch --nproc_per_node {wanted[-1] + 1} script.py), or make the mesh of {num_ranks}."
        )
    data_ranks = max(layout.num_data_ranks for layout in layouts)
    if num_ranks == 1 and data_ranks > 1:
        here = next((layout.data_rank for layout in layouts if layout.on_mesh), None)
        part = "no rows" if here is None else f"1/{data_ranks} of the rows, those of data rank {here}"
        logging.getLogger("paddle_shard").warning(
            "the mesh has the ranks %s, but this is the only process of its job, and reads %s. Fine for a look at a "
            "program; to train, start all ranks: python -m paddle.distributed.launch --nproc_per_node %d script.py",
            wanted if len(wanted) <= _SHOWN_RANKS else f"{wanted[0]} to {wanted[-1]}",
            part,
            wanted[-1] + 1,
        )
