"""How is any iterable used as a source?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.seeding import mix
from paddle_shard.stages.stage import Opening, Stage


class IterableSource(Stage):
    """A list, a function that returns an iterator, or anything that can be iterated once per epoch.

    It cannot open a part by itself. The global random generators are seeded before each sample from (seed, epoch,
    round, number of the sample), so every reader sees the same stream.
    """

    def __init__(self, iterable: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
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
        self.once = isinstance(iterable, Iterator)
        self._used = False

    @property
    def _indexed(self) -> bool:
        found = self._iterable
        return hasattr(found, "__getitem__") and hasattr(found, "__len__") and not isinstance(found, Mapping)

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

    def _items(self, opening: Opening) -> Iterator[Any]:
        key, seed = opening.key(0, "source"), opening.seed_generators
        if self._indexed:
            for number in range(opening.skip, len(self._iterable)):  # type: ignore[arg-type]
                seed(mix(key, number))
                yield self._iterable[number]  # type: ignore[index]
            return
        seed(key)
        yield from opening.drawn(self._begin(), key)

    def _begin(self) -> Iterator[Any]:
        if not self.once:
            return iter(self._iterable if isinstance(self._iterable, Iterable) else self._iterable())
        if self._used:
            raise ArgumentError(
                f"this {type(self._iterable).__name__} has been read already, and can be read only once. Give the "
                "function that makes it, without calling it, so that each epoch can begin anew. (Describing the inputs "
                "to dist.to_static begins to read it: load a state, or set the epoch, before.)"
            )
        self._used = True
        return iter(self._iterable)  # type: ignore[arg-type]
