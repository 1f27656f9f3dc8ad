"""How is each sample changed, independently of the others?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from paddle_shard.plan.seeding import mix
from paddle_shard.stages.opening import Opening
from paddle_shard.stages.stage import Stage


class Map(Stage):
    """Calls a function for each sample; skipped samples cost no call.

    The global generators are seeded before each call from (seed, epoch, round, part, number of the sample), so a
    random function gives the same result for any number of workers, and after a resume.
    """

    def __init__(self, upstream: Stage, function: Callable[[Any], Any]) -> None:
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream, self._function = upstream, function

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the changed samples of each part."""
        opened = self._upstream.open(opening)
        return [self._changed(items, part, opening) for part, items in zip(opening.parts, opened, strict=True)]

    def origin(self, opening: Opening, part: int, number: int) -> str | None:
        """Return the origin of the sample before the change."""
        return self._upstream.origin(opening, part, number)

    def _changed(self, items: Iterator[Any], part: int, opening: Opening) -> Iterator[Any]:
        key, function, seed = opening.key(part, "map", self.depth), self._function, opening.seed_generators
        for number in count(opening.skip):
            try:
                item = next(items)  # before seeding, because it runs code that seeds the generators, too
            except StopIteration:
                return
            seed(mix(key, number))
            yield opening.tried(function, item)
