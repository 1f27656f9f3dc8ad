"""How far has a pass come, and what has it delivered?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.coverage import Leg, Tally
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.state import LoaderState

numbers = count()
"""Of passes and of what divides them, in the order in which they are made."""


class PassProgress:
    """The position of one pass, counted in delivered samples."""

    def __init__(
        self,
        start: LoaderState,
        batch_size: int | None,
        data_rank: int | None,
        num_data_ranks: int,
        num_steps: int | None,
        plan: ShardPlan | None = None,
    ) -> None:
        """Begin at a position.

        Args:
            start: Where the pass begins.
            batch_size: Rows of a global batch; None where each batch has its own.
            data_rank: Of this process; None where it holds none of the data.
            num_data_ranks: How many there are.
            num_steps: Of the whole epoch; None if it shows only at its end.
            plan: The order of the epoch with this pass in it; None where a sampler or a stream has it.
        """
        self.start, self.plan = start, plan
        self.epoch = start.epoch
        self.segments = start.continued(batch_size) if batch_size is not None else start.segments
        self.number = next(numbers)
        self.num_steps = num_steps
        self._data_rank, self._num_data_ranks = data_rank, num_data_ranks
        self._legs: list[Leg] = list(start.certificate)
        self._leg_first = start.samples
        # In one value, so that a signal handler that saves the state finds all of a batch or nothing.
        self._at = (start.samples, start.steps, start.ended, start.sampler, Tally())

    @property
    def steps(self) -> int:
        """Batches of the epoch that were delivered."""
        return self._at[1]

    def deliver(
        self, num_real: int, ids: Sequence[Any] | npt.NDArray[np.int64], sampler_state: Mapping[str, Any] | None
    ) -> None:
        """Go on by one batch.

        Args:
            num_real: Samples of the global batch.
            ids: The samples of this process's slice of it, padding left out.
            sampler_state: Of a sampler of the user's own, after this batch.
        """
        samples, steps, _, _, tally = self._at
        ended = steps + 1 == self.num_steps
        self._at = (samples + num_real, steps + 1, ended, sampler_state, tally.added(ids))

    def legs(self) -> list[Leg]:
        """Return what has been delivered, up to here."""
        samples, _, _, _, tally = self._at
        if samples == self._leg_first or self._data_rank is None:
            return list(self._legs)
        counted = (tally.num_ids, *tally.sums)
        now = (self.epoch, self._leg_first, samples, self._data_rank, self._num_data_ranks, *counted)
        return [*self._legs, now]

    def close_legs(self, merged: list[Leg]) -> None:
        """Replace what has been delivered by what all ranks together have."""
        self._legs, self._leg_first = merged, self._at[0]
        self._at = (*self._at[:4], Tally())

    def state(self, fingerprint: Mapping[str, Any]) -> LoaderState:
        """Return the position as a value."""
        samples, steps, ended, sampler, _ = self._at
        return LoaderState(
            epoch=self.epoch,
            samples=samples,
            steps=steps,
            ended=ended,
            segments=self.segments,
            sampler=sampler,
            certificate=tuple(self.legs()),
            fingerprint=fingerprint,
        )
