"""Facts of a loader for the first line of a job in the record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import paddle

from paddle_shard.core.checks import length_or_none
from paddle_shard.loader.options import LoaderOptions
from paddle_shard.placement.field import FieldLayout
from paddle_shard.plan.shuffle import VERSION as ORDER_VERSION
from paddle_shard.reading.source import Source
from paddle_shard.run.run import Run
from paddle_shard.version import VERSION

_TOLD_OTHERWISE = {
    "dataloader",
    "meshes",
    "shard_dims",
    "batch_size",
    "skip_steps",
    "balance",
    "record",
}
_MOST_TEXT = 200


def facts_of_run(
    options: LoaderOptions,
    source: Source,
    run: Run,
    layouts: Sequence[FieldLayout],
    own: FieldLayout,
) -> dict[str, Any]:
    """Return what is known when a run begins: JSON-able.

    Args:
        options: Of the loader.
        source: What it reads.
        run: Its run.
        layouts: Of all fields.
        own: Layout of the field whose rows this rank reads.
    """
    given, stream, sizes, times = (
        options.dataloader,
        source.stream,
        options.batch_size,
        source.accumulation,
    )
    plan = run.plan if stream is None else stream.plan
    order: dict[str, Any] = {"batch_size": source.batch_size, "accumulation": times}
    order["num_data_ranks"] = (
        own.num_data_ranks if plan is None else plan.num_data_ranks
    )
    data: dict[str, Any] = {"class": type(given.dataset).__name__}
    if stream is None:
        data["length"] = length_or_none(given.dataset)
    else:
        data["files"] = list(stream.stage.source.files)
        data |= {} if source.item_is_batch else {"num_parts": stream.plan.num_parts}
    meshes = [_mesh(layout) for layout in layouts]
    given_options = {
        one.name: getattr(options, one.name)
        for one in fields(options)
        if one.name not in _TOLD_OTHERWISE
    }
    return {
        "versions": {
            "paddle_shard": VERSION,
            "paddle": paddle.__version__,
            "numpy": np.__version__,
        },
        "fingerprint": {"order_version": ORDER_VERSION, **source.batches.fingerprint()},
        "plan": None if source.item_is_batch else order,
        "sizes": sizes and [(int(first), int(rows) * times) for first, rows in sizes],
        "skip_steps": options.skip_ranges,
        "order_of": run.no_order(),
        "dealt": source.costs is not None,
        "meshes": [
            one for number, one in enumerate(meshes) if one not in meshes[:number]
        ],
        "data_rank": (own.data_rank, own.num_data_ranks) if own.on_mesh else None,
        "options": {
            name: _shown(value)
            for name, value in given_options.items()
            if value is not None
        },
        "data": data,
    }


def _mesh(layout: FieldLayout) -> dict[str, Any]:
    return {
        "axes": dict(zip(layout.layout.axes, layout.layout.shape, strict=True)),
        "process_ids": layout.layout.process_ids,
        "data_axes": layout.data_axis_names,
        "other_dims": {
            layout.layout.axes[axis]: dim for axis, dim in layout.dims if dim
        },
    }


def _shown(value: Any) -> Any:
    return (
        value
        if isinstance(value, bool | int | float | str)
        else repr(value)[:_MOST_TEXT]
    )
