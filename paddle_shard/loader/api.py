"""`shard_dataloader`: check the arguments, and hand each to what uses it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from os import PathLike
from typing import Any, Literal, ParamSpec, TypeVar

import paddle.distributed as dist
import paddle.io

from paddle_shard.core.trees import leaves
from paddle_shard.core.warn_once import say_once
from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.loader.arguments import (
    ASSIGNS,
    SIZES_BATCHES,
    check_arguments,
    reject,
)
from paddle_shard.loader.compat import auto_dp_axis, in_auto_dp_mode, mend_process_mesh
from paddle_shard.loader.loader import ShardDataloader
from paddle_shard.loader.rows import LoaderRows
from paddle_shard.loader.setup import (
    LoaderSetup,
    batch_check_of,
    config_of,
    make_reading,
    ranks_of,
    replicas_of,
    warn_if_unsplit,
)
from paddle_shard.loader.source import read_source
from paddle_shard.loader.stats import LoaderStats
from paddle_shard.loader.stream_source import as_dataloader, read_stream
from paddle_shard.placement.placer import BatchPlacer
from paddle_shard.plan.orders import Shuffle
from paddle_shard.plan.skips import union
from paddle_shard.plan.tails import TailName
from paddle_shard.ranks.agreeing import connect, tell_failed
from paddle_shard.ranks.replicas import Replicas
from paddle_shard.reading.reading import Readers
from paddle_shard.run.record_facts import record_facts
from paddle_shard.run.recorder import Recorder
from paddle_shard.run.run import Run

P = ParamSpec("P")
R = TypeVar("R")

_COMPARED = (
    "seed",
    "input_keys",
    "timeout",
    "on_error",
    "batch_size",
    "skip_steps",
    "num_batches",
    "verify",
    "replicas",
    "dense_tensor_idx",
)
"""Arguments that must be the same on all ranks, as they are. For others, ranks compare what is made of them;
`prefetch`, `on_lost` and `record` may differ."""
_AUTO_DP = (
    "auto-DP mode: when a DataLoader is made, Paddle replaces a sampler of yours by the order of the data set, and "
    "forgets drop_last of an IterableDataset, which nobody can see afterwards. Order the data set itself, and give "
    "tail='drop'."
)
_NO_INDEX = (
    "a stream has no index to be shuffled by. Permute it in windows: "
    "paddle_shard.Stream.of(...).shuffle(window)."
)


def _reports_failure(function: Callable[P, R]) -> Callable[P, R]:
    """Report an error of a function to the other ranks of its meshes, also one about an unknown argument."""
    parameters = inspect.signature(function).parameters
    of_dataloader = inspect.signature(paddle.io.DataLoader).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            for name in kwargs:
                if name not in parameters:
                    close = get_close_matches(name, parameters, 1)
                    fix = f"It has {', '.join(parameters)}."
                    if name in of_dataloader:
                        fix = "It is the DataLoader's: give it to that."
                    elif close:
                        fix = f"Did you mean {close[0]}=?"
                    raise ArgumentTypeError(
                        f"{function.__name__} has no argument {name}=. {fix}"
                    )
            return function(*args, **kwargs)
        except Exception as error:
            given = {**dict(zip(parameters, args, strict=False)), **kwargs}
            ranks = {
                rank
                for mesh in leaves(given.get("meshes"))
                for rank in getattr(mesh, "process_ids", ())
            }
            tell_failed("its loader was not made", error, tuple(sorted(ranks)))
            raise

    return checked


@_reports_failure
def shard_dataloader(
    dataloader: Any,
    meshes: Any,
    input_keys: Sequence[str] | None = None,
    shard_dims: Any = None,
    is_dataset_splitted: bool = False,
    dense_tensor_idx: Sequence[Sequence[int]] | None = None,
    *,
    shuffle: Shuffle | None = None,
    seed: int = 0,
    tail: TailName | None = None,
    batch_size: Sequence[tuple[int, int]] | None = None,
    skip_steps: Sequence[tuple[int, int]] | None = None,
    balance: Any = None,
    num_batches: int | None = None,
    placements: Any = None,
    pad_to: Mapping[Any, tuple[str | int | Sequence[int], float]] | None = None,
    verify: Literal["first"] | int | None = "first",
    replicas: Literal["each", "leader"] = "each",
    timeout: float = 1800.0,
    prefetch: int | None = None,
    readers: Readers | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    on_lost: Literal["raise", "exit"] = "raise",
    record: str | PathLike[str] | None = None,
) -> ShardDataloader:
    """Split the batches of a DataLoader along axes of the mesh and yield them as distributed tensors.

    The signature is that of `paddle.distributed.shard_dataloader`, which this function replaces. All further options
    are keyword-only. The given DataLoader is not changed.

    Args:
        dataloader: A `paddle.io.DataLoader` or a subclass. Its `batch_size` is the global batch, as in Paddle: what one
            step consumes over all data ranks. Its data set may be a `Stream` or any `IterableDataset`; every reader
            then reads it whole and keeps its own samples. Also a `Stream` itself, or an iterable of global batches:
            a list, a generator, or a function that returns one.
        meshes: A `ProcessMesh` for all fields, or a list with one for each field, by position or by `input_keys`. A
            field that is a list may have a list of meshes.
        input_keys: For batches that are dicts: the keys to deliver, in this order. Each is delivered on its mesh of
            `meshes`, or all on the only one. The keys that are left out are logged. None: all keys.
        shard_dims: The axes that split the rows: a name or an index for all meshes, or a list with an entry for each
            mesh. With one mesh, a list means several axes that act as one; with several meshes, use a tuple inside
            the list. None: nothing is split, and every rank gets the whole global batch; or in Paddle's auto-DP mode,
            where each data rank has rows of its own, the axis "dp".
        is_dataset_splitted: True if the loader of each data rank already has rows of its own. A data set may say so
            by an attribute of this name.
        dense_tensor_idx: For each field, the numbers of the items that stay local tensors. A field that is a tensor
            stays local if its entry is not empty. A local tensor need not have a row for each sample (for example
            image patches): it is what `collate_fn` made of this rank's samples. One worker then reads a batch of a
            stream.
        shuffle: None: as the DataLoader says. True or False, if the DataLoader has no sampler of your own. "blocks"
            for data on disk, where a full shuffle would open a block (a chunk, a page, a row group) for every
            sample: each block is opened by one data rank. The block size is the data set's `block_size` if it has
            one, or else that of `Blocks()`; `Blocks(size=, window=)` sets it here. "paddle": the order of Paddle's
            `DistributedBatchSampler`, for runs that migrate.
        seed: Seed of the order, and of the random numbers that samples draw from the global generators of numpy,
            Python, Paddle (on the CPU) and, where it is imported, torch.
        tail: What to do if the data does not fill the last global batch. "pad": pad it up to the padding unit with the
            first samples of the same epoch, marked in the iterator's `valid`. "fill": pad it to a full batch. "drop":
            do not serve it. "error": refuse. None: "drop" if the DataLoader has `drop_last`, or else "pad". A batch
            sampler of your own with `drop_last` drops batches itself, and all that it yields is served. Streams, whose
            parts end at different times, can have "pad", "drop", "error", or "repeat": a part that has ended is read
            again until the longest part has ended.
        batch_size: A schedule such as `[(0, 256), (500_000, 512)]`: (sample of the run, rows of the global batch from
            the first batch on that begins there or later). The rows replace those of the DataLoader; a run that is
            resumed from any state goes on by the schedule. None: always the DataLoader's.
        skip_steps: Steps of the run that are never read, such as `[(1200, 1230)]`: (first step, step after the last),
            counted from 0 over all epochs, skipped steps included. A step that is skipped yields no batch; its samples
            are counted in the certificate as skipped. The same on all ranks. A resumed run may have further ranges
            behind its position. (PaddleNLP's `skip_data_intervals` count from 1 and include their end: [[1201, 1230]]
            is `[(1200, 1230)]` here.) Not for streams.
        balance: The cost of each sample, such as its length or the square of it: an array, or a function of an array of
            ids; with several columns (text, image), each is balanced. The rows of each micro-batch are dealt to data
            ranks so that each has as many as before, and costs as nearly the same as can be. The samples of each
            global batch stay the same, and so does the saved state. Of a `Mixture`: a dict of costs by source. All
            ranks must give the same. `stats` has the `imbalance`. None: each data rank takes its stretch of the order.
        num_batches: For streams: the number of steps of an epoch. Parts that end are read again.
        placements: For single fields, by key or position: the tensor dim that each axis splits, such as
            `{"input_ids": {"dp": 0, "sep": 1}}`. `Balanced(dim=1)` splits for causal attention. "as read" is for a
            field whose rows are not the samples, such as pairs of them: each data rank keeps what `collate_fn` made
            of its own samples, and all must have the same number of rows. "row index" is the same for a field in which
            `collate_fn` writes which row of the batch is meant, as its numbers or in its first column: each data rank
            counts from 0, and gets the places in the global batch. For a field that is a list, a list of these names
            its items, with None for the others: `{"inputs": [None, "row index"]}`.
        pad_to: For a `collate_fn` that pads to the longest row that it is given, which differs from rank to rank. For
            each field to be padded further, by key or position (0 for a bare tensor): (length, number behind the end of
            its rows), such as `{"input_ids": ("longest", 0), "labels": ("longest", -100)}`. "longest": to the longest
            of the global batch, in each dim but the first. A list of lengths, such as [128, 256, 512]: dim 1 to the
            smallest that holds the longest row. Ranks tell each other their lengths ahead, with the agreement on the
            step. None: rows that differ are an error.
        verify: Ranks compare digests of what they have read: those that read the same samples must have got the same
            bytes, and data that is split already must differ between data ranks. If not, it is an error on all ranks
            that names the step, the ranks, the fields and the samples. "first": the first batch of each pass. An int k:
            also the batches of every k-th step. None: never. It goes with the agreement, in the background. Of data
            with an index that this loader splits, all ranks also read the same two samples when a pass begins, so that
            a rank that was given a part or another version of the data is seen. A saved state holds their digests, and
            those of the files that a stream was reading.
        replicas: Who reads for ranks that hold the same rows (that differ in mp, pp or sep only). "each": every rank
            reads for itself. "leader": on each host, one of them reads, with its workers, and hands every batch to the
            others through memory that they share. The others start no workers, and what the data set keeps in memory
            is there once.
        timeout: Seconds for which another rank, or a worker, may be silent while this rank waits for it. All ranks of
            the meshes iterate alike, and end or fail at the same step: they agree on it ahead, in the background. For a
            loop on one rank alone, give a mesh of that rank.
        prefetch: Number of batches that a thread keeps ready while the model computes. 0: no thread; without workers
            each batch is read when it is asked for. None: two, as Paddle's reader; none if the DataLoader has
            `use_buffer_reader=False`. Data that uses numpy's, Python's, Paddle's or torch's global random generators is
            read by the thread of the training loop, unless workers read it: the first batch of each pass shows whether
            it does, or the data set says so (`dataset.uses_rng = True` or False).
        readers: `RayReaders(num=...)`: actors of a Ray cluster read in place of the DataLoader's worker processes, as
            many as these say, with its `worker_init_fn`, `prefetch_factor`, `timeout` and `persistent_workers`. The
            batches are the same. None: worker processes as the DataLoader says.
        on_error: "raise": a sample that cannot be read is a `DataReadError` on all ranks. "skip": a sample that raises
            while it is read, mapped or collated becomes an invalid row (see the iterator's `valid`) that holds another
            sample's data; it is logged and counted in `stats`. Rows that differ in shape or fields are an error.
        on_lost: What to do when another rank is lost. "raise": the loop raises `PeerLostError`. A training thread that
            is stuck in a collective cannot be woken, so the log says it, too. "exit": the process also ends after
            10 s if its training thread has not raised the error by then.
        record: A file to which the first rank of the meshes appends what happens to the run: a line when it begins, at
            each pass, checkpoint, resume and error, and none a step. Give every job of the run the same file. The
            command `paddle-shard` answers from it which rank read which sample at which step, and whether each was read
            once. A file that cannot be written is an error here; later it is a warning.

    Returns:
        A `ShardDataloader`, which `dist.to_static` accepts, too.

    Raises:
        ArgumentError: An argument cannot be honoured; raised on every rank, before any batch.
        ArgumentTypeError: There is no such argument, or not any more.

    Examples:
        >>> loader = shard_dataloader(DataLoader(data, batch_size=64), mesh, shard_dims="dp")  # doctest: +SKIP
        >>> for inputs, labels in loader:  # doctest: +SKIP
        ...     loss = model(inputs, labels)
    """
    arguments = dict(locals())
    check_arguments(**arguments)
    mend_process_mesh()
    is_auto_dp = in_auto_dp_mode()
    if is_auto_dp:
        say_once(_AUTO_DP)
        if shard_dims is None:  # as Paddle's own loader splits
            shard_dims = auto_dp_axis(meshes)

    # Where the fields go, and the ranks that take part.
    rank = dist.get_rank()
    placer = BatchPlacer.of(
        meshes,
        shard_dims,
        input_keys=input_keys,
        placements=placements,
        dense_tensor_idx=dense_tensor_idx,
        pad_to=pad_to,
        global_rank=rank,
        replicated_in_name=is_auto_dp,
    )
    mesh_ranks = ranks_of(placer.layouts)
    ranks = mesh_ranks if rank in mesh_ranks else (rank,)
    connect(ranks, timeout)  # before data is counted, or rejected on this rank only
    if pad_to is not None and ranks != mesh_ranks:
        raise ArgumentError(
            f"pad_to={pad_to!r}: global rank {rank} is on none of the meshes and does not receive "
            "how long the rows are. Make this loader on the ranks of the meshes only."
        )
    own = placer.own_layout
    if shard_dims is None:
        warn_if_unsplit(own)

    # The order of the data.
    loader = as_dataloader(dataloader, readers)
    is_split = bool(
        is_dataset_splitted or getattr(loader.dataset, "is_dataset_splitted", False)
    )
    if isinstance(loader.dataset, paddle.io.IterableDataset):
        reject(_NO_INDEX, shuffle=shuffle or None)
        reject(f"the loader has a stream, {SIZES_BATCHES}", batch_size=batch_size)
        reject("a stream cannot skip steps without reading.", skip_steps=skip_steps)
        reject(f"a stream's samples have no number, {ASSIGNS}", balance=balance)
        source = read_stream(
            loader,
            placer.layouts,
            own,
            is_split=is_split,
            seed=seed,
            tail=tail,
            num_batches=num_batches,
            has_local_items=any(dense_tensor_idx or ()),
        )
    else:
        reject("it is for streams; this data has an index.", num_batches=num_batches)
        source = read_source(
            loader,
            placer.layouts,
            is_split=is_split,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            batch_size=batch_size,
            balance=balance,
        )

    # How it is read, and the position of the run.
    reading = make_reading(
        loader,
        source,
        seed=seed,
        skip_errors=on_error == "skip",
        # A sampler that knows its rank may repeat a row on another one, to augment it twice.
        data_rank=own.data_rank
        if source.split and own.on_mesh and not is_split
        else None,
        pad_to=placer.pad_to,
        timeout=timeout,
        readers=readers,
    )
    skips = union((int(first), int(end)) for first, end in skip_steps or ())
    run = Run(source, own, mesh_ranks, timeout, skips)
    if record is not None and rank == mesh_ranks[0]:
        facts = record_facts(
            source,
            run,
            placer.layouts,
            own,
            dataset=loader.dataset,
            skip_steps=skips,
            arguments=arguments,
        )
        run.recorder = Recorder(record, facts)
    sharing = Replicas()
    if replicas == "leader" and len(ranks) > 1:
        sharing = replicas_of(source, placer.layouts, ranks)
    compared = {name: arguments[name] for name in _COMPARED}
    if prefetch is None:
        prefetch = 2 if loader.use_buffer_reader else 0
    setup = LoaderSetup(
        dataloader=loader,
        source=source,
        placer=placer,
        own_layout=own,
        rows=LoaderRows(source, placer.layouts, own),
        reading=reading,
        run=run,
        stats=LoaderStats(sharing.__str__, rank),
        ranks=ranks,
        config=config_of(source, placer, loader.dataset, compared),
        verify=verify,
        batch_check=batch_check_of(source, own, ranks, loader.dataset, verify),
        replicas=sharing,
        timeout=timeout,
        exit_when_lost=on_lost == "exit",
        prefetch=prefetch,
    )
    return ShardDataloader(setup, dataloader, seed=seed)
