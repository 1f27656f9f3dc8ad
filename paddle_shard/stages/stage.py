"""What is a stage of a stream?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from paddle_shard.stages.opening import Opening


class Stage:
    """The source of a stream, or a step after it. The defaults suit a stage that changes each sample 1 : 1.

    A subclass defines `open`, and each other method whose result differs from that of its upstream.
    """

    upstream: Stage | None = None
    depth: int = 0
    """Number of stages before it; gives each stage its own random numbers."""
    makes_several: ClassVar[bool] = False
    """True if one sample may become several. Then a position in a part does not tell how much was read for it."""

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
        """Return an iterator over each opened part, which begins after `opening.skip` samples."""
        raise NotImplementedError

    def lengths(self, opening: Opening) -> list[int] | None:
        """Return the number of samples of each part without skipping; None if it is known only at the end."""
        return None if self.upstream is None else self.upstream.lengths(opening)

    def origin(self, opening: Opening, part: int, number: int) -> str | None:
        """Return the place in a file of a part's sample, counted from 0, for messages; None if only reading tells."""
        return None

    @property
    def num_shards(self) -> int | None:
        """Number of files of the stream; None if it is not made of files."""
        return None if self.upstream is None else self.upstream.num_shards

    @property
    def most_even_parts(self) -> int | None:
        """Most parts to which whole files can be assigned so that no part is much longer, as far as that is known."""
        return self.num_shards if self.upstream is None else self.upstream.most_even_parts

    @property
    def endless(self) -> bool:
        """True if its parts have no end."""
        return self.upstream is not None and self.upstream.endless

    @property
    def once(self) -> bool:
        """True if it can be opened only once."""
        return self.upstream is not None and self.upstream.once

    @property
    def cuts(self) -> bool:
        """True if it can open a part without reading the others, or if it cuts the stream."""
        return False

    def fingerprint(self) -> list[Any]:
        """Return what the samples and their order depend on: JSON-able, one entry per stage that matters."""
        return [] if self.upstream is None else self.upstream.fingerprint()
