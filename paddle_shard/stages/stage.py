"""What is a stage of a stream?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle_shard.stages.opening import Opening


class Stage:
    """A source of a stream, or a step on the way from it; one that changes nothing but the samples is 1 : 1.

    A subclass gives `open`, and whichever of the others is not what it is for its upstream.
    """

    upstream: Stage | None = None
    depth: int = 0
    """Stages before it; makes its random numbers its own."""

    def line(self) -> Iterator[Stage]:
        """Yield this stage and those before it, the source last."""
        stage: Stage | None = self
        while stage is not None:
            yield stage
            stage = stage.upstream

    @property
    def source(self) -> Stage:
        """The first stage of its stream."""
        return self if self.upstream is None else self.upstream.source

    def open(self, opening: Opening) -> list[Iterator[Any]]:
        """Return an iterator over each part that is opened, which begins after `opening.skip` samples."""
        raise NotImplementedError

    def lengths(self, opening: Opening) -> list[int] | None:
        """Return how many samples each of the parts has without skipping; None if that shows only at the end."""
        return None if self.upstream is None else self.upstream.lengths(opening)

    def origin(self, opening: Opening, part: int, number: int) -> str | None:
        """Return where a part's sample, counted from 0, stands in a file, for messages; None if only reading tells."""
        return None

    @property
    def num_shards(self) -> int | None:
        """Files that the stream is made of; None where it is not made of files."""
        return None if self.upstream is None else self.upstream.num_shards

    @property
    def most_even_parts(self) -> int | None:
        """Most parts that whole files can be dispatched to so that none is much longer, as far as that can be told."""
        return self.num_shards if self.upstream is None else self.upstream.most_even_parts

    @property
    def endless(self) -> bool:
        """Whether its parts have no end."""
        return self.upstream is not None and self.upstream.endless

    @property
    def once(self) -> bool:
        """Whether it can be opened once only."""
        return self.upstream is not None and self.upstream.once

    @property
    def cuts(self) -> bool:
        """Whether it can open a part without reading the others, or is where the stream is cut."""
        return False

    def fingerprint(self) -> list[Any]:
        """Return what the samples and their order depend on: JSON-able, one entry a stage that matters."""
        return [] if self.upstream is None else self.upstream.fingerprint()
