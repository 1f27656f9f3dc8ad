"""How far has a pass come, and what has it delivered?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.coverage import Leg, Tally
from paddle_shard.plan.state import LoaderState

_numbers = count()


class PassProgress:
    """The position of one pass, counted in delivered samples."""

    def __init__(
        self,
        start: LoaderState,
        batch_size: int | None,
        data_rank: int | None,
        num_data_ranks: int,
        num_steps: int | None,
    ) -> None:
        """Begin at a position.

        Args:
            start: Where the pass begins.
            batch_size: Rows of a global batch; None where each batch has its own.
            data_rank: Of this process; None where it holds none of the data.
            num_data_ranks: How many there are.
            num_steps: Of the whole epoch; None if it shows only at its end.
        """
        self.epoch, self.samples, self.steps, self.ended = start.epoch, start.samples, start.steps, start.ended
        self.segments = start.continued(batch_size) if batch_size is not None else start.segments
        self.sampler_state = start.sampler
        self.number = next(_numbers)
        self._num_steps = num_steps
        self._data_rank, self._num_data_ranks = data_rank, num_data_ranks
        self._legs: list[Leg] = list(start.certificate)
        self._leg_first, self._tally = start.samples, Tally()

    def deliver(
        self, num_real: int, ids: Sequence[Any] | npt.NDArray[np.int64], sampler_state: Mapping[str, Any] | None
    ) -> None:
        """Go on by one batch.

        Args:
            num_real: Samples of the global batch.
            ids: The samples of this process's slice of it, padding left out.
            sampler_state: Of a sampler of the user's own, after this batch.
        """
        self.samples += num_real
        self.steps += 1
        self.ended = self.steps == self._num_steps
        self.sampler_state = sampler_state
        self._tally.add(ids)

    def legs(self) -> list[Leg]:
        """Return what has been delivered, up to here."""
        if self.samples == self._leg_first or self._data_rank is None:
            return list(self._legs)
        counted = (self._tally.count, *self._tally.sums)
        now = (self.epoch, self._leg_first, self.samples, self._data_rank, self._num_data_ranks, *counted)
        return [*self._legs, now]

    def close_legs(self, merged: list[Leg]) -> None:
        """Replace what has been delivered by what all ranks together have."""
        self._legs, self._leg_first, self._tally = merged, self.samples, Tally()

    def state(self, fingerprint: Mapping[str, Any]) -> LoaderState:
        """Return the position as a value."""
        return LoaderState(
            epoch=self.epoch,
            samples=self.samples,
            steps=self.steps,
            ended=self.ended,
            segments=self.segments,
            sampler=self.sampler_state,
            certificate=tuple(self.legs()),
            fingerprint=fingerprint,
        )
