"""What do the orders of data with an index have in common?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle_shard.plan.skips import Skips
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.step import Deal, GlobalBatch, RowsOf, Step, rank_steps


class IndexBatches:
    """All global batches of any epoch, and what a rank reads of them."""

    deal: Deal | None
    """How rows are dealt to the data ranks by cost; None: they stay in their order."""

    @property
    def knows_length(self) -> bool:
        """True if `len` costs nothing."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on every rank."""
        raise NotImplementedError

    def epoch(self, epoch: int, resumed: LoaderState | None = None) -> Iterator[GlobalBatch]:
        """Iterate over the global batches of an epoch, independently of any other iteration.

        Args:
            epoch: The epoch.
            resumed: A position in this epoch to begin at.
        """
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order depends on: JSON-able, without the batch size."""
        raise NotImplementedError

    def steps(self, start: LoaderState, rows_of: RowsOf, skips: Skips, *, compared: bool = False) -> Iterator[Step]:
        """Yield the steps of one rank from a position on; see `rank_steps`."""
        batches = self.epoch(start.epoch, start)
        return rank_steps(batches, start.epoch, start.samples, rows_of, skips=skips, deal=self.deal, compared=compared)
