"""A recipe: a MosaicML StreamingDataset, in MDS format, as an `ExternalLoader`.

Copy this file and `shares.py` beside your training script. It tells the library its data rank by private attributes,
and so needs one version of it: pip install 'mosaicml-streaming==0.13.*'. Its tests are run by
`make test-adapters ADAPTERS=mds`.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import sys
import tempfile
import threading
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import shares

from paddle_shard import ExternalLoader, ShardOptions
from paddle_shard.errors import (
    ArgumentError,
    MissingDependencyError,
    SplitError,
)

_ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}
_OURS = {
    "batching_method": "other methods than 'random' leave samples out",
    "num_canonical_nodes": "it must be a multiple of the data ranks, which are known only later",
    "replication": "replicas of a data rank read the same anyway",
    "shuffle_seed": "it is the seed of shard_dataloader",
    "streams": "only a single stream is supported",
}
_MEMORIES = attrgetter(
    *(
        "_locals_shm",
        "_shared_barrier._arr.shm",
        "_next_epoch.arr.shm",
        "_cache_usage.arr.shm",
    ),
    *("_shard_states.shm", "_shard_access_times.shm"),
)
"""Returns the shared memory of a data set."""
_USED = (
    "_parallel_rank_world",
    "_get_work",
    "_shm_prefix_int",
    "_locals_shm",
    "_shared_barrier",
    "_next_epoch",
)


def mds_stream(
    *,
    local: str | os.PathLike[str],
    remote: str | None = None,
    batch_size: int,
    shuffle: bool = False,
    transform: Callable[[Mapping[str, Any]], Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **options: Any,
) -> ExternalLoader:
    """Return a StreamingDataset that is told the data rank, and reads each sample exactly once.

    Each process has its own StreamingDataset, which acts as if it were the only one on its host. So no process waits
    for another, and `torch.distributed` is not started. The order is the library's own, with one canonical node per
    data rank, so that a data rank reads its own shards. The samples that the library repeats to make ranks equal are
    left out. A pass resumes by the library's own state.

    Args:
        local: Directory of the data. If `remote` is given, directory of the cache, in which each process has its own
            directory.
        remote: Directory or URL from which shards are downloaded; None: they are all in `local`.
        batch_size: The global batch size; the data ranks must divide it.
        shuffle: If True, shuffle by the library's own algorithm, in another order each epoch.
        transform: Turns the dict of decoded columns into a sample, in this process; None: the dict is the sample.
        collate_fn: Turns a list of samples into a batch; None: arrays and numbers are stacked, and other leaves become
            lists.
        options: Options of StreamingDataset: `cache_limit`, `predownload`, `shuffle_algo`, `shuffle_block_size`, ...

    Raises:
        MissingDependencyError: mosaicml-streaming is not installed.
        ArgumentError: An option is given that the user cannot choose here; the text says why.

    Examples:
        >>> source = mds_stream(local="/data/mds", batch_size=256, shuffle=True)  # doctest: +SKIP
        >>> loader = shard_dataloader(source, mesh, shard_dims="dp")  # doctest: +SKIP
    """
    for name in sorted(options.keys() & _OURS.keys()):
        raise ArgumentError(f"mds_stream: leave {name} out: {_OURS[name]}.")
    import_streaming()
    settings = {
        "local": os.path.abspath(os.fspath(local)),
        "remote": remote,
        "shuffle": shuffle,
        **options,
    }

    def build(share: ShardOptions) -> _Pass:
        return _Pass(
            share,
            settings,
            batch_size,
            transform or dict,
            collate_fn or stacked,
        )

    return ExternalLoader(build, name="mds", save=_Pass.state, repeatable=True)


def stacked(samples: Sequence[Any]) -> Any:
    """Return the batch of some samples: arrays and numbers are stacked, and other leaves become lists.

    Raises:
        ValueError: The samples differ in their keys, their number of fields, or the dtype or shape of an array.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        if any(sample.keys() != first.keys() for sample in samples):
            raise ValueError("samples differ in their keys")
        return {
            key: stacked([sample[key] for sample in samples]) for key in first
        }
    if isinstance(first, list | tuple):
        columns = [stacked(column) for column in zip(*samples, strict=True)]
        if hasattr(first, "_fields"):  # a namedtuple
            return type(first)(*columns)
        return type(first)(columns)
    if isinstance(first, np.ndarray | np.generic | int | float):
        # Python's numbers fit several dtypes.
        dtypes = {x.dtype for x in samples if hasattr(x, "dtype")}
        if len(dtypes) > 1:
            raise ValueError("samples differ in the dtype of a field")
        return np.stack(samples)
    return list(samples)


