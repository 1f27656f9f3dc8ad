"""How does a loader come together from what the user gives, and does the job have the ranks that it names?"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import paddle.distributed as dist
import paddle.io

from paddle_shard.core.warn_once import say_once
from paddle_shard.data.generators import generators_of
from paddle_shard.errors import ArgumentError, BatchSizeError
from paddle_shard.loader.compat import auto_dp_axis, in_auto_dp_mode
from paddle_shard.loader.options import COMPARED, LoaderOptions, checked_prefetch
from paddle_shard.loader.placing import LoaderRows, PassSetup
from paddle_shard.loader.recording import facts_of_run
from paddle_shard.loader.replicas import replicas_of
from paddle_shard.loader.source import read_source
from paddle_shard.loader.stats import LoaderStats
from paddle_shard.loader.stream_source import as_stream_loader, read_stream
from paddle_shard.placement.field import FieldLayout
from paddle_shard.placement.lengths import PadTo
from paddle_shard.placement.placer import BatchPlacer
from paddle_shard.ranks.agreeing import connect
from paddle_shard.ranks.batch_check import BatchCheck
from paddle_shard.ranks.rendezvous import num_ranks
from paddle_shard.ranks.reports import IF_SPLIT
from paddle_shard.reading.reader import HowToRead
from paddle_shard.reading.reading import Reading, StreamReading, shallow_copy
from paddle_shard.reading.source import Source
from paddle_shard.run.recorder import Recorder
from paddle_shard.run.run import Run
from paddle_shard.version import VERSION

_SHOWN_RANKS = 32
_WHOLE = "If an item is a batch already, give the DataLoader batch_size=None, and no collate_fn that unwraps the item."
_LISTS = (
    "The sampler's items are lists of indices, those of another batch sampler: give that one as batch_sampler=, and "
    "read a whole list at once, if you like, in a `__getitems__` of the data set."
)
_LOST = (
    "auto-DP mode: when a DataLoader is made, Paddle replaces a sampler of yours by the order of the data set, and "
    "forgets drop_last of an IterableDataset, which nobody can see afterwards. Order the data set itself, and give "
    "tail='drop'."
)


def setup_of(options: LoaderOptions) -> PassSetup:
    """Return what the passes of a loader need. Other ranks are not waited for.

    Raises:
        ArgumentError: An argument cannot be honoured.
    """
    auto_dp, me = in_auto_dp_mode(), dist.get_rank()
    if auto_dp:
        say_once(_LOST)
        if (
            options.shard_dims is None
        ):  # as Paddle's own, and PaddleFormers for data without an index
            options = replace(options, shard_dims=auto_dp_axis(options.meshes))
    if (
        getattr(
            getattr(options.dataloader, "dataset", None), "is_dataset_splitted", False
        )
        is True
    ):
        options = replace(options, is_dataset_splitted=True)
    given = options.dataloader
    _check_own_iteration(given)
    name = type(
        given.dataset if isinstance(given, paddle.io.DataLoader) else given
    ).__name__
    placer = BatchPlacer.of(options, me, replicated_in_name=auto_dp)
    layouts, pad_to = placer.layouts, placer.pad_to
    members = _members(layouts)
    agreeing = members if me in members else (me,)
    connect(
        agreeing, options.timeout
    )  # first, since the data may be counted for minutes, or refused on this rank only
    here = [layout for layout in layouts if layout.on_mesh] or layouts
    own = max(here, key=lambda layout: layout.num_data_ranks)
    if (
        options.shard_dims is None
        and own.num_data_ranks == 1
        and me == own.layout.process_ids[0]
    ):
        _say_what_is_not_split(own)
    stream = as_stream_loader(options.dataloader, split=options.is_dataset_splitted)
    options = options if stream is None else replace(options, dataloader=stream)
    if options.readers is not None:  # they are the workers from here on
        with_readers = shallow_copy(options.dataloader, type(options.dataloader))
        with_readers.num_workers = options.readers.num
        options = replace(options, dataloader=with_readers)
    source = _source_of(options, layouts, own, stream=stream is not None)
    prefetch = checked_prefetch(options)
    if pad_to is not None and agreeing != members:
        raise ArgumentError(
            f"pad_to={options.pad_to!r}: global rank {me} is on none of the meshes, so nobody tells it "
            "how long the rows are. Make this loader on the ranks of the meshes only."
        )
    replicas = replicas_of(options, source, layouts, agreeing)
    batch_check: BatchCheck | None = None
    compares = options.verify is not None and len(agreeing) > 1
    if compares and not source.split:
        batch_check = BatchCheck(
            None, getattr(options.dataloader.dataset, "sample_name", None)
        )
    elif compares and own.on_mesh:  # also of one data rank: its replicas are compared
        batch_check = BatchCheck((own.layout, own.data_axes))
    run = Run(source, own, members, options.timeout, options.skip_ranges)
    if options.record is not None and me == min(
        rank for layout in layouts for rank in layout.layout.process_ids
    ):
        run.recorder = Recorder(
            options.record, facts_of_run(options, source, run, layouts, own)
        )
    return PassSetup(
        options=options,
        source=source,
        placer=placer,
        own_layout=own,
        rows=LoaderRows(source, layouts, own),
        reading=_reading(options, source, own, pads=pad_to),
        run=run,
        stats=LoaderStats(replicas.__str__, me),
        agreeing_ranks=agreeing,
        facts={"data set": name, **_facts(options, source, placer)},
        batch_check=batch_check,
        replicas=replicas,
        prefetch=prefetch,
    )


def _check_own_iteration(given: Any) -> None:
    if (
        isinstance(given, paddle.io.DataLoader)
        and type(given).__iter__ is not paddle.io.DataLoader.__iter__
    ):
        raise ArgumentError(
            f"dataloader: {type(given).__name__} has an __iter__ of its own, which would not be called. Change batches "
            "in the collate_fn and their order in a batch_sampler; or give shard_dataloader a function that returns an "
            "iterator of its batches, each of which is then a global batch."
        )


def _source_of(
    options: LoaderOptions,
    layouts: Sequence[FieldLayout],
    own: FieldLayout,
    *,
    stream: bool,
) -> Source:
    try:
        return (
            read_stream(options, layouts, own)
            if stream
            else read_source(options, layouts)
        )
    except BatchSizeError as error:
        several = isinstance(
            getattr(options.dataloader.batch_sampler, "sampler", None),
            paddle.io.BatchSampler,
        )
        ways = f"{IF_SPLIT} {_LISTS if several else _WHOLE}"
        raise BatchSizeError(
            str(error) if options.is_dataset_splitted else f"{error} {ways}"
        ) from None


def _say_what_is_not_split(own: FieldLayout) -> None:
    """Log that the ranks of a data axis get the same rows, which is seldom meant."""
    for axis, size in zip(own.layout.axes, own.layout.shape, strict=True):
        if axis in ("dp", "data") and size > 1:
            say_once(
                f"shard_dims is None: all ranks of the mesh's axis {axis!r} get the same rows, the whole of each "
                f"batch. shard_dims={axis!r} gives each of them rows of its own."
            )


def _reading(
    options: LoaderOptions, source: Source, own: FieldLayout, *, pads: PadTo | None
) -> Reading:
    """Return how steps are read, here or in workers."""
    how = HowToRead(
        generators=generators_of(),
        seed=options.seed,
        skip_errors=options.on_error == "skip" and not source.item_is_batch,
        items_are_batches=source.item_is_batch,
        # A sampler that says which rank it is of may repeat a row on another on purpose, to augment it twice. With
        # is_dataset_splitted=True a row that is the same on two shows that the data is not split, and must stay so.
        of_rank=(own.data_rank,)
        if source.split and own.on_mesh and not options.is_dataset_splitted
        else (),
    )
    stream, even, read = source.stream, None if pads is None else pads.even, None
    if stream is not None:
        read = StreamReading(
            stage=stream.stage,
            num_workers=stream.num_workers,
            places=stream.places(),
            even=even,
        )
    # Workers have less time than the other ranks, so that these are told what it is.
    return Reading(
        options.dataloader, how, 0.9 * options.timeout, read, options.readers
    )


def _facts(
    options: LoaderOptions, source: Source, placer: BatchPlacer
) -> dict[str, Any]:
    """Return what must be the same on all ranks, and is compared when a pass begins: name -> value."""
    facts: dict[str, Any] = {"paddle_shard": VERSION}
    facts |= {
        "meshes": _shown(placer.layouts),
        "global batch": source.batch_size,
        "accumulation": source.accumulation,
    }
    facts["num_parts"] = (
        None
        if source.stream is None or source.item_is_batch
        else source.stream.plan.num_parts
    )
    facts |= {"tail": str(source.tail), "is_dataset_splitted": source.split}
    facts |= {name: getattr(options, name) for name in COMPARED}
    if placer.pad_to is not None:
        facts["pad_to"] = placer.pad_to.fact()
    if source.costs is not None:
        facts["balance"] = source.costs.fact()
    if source.stream is not None and not source.split:
        # As much as fits into a report; a digest of all is compared, too.
        facts["files"] = "\n".join(source.stream.stage.source.files)[:40_000]
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
        split = {
            mesh.axes[axis]: f"{dim} balanced" if dim in layout.balanced else dim
            for axis, dim in layout.dims
        }
        found.append(f"{axes} of {ranks}, dims split {split}")
    return " and ".join(dict.fromkeys(found))


def _members(layouts: Sequence[FieldLayout]) -> tuple[int, ...]:
    """Return the ranks that keep in step: those of the meshes, and no others; this one, if it is alone, with a warning.

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
        part = (
            "no rows"
            if here is None
            else f"1/{data_ranks} of the rows, those of data rank {here}"
        )
        shown = (
            wanted if len(wanted) <= _SHOWN_RANKS else f"{wanted[0]} to {wanted[-1]}"
        )
        logging.getLogger("paddle_shard").warning(
            f"the mesh has the ranks {shown}, but this is the only process of its job, and reads {part}. Fine for a "
            "look at a program; to train, start all ranks: python -m paddle.distributed.launch --nproc_per_node "
            f"{wanted[-1] + 1} script.py"
        )
    return tuple(wanted) if count > 1 else (dist.get_rank(),)
