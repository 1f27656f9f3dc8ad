"""What does the rest of the library know about a stream's order?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddle_shard.errors import ArgumentTypeError
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.tails import Tail
from paddle_shard.stages.stage import Opening, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBatches:
    """All global batches of a stream."""

    stage: Stage
    """The stage that opens the stream's parts, or the whole stream if items are whole batches."""
    plan: PartsPlan | None
    """How batches are made of the parts; None: each item is a whole batch."""
    tail: Tail
    num_batches: int | None
    seed: int
    split_over: int | None = None
    """Number of data ranks, if each has a stream of its own. Such a run is bound to this number."""

    @property
    def repeats(self) -> bool:
        """True if a part that ends is read again."""
        return self.tail.repeats or self.num_batches is not None

    @property
    def knows_length(self) -> bool:
        """True if the number of steps is known before the end."""
        return self._num_steps() is not None

    def __len__(self) -> int:
        steps = self._num_steps()
        if steps is None:  # a TypeError, so that list(loader) works
            raise ArgumentTypeError(
                "the number of batches of a stream shows only at its end. Give num_batches= for epochs of a known "
                "length, or a source that knows its counts."
            )
        return steps

    def _num_steps(self) -> int | None:
        return self.steps_left(LoaderState())

    def steps_left(self, start: LoaderState) -> int | None:
        """Return how many steps of an epoch follow a position, the same on every rank; None if it is not known yet."""
        if self.num_batches is not None:
            return max(0, self.num_batches - start.steps)
        if self.split_over is not None:
            return None
        plan, num_parts = self.plan, 1 if self.plan is None else self.plan.num_parts
        opening = Opening(
            parts=tuple(range(num_parts)),
            num_parts=num_parts,
            stripe=self.stripe(start),
            seed=self.seed,
            epoch=start.epoch,
        )
        lengths = self.stage.lengths(opening)
        if lengths is None:
            return None
        if plan is None:
            return max(0, lengths[0] - start.samples)
        whole = plan.num_steps(lengths)  # also checks what the tail demands
        if not start.samples:
            return whole
        left = [max(0, length - start.samples // num_parts) for length in lengths]
        size = plan.samples_per_part
        return plan.ending.num_steps(left, size)

    def stripe(self, start: LoaderState) -> int:
        """Return the rows of a micro-batch that come from one part. The batch size at the epoch's start decides it."""
        if self.plan is None:
            return 1
        first_size = start.segments[0][1] if start.segments else self.plan.batch_size
        return max(1, first_size // self.plan.accumulation // self.plan.num_parts)

    def fingerprint(self) -> dict[str, Any]:
        """Return the values that the order depends on."""
        found: dict[str, Any] = {"stream": self.stage.fingerprint(), "seed": self.seed, "tail": str(self.tail)}
        if self.plan is not None:
            found["num_parts"] = self.plan.num_parts
        if self.num_batches is not None:
            found["num_batches"] = self.num_batches
        if self.split_over is not None:
            found["num_data_ranks"] = self.split_over
        return found