class _Pass:
    """One pass over a share."""

    def __init__(
        self,
        share: ShardOptions,
        settings: Mapping[str, Any],
        batch_size: int,
        transform: Callable[[Mapping[str, Any]], Any],
        collate_fn: Callable[[list[Any]], Any],
    ) -> None:
        self._share, self._transform, self._collate_fn = (
            share,
            transform,
            collate_fn,
        )
        self._rows = shares.local_rows(batch_size, share)
        self._dataset, self._close = _open(share, settings, self._rows)
        # Close in a new thread: the garbage collector may run this in any thread and under any lock.
        weakref.finalize(self, start_new_thread, self._close, ()).atexit = False
        self._same = {
            "samples": self._dataset.num_samples,
            "batch_size": batch_size,
        }
        self._delivered = 0
        if share.state is None:
            self._dataset.next_epoch = share.epoch
        else:
            shares.check_same(share, **self._same)
            self._delivered = share.state["delivered"]
            self._dataset.load_state_dict(
                shares.from_json(share.state["library"])
            )

    def __iter__(self) -> Iterator[Any]:
        samples = map(self._transform, self._dataset)
        while batch := list(islice(samples, self._rows)):
            self._delivered += len(batch)
            yield self._collate_fn(batch)
        self._close()

    def state(self) -> dict[str, Any]:
        """Return the state after the last batch that was taken."""
        # The library counts the samples of all ranks.
        seen = self._delivered * self._share.num_shards
        library = self._dataset.state_dict(
            num_samples=seen, from_beginning=True
        )
        return {
            "delivered": self._delivered,
            "library": shares.to_json(library),
            **self._same,
        }


def _open(
    share: ShardOptions, settings: Mapping[str, Any], rows: int
) -> tuple[Any, Callable[[], None]]:
    """Open a StreamingDataset that reads a share; return it, and the function that closes it."""
    streaming = import_streaming()
    # a dependency of streaming
    from filelock import FileLock
    from streaming.base.batching import generate_work
    from streaming.base.world import World

    torch_distributed = sys.modules["torch"].distributed
    if torch_distributed.is_available() and torch_distributed.is_initialized():
        raise SplitError(
            "mds_stream: torch.distributed runs in this process, and StreamingDataset would wait for its ranks, not "
            "for those of the mesh. Do not initialize it, or destroy its process group first."
        )
    settings, lane = dict(settings), None
    if settings["remote"] is not None:
        settings["local"], lane = _claim(settings["local"], share)
    # the library adds the epoch to it
    seed = shares.seed_of(replace(share, epoch=0), "mds", bits=30)
    # One process of the host at a time looks for free names of shared memory, since the library has no lock.
    # The data set is alone on its "host", so that no rank waits for another. Below, it gets its data rank.
    one_at_a_time = os.path.join(
        tempfile.gettempdir(), f"paddle_shard_mds_{os.getuid()}.lock"
    )
    with FileLock(one_at_a_time), _environment(_ALONE):
        dataset = streaming.StreamingDataset(
            batch_size=rows, shuffle_seed=seed, **settings
        )
    missing = [name for name in _USED if not hasattr(dataset, name)]
    if missing:
        raise MissingDependencyError(
            f"mosaicml-streaming {streaming.__version__} has no {', '.join(missing)}, by which it is told the data "
            "rank. Install the version that this was written for: pip install 'mosaicml-streaming==0.13.*'."
        )
    world = dataset._parallel_rank_world = World(
        num_nodes=share.num_shards,
        ranks_per_node=1,
        workers_per_rank=1,
        worker=share.shard,
    )

    def work(epoch: int, sample_in_epoch: int) -> npt.NDArray[np.int64]:
        """Replace `_get_work`: return this data rank's sample ids after all ranks have seen `sample_in_epoch`."""
        # [data rank, 0, 0, batch, row]
        ids = generate_work(dataset.batching_method, dataset, world, epoch, 0)
        wanted = np.bincount(
            dataset.resample_streams(epoch)[1], minlength=dataset.num_samples
        )
        kept: npt.NDArray[np.int64] = _as_often_as(wanted, ids[:, 0, 0])[
            share.shard
        ]
        return kept[kept >= 0][sample_in_epoch // share.num_shards :]

    dataset._get_work = work
    if settings["remote"] is None:
        # The processes of a host share the directory, where the library would unpack a shard in all of them at once.
        for stream in dataset.streams:
            stream.prepare_shard = partial(
                _prepared_alone, stream.prepare_shard, one_at_a_time
            )
    return dataset, _closing(dataset, lane)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while, and restore the old ones."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _prepared_alone(
    prepare: Callable[[Any], int], lock_file: str, shard: Any
) -> int:
    from filelock import FileLock

    with FileLock(lock_file):
        return prepare(shard)


