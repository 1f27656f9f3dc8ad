"""How is a stream read once for all workers of a data rank?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle_shard.stages.opening import Opening
from paddle_shard.stages.stage import Stage


class RoundRobin(Stage):
    """Where the main process of a data rank, which reads what stands before, dispatches the samples to its workers.

    For sources that cannot be opened several times, or are too dear to be. Only stages that change each sample
    by itself may follow; they run in the workers. It delivers what the opening's parts are dispatched.
    """

    def __init__(self, upstream: Stage) -> None:
        self.upstream, self.depth = upstream, upstream.depth + 1
        self.read = upstream
        """What the main process opens."""

    @property
    def cuts(self) -> bool:
        """What stands before it is cut there."""
        return True

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return what the parts are dispatched; `skip` is left out by the one who dispatches."""
        return [opening.dispatched[part] for part in opening.parts]
