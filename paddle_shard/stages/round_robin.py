"""How is a stream read only once for all workers of a data rank?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle_shard.stages.opening import Opening
from paddle_shard.stages.stage import Stage


class RoundRobin(Stage):
    """The main process of a data rank reads the stages before this one, and dispatches the samples to its workers.

    It is for sources that cannot be opened several times, or are too expensive for that. Only stages that change each
    sample on its own may follow; they run in the workers. It delivers the samples that are dispatched to the opening's
    parts.
    """

    def __init__(self, upstream: Stage) -> None:
        self.upstream, self.depth = upstream, upstream.depth + 1
        self.read = upstream
        """The stage that the main process opens."""

    @property
    def cuts(self) -> bool:
        """True: the stream is cut at this stage."""
        return True

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return the samples that are dispatched to the parts; the dispatching process leaves out `skip` samples."""
        return [opening.dispatched[part] for part in opening.parts]
