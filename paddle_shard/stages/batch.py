"""How are samples of a part grouped, and groups taken apart?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from paddle_shard.plan.opening import Opening, Stage
from paddle_shard.plan.parts import check_count


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
        """Return the size, too."""
        return [*self._upstream.fingerprint(), ["batch", self._size]]

    def _grouped(self, items: Iterator[Any]) -> Iterator[list[Any]]:
        while group := list(islice(items, self._size)):
            yield group


class Unbatch(Stage):
    """Delivers the items of each sample one by one; skipping reads what it skips."""

    def __init__(self, upstream: Stage) -> None:
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream = upstream

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the items of the parts' samples."""
        opened = self._upstream.open(replace(opening, skip=0))
        return [islice(chain.from_iterable(items), opening.skip, None) for items in opened]

    def lengths(self, opening: Opening) -> None:
        """Not known."""
        return

    def fingerprint(self) -> list[Any]:
        """Say so."""
        return [*self._upstream.fingerprint(), ["unbatch"]]
