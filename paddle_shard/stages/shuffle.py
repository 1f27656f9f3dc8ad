"""How is a stream without an index shuffled?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import numpy as np

from paddle_shard.plan.parts import check_count
from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import Permutation
from paddle_shard.stages.opening import Opening
from paddle_shard.stages.stage import Stage


class Shuffle(Stage):
    """Permutes the samples of a part in windows, each with its own key.

    A window is read completely before its first sample is delivered, so a part holds up to `window` samples in
    memory. A resume needs no saved buffer: it reads less than one window again.
    """

    def __init__(self, upstream: Stage, window: int) -> None:
        """Set up the stage.

        Args:
            upstream: The stage to shuffle.
            window: Number of samples that are mixed, at least 1.
        """
        check_count("window", window)
        self.upstream, self.depth = upstream, upstream.depth + 1
        self._upstream, self._window = upstream, window
        # Count only the shuffles before it: then stages that keep the order can be added to a run.
        self.number: int = sum(isinstance(stage, Shuffle) for stage in upstream.line())

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the shuffled samples of each part."""
        first = opening.skip // self._window
        opened = self._upstream.open(replace(opening, skip=first * self._window))
        return [
            islice(self._mixed(items, part, opening, first), opening.skip % self._window, None)
            for part, items in zip(opening.parts, opened, strict=True)
        ]

    def fingerprint(self) -> list[Any]:
        """Add the window."""
        return [*self._upstream.fingerprint(), ["shuffle", self._window]]

    def _mixed(self, items: Iterator[Any], part: int, opening: Opening, first: int) -> Iterator[Any]:
        rounds = opening.rounds
        for window in count(first):
            before = rounds[part]
            held: list[Any] = list(islice(items, self._window))
            rounds[part], behind = before, rounds[part]  # a window that was read is no progress yet
            if not held:
                return
            key = derive_key(opening.key(part, "window", self.number), window, size=64)
            order = Permutation(len(held), key)(np.arange(len(held), dtype=np.int64)).tolist()
            for number in order:
                item, held[number] = held[number], None  # release delivered samples
                yield item
            rounds[part] = behind
