"""The order that a loader reads, and how its batches are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddle_shard.plan.tails import TAILS, Tail
from paddle_shard.reading.stream_order import StreamOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The order of a DataLoader, read once at construction."""

    batches: Any
    """The order: `Batches`."""
    batch_size: int | None
    """Rows of the global batch, at the start of the run if there is a schedule; None if batches differ in size."""
    accumulation: int = 1
    split: bool = False
    """True if the loader of every data rank has rows of its own."""
    item_is_batch: bool = False
    """True if an item of the data set is a whole global batch (`batch_size=None`)."""
    tail: Tail = TAILS["pad"]
    custom_sampler: Any = None
    """The user's batch sampler, if it decides on the order."""

    @property
    def stream(self) -> StreamOrder | None:
        """The order, if the data has no index."""
        return self.batches if isinstance(self.batches, StreamOrder) else None
