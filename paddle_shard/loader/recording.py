"""What do the record of a run, in the line with which a job begins, and a page say of a loader?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import paddle

from paddle_shard.checks import length_or_none
from paddle_shard.cli.page import life_of, page_of, view_of
from paddle_shard.delivery.placing import PassSetup
from paddle_shard.errors import ArgumentError
from paddle_shard.inputs.options import LoaderOptions
from paddle_shard.inputs.source import Source
from paddle_shard.place.field import FieldLayout
from paddle_shard.plan.hazards import hazards_of, hazards_of_parts
from paddle_shard.plan.shuffle import VERSION as ORDER_VERSION
from paddle_shard.plan.state import LoaderState
from paddle_shard.position.run import Run
from paddle_shard.record.lines import read
from paddle_shard.record.timeline import timeline
from paddle_shard.shown import Page
from paddle_shard.sources.shards import ShardSource
from paddle_shard.version import VERSION

_TOLD_OTHERWISE = {"dataloader", "meshes", "shard_dims", "batch_size", "skip_steps", "balance", "record"}
_MOST_TEXT = 200


def facts_of_run(
    options: LoaderOptions, source: Source, run: Run, layouts: Sequence[FieldLayout], own: FieldLayout
) -> dict[str, Any]:
    """Return what is known when a run begins: JSON-able.

    Args:
        options: Of the loader.
        source: What it reads.
        run: Its run.
        layouts: Of all fields.
        own: Layout of the field whose rows this rank reads.
    """
    given, stream, sizes, times = options.dataloader, source.stream, options.batch_size, source.accumulation
    plan = run.plan if stream is None else stream.plan
    order: dict[str, Any] = {"batch_size": source.batch_size, "accumulation": times}
    order["num_data_ranks"] = own.num_data_ranks if plan is None else plan.num_data_ranks
    data: dict[str, Any] = {"class": type(given.dataset).__name__}
    if stream is None:
        data["length"] = length_or_none(given.dataset)
    else:
        data["files"] = list(stream.stage.source.files)
        data |= {} if source.item_is_batch else {"num_parts": stream.plan.num_parts}
    meshes = [_mesh(layout) for layout in layouts]
    given_options = {one.name: getattr(options, one.name) for one in fields(options) if one.name not in _TOLD_OTHERWISE}
    return {
        "versions": {"paddle_shard": VERSION, "paddle": paddle.__version__, "numpy": np.__version__},
        "fingerprint": {"order_version": ORDER_VERSION, **source.batches.fingerprint()},
        "plan": None if source.item_is_batch else order,
        "sizes": sizes and [(int(first), int(rows) * times) for first, rows in sizes],
        "skip_steps": options.skip_ranges,
        "order_of": run.no_order(),
        "dealt": source.costs is not None,
        "meshes": [one for number, one in enumerate(meshes) if one not in meshes[:number]],
        "data_rank": (own.data_rank, own.num_data_ranks) if own.on_mesh else None,
        "options": {name: _shown(value) for name, value in given_options.items() if value is not None},
        "data": data,
    }


def page_of_loader(setup: PassSetup) -> Page:
    """Return the page of a loader, with what is wrong with its plan on its meshes.

    Args:
        setup: Of the loader.

    Raises:
        ArgumentError: Nobody but the loader knows the order, or the page cannot compute it.
    """
    run, source, own = setup.run, setup.source, setup.own_layout
    stream, plan = source.stream, run.plan
    drawn: Any = plan if stream is None else stream.plan
    if drawn is None or source.item_is_batch:
        raise ArgumentError(f"explain: the order is that of {run.no_order()}, so only its steps are known.")
    dealt = source.costs is not None
    lines = [] if run.recorder is None else read(run.recorder.path)[0]
    if any(line["line"] == "pass" for line in lines):
        more = life_of(timeline(lines))
    else:
        at = run.state()
        told = {"epoch": at.epoch, "first": 0, "end": at.samples, "run": "this run"}
        more = {"stretches": [told] if at.samples else [], "dealt": dealt}
    if plan is not None:
        more["plans"] = {**more.get("plans", {}), run.epoch: plan}
    meshes = list(dict.fromkeys((one.layout, one.data_axis_names) for one in setup.placer.layouts))
    hazards = list(hazards_of(plan, meshes, setup.options.replicas, None, run.epoch, dealt=dealt))
    if stream is not None and isinstance(stream.stage.source, ShardSource):
        sizes = stream.stage.source.part_sizes(stream.opening(LoaderState(epoch=run.epoch)))
        hazards += [] if sizes is None else hazards_of_parts(stream.plan, sizes)
    return page_of(view_of(drawn, own.layout, own.data_axes, **more), hazards)


def _mesh(layout: FieldLayout) -> dict[str, Any]:
    return {
        "axes": dict(zip(layout.layout.axes, layout.layout.shape, strict=True)),
        "process_ids": layout.layout.process_ids,
        "data_axes": layout.data_axis_names,
        "other_dims": {layout.layout.axes[axis]: dim for axis, dim in layout.dims if dim},
    }


def _shown(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else repr(value)[:_MOST_TEXT]
