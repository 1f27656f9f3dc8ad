"""What does a rank ask its reader for at a step?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.seeding import derive_seed, mix
from paddle_shard.reading.digest import digest


class Request(Protocol):
    """A request to a reader, with what an error says about it."""

    @property
    def epoch(self) -> int:
        """The epoch."""

    @property
    def step(self) -> int:
        """The step of the epoch."""

    @property
    def indices(self) -> Sequence[Any] | npt.NDArray[np.int64]:
        """The samples."""


class Reader(Protocol):
    """Serves requests, in a worker or in the main process."""

    dataset: Any
    """The data set that the user's functions see."""

    def read(self, request: Any, worker: int | None) -> Any:
        """Return what was asked for, or a `ReadFailure`."""


class ReadRequest(NamedTuple):
    """The rows of one step, small enough to send to a worker."""

    epoch: int
    step: int
    indices: list[Any] | npt.NDArray[np.int64]
    """Indices into the data set, one for each row; a single one if an item is a whole batch."""
    item_is_batch: bool
    """True if the items of the data set are whole batches (`batch_size=None`)."""
    key: int
    """Seed of the epoch's random numbers, in [0, 2^64)."""
    rows_are_split: bool
    """True if other data ranks read the other rows. A row that depends on its neighbours is refused then."""
    lengths_vary: bool = False
    """True if rows may differ in length, but in nothing else. They are padded when they are placed."""

    def sample_seed(self, index: Any) -> int:
        """Return the seed for reading one sample: a function of (seed, epoch, index)."""
        return mix(self.key, index) if isinstance(index, int) else derive_seed(self.key, index)


def key_of(request: Request) -> int:
    """Return a number by which a follower knows that a message is the answer to its own request."""
    if isinstance(request, ReadRequest):
        return digest(request.indices, request.step)
    return request.step
