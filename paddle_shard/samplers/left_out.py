"""How does a pass go on over the samples that the user leaves out?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.partition import Rows
from paddle_shard.plan.skips import Skips
from paddle_shard.samplers.batches import IndexBatch, WrappedBatch


class BatchWithout(WrappedBatch):
    """A global batch without some of its samples. Their rows hold the first sample that is kept, and are not real."""

    def __init__(self, batch: IndexBatch, left_out: npt.NDArray[np.bool_], passed: tuple[int, int]) -> None:
        """Take the batch as it is but for some rows.

        Args:
            batch: The batch.
            left_out: Mask of its rows.
            passed: (steps, positions) directly before it that are left out as a whole.
        """
        super().__init__(batch)
        self.passed, self._left_out = passed, left_out
        self._kept = int(left_out.argmin())

    @property
    def all_real(self) -> bool:
        """See `IndexBatch`."""
        return self.batch.all_real and not self._left_out.any()

    @property
    def drawn(self) -> Sequence[Any] | npt.NDArray[np.int64]:
        """See `IndexBatch`."""
        drawn = self.batch.drawn
        return np.asarray(drawn)[~self._left_out[: len(drawn)]] if len(drawn) else drawn

    def take(self, rows: Rows | range) -> Any:
        """See `IndexBatch`."""
        rows = rows if isinstance(rows, np.ndarray) else np.asarray(rows, np.int64)
        return self.batch.take(np.where(self._left_out[rows], self._kept, rows))

    def valid(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """See `IndexBatch`."""
        return self.batch.valid(rows) & ~self._left_out[rows]

    def num_left_out(self, rows: Rows) -> int:
        """See `IndexBatch`."""
        return int(np.count_nonzero(self.batch.valid(rows) & self._left_out[rows]))


def without(batches: Iterator[IndexBatch], skips: Skips, epoch: int, first: int) -> Iterator[IndexBatch]:
    """Return the batches without the samples that are left out. A batch of which nothing is left is passed over.

    Args:
        batches: The batches of an epoch, from a position on.
        skips: What is left out.
        epoch: The epoch.
        first: The position.
    """
    return _without(batches, skips, epoch, first) if skips.concerns(epoch) else batches


def _without(batches: Iterator[IndexBatch], skips: Skips, epoch: int, first: int) -> Iterator[IndexBatch]:
    steps = positions = 0
    for batch in batches:
        all_rows, real = np.arange(batch.num_rows), batch.num_real
        ids = batch.take(all_rows)
        padding = np.ones(len(ids) - real, bool)  # of samples that may be left out elsewhere in the epoch
        left_out = np.concatenate([skips.rows(epoch, first, ids[:real]), padding])
        first += real
        if left_out[:real].all():
            steps, positions = steps + 1, positions + real
            continue
        yield BatchWithout(batch, left_out, (steps, positions)) if left_out.any() or steps else batch
        steps = positions = 0
