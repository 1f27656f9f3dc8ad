"""How is a stream read once for all workers of a data rank?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from paddle_shard.plan.opening import Opening, Stage


class RoundRobin(Stage):
    """Where the main process of a data rank, which reads what stands before, deals the samples to its workers.

    For sources that cannot be opened several times, or are too dear to be. Only stages that change each sample
    by itself may follow; they run in the workers. It delivers what it is fed with.
    """

    def __init__(self, upstream: Stage) -> None:
        self.upstream, self.depth = upstream, upstream.depth + 1
        self.read = upstream
        """What the main process opens."""
        self._fed: dict[int, deque[Any]] = {}

    @property
    def cuts(self) -> bool:
        """What stands before it is cut there."""
        return True

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return what the parts are fed with; `skip` is left out by the one who feeds."""
        self._fed = {part: deque() for part in opening.parts}
        return [self._items(queue) for queue in self._fed.values()]

    def feed(self, part: int, samples: Sequence[Any]) -> None:
        """Give a part its next samples; fewer than are asked for are its last."""
        self._fed[part].extend(samples)

    @staticmethod
    def _items(queue: deque[Any]) -> Iterator[Any]:
        while queue:
            yield queue.popleft()
