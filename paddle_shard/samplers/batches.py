"""Which interface to an epoch's order does the rest of the library use?"""

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
        """Positions of the epoch's order that the batch serves: its rows without the padding at its end."""

    @property
    def sampler_state(self) -> Mapping[str, Any] | None:
        """The state of the user's own sampler after it has drawn this batch."""

    @property
    def all_real(self) -> bool:
        """True if no row is padding; False also if that is not known."""

    def take(self, rows: Rows | range) -> list[Any] | Rows:
        """Return the data set's indices at some rows; an array if all are ints."""

    def valid(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of some rows are real."""


class IndexBatches(Protocol):
    """All batches of any epoch."""

    @property
    def knows_length(self) -> bool:
        """True if `len` costs nothing."""

    def untouched(self) -> IndexBatches:
        """Return the same batches, for an iteration that does not change the user's own sampler."""

    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on every rank."""

    def epoch(self, epoch: int, resumed: LoaderState | None = None) -> Iterator[IndexBatch]:
        """Iterate over the global batches of an epoch, independently of any other iteration.

        Args:
            epoch: The epoch.
            resumed: The position in the epoch to begin at; None for its beginning.
        """

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order depends on: JSON-able, without the batch size."""
