"""A recipe: an FFCV Loader as an `ExternalLoader`. Copy this file and `shares.py` beside your training script.

FFCV is compiled and pinned to old libraries, and can seldom be installed; so this is no part of the package.
`make test-adapters ADAPTERS=ffcv` runs its tests where FFCV can be compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from queue import Queue
from typing import Any

import numpy as np
import numpy.typing as npt
from shares import check_same, local_rows, seed_of

from paddle_shard import ExternalLoader, ShardOptions
from paddle_shard.errors import ArgumentError, StateError

NAME = "ffcv"
_OURS = ("distributed", "order", "seed", "drop_last", "recompile")


def ffcv_loader(
    fname: str | os.PathLike[str],
    *,
    batch_size: int,
    shuffle: bool | str = False,
    indices: Sequence[int] | None = None,
    num_workers: int = 1,
    as_dict: bool = False,
    **options: Any,
) -> ExternalLoader:
    """Return an FFCV Loader that is told its data rank's samples, each of which is read exactly once.

    A process compiles its pipelines once, for all passes. What FFCV's random operations draw is seeded by nobody
    (numba has generators of its own): replicas and repeated runs differ in it, so leave them out where the mesh
    has more than data axes.

    Args:
        fname: The `.beton` file.
        batch_size: The global batch; the data ranks divide it.
        shuffle: True: in each epoch another permutation of all samples, of which a global batch holds the same
            for every number of data ranks. "quasi": FFCV's own quasi random order, in which each data rank reads
            its own stretch of the file, some pages at a time; with `os_cache=False`.
        indices: The samples to read; None: all.
        num_workers: Threads of this process; FFCV's own default is as many as the host has cores.
        as_dict: Batches are dicts by the names of the fields, and not lists.
        options: Of the Loader: `pipelines`, `os_cache`, `batches_ahead`, `custom_fields`. A pipeline without
            `ToTensor` gives numpy arrays; both are copied once, since FFCV uses its memory again.

    Raises:
        ArgumentError: An option that is not the user's to choose here.
    """
    for name in _OURS:
        if name in options:
            raise ArgumentError(
                f"ffcv_loader: leave {name} out; {_INSTEAD.get(name, 'it follows from the data rank')}."
            )
    if shuffle not in (False, True, "quasi"):
        raise ArgumentError(
            f"ffcv_loader: shuffle must be False, True or 'quasi', got {shuffle!r}."
        )
    settings = {
        "fname": os.fspath(fname),
        "num_workers": num_workers,
        **options,
    }
    chosen = None if indices is None else np.array(indices, np.int64)
    ready: dict[tuple[int, int, int, int], Any] = {}

    def build(share: ShardOptions) -> _Pass:
        key = (
            os.getpid(),
            share.shard,
            share.num_shards,
            local_rows(batch_size, share),
        )
        if key not in ready:
            ready[key] = _make(share, settings, shuffle, chosen, key[-1])
        return _Pass(ready[key], share, shuffle, chosen, batch_size, as_dict)

    return ExternalLoader(build, name=NAME, save=_Pass.state, repeatable=True)


_INSTEAD = {
    "order": "say shuffle=False, True or 'quasi'",
    "seed": "it is the seed of shard_dataloader",
    "drop_last": "say tail='drop' to shard_dataloader",
    "recompile": "the Loader is compiled once for all passes",
}


def _make(
    share: ShardOptions,
    settings: Mapping[str, Any],
    shuffle: bool | str,
    chosen: npt.NDArray[np.int64] | None,
    rows: int,
) -> Any:
    """Return a Loader for a share; its own order counts with "quasi" only."""
    from ffcv.loader import Loader, OrderOption

    def make(indices: Any, order: Any) -> Any:
        # Without a seed it would draw one from numpy's global generator.
        return Loader(
            batch_size=rows,
            order=order,
            indices=indices,
            seed=0,
            drop_last=False,
            **settings,
        )

    if shuffle != "quasi":
        return make(chosen, OrderOption.SEQUENTIAL)
    if chosen is None:
        from ffcv.reader import Reader

        chosen = np.arange(
            Reader(
                settings["fname"], settings.get("custom_fields", {})
            ).num_samples
        )
    first, last = (
        len(chosen) * part // share.num_shards
        for part in (share.shard, share.shard + 1)
    )
    loader = make(chosen[first:last], OrderOption.QUASI_RANDOM)
    loader.traversal_order.prepare_data_structures()
    loader.pages_as_written = loader.traversal_order.page_to_samples_array
    return loader


class _Pass:
    """One pass over a share."""

    def __init__(
        self,
        loader: Any,
        share: ShardOptions,
        shuffle: bool | str,
        chosen: npt.NDArray[np.int64] | None,
        batch_size: int,
        as_dict: bool,
    ) -> None:
        self._loader, self._as_dict = loader, as_dict
        if shuffle == "quasi":
            loader.next_epoch = 0
            loader.traversal_order.seed = seed_of(share, share.shard, bits=20)
            # FFCV permutes this table in place: an epoch's order would depend on those before it.
            loader.traversal_order.page_to_samples_array = (
                loader.pages_as_written.copy()
            )
            self._order = np.asarray(loader.next_traversal_order())
        else:
            every = (
                np.arange(loader.reader.num_samples)
                if chosen is None
                else chosen
            )
            if shuffle:
                every = np.random.default_rng(
                    seed_of(share, "order", bits=63)
                ).permutation(every)
            # Every data rank takes its turn, so that shares differ by one sample at most.
            self._order = every[share.shard :: share.num_shards]
        self._same = {
            "samples": len(self._order),
            "batch_size": batch_size,
            "shuffle": shuffle,
        }
        self._delivered = 0
        if share.state is not None:
            check_same(share, **self._same)
            self._delivered = share.state["delivered"]
            if not 0 <= self._delivered <= len(self._order):
                raise StateError(
                    f"state: {self._delivered} samples of {len(self._order)} were delivered."
                )

    def __iter__(self) -> Iterator[Any]:
        if self._delivered == len(self._order):
            return
        from ffcv.pipeline.compiler import Compiler

        Compiler.set_num_threads(self._loader.num_workers)
        names = list(self._loader.pipeline_specs)
        batches = _reading_class()(
            self._loader, self._order[self._delivered :].astype(np.uint64)
        )
        try:
            for batch in batches:
                leaves = [_own(leaf) for leaf in batch]
                self._delivered += len(leaves[0])
                yield (
                    dict(zip(names, leaves, strict=True))
                    if self._as_dict
                    else leaves
                )
        finally:
            # Not waited for: this may be run by the garbage collector, in any thread and under any lock.
            batches.terminate_event.set()
        if batches.failure is not None:
            raise batches.failure

    def state(self) -> dict[str, Any]:
        """Return where it stands, behind the batch that was taken last."""
        return {"delivered": self._delivered, **self._same}


@cache
def _reading_class() -> Any:
    """Return FFCV's iterator, whose thread ends in any case and leaves its failure."""
    from ffcv.loader.epoch_iterator import EpochIterator

    class Reading(EpochIterator):  # type: ignore[misc]
        """An `EpochIterator`; where its thread failed, FFCV's own waits for ever."""

        failure: BaseException | None = None

        def start(self) -> None:
            """Start the thread; called by the constructor."""
            self.output_queue: Queue[Any] = _Ending(self.loader.batches_ahead)
            super().start()

        def run(self) -> None:
            """Read, in the thread."""
            try:
                super().run()
            except BaseException as error:
                self.failure = error
                self.output_queue.put(None)

    return Reading


class _Ending(Queue[Any]):
    """A queue that always has room for the end, also when nobody takes from it any more."""

    def put(
        self, item: Any, block: bool = True, timeout: float | None = None
    ) -> None:
        """Put an item; None is the end."""
        if item is None:
            self.maxsize = 0
        super().put(item, block, timeout)


def _own(leaf: Any) -> Any:
    """Return a copy of an array or tensor; FFCV writes another batch to the same memory."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if leaf.device.type == "cpu":
        return leaf.numpy().copy()
    return leaf.clone()
