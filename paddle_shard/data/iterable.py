"""Sources from what users iterate: a list, a function, or a data set, which may split itself among workers."""

from __future__ import annotations

import contextlib
import copy
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from paddle.io.dataloader.worker import WorkerInfo

from paddle_shard.core.warn_once import warn_once
from paddle_shard.data.files.files import FileVersion
from paddle_shard.data.stages.stage import (
    Lengths,
    Opening,
    PartsSource,
    Samples,
    Stage,
)
from paddle_shard.data.worker_info import visible_worker_info, worker_modules
from paddle_shard.errors import ArgumentError, ArgumentTypeError, SplitError

IterableOrFunction = Iterable[Any] | Callable[[], Iterable[Any]]

ROUND = 1 << 20
"""Number that is added to a library's epoch each time that the data is read again within an epoch."""


_CONTAINERS = (list, dict, set, deque, bytearray)
"""What a data set may change in place."""
_MOST_ITEMS = 1 << 20
_MOST_BYTES = 64 << 20
"""Containers of more items, and larger arrays, are not copied: they are the data itself, of which each worker would
have a copy."""
_END: Any = object()


def set_epoch_of(dataset: Any, opening: Opening) -> None:
    """Pass the epoch to a data set of the user that has a `set_epoch`, as torch's and others have."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(opening.epoch + opening.round * ROUND)


def is_iterable_dataset(dataset: object) -> bool:
    """True if an object can only be iterated, even if it has a `__getitem__` that raises, as torch's streams have."""
    return any(
        base.__name__ == "IterableDataset" for base in type(dataset).__mro__
    )


class _Iterators:
    """Iterators that were seen and still exist, without keeping more than a few of them."""

    def __init__(self) -> None:
        self._weak: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._newest: deque[Any] = deque(maxlen=8)
        """Of those that allow no weak references, as most of Python's own types."""

    def add(self, iterator: Iterator[Any]) -> bool:
        """Add an iterator; return whether it was here already."""
        if self._weak.get(id(iterator)) is iterator:
            return True
        if any(iterator is other for other in self._newest):
            return True
        try:
            self._weak[id(iterator)] = iterator
        except TypeError:
            self._newest.append(iterator)
        return False


_begun = _Iterators()
"""What `__iter__` has returned."""
_held = _Iterators()
"""Attributes of data sets that were read."""


def iterate(iterable: IterableOrFunction) -> Samples:
    """Begin to iterate over an iterable, or over what a function returns.

    Raises:
        ArgumentError: It returns the iterator of an earlier epoch, which would continue where that has stopped.
    """
    samples = iter(iterable if isinstance(iterable, Iterable) else iterable())
    if _begun.add(samples):
        raise ArgumentError(
            f"the __iter__ of this {type(iterable).__name__} has returned the iterator of an earlier pass, so samples "
            "would be missing. Make a new iterator in __iter__, for example with `yield`."
        )
    return samples


def copy_for_reading(dataset: Any) -> Any:
    """Return a copy of a data set for one reading, with its own lists, dicts, sets and small arrays.

    So a data set that shuffles its files in place, as by `random.shuffle(self.files)`, begins each epoch with the list
    that the user gave: with and without workers, for each part that it reads, and where a run is resumed.
    """
    # A `__del__` of the copy would free what both have.
    if hasattr(type(dataset), "__del__"):
        return dataset
    try:
        copied = copy.copy(dataset)
    except Exception:  # some objects refuse
        return dataset
    if copied is not dataset and hasattr(copied, "__dict__"):
        attributes = vars(copied)
        for name, value in attributes.items():
            if isinstance(value, Iterator) and _held.add(value):
                warn_once(
                    "%s.%s is a file or an iterator that an earlier pass has begun, and unless __iter__ rewinds it, "
                    "samples are missing from this pass. Make it in __iter__.",
                    type(dataset).__name__,
                    name,
                )
        attributes.update(
            {name: _copy(value) for name, value in attributes.items()}
        )
    return copied


def _copy(value: Any) -> Any:
    kind = type(value)
    if is_iterable_dataset(value):
        return copy_for_reading(value)
    if kind is list and value and is_iterable_dataset(value[0]):
        return list(map(_copy, value))  # as in Paddle's ChainDataset
    if kind in _CONTAINERS and len(value) <= _MOST_ITEMS:
        return copy.copy(value)
    if kind is np.ndarray and value.nbytes <= _MOST_BYTES:
        return value.copy()
    return value


def iterate_with(
    info: WorkerInfo | None, dataset: IterableOrFunction
) -> Samples:
    """Iterate over the user's stream, which sees `info` instead of its worker.

    With None, it does not know of the workers, and does not split itself among them: every reader reads the whole
    stream, which is cut later.
    """
    with visible_worker_info(info):
        items = iterate(dataset)
    outside = [(module, module._worker_info) for module in worker_modules()]
    if all(known is info for _, known in outside):
        yield from items  # where no workers read, there is nothing to hide
        return
    while True:
        # Not by `visible_worker_info`, which takes as long as a small sample.
        for module, _ in outside:
            module._worker_info = info
        try:
            item = next(items, _END)
        finally:
            for module, known in outside:
                module._worker_info = known
        if item is _END:
            return
        yield item


