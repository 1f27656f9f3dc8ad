"""Sources from anything that can be iterated: another library's loader, which reads parts, or an iterable."""

from __future__ import annotations

import contextlib
import copy
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from paddle_shard.data.stages.stage import Opening, Stage, Stated
from paddle_shard.errors import ArgumentError, ArgumentTypeError, StateError

VERSION = 1
"""Version of the states that are saved."""
ROUND = 1 << 20
"""Number that is added to a library's epoch each time that the data is read again within an epoch."""
_CONTAINERS, _NUMBERS = (list, dict, set, deque, bytearray), (int, float)
"""What a data set may change in place, and what it may count in."""
_MOST_ITEMS = 1 << 20
_MOST_BYTES = 64 << 20
"""Containers of more items, and larger arrays, are not copied: they are the data itself, of which each worker would
have a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """The part of the data that another library reads. It replaces a rank and a world size."""

    shard: int
    """The data rank, which is the same for all ranks of a replica group."""
    num_shards: int
    """Number of data ranks."""
    seed: int
    """Seed of the run, the same on every rank."""
    epoch: int
    """The epoch. If the data is repeated within an epoch, each repetition has another number."""
    state: Any = None
    """Result of `save` after the last batch that was delivered; None at the beginning."""


class ExternalLoader:
    """Another library's loader. Each process builds one for its share, and uses the loader's batches as its own rows.

    Give it to `shard_dataloader` in place of a DataLoader. The library decides which samples a share holds. So a run is
    bound to its number of data ranks: resuming it on another number is an error that says so.
    """

    def __init__(
        self,
        build: Callable[[ShardOptions], Iterable[Any]],
        *,
        name: str,
        save: Callable[[Any], Any] | None = None,
        repeatable: bool = False,
    ) -> None:
        """Describe the loader.

        Args:
            build: Returns an iterable over the batches of an epoch: arrays, or tensors that support DLPack. All batches
                except the last have the same number of rows. It is called in each process when a pass begins.
            name: Name of the library, for messages and the saved state.
            save: Called after each batch with the result of `build`. It returns the state, which `build` gets again in
                `ShardOptions.state`: None, numbers, strings, and lists and dicts (by strings) of these. None: the
                loader has no state.
            repeatable: True if `build` gives the same batches in the same order whenever it gets the same share. Then a
                run can be resumed within an epoch without a state: the delivered batches are read again and dropped.
        """
        self.build, self.name, self.save, self.repeatable = (
            build,
            name,
            save,
            repeatable,
        )


def tell_epoch(dataset: Any, opening: Opening) -> None:
    """Tell a data set of the user's the epoch that is read, if it has a `set_epoch`, as torch's and others have."""
    if callable(set_epoch := getattr(dataset, "set_epoch", None)):
        set_epoch(opening.epoch + opening.round * ROUND)


def is_iterable_dataset(given: object) -> bool:
    """True if an object can only be iterated, even if it has a `__getitem__` that raises, as torch's streams have."""
    return any(base.__name__ == "IterableDataset" for base in type(given).__mro__)


