"""What is a stream made of, and what follows from that for its readers?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from paddle_shard.stages import Stripe
from paddle_shard.stages.stage import Opening, Stage

Step = Callable[[Stage], Stage]


@dataclass(frozen=True)
class Recipe:
    """A source and the stages after it."""

    source: Stage
    steps: tuple[Step, ...] = ()
    """Functions that each return a new stage, given the stage before it."""
    batched: int | None = None
    """Size of the lists that the last stage makes, if it is `batch`."""
    num_parts: int | None = None
    """P, as the user has chosen it (`in_parts`)."""

    def then(self, step: Step, *, batched: int | None = None) -> Recipe:
        """Return the recipe with one more stage.

        Args:
            step: Makes the stage.
            batched: Size of the lists that the stage makes, if it is `batch`.
        """
        return replace(self, steps=(*self.steps, step), batched=batched)

    def cut(self) -> Recipe:
        """Return the recipe with a cut right after its source, unless it has a cut already."""
        return self if self.is_cut else replace(self, steps=(Stripe, *self.steps))

    def unbatched(self) -> Recipe:
        """Return the recipe without its last stage, `batch`."""
        return replace(self, steps=self.steps[:-1], batched=None)

    @property
    def whole(self) -> Stage:
        """The last stage, without a cut being added: it opens the stream as the user put it together."""
        stage = self.source
        for step in self.steps:
            stage = step(stage)
        return stage

    @property
    def stage(self) -> Stage:
        """The last stage, with a cut added if there is none: it opens the stream's parts."""
        return self.cut().whole

    @property
    def is_cut(self) -> bool:
        """True if a stage can open a part by itself, or cuts the stream."""
        return any(stage.cuts for stage in self.whole.line())

    @property
    def num_shards(self) -> int | None:
        """Number of the stream's files, if each part needs at least one; None: files are counted, or there are none."""
        counted = self.source.lengths(Opening(parts=(0,), num_parts=1)) is not None
        return None if counted else self.source.num_shards

    @property
    def most_even_parts(self) -> int | None:
        """Most parts to which these files can be assigned evenly, as far as known; None as for `num_shards`."""
        return None if self.num_shards is None else self.source.most_even_parts

    @property
    def is_read_whole(self) -> bool:
        """True if every reader reads the whole stream and keeps its own parts of it."""
        return not self.source.cuts