class IterableSource(Stage):
    """A list, a function that returns an iterator, or anything that can be iterated once per epoch.

    It cannot open a part by itself. The global random generators are seeded before each sample from (seed, epoch,
    round, number of the sample), so every reader sees the same stream.
    """

    def __init__(self, iterable: IterableOrFunction) -> None:
        """Set up the source.

        Args:
            iterable: Iterated once per epoch. A generator can be read in one epoch only; to read it in several, give
                the function that makes it, without calling it.

        Raises:
            ArgumentTypeError: The argument is neither iterable nor callable.
        """
        if not hasattr(iterable, "__iter__") and not callable(iterable):
            raise ArgumentTypeError(
                f"a stream must be iterable, or a function that returns something iterable, got "
                f"{type(iterable).__name__}: {iterable!r}."
            )
        self._iterable = iterable
        is_dataset = is_iterable_dataset(iterable)
        self._begin = partial(iterate_with, None) if is_dataset else iterate
        has_index = hasattr(iterable, "__getitem__") and hasattr(
            iterable, "__len__"
        )
        self._indexed: Any = None
        """The iterable if it has an index; else None."""
        if has_index and not is_dataset and not isinstance(iterable, Mapping):
            self._indexed = iterable
        self.once = isinstance(iterable, Iterator) and not is_dataset
        self._is_used = False

    def open(self, opening: Opening) -> list[Samples]:
        """Return the whole stream: part 0 of 1."""
        return [self._items(opening)]

    def lengths(self, opening: Opening) -> Lengths:
        """Return the length of a list; None for anything else."""
        return None if self._indexed is None else [len(self._indexed)]

    def fingerprint(self) -> list[Any]:
        """Return the length of a list; nothing for anything else."""
        return [] if self._indexed is None else [["list", len(self._indexed)]]

    def files_identity(self) -> list[FileVersion]:
        """Return the first and the last item of a list of plain values: a rank may have been given a part of it."""
        items = self._indexed
        if not isinstance(items, list | tuple | range) or not items:
            return []
        with contextlib.suppress(TypeError, ValueError):  # no plain values
            ends = [json.dumps(item)[:100] for item in (items[0], items[-1])]
            return [(f"a list from {ends[0]} to {ends[1]}", 0, "")]
        return []

    def _items(self, opening: Opening) -> Samples:
        key = opening.key(0, "source")
        rng = opening.rng
        items = self._indexed
        if items is not None:
            for number in range(opening.skip, len(items)):
                if not rng.seeds:
                    yield from map(items.__getitem__, range(number, len(items)))
                    return
                rng.seed(key, number)
                yield items[number]
            return
        rng.seed(key)
        dataset = self._iterable
        if not self.once:
            dataset = copy_for_reading(dataset)
            set_epoch_of(dataset, opening)
        elif self._is_used:
            raise ArgumentError(
                f"this {type(dataset).__name__} has been read already, and can be read only once. Give the "
                "function that makes it, without calling it, so that each epoch begins again. (Describing the inputs "
                "to dist.to_static begins to read it: load a state, or set the epoch, before.)"
            )
        self._is_used = True
        yield from opening.seeded(self._begin(dataset), 0)


class _Part(WorkerInfo):
    """Tells "worker p of P" to a stream that splits itself, and whether the stream has read it."""

    is_read = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "num_workers"):
            self.__dict__["is_read"] = (
                True  # a `WorkerInfo` cannot be changed otherwise
            )
        return super().__getattribute__(name)


class SelfSplit(PartsSource):
    """A user's stream that splits itself by `paddle.io.get_worker_info()` or torch's: it sees "worker p of P".

    So each sample is read once, whatever the number of readers. The stream must yield different samples for each p,
    and the same samples each time it is opened for an epoch.
    """

    def __init__(self, dataset: IterableOrFunction) -> None:
        can_repeat = isinstance(dataset, Iterable) or callable(dataset)
        if isinstance(dataset, Iterator) or not can_repeat:
            raise ArgumentTypeError(
                "splits_itself=True needs a data set that can be iterated for each part, or a function that returns "
                f"one, got {type(dataset).__name__}: {dataset!r}."
            )
        self._dataset = dataset

    def part(self, part: int, opening: Opening) -> Samples:
        """See `PartsSource`."""
        key = opening.key(part, "source")
        opening.rng.seed(key)
        dataset = copy_for_reading(self._dataset)
        set_epoch_of(dataset, opening)
        info = _Part(
            id=part,
            num_workers=opening.num_parts,
            dataset=dataset,
            seed=key & 0x7FFFFFFF,
        )
        items = opening.seeded(iterate_with(info, dataset), part)
        for number, item in enumerate(islice(items, 2)):
            # It may read its info after its first sample.
            if number and opening.num_parts > 1 and not info.is_read:
                raise SplitError(
                    f"splits_itself=True, but the {type(self._dataset).__name__} asks neither "
                    "paddle.io.get_worker_info() nor torch's (imported before) which part to read, so each part would "
                    "be all of it. Leave splits_itself out."
                )
            yield item
        yield from items
