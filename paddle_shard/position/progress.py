"""How far has a pass come, and what has it delivered?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.certificate import DRAWN, Leg
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.tally import Tally, Total, plus

numbers = count()
"""Numbers of passes, and of events between them, in the order in which they occur."""

Mark = tuple[int, Total, Total]
"""A position of a pass: the sample, what this process had delivered, what had been drawn."""


class PassProgress:
    """The position of one pass, counted in delivered samples."""

    def __init__(
        self,
        start: LoaderState,
        batch_size: int | None,
        place: tuple[int, int] | None,
        num_steps: int | None,
        plan: ShardPlan | None = None,
    ) -> None:
        """Begin at a position.

        Args:
            start: Where the pass begins.
            batch_size: Rows of every global batch; None if batches differ in size.
            place: (data rank, number of data ranks) of this process; None if its deliveries are not counted.
            num_steps: Steps of the whole epoch; None if it is known only at the end.
            plan: The order of the epoch, with the batch size of this pass; None if a sampler or a stream has the order.
        """
        self.start, self.plan = start, plan
        self.epoch = start.epoch
        self.segments = start.continued(batch_size) if batch_size is not None else start.segments
        self.number = next(numbers)
        self.num_steps = num_steps
        self.counted = self.closed = False
        """`counted`: True if the run counts its deliveries. `closed`: True if it delivers no more."""
        self._place = place
        # In one value, so that a signal handler that saves the state finds all of a batch or nothing.
        self._at = (start.samples, start.steps, start.ended, start.sampler, Tally(), Tally())

    @property
    def samples(self) -> int:
        """Samples of the epoch that were delivered."""
        return self._at[0]

    @property
    def steps(self) -> int:
        """Batches of the epoch that were delivered."""
        return self._at[1]

    @property
    def ended(self) -> bool:
        """True if the epoch's last batch was delivered."""
        return self._at[2]

    def deliver(
        self,
        num_real: int,
        ids: Sequence[Any] | npt.NDArray[np.int64],
        sampler_state: Mapping[str, Any] | None,
        last: bool | None = None,
        drawn: Sequence[Any] | npt.NDArray[np.int64] = (),
    ) -> None:
        """Count one more batch.

        Args:
            num_real: Samples of the global batch.
            ids: The samples of this process's slice of it, without padding.
            sampler_state: State of the user's own sampler after this batch.
            last: True if it was seen that the epoch ends with it; None: its steps are known.
            drawn: The samples of the global batch that the user's own sampler drew.
        """
        samples, steps, _, _, tally, of_all = self._at
        ended = steps + 1 == self.num_steps if last is None else last
        of_all = of_all.added(drawn) if len(drawn) else of_all
        self._at = (samples + num_real, steps + 1, ended, sampler_state, tally.added(ids), of_all)

    def end(self) -> None:
        """Note that the epoch has ended with the last batch that was delivered."""
        samples, steps, _, sampler, tally, of_all = self._at
        self._at = (samples, steps, True, sampler, tally, of_all)

    def mark(self) -> Mark:
        """Return the mark of the present position."""
        return self._at[0], self._at[4].total, self._at[5].total

    def legs(self, since: Mark) -> list[Leg]:
        """Return what has been delivered since a mark."""
        (samples, mine, drawn), (first, *before) = self.mark(), since
        if samples == first:
            return []
        legs = []
        if self._place is not None:
            legs.append(Leg(self.epoch, first, samples, *self._place, *plus(mine, before[0], -1)))
        if drawn[0]:
            legs.append(Leg(self.epoch, first, samples, DRAWN, 1, *plus(drawn, before[1], -1)))
        return legs

    def state(self, fingerprint: Mapping[str, Any], certificate: tuple[Leg, ...]) -> LoaderState:
        """Return the position as a value, together with the deliveries of the epoch."""
        samples, steps, ended, sampler, *_ = self._at
        return LoaderState(
            epoch=self.epoch,
            samples=samples,
            steps=steps,
            ended=ended,
            segments=self.segments,
            sampler=sampler,
            certificate=certificate,
            fingerprint=fingerprint,
        )
