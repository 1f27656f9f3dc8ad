"""Sources from anything that can be iterated: another library's loader, which reads parts, or an iterable."""

from __future__ import annotations

import contextlib
import copy
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from paddle_shard.core.warn_once import warn_once
from paddle_shard.data.files.files import FileVersion
from paddle_shard.data.stages.stage import (
    Lengths,
    Opening,
    PartsSource,
    Samples,
    Stage,
    Stated,
)
from paddle_shard.errors import ArgumentError, ArgumentTypeError, StateError

VERSION = 1
"""Version of the states that are saved."""
ROUND = 1 << 20
"""Number that is added to a library's epoch each time that the data is read again within an epoch."""
_CONTAINERS = (list, dict, set, deque, bytearray)
"""What a data set may change in place."""
_MOST_ITEMS = 1 << 20
_MOST_BYTES = 64 << 20
"""Containers of more items, and larger arrays, are not copied: they are the data itself, of which each worker would
have a copy."""


IterableOrFunction = Iterable[Any] | Callable[[], Iterable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """The part of the data that another library reads. It replaces a rank and a world size.

    Attributes:
        shard: The data rank, which is the same for all ranks of a replica group.
        num_shards: Number of data ranks.
        seed: Seed of the run, the same on every rank.
        epoch: The epoch. If the data is repeated within an epoch, each repetition has another number.
        state: Result of `save` after the last batch that was delivered; None at the beginning.
    """

    shard: int
    num_shards: int
    seed: int
    epoch: int
    state: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class ExternalLoader:
    """Another library's loader. Each process builds one for its share, and uses the loader's batches as its own rows.

    Give it to `shard_dataloader` in place of a DataLoader. The library decides which samples a share holds. So a run is
    bound to its number of data ranks: resuming it on another number is an error that says so.

    Args:
        build: Returns an iterable over the batches of an epoch: arrays, or tensors that support DLPack. All batches
            except the last have the same number of rows. It is called in each process when an iteration begins.
        name: Name of the library, for messages and the saved state.
        save: Called after each batch with the result of `build`. It returns the state, which `build` gets again in
            `ShardOptions.state`: None, numbers, strings, and lists and dicts (by strings) of these. None: the
            loader has no state.
        repeatable: True if `build` gives the same batches in the same order whenever it gets the same share. Then a
            run can be resumed within an epoch without a state: the delivered batches are read again and dropped.
    """

    build: Callable[[ShardOptions], Iterable[Any]]
    _: KW_ONLY
    name: str
    save: Callable[[Any], Any] | None = None
    repeatable: bool = False

    def __post_init__(self) -> None:
        if not callable(self.build):
            raise ArgumentTypeError(
                f"ExternalLoader: build must be a function of ShardOptions that returns a loader, got {self.build!r}."
            )


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


class ExternalSource(PartsSource):
    """An external loader as a source. Part p of P is what the library reads as shard p of P."""

    def __init__(self, loader: ExternalLoader) -> None:
        self._loader = loader

    def check_resume(self, *, repeats: bool) -> None:
        """Refuse to resume within an epoch if the delivered batches cannot be found again.

        Args:
            repeats: True if the data is read again within an epoch. A library's state is of one reading.

        Raises:
            StateError: There is no state, and another reading may give other batches.
        """
        loader = self._loader
        if loader.repeatable or (loader.save is not None and not repeats):
            return
        why = (
            "is read again within an epoch, which its save= does not cover"
            if loader.save
            else "has no save="
        )
        raise StateError(
            f"state is within an epoch, but the {loader.name} loader {why}. If it gives other batches when it is read "
            "again, some samples would be missing and others come twice. Resume from the end of an epoch; or, if it "
            "is your own and gives the same batches in the same order for the same ShardOptions, say "
            "ExternalLoader(repeatable=True)."
        )

    def fingerprint(self) -> list[Any]:
        """Return the library's name."""
        # the kind as saved states spell it
        return [["foreign", self._loader.name]]

    def part(self, part: int, opening: Opening) -> Samples:
        """Return the batches of a part."""
        name = self._loader.name
        save = self._loader.save
        state: Any = opening.state or {"at": 0, "saved": None}
        options = ShardOptions(
            shard=part,
            num_shards=opening.num_parts,
            seed=opening.seed,
            epoch=opening.epoch + opening.round * ROUND,
            state=state["saved"],
        )
        # Building may use the generators, for instance for the order of a shuffle.
        opening.rng.seed(opening.key(part, "source"))
        loader = self._loader.build(options)
        if not hasattr(loader, "__iter__"):
            raise ArgumentError(
                f"{name}: build returned {type(loader).__name__}, which cannot be iterated."
            )
        batches = opening.seeded(iter(loader), part, state["at"])
        if save is None:
            yield from batches
            return
        for number, batch in enumerate(batches, state["at"] + opening.skip + 1):
            saved = _json_copy(save(loader), name)
            yield Stated(
                batch, {"version": VERSION, "at": number, "saved": saved}
            )


def _json_copy(state: Any, name: str) -> Any:
    """Return a copy of a library's state, which JSON must keep as it is."""
    try:
        copied = json.loads(json.dumps(state))
    except (TypeError, ValueError):
        copied = None
    if copied != state:
        raise ArgumentTypeError(
            f"the save= of the {name} loader returned {state!r:.200}, which JSON does not keep as it is. Return None, "
            "numbers, strings, and lists and dicts (by strings) of these."
        )
    return copied


class IterableSource(Stage):
    """A list, a function that returns an iterator, or anything that can be iterated once per epoch.

    It cannot open a part by itself. The global random generators are seeded before each sample from (seed, epoch,
    round, number of the sample), so every reader sees the same stream.
    """

    def __init__(
        self,
        iterable: IterableOrFunction,
        begin: Callable[[Any], Samples] | None = None,
    ) -> None:
        """Set up the source.

        Args:
            iterable: Iterated once per epoch. A generator can be read in one epoch only; to read it in several, give
                the function that makes it, without calling it.
            begin: Iterates over it, if it is a data set that can only be iterated; None: as usual.

        Raises:
            ArgumentTypeError: The argument is neither iterable nor callable.
        """
        if not hasattr(iterable, "__iter__") and not callable(iterable):
            raise ArgumentTypeError(
                f"a stream must be iterable, or a function that returns something iterable, got "
                f"{type(iterable).__name__}: {iterable!r}."
            )
        self._iterable = iterable
        self._begin = begin or iterate
        has_index = hasattr(iterable, "__getitem__") and hasattr(
            iterable, "__len__"
        )
        self._indexed: Any = None
        """The iterable if it has an index; else None."""
        if begin is None and has_index and not isinstance(iterable, Mapping):
            self._indexed = iterable
        self.once = begin is None and isinstance(iterable, Iterator)
        self._is_used = False

    def open(self, opening: Opening) -> list[Samples]:
        """Return the whole stream: part 0 of 1."""
        if opening.num_parts != 1:
            raise AssertionError("an iterable is cut by a stage behind it")
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
