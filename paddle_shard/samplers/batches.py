"""What does the rest of the library see of an epoch's order?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.partition import Rows
from paddle_shard.plan.state import LoaderState


class IndexBatch(Protocol):
    """The samples of one global batch; the same on every rank."""

    @property
    def num_rows(self) -> int:
        """Rows of the global batch, padding included."""

    @property
    def micro_size(self) -> int:
        """Rows of each of its micro-batches."""

    @property
    def num_real(self) -> int:
        """Positions of the epoch's order that it serves: its rows without the padding at its end."""

    @property
    def sampler_state(self) -> Mapping[str, Any] | None:
        """The state of a sampler of the user's own, when it had drawn this batch."""

    @property
    def all_real(self) -> bool:
        """Whether no row is padding; False also where that is not known."""

    def take(self, rows: Rows | range) -> list[Any] | Rows:
        """Return the data set's indices at some rows; an array where all are ints."""

    def valid(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of some rows are real."""


class IndexBatches(Protocol):
    """All batches of any epoch."""

    @property
    def knows_length(self) -> bool:
        """Whether `len` costs nothing."""

    def untouched(self) -> IndexBatches:
        """Return the same batches for a look that leaves a sampler of the user's own as it is."""

    def __len__(self) -> int:
        """Return the steps of an epoch, the same on every rank."""

    def epoch(self, epoch: int, resumed: LoaderState | None = None) -> Iterator[IndexBatch]:
        """Iterate over the global batches of an epoch, independently of any other iteration.

        Args:
            epoch: The epoch.
            resumed: Where in it to begin; None for its beginning.
        """

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order depends on: JSON-able, without the batch size."""
