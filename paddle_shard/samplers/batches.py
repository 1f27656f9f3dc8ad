"""What does the rest of the library see of an epoch's order?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from paddle_shard.plan.partition import Rows


class IndexBatch(Protocol):
    """The samples of one global batch; the same object on every rank."""

    @property
    def num_rows(self) -> int:
        """Rows of the global batch, padding included: a multiple of the padding unit."""

    @property
    def padding(self) -> int:
        """How many of the last rows are padding."""

    def take(self, rows: Rows) -> list[Any]:
        """Return the data set's indices at some rows."""


class IndexBatches(Protocol):
    """All batches of any epoch."""

    def __len__(self) -> int:
        """Return the steps of an epoch, the same on every rank."""

    def epoch(self, epoch: int) -> Iterator[IndexBatch]:
        """Iterate over the global batches of an epoch, independently of any other iteration."""
