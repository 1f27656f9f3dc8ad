"""How are the samples of a part grouped, and how are groups split into samples?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any, ClassVar

from paddle_shard.plan.parts import check_count
from paddle_shard.plan.seeding import mix
from paddle_shard.stages.opening import Opening, Unreadable
from paddle_shard.stages.search import Search
from paddle_shard.stages.stage import Stage

_END = object()


class Batch(Stage):
    """Makes lists of `size` samples of a part; the last one may be shorter."""

    def __init__(self, upstream: Stage, size: int) -> None:
        check_count("size", size)
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream, self._size = upstream, size

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the parts' lists."""
        opened = self._upstream.open(replace(opening, skip=opening.skip * self._size))
        return [self._grouped(items) for items in opened]

    def lengths(self, opening: Opening) -> list[int] | None:
        """Return the number of lists in each part."""
        found = self._upstream.lengths(opening)
        return None if found is None else [-(-length // self._size) for length in found]

    def fingerprint(self) -> list[Any]:
        """Add the size."""
        return [*self._upstream.fingerprint(), ["batch", self._size]]

    def _grouped(self, items: Iterator[Any]) -> Iterator[list[Any] | Unreadable]:
        while group := list(islice(items, self._size)):
            bad = [item for item in group if isinstance(item, Unreadable)]
            yield Unreadable(bad[0].why, tuple(group)) if bad else group


class Unbatch(Stage):
    """Delivers the items of each sample one by one. Items to be skipped are still read."""

    makes_several: ClassVar[bool] = True

    def __init__(self, upstream: Stage) -> None:
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream = upstream

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the items of the samples of each part."""
        opened = self._upstream.open(replace(opening, skip=0))
        return [
            islice(self._items(items, part, opening), opening.skip, None)
            for part, items in zip(opening.parts, opened, strict=True)
        ]

    def lengths(self, opening: Opening) -> None:
        """Return None: the lengths are not known."""
        return

    def fingerprint(self) -> list[Any]:
        """Add this stage."""
        return [*self._upstream.fingerprint(), ["unbatch"]]

    def _items(self, groups: Iterator[Any], part: int, opening: Opening) -> Iterator[Any]:
        rounds, search = opening.rounds, Search(opening, part, "unbatch")
        numbers = count()
        while True:
            before = rounds[part]
            try:
                group = next(groups)
            except StopIteration:
                return
            rounds[part], behind = before, rounds[part]  # a group that was read is no progress yet
            found = False
            for item in self._of(group, part, opening, numbers):
                found = True
                yield item
            rounds[part] = behind
            if found:
                search.kept()
            else:
                search.dropped()

    def _of(self, group: Any, part: int, opening: Opening, numbers: Iterator[int]) -> Iterator[Any]:
        if isinstance(group, Unreadable):
            yield from group.items or (group,)
            return
        if isinstance(group, list | tuple):
            yield from group
            return
        key = opening.key(part, "unbatch", self.depth)
        items = opening.tried(iter, group)  # may be a generator, which runs the user's code for each item
        while not isinstance(items, Unreadable):
            if not isinstance(group, Sequence):
                opening.seed_generators(mix(key, next(numbers)))
            item = opening.tried(lambda rest: next(rest, _END), items)
            if item is _END:
                return
            yield item
            if isinstance(item, Unreadable):  # the items after it cannot be read
                return
        yield items
