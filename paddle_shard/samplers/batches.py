"""Which interface to an epoch's order does the rest of the library use?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    def drawn(self) -> Sequence[Any] | npt.NDArray[np.int64]:
        """Numbers of the samples that the user's own sampler drew, without padding and without those left out."""

    @property
    def last(self) -> bool | None:
        """True if the user's own sampler ends with this batch; None if the plan tells."""

    @property
    def passed(self) -> tuple[int, int]:
        """(steps, positions) directly before this batch that are left out as a whole."""

    @property
    def load(self) -> tuple[float, float]:
        """(cost of the data rank that has most, mean cost of a data rank); zeros if rows are not dealt by cost."""

    @property
    def all_real(self) -> bool:
        """True if no row is padding; False also if that is not known."""

    def take(self, rows: Rows | range) -> list[Any] | Rows:
        """Return the data set's indices at some rows; an array if all are ints."""

    def valid(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of some rows are real."""

    def num_left_out(self, rows: Rows) -> int:
        """Return how many of some rows are not real because the user leaves their samples out."""


class WrappedBatch:
    """A batch that is another batch, but for what a subclass changes."""

    def __init__(self, batch: IndexBatch) -> None:
        self.batch = batch
        self.num_rows, self.micro_size, self.num_real = batch.num_rows, batch.micro_size, batch.num_real
        self.sampler_state, self.last, self.passed = batch.sampler_state, batch.last, batch.passed

    @property
    def drawn(self) -> Sequence[Any] | npt.NDArray[np.int64]:
        """See `IndexBatch`."""
        return self.batch.drawn

    @property
    def all_real(self) -> bool:
        """See `IndexBatch`."""
        return self.batch.all_real

    @property
    def load(self) -> tuple[float, float]:
        """See `IndexBatch`."""
        return self.batch.load


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
