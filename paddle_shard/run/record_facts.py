"""The first line of a job in the record: versions, order, meshes and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from paddle_shard.core.checks import length_or_none
from paddle_shard.placement.field import describe_layouts
from paddle_shard.placement.placer import BatchPlacer
from paddle_shard.plan.shard_plan import BatchSizes
from paddle_shard.plan.shuffle import VERSION as ORDER_VERSION
from paddle_shard.plan.skips import Ranges
from paddle_shard.reading.source import Source
from paddle_shard.run.run import Run
from paddle_shard.version import VERSION

_MOST_TEXT = 200
"""Characters of an argument that are recorded."""
_RECORDED_ELSEWHERE = (
    "dataloader",
    "meshes",
    "shard_dims",
    "batch_size",
    "skip_steps",
    "balance",
    "record",
)
"""Arguments that the record has in another form."""


def record_facts(
    source: Source,
    run: Run,
    placer: BatchPlacer,
    *,
    dataset: Any,
    skip_steps: Ranges,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what is known when a run begins: JSON-able.

    Args:
        source: The order of the data.
        run: The run.
        placer: Knows the layouts of all fields.
        dataset: The data set.
        skip_steps: Skipped steps of the run.
        arguments: All arguments of the user.
    """
    row_layout = placer.row_layout
    stream = source.stream
    plan = run.plan if stream is None else stream.plan
    data: dict[str, Any] = {"class": type(dataset).__name__}
    if stream is None:
        data["length"] = length_or_none(dataset)
    else:
        data["files"] = stream.stage.source.fingerprint()
        if not source.item_is_batch:
            data["num_parts"] = stream.plan.num_parts
    order = {
        "batch_size": source.batch_size,
        "accumulation": source.accumulation,
        "num_data_ranks": row_layout.num_data_ranks
        if plan is None
        else plan.num_data_ranks,
    }
    sizes: BatchSizes | None = getattr(source.batches, "sizes", None)
    options = {
        name: str(value)[:_MOST_TEXT]
        for name, value in arguments.items()
        if name not in _RECORDED_ELSEWHERE and value is not None
    }
    return {
        "versions": {
            "paddle_shard": VERSION,
            "paddle": paddle.__version__,
            "numpy": np.__version__,
        },
        "fingerprint": {
            "order_version": ORDER_VERSION,
            **source.batches.fingerprint(),
        },
        "plan": None if source.item_is_batch else order,
        "sizes": None if sizes is None else sizes.entries,
        "skip_steps": skip_steps,
        "order_of": run.no_order(),
        "dealt": stream is None and source.batches.balance_rows is not None,
        "meshes": describe_layouts(placer.layouts),
        "data_rank": row_layout.slice_of(row_layout.global_rank),
        "options": options,
        "data": data,
    }