def _closing(dataset: Any, lane: Any) -> Callable[[], None]:
    """Return the function that closes a data set and lets go of its directory. It is called when the process ends."""
    process, closing = os.getpid(), threading.Lock()

    def close() -> None:
        """End the threads, remove shared memory and lock files, and release the directory; only once."""
        atexit.unregister(close)
        # the parent's, or closed already
        if process != os.getpid() or not closing.acquire(blocking=False):
            return
        if hasattr(dataset, "_iterator"):
            dataset._iterator.non_blocking_exit()
        if hasattr(dataset, "_executor"):
            dataset._executor.shutdown(wait=True, cancel_futures=True)
        for memory in (
            *_MEMORIES(dataset),
            getattr(dataset, "_resume_shm", None),
        ):
            if memory is not None:
                atexit.unregister(memory.cleanup)
                memory.cleanup()
        for path in (
            dataset._shared_barrier.filelock_path,
            dataset._cache_filelock_path,
        ):
            with suppress(OSError):
                os.unlink(path)
        if lane is not None:
            lane.close()

    # after the library's own functions, so that it runs before them
    atexit.register(close)
    return close


def _as_often_as(
    wanted: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return each data rank's sample ids, with -1 in place of an id that has come as often as wanted before.

    Args:
        wanted: How often each sample occurs in the epoch.
        ids: [data rank, batch, row]; -1: no sample.

    Returns:
        [data rank, position]
    """
    num_ranks = ids.shape[0]
    # [position, data rank], in the order of delivery
    ids = ids.reshape(num_ranks, -1).T
    flat = ids.flatten()
    order = np.argsort(flat, kind="stable")
    found = flat[order]
    # How often the same id has come before.
    before = np.arange(len(found)) - np.searchsorted(found, found)
    surplus = order[(found >= 0) & (before >= wanted[found])]
    flat[surplus] = -1
    return flat.reshape(ids.shape).T


def _claim(local: str, share: ShardOptions) -> tuple[str, Any]:
    """Return a directory for downloads that no other process uses, and the lock on it.

    The library does not allow two data sets on one directory. Each process takes the first free directory of its data
    rank. So these are the same directories in each pass, and their downloads are used again.
    """
    folder = os.path.join(
        local, f"data-rank-{share.shard}-of-{share.num_shards}"
    )
    os.makedirs(folder, exist_ok=True)
    for number in count():
        lock = open(os.path.join(folder, f"{number}.lock"), "w")  # noqa: SIM115 - it is held
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            lock.close()
    return os.path.join(folder, str(number)), lock


def import_streaming() -> Any:
    """Return the module `streaming`, even if torchvision cannot be imported: only its vision data sets need that.

    The registry's torchvision is a CUDA build, whose import fails if torch is a CPU build.
    """
    with shares.needs("'mosaicml-streaming==0.13.*' torch"):
        import torch  # noqa: F401

        try:
            import streaming
        except (ImportError, RuntimeError) as error:
            if "torchvision" not in str(error):
                raise
            name = "streaming.vision"
            sys.modules[name] = ModuleType(name)
            try:
                import streaming
            finally:
                # so that a later import of it says what is missing
                del sys.modules[name]
        return streaming
