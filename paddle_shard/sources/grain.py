"""How are Grain's data sets read?"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

from paddle_shard.errors import ArgumentError, ArgumentTypeError, SplitError
from paddle_shard.sources.external import ExternalLoader, ShardOptions, build_watched
from paddle_shard.sources.files import needs

NO_REPEAT = "Leave repeat() out (each pass over the loader is an epoch), or give it a number."
"""The way out for a data set that is repeated without an end, and has a length all the same."""


def grain_dataset(map_dataset: Any) -> GrainDataset:
    """Return a `grain.MapDataset` as a data set of fixed length for a `paddle.io.DataLoader`.

    The loader decides the order, and a run resumes exactly. Grain's own `shuffle` and `random_map` give the results of
    Grain's first epoch in every epoch. So shuffle by `shard_dataloader(..., shuffle=True)`. Or let Grain concatenate
    its epochs (`.shuffle(seed).repeat(n)`) and leave the loader's shuffle out.

    Args:
        map_dataset: A data set that is neither endless nor cut for a rank.

    Raises:
        MissingDependencyError: grain is not installed.
        ArgumentTypeError: `map_dataset` is not a MapDataset.
        ArgumentError: The data set is repeated forever.
        SplitError: The data set has a slice with a step, which is how shards are cut (`ds[rank::ranks]`).
    """
    return GrainDataset(map_dataset)


class GrainDataset:
    """A `grain.MapDataset` with an end; see `grain_dataset`."""

    def __init__(self, map_dataset: Any) -> None:
        with needs("grain"):
            import grain  # type: ignore[import-untyped]
        if not isinstance(map_dataset, grain.MapDataset):
            raise ArgumentTypeError(
                f"map_dataset must be a grain.MapDataset, got {type(map_dataset).__name__}. An IterDataset has no "
                "index: give a function that builds it to grain_loader."
            )
        for node in _nodes(map_dataset):
            step = getattr(node, "_step", 1)
            if type(node).__name__ == "SliceMapDataset" and abs(step) != 1:
                raise SplitError(
                    f"map_dataset is cut already, by a slice with step {step} ({node}): each rank would read only its "
                    "share of that again. Give it uncut; the loader cuts it for the mesh."
                )
        if len(map_dataset) >= sys.maxsize:
            raise ArgumentError(f"map_dataset is repeated without an end. {NO_REPEAT}")
        self._dataset, self._length = map_dataset, len(map_dataset)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Return an element.

        Raises:
            IndexError: The index is out of range. Grain itself would wrap around.
            ArgumentError: A filter of Grain has dropped the element.
        """
        number = operator.index(index)
        if not 0 <= number < self._length:
            raise IndexError(f"index {number} is not in range({self._length})")
        element = self._dataset[number]
        if element is None:
            raise ArgumentError(
                f"element {number} of the MapDataset is None, which is how Grain leaves out what a filter drops. "
                "Filter a stream instead: paddle_shard.Stream.of(range(len(ds))).sharding_filter().map(ds.__getitem__)"
                ".filter(lambda element: element is not None)."
            )
        return element


def grain_loader(build: Callable[[ShardOptions], Any]) -> ExternalLoader:
    """Return a loader of a `grain.IterDataset` of batches, which each process builds for its share.

    A run resumes exactly, by Grain's own state.

    Args:
        build: Called with the share for each pass, in the main process. It returns an IterDataset of this data rank's
            own batches. It must read `share.shard` and `share.num_shards`, and derive its order from `share.seed` and
            `share.epoch`.

    Raises:
        MissingDependencyError: grain is not installed.
        ArgumentTypeError: `build` is no function.

    Examples:
        >>> def build(share):  # doctest: +SKIP
        ...     mine = images.seed(share.seed + share.epoch).shuffle()[share.shard :: share.num_shards]
        ...     return mine.to_iter_dataset().batch(32)
        >>> shard_dataloader(grain_loader(build), mesh, shard_dims="dp")  # doctest: +SKIP
    """
    with needs("grain"):
        import grain
    if not callable(build):
        raise ArgumentTypeError(
            f"build must be a function of share that makes the data set, got {type(build).__name__}. Give "
            "lambda share: ..., which cuts it by share.shard and share.num_shards, and makes batches of a rank's rows."
        )

    def iterator(share: ShardOptions) -> Any:
        dataset = build_watched(build, share, "grain")
        if not isinstance(dataset, grain.IterDataset):
            raise ArgumentTypeError(f"grain: build must return a grain.IterDataset, got {type(dataset).__name__}.")
        batches = iter(dataset)
        if share.state is not None:
            batches.set_state(share.state)
        return batches

    return ExternalLoader(iterator, name="grain", save=lambda batches: batches.get_state(), repeatable=True)


def _nodes(dataset: Any) -> Iterator[Any]:
    yield dataset
    for parent in dataset.parents:
        yield from _nodes(parent)
