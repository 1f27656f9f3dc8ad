"""What does a loader say of itself?"""

from __future__ import annotations

import warnings
from typing import Any

from paddle_shard.inputs.source import Source
from paddle_shard.place.field import FieldLayout
from paddle_shard.plan.shard_plan import ShardPlan


def shown(
    kind: str,
    dataset: Any,
    source: Source,
    plan: ShardPlan | None,
    layout: FieldLayout,
    seed: int,
    epoch: int,
    who_reads: str,
) -> str:
    """Return a loader's `repr`."""
    axes = [layout.layout.axes[axis] for axis in layout.data_axes]
    order = type(source.custom_sampler).__name__ if source.custom_sampler is not None else "sequential"
    parts = None if source.stream is None else source.stream.batches.plan
    if parts is not None:
        order = f"stream in {parts.num_parts} parts"
    if source.custom_sampler is None and plan is not None and plan.ordering.shuffles:
        order = f"shuffled with seed {seed}"
    return (
        f"{kind}({type(dataset).__name__}, {order}, global batch {source.batch_size}, "
        f"tail {source.tail!r}, split over {axes} = {layout.num_data_ranks} data ranks of the mesh "
        f"{dict(zip(layout.layout.axes, layout.layout.shape, strict=True))}, epoch {epoch}"
        + (f", {who_reads})" if who_reads else ")")
    )


def warn_if_batches_differ(source: Source, plan: ShardPlan | None) -> None:
    """Warn if the last batch of an epoch has another size, on which a static program fails."""
    if source.batch_size is None or source.split or plan is None:
        return
    rows = plan.num_rows(step=plan.num_steps - 1)
    sizes = sorted({size for _, size in plan.segments})
    if len(sizes) > 1:
        warnings.warn(
            f"batches have {' and '.join(map(str, sizes))} rows in this epoch: a static program is compiled for one "
            "size and fails on another. Compile it again when the size changes, or train dynamically.",
            stacklevel=4,
        )
    elif rows != plan.batch_size:
        warnings.warn(
            f"the last batch of an epoch has {rows} rows and the others {plan.batch_size}: a static program is "
            "compiled for one size and fails on another. Give shard_dataloader tail='fill' (rows are marked in "
            ".valid) or tail='drop'.",
            stacklevel=4,
        )
