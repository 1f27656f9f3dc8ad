"""A recipe: torchdata's loaders, `torchdata.nodes` and `StatefulDataLoader`, as an `ExternalLoader`.

Copy this file and `shares.py` beside your training script: pip install 'torchdata>=0.11'. `make test-adapters
ADAPTERS=torchdata` runs its tests.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import shares

from paddle_shard import ExternalLoader, ShardOptions
from paddle_shard.errors import ArgumentError, ArgumentTypeError


def torchdata_loader(build: Callable[[ShardOptions], Any]) -> ExternalLoader:
    """Return a loader that `build` makes in each process: nodes, or a `StatefulDataLoader`.

    A run resumes exactly, by the library's own state. torch's generator is seeded for each batch that this process
    makes, and restored after it, so that replicas agree. The generators of torch's workers are seeded when the workers
    start, and are not part of the library's state.

    Args:
        build: Called with the share for each pass. It returns a `torchdata.nodes.BaseNode` or `Loader`, or a
            `StatefulDataLoader`. Its items are this data rank's own batches of arrays or tensors; all batches except
            the last have the same number of rows. It must read `share.shard` and `share.num_shards`, and derive its
            order from `share.seed` and `share.epoch`. A sampler or node that has a rank must have the share's:
            `DistributedSampler(num_replicas=share.num_shards, rank=share.shard)`, which repeats samples to make shares
            equal, or `MultiNodeWeightedSampler(rank=, world_size=)`.

    Raises:
        MissingDependencyError: torchdata is not installed.

    Examples:
        >>> def build(share):  # doctest: +SKIP
        ...     mine = range(share.shard, len(images), share.num_shards)
        ...     return Batcher(Mapper(SamplerWrapper(mine), images.__getitem__), batch_size=32)
        >>> shard_dataloader(torchdata_loader(build), mesh, shard_dims="dp")  # doctest: +SKIP
    """
    _import()

    def build_pass(share: ShardOptions) -> _Pass:
        return _Pass(shares.build_watched(build, share, "torchdata"), share)

    return ExternalLoader(
        build_pass, name="torchdata", save=_Pass.state, repeatable=True
    )


def stateful_dataloader(
    dataset: Any, *, batch_size: int, shuffle: bool = False, **options: Any
) -> ExternalLoader:
    """Return a `StatefulDataLoader` over a map-style data set, which is split here. Each sample is read exactly once.

    A global batch holds the same samples for every number of data ranks.

    Args:
        dataset: A data set with a length and an index, the same in every process.
        batch_size: The global batch size; the data ranks must divide it.
        shuffle: If True, permute the samples, in another order each epoch.
        options: Options of `StatefulDataLoader`: `num_workers`, `collate_fn`, `drop_last`, ...

    Raises:
        MissingDependencyError: torchdata is not installed.
        ArgumentError: An option would order the data in another way.
        ArgumentTypeError: The data set has no length or index.
    """
    _import()
    ordering = sorted({"sampler", "batch_sampler", "generator"} & set(options))
    if ordering:
        raise ArgumentError(
            f"stateful_dataloader: {', '.join(ordering)} would order the data in another way than by the data rank. "
            "Leave it out, or make the loader yourself and give it to torchdata_loader."
        )
    has_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not has_index or isinstance(dataset, str | Mapping):
        raise ArgumentTypeError(
            "stateful_dataloader: dataset must have a length and an index (__len__, __getitem__), got "
            f"{type(dataset).__name__}. Split it yourself, in a function that torchdata_loader is given."
        )

    def build_pass(share: ShardOptions) -> _Pass:
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader

        length = len(dataset)
        order = np.arange(length)
        if shuffle:
            order = np.random.default_rng(
                shares.seed_of(share, "order", bits=63)
            ).permutation(length)
        # The data ranks take samples in turns, so their shares differ by at most one sample.
        mine = order[share.shard :: share.num_shards]
        loader = StatefulDataLoader(
            dataset,
            batch_size=shares.local_rows(batch_size, share),
            sampler=mine.tolist(),
            generator=torch.Generator().manual_seed(
                shares.seed_of(share, "workers", share.shard, bits=63)
            ),
            **options,
        )
        return _Pass(loader, share, samples=length, batch_size=batch_size)

    return ExternalLoader(
        build_pass,
        name="torchdata StatefulDataLoader",
        save=_Pass.state,
        repeatable=True,
    )


def _import() -> None:
    with shares.needs("torchdata torch"):
        import torchdata.nodes
        import torchdata.stateful_dataloader  # noqa: F401


class _Pass:
    """One pass over a share."""

    def __init__(self, built: Any, share: ShardOptions, **same: Any) -> None:
        """Set up the pass.

        Args:
            built: What the user's function returned.
            share: The share that it was built for.
            same: Values that must not change between saving a state and resuming from it.
        """
        from torchdata.nodes import BaseNode, Loader
        from torchdata.stateful_dataloader import StatefulDataLoader

        if not isinstance(built, BaseNode | Loader | StatefulDataLoader):
            raise ArgumentTypeError(
                "torchdata_loader: build must return a torchdata.nodes.BaseNode or Loader, or a StatefulDataLoader, "
                f"got {type(built).__name__}."
            )
        _check_ranks(built, share)
        if isinstance(built, Loader):
            built = built.root
        # By default, a Loader begins again if its state is at the end.
        self._loader = (
            Loader(built, restart_on_stop_iteration=False)
            if isinstance(built, BaseNode)
            else built
        )
        self._seed_of = partial(
            shares.seed_of, share, "torch", share.shard, bits=63
        )
        self._same = {"kind": type(self._loader).__name__, **same}
        self._batches = 0
        if share.state is not None:
            shares.check_same(share, **self._same)
            self._batches = share.state["batches"]
            self._loader.load_state_dict(
                shares.from_json(share.state["library"])
            )

    def __iter__(self) -> Iterator[Any]:
        import torch

        # the generator is the user's: it is put back
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed_of())
            items = iter(self._loader)
        # torch's handler would make Paddle's store fail ("Interrupted system call") when a worker ends.
        signal.siginterrupt(signal.SIGCHLD, False)
        while True:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed_of(self._batches))
                try:
                    batch = next(items)
                except StopIteration:
                    return
            self._batches += 1
            yield batch

    def state(self) -> dict[str, Any]:
        """Return the state after the last batch that was taken."""
        return {
            "batches": self._batches,
            "library": shares.to_json(self._loader.state_dict()),
            **self._same,
        }


def _check_ranks(loader: Any, share: ShardOptions) -> None:
    """Check every sampler and node of a loader that has a rank.

    Raises:
        SplitError: One has another rank, or another number of ranks, than the share.
    """
    from torch.utils.data import DataLoader, IterableDataset, Sampler
    from torchdata.nodes import BaseNode, Loader

    todo, seen = [loader], set[int]()
    while todo:
        found = todo.pop()
        if id(found) in seen or not isinstance(
            found, BaseNode | Loader | DataLoader | Sampler | IterableDataset
        ):
            continue
        seen.add(id(found))
        name = type(found).__name__
        for count_name in ("num_replicas", "world_size"):
            if hasattr(found, "rank") and hasattr(found, count_name):
                has = {
                    "rank": found.rank,
                    count_name: getattr(found, count_name),
                }
                fix = f"Pass {name}(rank=share.shard, {count_name}=share.num_shards)."
                shares.check_share(has, share, f"torchdata: the {name}", fix)
        # look at the samplers and nodes that it holds
        if not isinstance(found, IterableDataset):
            held = list(vars(found).values())
            todo += held + [
                item
                for value in held
                if isinstance(value, dict)
                for item in value.values()
            ]