def iterate(given: Iterable[Any] | Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Begin to iterate over what can be iterated, or over what a function returns."""
    return iter(given if isinstance(given, Iterable) else given())


class OwnCopy:
    """A data set for one reading, which may change it: with lists, dicts, sets and small arrays of its own.

    A worker that is started for a pass has one, too. So a data set that shuffles its files in place, as by
    `random.shuffle(self.files)`, begins each epoch with the list that the user gave: with and without workers, for each
    part that it reads, and where a run is resumed. What it counts in a number is given back, for those that count their
    epochs themselves, which is as far as they can be resumed.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._copies: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        """The attributes of each copy, of what it is a copy of, and the numbers among them at the beginning."""
        self.dataset = self._copy(given)

    def _copy(self, value: Any) -> Any:
        if (
            type(value) is list and value and is_iterable_dataset(value[0])
        ):  # as in Paddle's ChainDataset
            return list(map(self._copy, value))
        if type(value) in _CONTAINERS:
            return copy.copy(value) if len(value) <= _MOST_ITEMS else value
        if type(value) is np.ndarray:
            return value.copy() if value.nbytes <= _MOST_BYTES else value
        is_dataset = value is self._given or is_iterable_dataset(value)
        if not is_dataset or hasattr(
            type(value), "__del__"
        ):  # which would free what both have
            return value
        try:
            copied = copy.copy(value)
        except Exception:  # some objects refuse
            return value
        if copied is not value and hasattr(copied, "__dict__"):
            held = vars(copied)
            self._copies.append(
                (
                    held,
                    vars(value),
                    {name: n for name, n in held.items() if type(n) in _NUMBERS},
                )
            )
            held.update({name: self._copy(item) for name, item in held.items()})
        return copied

    def give_back(self) -> None:
        """Give the user's objects the numbers that have changed."""
        for held, given, before in self._copies:
            numbers = {
                name: value for name, value in held.items() if type(value) in _NUMBERS
            }
            given.update(
                {
                    name: number
                    for name, number in numbers.items()
                    if before.get(name) != number
                }
            )


class ExternalSource(Stage):
    """An external loader as a source. Part p of P is what the library reads as shard p of P."""

    def __init__(self, loader: ExternalLoader) -> None:
        self._loader = loader

    cuts = True
    """The library reads a part without reading the others."""

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return an iterator over the batches of each part."""
        return [self._batches(part, opening) for part in opening.parts]

    def check_resume(self, *, repeats: bool) -> None:
        """Refuse to resume within an epoch if the delivered batches cannot be found again.

        Args:
            repeats: True if the data is read again within an epoch. A library's state is of one reading.

        Raises:
            StateError: There is no state, and another reading may give other batches.
        """
        given = self._loader
        if given.repeatable or (given.save is not None and not repeats):
            return
        why = (
            "has no save="
            if given.save is None
            else "is read again within an epoch, which its save= does not cover"
        )
        raise StateError(
            f"state is within an epoch, but the {given.name} loader {why}. If it gives other batches when it is read "
            "again, some samples would be missing and others come twice. Resume from the end of an epoch; or, if it "
            "is your own and gives the same batches in the same order for the same ShardOptions, say "
            "ExternalLoader(repeatable=True)."
        )

    def fingerprint(self) -> list[Any]:
        """Return the library's name."""
        return [["foreign", self._loader.name]]  # the kind as saved states spell it

    def _batches(self, part: int, opening: Opening) -> Iterator[Any]:
        name, save, key = (
            self._loader.name,
            self._loader.save,
            opening.key(part, "source"),
        )
        state: Any = (
            {"version": VERSION, "at": 0, "saved": None}
            if opening.state is None
            else opening.state
        )
        share = ShardOptions(
            shard=part,
            num_shards=opening.num_parts,
            seed=opening.seed,
            epoch=opening.epoch + opening.round * ROUND,
            state=state["saved"],
        )
        opening.seed_generators(
            key
        )  # building may draw, for instance the order of a shuffle
        loader = self._loader.build(share)
        if not hasattr(loader, "__iter__"):
            raise ArgumentError(
                f"{name}: build returned {type(loader).__name__}, which cannot be iterated."
            )
        batches = opening.drawn(iter(loader), part, state["at"])
        for number, batch in enumerate(batches, state["at"] + opening.skip + 1):
            if save is None:
                yield batch
            else:
                yield Stated(
                    batch,
                    {
                        "version": VERSION,
                        "at": number,
                        "saved": _as_json(save(loader), name),
                    },
                )


def _as_json(state: Any, name: str) -> Any:
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


_last_iterators: WeakKeyDictionary[Stage, Any] = WeakKeyDictionary()
"""Source -> the iterator with which its newest pass has begun, or a reference to it."""


class IterableSource(Stage):
    """A list, a function that returns an iterator, or anything that can be iterated once per epoch.

    It cannot open a part by itself. The global random generators are seeded before each sample from (seed, epoch,
    round, number of the sample), so every reader sees the same stream.
    """

    def __init__(
        self,
        iterable: Iterable[Any] | Callable[[], Iterable[Any]],
        begin: Callable[[Any], Iterator[Any]] | None = None,
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
        self._iterable, self._begin = iterable, begin or iterate
        has_index = hasattr(iterable, "__getitem__") and hasattr(iterable, "__len__")
        self._indexed = (
            begin is None and has_index and not isinstance(iterable, Mapping)
        )
        self.once = begin is None and isinstance(iterable, Iterator)
        self._used = False

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the whole stream: part 0 of 1."""
        if opening.num_parts != 1:
            raise AssertionError("an iterable is cut by a stage behind it")
        return [self._items(opening)]

    def lengths(self, opening: Opening) -> list[int] | None:
        """Return the length of a list; None for anything else."""
        return [len(self._iterable)] if self._indexed else None  # type: ignore[arg-type]

    def fingerprint(self) -> list[Any]:
        """Return the length of a list; nothing for anything else."""
        return [["list", len(self._iterable)]] if self._indexed else []  # type: ignore[arg-type]

    @property
    def files(self) -> list[str]:
        """The first and the last item of a list of plain values: a rank may have been given a part of it."""
        given = self._iterable
        if isinstance(given, list | tuple | range) and len(given):
            with contextlib.suppress(TypeError, ValueError):  # no plain values
                return [
                    f"a list from {json.dumps(given[0])[:100]} to {json.dumps(given[-1])[:100]}"
                ]
        return []

    def _items(self, opening: Opening) -> Iterator[Any]:
        key, seed = opening.key(0, "source"), opening.seed_generators
        if self._indexed:
            for number in range(opening.skip, len(self._iterable)):  # type: ignore[arg-type]
                seed(key, number)
                yield self._iterable[number]  # type: ignore[index]
            return
        seed(key)
        if self.once:
            yield from opening.drawn(self._begun_once(), 0)
            return
        own = OwnCopy(self._iterable)
        tell_epoch(own.dataset, opening)
        try:
            yield from opening.drawn(
                self._begin(partial(self._new_iterator, own.dataset)), 0
            )
        finally:
            own.give_back()

    def _new_iterator(self, dataset: Any) -> Iterator[Any]:
        """Begin to iterate; refuse the iterator of an earlier pass, which would continue behind what that has read."""
        items = iterate(dataset)
        last = _last_iterators.get(self)
        if items is (last() if isinstance(last, ref) else last):
            raise ArgumentError(
                f"the __iter__ of this {type(dataset).__name__} has returned the iterator of an earlier pass, and not "
                "a new one: samples would be missing. Make the iterator in __iter__, for instance with `yield`."
            )
        try:
            _last_iterators[self] = ref(items)
        except TypeError:  # most iterators of Python's own types allow no references
            _last_iterators[self] = items
        return items

    def _begun_once(self) -> Iterator[Any]:
        if self._used:
            raise ArgumentError(
                f"this {type(self._iterable).__name__} has been read already, and can be read only once. Give the "
                "function that makes it, without calling it, so that each epoch can begin anew. (Describing the inputs "
                "to dist.to_static begins to read it: load a state, or set the epoch, before.)"
            )
        self._used = True
        return iter(self._iterable)  # type: ignore[arg-type]
