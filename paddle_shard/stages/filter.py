"""Which samples are kept?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

from paddle_shard.plan.seeding import mix
from paddle_shard.stages.opening import Opening, Unreadable
from paddle_shard.stages.search import Search
from paddle_shard.stages.stage import Stage


class Filter(Stage):
    """Keeps the samples for which a function is true. Samples to be skipped are still read and tested."""

    def __init__(self, upstream: Stage, predicate: Callable[[Any], bool]) -> None:
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream, self._predicate = upstream, predicate

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the kept samples of each part."""
        opened = self._upstream.open(replace(opening, skip=0))
        return [
            islice(self._kept(items, part, opening), opening.skip, None)
            for part, items in zip(opening.parts, opened, strict=True)
        ]

    def lengths(self, opening: Opening) -> None:
        """Return None: the lengths are not known."""
        return

    def fingerprint(self) -> list[Any]:
        """Add this stage."""
        return [*self._upstream.fingerprint(), ["filter"]]

    def _kept(self, items: Iterator[Any], part: int, opening: Opening) -> Iterator[Any]:
        key, predicate, seed = opening.key(part, "filter", self.depth), self._predicate, opening.seed_generators
        search = Search(opening, part, "filter")
        for number in count():
            try:
                item = next(items)
            except StopIteration:
                return
            seed(mix(key, number))
            keep = opening.tried(lambda one: bool(predicate(one)), item)
            if not isinstance(keep, Unreadable) and not keep:
                search.dropped()
                continue
            search.kept()
            yield keep if isinstance(keep, Unreadable) else item
