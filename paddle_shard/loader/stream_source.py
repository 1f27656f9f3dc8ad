"""Reading a loader over a stream: its batches, and the parts that this rank reads."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.io
from paddle.distributed.auto_parallel.api import ShardDataloader

from paddle_shard.core.warn_once import warn_once
from paddle_shard.data.external import ExternalLoader, ExternalSource
from paddle_shard.data.files.shards import ShardSource
from paddle_shard.data.stages.cut import Stripe, chosen_num_parts, cut
from paddle_shard.data.stages.pack import Pack
from paddle_shard.data.stages.stage import Stage
from paddle_shard.data.stages.steps import Filter, Group, Repeat, Shuffle
from paddle_shard.data.stream import Stream, last_stage
from paddle_shard.errors import ArgumentError, ArgumentTypeError, SplitError
from paddle_shard.loader.arguments import reject
from paddle_shard.placement.field import FieldLayout
from paddle_shard.placement.placer import BatchPlacer
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.tails import TAILS, find_tail
from paddle_shard.reading.reading import Readers, shallow_copy
from paddle_shard.reading.sample_threads import Threads
from paddle_shard.reading.source import Source
from paddle_shard.reading.stream_order import StreamOrder


def as_dataloader(
    given: Any, readers: Threads | Readers | None
) -> paddle.io.DataLoader:
    """Return the given DataLoader, or one made for the given stream or batches.

    Args:
        given: What the user gave.
        readers: Threads that read samples, or what takes the place of worker processes.

    Raises:
        ArgumentError: A DataLoader has an `__iter__` of its own.
        ArgumentTypeError: It is neither a DataLoader nor anything that yields batches.
        SplitError: It is sharded already.
    """
    if isinstance(given, ShardDataloader):
        raise SplitError(
            f"dataloader is sharded already (a {type(given).__name__}); sharding it again would lose data. "
            "Give the paddle.io.DataLoader that it was made from."
        )
    if isinstance(given, paddle.io.DataLoader):
        if type(given).__iter__ is not paddle.io.DataLoader.__iter__:
            raise ArgumentError(
                f"dataloader: {type(given).__name__} has an __iter__ of its own, which would not be called. Change "
                "batches in the collate_fn and their order in a batch_sampler; or give shard_dataloader a function "
                "that returns an iterator of its batches, each of which is then a global batch."
            )
        dataloader = given
    elif isinstance(given, ExternalLoader):
        reject(
            "another library reads, in processes of its own.", readers=readers
        )
        dataloader = _loader_of(Stream(ExternalSource(given)))
    else:
        stream = given if isinstance(given, Stream) else _stream_of(given)
        _check_batched(stream)
        dataloader = _loader_of(stream)
    if isinstance(readers, Threads):
        if isinstance(dataloader.dataset, paddle.io.IterableDataset):
            reject(
                "a stream is read one sample after the other. Give the DataLoader workers, each of which reads other "
                "parts.",
                readers=readers,
            )
    elif readers is not None:
        dataloader = shallow_copy(dataloader, type(dataloader))
        dataloader.num_workers = readers.num
    return dataloader


def _stream_of(given: Any) -> Stream:
    """Return a stream of global batches."""
    name = type(given).__name__
    if isinstance(given, paddle.io.Dataset):
        raise ArgumentTypeError(
            f"dataloader is the data set, a {name}; give paddle.io.DataLoader(it, batch_size=...), or "
            "batch_size=None if its items are whole global batches."
        )
    no_batches = (str, bytes, np.ndarray, paddle.Tensor, Mapping)
    is_iterable = hasattr(given, "__iter__") or callable(given)
    if isinstance(given, no_batches) or not is_iterable:
        raise ArgumentTypeError(
            "dataloader must be a paddle.io.DataLoader, a paddle_shard.Stream, or an iterable of batches (a list, a "
            f"generator, a function that returns one), got {name}: {given!r}."
        )
    return Stream.of(given)


def _check_batched(stream: Stream) -> None:
    """Reject a stream of single samples: of files or packed rows, with no stage that could make batches of them.

    Raises:
        ArgumentError: Each of its samples would be taken for a global batch.
    """
    for stage in last_stage(stream)[0].line():
        if isinstance(stage, ShardSource | Pack):
            raise ArgumentError(
                f"dataloader: {stream!r} yields single samples, and each would be taken for a global batch. "
                "End it with .batch(rows), or give paddle.io.DataLoader(stream, batch_size=rows)."
            )
        if not isinstance(stage, Filter | Repeat | Shuffle | Stripe):
            return


def _loader_of(stream: Stream) -> paddle.io.DataLoader:
    """Return a DataLoader over a stream whose items are batches.

    In auto-DP mode, Paddle's constructor would ask the stream for a length, to split its indices.
    """
    no_mode = SimpleNamespace()
    mode: Any = sys.modules.get(
        "paddle.distributed.auto_parallel.auto_dp_utils", no_mode
    )
    is_auto_dp = getattr(mode, "_enable_auto_dp_mode", False)
    mode._enable_auto_dp_mode = False
    try:
        return paddle.io.DataLoader(stream, batch_size=None)
    finally:
        mode._enable_auto_dp_mode = is_auto_dp


def read_stream(
    dataloader: paddle.io.DataLoader,
    placer: BatchPlacer,
    *,
    is_split: bool,
    seed: int,
    tail: str | None,
    num_batches: int | None,
) -> Source:
    """Return the order of a DataLoader over an IterableDataset, checked against the meshes.

    Args:
        dataloader: The user's, or one made for the stream.
        placer: Knows the layouts of all fields.
        is_split: True if each data rank has a stream of its own.
        seed: Seed of the order.
        tail: The name of the remainder policy.
        num_batches: Steps of an epoch; None: until the stream ends.

    Raises:
        ArgumentError: A setting cannot be honoured; the text says what works.
    """
    dataset = dataloader.dataset
    row_layout = placer.row_layout
    stage, num_parts = last_stage(
        dataset if isinstance(dataset, Stream) else Stream.of(dataset)
    )
    # Each process of another library reads a part of its own.
    is_split = is_split or isinstance(stage, ExternalSource)
    if num_batches is None:
        _check_has_end(stage, row_layout, is_split=is_split)

    # The rows of a batch, and who makes the batches.
    policy = find_tail(tail, stream=True, drop_last=dataloader.drop_last)
    accumulation = int(getattr(dataloader.batch_sampler, "_acc_steps", 1))
    micro_rows = _micro_rows(dataloader, is_split=is_split)
    if micro_rows is None and isinstance(stage, Group):
        micro_rows = stage.size
        stage = stage.upstream
    num_workers = dataloader.num_workers
    batch_size = None
    if micro_rows is None:
        if num_parts is not None:
            raise ArgumentError(
                f"in_parts({num_parts}): its items are whole global batches, which have no parts."
            )
        # If all ranks read the same batches, they end together.
        policy = policy if is_split else TAILS["drop"]
        plan = PartsPlan(
            batch_size=1,
            num_parts=1,
            num_data_ranks=1,
            tail=policy,
            num_batches=num_batches,
        )
        opened, parts = _whole_items(stage, row_layout, plan, is_split=is_split)
        # Each of several readers would repeat only its own batches.
        needs_one_reader = is_split and plan.repeats
    else:
        if num_parts is None:
            num_parts = chosen_num_parts(stage.source, micro_rows)
        batch_size = micro_rows * accumulation
        plan = PartsPlan(
            batch_size=batch_size,
            num_parts=num_parts,
            num_data_ranks=1 if is_split else placer.num_data_ranks,
            accumulation=accumulation,
            tail=policy,
            num_batches=num_batches,
        )
        opened = cut(stage)
        parts = _held_parts([] if is_split else placer.layouts, plan)
        num_workers = min(num_workers, len(parts))
        # Rows that are not the samples cannot be joined one by one: one reader collates each batch.
        needs_one_reader = any(placer.dense_tensor_idx or ()) or any(
            layout.own_rows for layout in placer.layouts
        )
    order = StreamOrder(
        stage=opened,
        plan=plan,
        seed=seed,
        parts=parts,
        num_workers=min(1, num_workers) if needs_one_reader else num_workers,
        whole_items=micro_rows is None,
        split_over=row_layout.num_data_ranks if is_split else None,
    )

    # also rejects lengths that the policy forbids
    if order.known_steps(LoaderState()) == 0:
        raise ArgumentError(
            f"the stream has no batch: it is empty, or too short for tail={policy!r} and batches of {batch_size}. "
            "Check its path and filters, or use a smaller batch or tail='pad'."
        )
    num_readers = max(1, order.num_workers) * (
        1 if is_split else row_layout.num_data_ranks
    )
    if (
        row_layout.global_rank == 0
        and num_readers > 1
        and not stage.source.cuts
    ):
        warn_once(
            f"this stream cannot be sharded at its source: each of {num_readers} readers "
            "reads all of it and discards the samples of the others. Files (Stream.csv, .lines, .webdataset), or a "
            "data set that splits itself (Stream.of(..., splits_itself=True)) are read once."
        )
    return Source(
        batches=order,
        batch_size=batch_size,
        accumulation=accumulation,
        split=is_split,
        item_is_batch=micro_rows is None,
        tail=policy,
    )


def _check_has_end(
    stage: Stage, row_layout: FieldLayout, *, is_split: bool
) -> None:
    """Check that the end of a stream can be known, if the user does not say how many batches it has."""
    if is_split and not row_layout.on_mesh:
        raise ArgumentError(
            f"global rank {row_layout.global_rank} is on none of the meshes, and cannot know when the others' data, "
            "which is split already, ends. Give num_batches=, or make this loader on the ranks of the meshes only."
        )
    if stage.endless:
        raise ArgumentError(
            "num_batches is missing: the stream has no end (it is repeated without a number), so say how "
            "many batches an epoch has."
        )


def _micro_rows(
    dataloader: paddle.io.DataLoader, *, is_split: bool
) -> int | None:
    """Return the rows of a global micro-batch that a DataLoader makes; None if it makes none."""
    rows: int | None = dataloader.batch_size
    if rows is None or is_split:
        return rows
    # In auto-DP mode, Paddle's constructor has divided it by the data ranks.
    return int(rows * getattr(dataloader.batch_sampler, "nranks", 1))


def _whole_items(
    stage: Stage, row_layout: FieldLayout, plan: PartsPlan, *, is_split: bool
) -> tuple[Stage, tuple[int, ...]]:
    """Return the stage that opens a stream whose items are whole batches, and the parts that this rank holds."""
    if isinstance(stage, ExternalSource):
        return stage, (row_layout.data_rank if row_layout.on_mesh else 0,)
    if plan.num_batches is not None and not is_split:
        # All ranks read the same: it is repeated before it is cut for the workers.
        stage = Repeat(stage)
    return Stripe(stage), (0,)


def _held_parts(
    layouts: Sequence[FieldLayout], plan: PartsPlan
) -> tuple[int, ...]:
    """Return the parts from which this rank reads rows, for any of its fields.

    They are all parts if the rank has a stream of its own, and also on no mesh, to know where they end.
    """
    parts = {
        part
        for layout in layouts
        if layout.on_mesh
        for part in plan.parts_of(layout.data_rank, layout.num_data_ranks)
    }
    return tuple(sorted(parts)) or tuple(range(plan.num_parts))
