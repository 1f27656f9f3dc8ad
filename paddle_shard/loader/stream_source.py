"""Reading a loader over a stream: its batches, and the cut of the stream for the mesh."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.io
from paddle.distributed.auto_parallel.api import ShardDataloader

from paddle_shard.core.warn_once import say_once
from paddle_shard.data.external import ExternalLoader, ExternalSource
from paddle_shard.data.stages import Batch, Repeat, Stripe
from paddle_shard.data.stages.cut import chosen_num_parts, cut
from paddle_shard.data.stages.stage import Stage
from paddle_shard.data.stream import Stream, last_stage
from paddle_shard.errors import ArgumentError, ArgumentTypeError, SplitError
from paddle_shard.loader.options import DEALS, DECIDES, LoaderOptions
from paddle_shard.placement.field import FieldLayout
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.tails import TAILS, find_tail
from paddle_shard.reading.source import Source
from paddle_shard.reading.stream_order import StreamOrder


def as_stream_loader(given: Any, *, split: bool) -> paddle.io.DataLoader | None:
    """Return the given DataLoader over a stream, or one made for the given stream; None if it is not a stream.

    Args:
        given: What the user gave.
        split: True if `given` yields a data rank's own rows.

    Raises:
        ArgumentTypeError: `given` is neither a DataLoader nor anything that yields batches.
        SplitError: `given` is sharded already.
    """
    if isinstance(given, ShardDataloader):
        raise SplitError(
            f"dataloader is sharded already (a {type(given).__name__}); sharding it again would lose data. "
            "Give the paddle.io.DataLoader that it was made from."
        )
    if isinstance(given, paddle.io.DataLoader):
        if split and _reads_for_itself(given):  # use its batches as they are
            return _loader_of(Stream.of(lambda: iter(given)), places=given.places)
        return given if isinstance(given.dataset, paddle.io.IterableDataset) else None
    if isinstance(given, ExternalLoader):
        return _loader_of(Stream(ExternalSource(given)))
    if isinstance(given, Stream):
        return _loader_of(given)
    if isinstance(given, paddle.io.IterableDataset):
        raise ArgumentTypeError(
            f"dataloader is the {type(given).__name__} itself; give paddle.io.DataLoader(it, batch_size=...), or "
            "batch_size=None if it yields whole global batches."
        )
    refused = (str, bytes, np.ndarray, paddle.Tensor, Mapping, paddle.io.Dataset)
    if isinstance(given, refused) or not (
        hasattr(given, "__iter__") or callable(given)
    ):
        raise ArgumentTypeError(
            "dataloader must be a paddle.io.DataLoader, a paddle_shard.Stream, or an iterable of batches (a list, a "
            f"generator, a function that returns one), got {type(given).__name__}: {given!r}."
        )
    return _loader_of(Stream.of(given))


def _loader_of(stream: Stream, **settings: Any) -> paddle.io.DataLoader:
    """Return a DataLoader over a stream whose items are batches.

    In auto-DP mode, Paddle's constructor would ask the stream for a length, to split its indices.
    """
    mode: Any = sys.modules.get(
        "paddle.distributed.auto_parallel.auto_dp_utils", SimpleNamespace()
    )
    was, mode._enable_auto_dp_mode = getattr(mode, "_enable_auto_dp_mode", False), False
    try:
        return paddle.io.DataLoader(stream, batch_size=None, **settings)
    finally:
        mode._enable_auto_dp_mode = was


def _reads_for_itself(dataloader: paddle.io.DataLoader) -> bool:
    """True if a subclass has an `__iter__` that does not call Paddle's, as PaddleNLP's DistDataLoader has."""
    iterates: Any = type(dataloader).__iter__
    if iterates is paddle.io.DataLoader.__iter__ or not hasattr(iterates, "__code__"):
        return False
    # One that calls Paddle's (`super().__iter__()`) has this name in its code.
    return "__iter__" not in iterates.__code__.co_names


def read_stream(
    options: LoaderOptions, layouts: Sequence[FieldLayout], own: FieldLayout
) -> Source:
    """Return the order of a DataLoader over an IterableDataset, checked against the meshes.

    Raises:
        ArgumentError: A setting cannot be honoured; the text says what works.
        ArgumentTypeError: The DataLoader has an `__iter__` of its own.
    """
    dataloader = options.dataloader
    dataset = dataloader.dataset
    stage, num_parts = last_stage(
        dataset if isinstance(dataset, Stream) else Stream.of(dataset)
    )
    _check_arguments(options, stage)
    is_external = isinstance(stage, ExternalSource)
    if is_external:
        options.refuse(readers="another library reads, in processes of its own.")
    split = options.is_dataset_splitted or is_external
    if split and options.num_batches is None:
        _check_off_mesh(own)

    # The rows of a batch, and who makes the batches.
    tail = find_tail(options.tail, stream=True, drop_last=dataloader.drop_last)
    accumulation = int(getattr(dataloader.batch_sampler, "_acc_steps", 1))
    micro_rows = _micro_rows(dataloader, split=split)
    if micro_rows is None and isinstance(stage, Batch):
        micro_rows = stage.size
        stage = stage.upstream
    if micro_rows is None:
        if num_parts is not None:
            raise ArgumentError(
                f"in_parts({num_parts}): its items are whole global batches, which have no parts."
            )
        tail = (
            tail if split else TAILS["drop"]
        )  # all ranks read the same batches, so they end together
        order = _order_of_batches(options, own, stage, tail, split=split)
    else:
        ranks = 1 if split else math.lcm(*(layout.num_data_ranks for layout in layouts))
        plan = PartsPlan(
            batch_size=micro_rows * accumulation,
            num_parts=chosen_num_parts(stage.source, micro_rows, ranks)
            if num_parts is None
            else num_parts,
            num_data_ranks=ranks,
            accumulation=accumulation,
            tail=tail,
            num_batches=options.num_batches,
        )
        parts, num_workers = _held(options, layouts, plan, split=split)
        order = StreamOrder(
            stage=cut(stage),
            plan=plan,
            seed=options.seed,
            parts=parts,
            num_workers=num_workers,
            split_over=own.num_data_ranks if split else None,
        )

    batch_size = None if micro_rows is None else micro_rows * accumulation
    if (
        order.known_steps(LoaderState()) == 0
    ):  # this also refuses lengths that the tail forbids
        raise ArgumentError(
            f"the stream has no batch: it is empty, or too short for tail={tail!r} and batches of {batch_size}. "
            "Check its path and filters, or use a smaller batch or tail='pad'."
        )
    if own.global_rank == 0 and not stage.source.cuts:
        _say_if_all_read_all(
            max(1, order.num_workers) * (1 if split else own.num_data_ranks)
        )
    return Source(
        batches=order,
        batch_size=batch_size,
        accumulation=accumulation,
        split=split,
        item_is_batch=micro_rows is None,
        tail=tail,
    )


def _say_if_all_read_all(num_readers: int) -> None:
    if num_readers > 1:
        say_once(
            f"this stream cannot be sharded at its source: each of {num_readers} readers "
            "reads all of it and discards the samples of the others. Files (Stream.csv, .lines, .webdataset), or a "
            "data set that splits itself (Stream.of(..., splits_itself=True)) are read once."
        )


def _micro_rows(dataloader: paddle.io.DataLoader, *, split: bool) -> int | None:
    """Return the rows of a global micro-batch that a DataLoader makes; None if it makes none."""
    rows: int | None = dataloader.batch_size
    if rows is None or split:
        return rows
    # In auto-DP mode, Paddle's constructor has divided it by the data ranks.
    return int(rows * getattr(dataloader.batch_sampler, "nranks", 1))


def _order_of_batches(
    options: LoaderOptions, own: FieldLayout, stage: Stage, tail: str, *, split: bool
) -> StreamOrder:
    """Return the order of a stream whose items are whole batches."""
    num_batches = options.num_batches
    num_workers = options.dataloader.num_workers
    plan = PartsPlan(
        batch_size=1, num_parts=1, num_data_ranks=1, tail=tail, num_batches=num_batches
    )
    parts = (0,)
    if isinstance(stage, ExternalSource):
        parts = (own.data_rank,) if own.on_mesh else (0,)
    else:  # repeat it before it is cut for the workers, if all ranks read the same
        stage = Stripe(stage if num_batches is None or split else Repeat(stage))
    if (
        split and plan.repeats
    ):  # each of several workers would repeat only its own batches
        num_workers = min(1, num_workers)
    return StreamOrder(
        stage=stage,
        plan=plan,
        seed=options.seed,
        parts=parts,
        num_workers=num_workers,
        whole_items=True,
        split_over=own.num_data_ranks if split else None,
    )


def _held(
    options: LoaderOptions,
    layouts: Sequence[FieldLayout],
    plan: PartsPlan,
    *,
    split: bool,
) -> tuple[tuple[int, ...], int]:
    """Return the parts from which this rank reads rows, for any of its fields, and the workers that read them."""
    mine = [] if split else [layout for layout in layouts if layout.on_mesh]
    held = {
        part
        for layout in mine
        for part in plan.parts_of(layout.data_rank, layout.num_data_ranks)
    }
    # All parts of a stream of its own; and on no mesh, to know where they end.
    parts = tuple(sorted(held)) or tuple(range(plan.num_parts))
    num_workers = options.dataloader.num_workers
    if num_workers > len(parts):
        say_once(
            f"{num_workers} readers, but this rank holds {len(parts)} parts of the stream, each of which is read by "
            "one of them; the others are not started. in_parts() makes more parts."
        )
    # Rows that are not the samples cannot be joined one by one: one reader collates each batch.
    if num_workers > 1 and (
        any(options.dense_tensor_idx or ())
        or any(layout.own_rows for layout in layouts)
    ):
        num_workers = 1
    return parts, min(num_workers, len(parts))


def _check_off_mesh(own: FieldLayout) -> None:
    """Reject a rank on none of the meshes, which hears nothing from the others, if it cannot know their data's end."""
    if not own.on_mesh:
        raise ArgumentError(
            f"global rank {own.global_rank} is on none of the meshes, and cannot know when the others' data, which is "
            "split already, ends. Give num_batches=, or make this loader on the ranks of the meshes only."
        )


def _check_arguments(options: LoaderOptions, stage: Stage) -> None:
    if options.shuffle is not False:
        permute = "Permute it in windows: paddle_shard.Stream.of(...).shuffle(window)."
        options.refuse(shuffle=f"a stream has no index to be shuffled by. {permute}")
    options.refuse(
        skip_steps="the steps of a stream cannot be passed over without reading them."
    )
    options.refuse(
        batch_size=f"the loader has a stream, {DECIDES}",
        balance=f"the data is a stream, whose samples have no number, and {DEALS}",
    )
    if options.num_batches is None and stage.endless:
        raise ArgumentError(
            "num_batches is missing: the stream has no end (it is resampled, or repeated without a number), so say how "
            "many batches an epoch has."
        )
    given = type(options.dataloader)
    if given.__iter__ is not paddle.io.DataLoader.__iter__:
        raise ArgumentTypeError(
            f"dataloader is a {given.__name__} with an __iter__ of its own over a stream, whose batches "
            "are made of the chunks of several readers. Do in the stream or in a collate_fn what it does to a batch."
        )
