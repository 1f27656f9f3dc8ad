"""`shard_dataloader`: check the arguments, and hand each to what uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle.distributed as dist
import paddle.io

from paddle_shard.core.trees import leaves
from paddle_shard.core.warn_once import warn_once
from paddle_shard.data.external import ExternalLoader
from paddle_shard.data.generators import generators_of
from paddle_shard.data.stream import Stream
from paddle_shard.errors import ArgumentError
from paddle_shard.loader.arguments import (
    check_arguments,
    is_already_split,
    reject,
)
from paddle_shard.loader.compat import (
    auto_dp_axis,
    in_auto_dp_mode,
    mend_process_mesh,
)
from paddle_shard.loader.loader import ShardDataloader
from paddle_shard.loader.rows import LoaderRows
from paddle_shard.loader.setup import (
    LoaderSetup,
    config_of,
    ranks_of,
    replicas_of,
    warn_if_unsplit,
)
from paddle_shard.loader.source import read_source
from paddle_shard.loader.stats import LoaderStats
from paddle_shard.loader.stream_source import as_dataloader, read_stream
from paddle_shard.placement.field import Balanced
from paddle_shard.placement.lengths import PadTo
from paddle_shard.placement.placer import BatchPlacer
from paddle_shard.plan.blocks import Blocks
from paddle_shard.plan.skips import union
from paddle_shard.ranks.agreeing import connect, fails_on_all_ranks
from paddle_shard.reading.reader import HowToRead
from paddle_shard.reading.reading import Readers, Reading
from paddle_shard.reading.sample_threads import Threads
from paddle_shard.run.record_facts import record_facts
from paddle_shard.run.recorder import Recorder
from paddle_shard.run.run import Run

Placement: TypeAlias = "Mapping[str | int | tuple[str, ...], int | Balanced | None] | Literal['as read', 'row index']"
"""Of a field: the tensor dim that each axis splits, or a word."""

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
    "local",
    "pad_to",
)
"""Arguments that must be the same on all ranks, as they are. For others, ranks compare what is made of them;
`prefetch`, `on_lost` and `record` may differ."""
_AUTO_DP = (
    "auto-DP mode: when a DataLoader is made, Paddle replaces a sampler of yours by the order of the data set, and "
    "forgets drop_last of an IterableDataset, which nobody can see afterwards. Order the data set itself, and give "
    "tail='drop'."
)
_NO_INDEX = (
    "a stream's samples have no number, by which their order, batches or costs could be chosen. Permute a stream in "
    "windows: paddle_shard.Stream.of(...).shuffle(window)."
)


def _ranks_of(
    _dataloader: Any = None, meshes: Any = None, *_: Any, **__: Any
) -> list[tuple[int, ...]]:
    """Return the global ranks of all meshes."""
    ranks = {
        rank
        for mesh in leaves(meshes)
        for rank in getattr(mesh, "process_ids", ())
    }
    return [tuple(sorted(ranks))]


@fails_on_all_ranks(_ranks_of)
def shard_dataloader(  # noqa: PLR0913
    dataloader: paddle.io.DataLoader
    | Stream
    | ExternalLoader
    | Iterable[Any]
    | Callable[[], Iterable[Any]],
    meshes: dist.ProcessMesh
    | Sequence[dist.ProcessMesh | Sequence[dist.ProcessMesh]],
    input_keys: Sequence[str] | None = None,
    shard_dims: str
    | int
    | Sequence[str | int | Sequence[str | int | None] | None]
    | None = None,
    is_dataset_splitted: bool = False,
    dense_tensor_idx: Sequence[Sequence[int]] | None = None,
    *,
    shuffle: bool | Literal["blocks", "paddle"] | Blocks | None = None,
    seed: int = 0,
    tail: Literal["pad", "fill", "drop", "error", "repeat"] | None = None,
    batch_size: Sequence[tuple[int, int]] | None = None,
    skip_steps: Sequence[tuple[int, int]] | None = None,
    balance: npt.ArrayLike
    | Callable[[npt.NDArray[np.int64]], npt.ArrayLike]
    | None = None,
    num_batches: int | None = None,
    local: bool = False,
    placements: Mapping[str | int, Placement | list[Placement | None]]
    | None = None,
    pad_to: Mapping[
        str | int, tuple[Literal["longest"] | int | Sequence[int], float]
    ]
    | None = None,
    verify: Literal["first"] | int | None = "first",
    replicas: Literal["each", "leader"] = "each",
    timeout: float = 1800.0,
    prefetch: int | None = None,
    readers: Threads | Readers | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    on_lost: Literal["raise", "exit"] = "raise",
    record: str | PathLike[str] | None = None,
) -> ShardDataloader:
    """Split the batches of a DataLoader along axes of the mesh and yield them as distributed tensors.

    The signature is that of `paddle.distributed.shard_dataloader`, which this function replaces; further options are
    keyword-only. The given DataLoader is not changed.

    Args:
        dataloader: A `paddle.io.DataLoader`. Its `batch_size` is the global batch, as in Paddle: the rows of one step
            over all data ranks. Its data set may be a `Stream` or another `IterableDataset`. Also a `Stream`, or an
            iterable of global batches: a list, a generator, or a function that returns one.
        meshes: A `ProcessMesh` for all fields, or a list with one for each field, by position or by `input_keys`. If a
            field is a list, its entry may be a list of meshes.
        input_keys: The keys of dict batches to deliver, in this order, each on its mesh of `meshes`. Keys that are not
            listed are logged once. None: all keys.
        shard_dims: The mesh axes that split the rows: a name or an index for all meshes, or a list with an entry for
            each mesh. With one mesh, a list means several axes that act as one; with several meshes, nest a tuple in
            the list. None: every rank gets the whole global batch; in Paddle's auto-DP mode, the axis "dp".
        is_dataset_splitted: True if the loader of each data rank already has rows of its own. An attribute of this name
            on the data set has the same effect.
        dense_tensor_idx: For each field, the numbers of the items that stay local tensors; a field that is a tensor
            stays local if its entry is not empty. A local tensor need not have a row for each sample: it is what
            `collate_fn` returns for this rank's samples.
        shuffle: True or False. "blocks": for data on disk, shuffle so that each block (chunk, page, row group) is
            opened by one data rank; `Blocks(size=, window=)` sets the size. "paddle": the order of
            `paddle.io.DistributedBatchSampler`. None: as the DataLoader says. Only for a DataLoader without a sampler
            of your own.
        seed: Seed of the order, and of the random numbers that samples draw from the global generators of numpy,
            Python, Paddle (on the CPU) and, if it is imported, torch.
        tail: The remainder policy: what to do if the data does not fill the last global batch. "pad": pad up to the
            next size that can be split, with rows that are False in the iterator's `valid`. "fill": pad to a full
            batch. "drop": do not deliver it. "error": raise. None: "drop" if the DataLoader has `drop_last`, or else
            "pad". For streams, whose parts end at different times: "pad", "drop", "error", or "repeat", which reads
            parts again until the longest has ended. A batch sampler of your own with `drop_last` drops batches itself.
        batch_size: A schedule of global batch sizes, such as `[(0, 256), (500_000, 512)]`: (sample of the run, rows of
            the batches that begin there or later). None: the DataLoader's.
        skip_steps: Steps of the run that are never read, such as `[(1200, 1230)]`: (first step, step after the last),
            counted from 0 over all epochs. Their samples are counted as skipped in the certificate. (PaddleNLP's
            `skip_data_intervals=[[1201, 1230]]` is `[(1200, 1230)]` here.) Not for streams.
        balance: The cost of each sample, such as its length: an array, or a function of an array of ids; with several
            columns, each is balanced. The rows of each micro-batch are assigned to data ranks so that each rank has as
            many as before, at nearly equal cost. For a `Mixture`, a function of ids.
        num_batches: For streams, the number of steps of an epoch; parts that end are read again.
        local: If True, tensors stay local: each rank gets its rows of the batch, as `paddle.DataParallel` and fleet's
            models take them, and `valid` is local, too. `meshes` and `shard_dims` say which rows.
        placements: For single fields, by key or position, the tensor dim that each axis splits, such as
            `{"input_ids": {"dp": 0, "sep": 1}}`; `Balanced(dim=1)` splits for causal attention. "as read": for a field
            whose rows are not the samples, each data rank keeps what `collate_fn` makes of its own samples; all must
            have the same number of rows. "row index": the same for a field that refers to rows of the batch, as its
            numbers or in its first column; they become rows of the global batch. A list of these names the items of
            a field that is a list, with None for the others.
        pad_to: For a `collate_fn` that pads to the longest row of its samples, which differs between ranks: for each
            field to be padded further, by key or position, (length, number behind the end of its rows), such as
            `{"input_ids": ("longest", 0), "labels": ("longest", -100)}`. "longest": to the longest row of the global
            batch, in each dim but the first. A list of lengths, such as [128, 256, 512]: dim 1 to the smallest length
            that holds the longest row. None: rows that differ are an error.
        verify: When ranks compare digests of what they read: ranks that read the same samples must get the same bytes,
            and data that is split already must differ between data ranks. "first": the first batch of each iterator.
            An int k: also every k-th step. None: never. For data with an index, all ranks also read the same two
            samples when the run begins; the saved state holds their digests, or those of a stream's files.
        replicas: Which ranks read, of those that hold the same rows. "each": every rank. "leader": on each host, one
            rank reads and hands every batch to the others through shared memory.
        timeout: Seconds for which another rank, or a worker, may be silent while this rank waits for it. All ranks of
            the meshes iterate alike, and end or fail at the same step.
        prefetch: Number of batches that a thread keeps ready while the model computes. 0: no thread. None: 2, or 0 if
            the DataLoader has `use_buffer_reader=False`. Without workers, data that uses the global random generators
            is read by the training thread; the first batch of each iterator shows whether it does, or
            `dataset.uses_rng = True` or False declares it.
        readers: `Threads(16)`: in each process that reads, 16 threads read samples at the same time, for data whose
            reads wait; not for streams. `RayReaders(num=...)`: actors of a Ray cluster read in place of the
            DataLoader's worker processes.
        on_error: "raise": a sample that cannot be read is a `DataReadError` on all ranks. "skip": its row becomes
            invalid and holds another sample's data; it is logged, and counted in `stats`.
        on_lost: What to do when another rank is lost. "raise": the loop raises `PeerLostError`. "exit": also end the
            process if its training thread has not raised the error after 10 s, since it may be stuck in a collective.
        record: A file to which the first rank of the meshes appends a line when the run begins, at each iterator,
            checkpoint, resume and error. Give every job of the run the same file; the command `paddle-shard` reads it.

    Returns:
        A `ShardDataloader`, which `dist.to_static` accepts, too.

    Raises:
        ArgumentError: An argument cannot be honoured; raised on every rank, before any batch.
        ArgumentTypeError: The type of an argument is not supported.

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
        warn_once(_AUTO_DP)
        if shard_dims is None:  # as Paddle's own loader splits
            shard_dims = auto_dp_axis(meshes)

    # Where the fields go, and the ranks that take part.
    rank = dist.get_rank()
    placer = BatchPlacer(
        meshes=meshes,
        shard_dims=shard_dims,
        input_keys=input_keys,
        placements=placements,
        dense_tensor_idx=dense_tensor_idx,
        local=local,
        pad_to=PadTo.of(pad_to),
        global_rank=rank,
        replicated_in_name=is_auto_dp,
    )
    mesh_ranks = ranks_of(placer.layouts)
    ranks = mesh_ranks if rank in mesh_ranks else (rank,)
    # before data is counted, or rejected on this rank only
    connect(ranks, timeout)
    if pad_to is not None and ranks != mesh_ranks:
        raise ArgumentError(
            f"pad_to={pad_to!r}: global rank {rank} is on none of the meshes and does not receive "
            "how long the rows are. Make this loader on the ranks of the meshes only."
        )
    row_layout = placer.row_layout
    if shard_dims is None:
        warn_if_unsplit(row_layout)

    # The order of the data.
    loader = as_dataloader(dataloader, readers)
    is_split = is_already_split(is_dataset_splitted, loader.dataset, shard_dims)
    if isinstance(loader.dataset, paddle.io.IterableDataset):
        reject(
            _NO_INDEX,
            shuffle=shuffle or None,
            batch_size=batch_size,
            skip_steps=skip_steps,
            balance=balance,
        )
        source = read_stream(
            loader,
            placer,
            is_split=is_split,
            seed=seed,
            tail=tail,
            num_batches=num_batches,
        )
    else:
        reject(
            "it is for streams; this data has an index.",
            num_batches=num_batches,
        )
        source = read_source(
            loader,
            placer,
            is_split=is_split,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            batch_size=batch_size,
            balance=balance,
        )

    # How it is read, and the position of the run.
    # A sampler that knows its rank may repeat a row on another one, to augment it twice.
    draws_for_rank = source.split and row_layout.on_mesh and not is_split
    how = HowToRead(
        generators=generators_of(),
        seed=seed,
        skip_errors=on_error == "skip" and not source.item_is_batch,
        items_are_batches=source.item_is_batch,
        of_rank=(row_layout.data_rank,) if draws_for_rank else (),
        num_threads=readers.num if isinstance(readers, Threads) else 0,
    )
    reading = Reading(
        loader,
        how,
        # A worker times out before a rank does, so that the other ranks receive the reason.
        worker_timeout=0.9 * timeout,
        stream=source.stream,
        even=None if placer.pad_to is None else placer.pad_to.even,
        readers=None if isinstance(readers, Threads) else readers,
    )
    skips = union((int(first), int(end)) for first, end in skip_steps or ())
    run = Run(source, row_layout, mesh_ranks, timeout, skips)
    if record is not None and rank == mesh_ranks[0]:
        facts = record_facts(
            source,
            run,
            placer,
            dataset=loader.dataset,
            skip_steps=skips,
            arguments=arguments,
        )
        run.recorder = Recorder(record, facts)
    sharing = replicas_of(replicas, source, placer.layouts, ranks)
    if prefetch is None:
        prefetch = 2 if loader.use_buffer_reader else 0
    setup = LoaderSetup(
        dataloader=loader,
        source=source,
        placer=placer,
        row_layout=row_layout,
        rows=LoaderRows(source, placer),
        reading=reading,
        run=run,
        stats=LoaderStats(rank),
        ranks=ranks,
        config=config_of(
            source,
            placer,
            type(getattr(dataloader, "dataset", dataloader)).__name__,
            {name: arguments[name] for name in _COMPARED},
        ),
        verify=verify,
        replicas=sharing,
        timeout=timeout,
        exit_when_lost=on_lost == "exit",
        prefetch=prefetch,
    )
    return ShardDataloader(setup, dataloader, seed=seed)
