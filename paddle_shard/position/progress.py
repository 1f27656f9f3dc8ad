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
from paddle_shard.samplers import IndexBatch

numbers = count()
"""Numbers the passes, and the events between them, in the order in which they occur."""

Mark = tuple[int, Total, Total]
"""A position of a pass: samples of the epoch, total that this process delivered, total that the sampler drew."""


class PassProgress:
    """The position of one pass, counted in delivered samples."""

    def __init__(
        self,
        start: LoaderState,
        segments: tuple[tuple[int, int], ...],
        place: tuple[int, int] | None,
        num_steps: int | None,
        plan: ShardPlan | None = None,
    ) -> None:
        """Begin at a position.

        Args:
            start: The state at which the pass begins.
            segments: (first position, batch size) of each stretch of the epoch.
            place: (data rank, number of data ranks) of this process; None if what it delivers is not counted.
            num_steps: Steps of the whole epoch; None if they are only known at its end.
            plan: The order of the epoch, as this pass continues it; None if a sampler or a stream decides the order.
        """
        self.start, self.plan = start, plan
        self.epoch = start.epoch
        self._segments = segments
        self.number = next(numbers)
        self.num_steps = num_steps
        self.counted = self.closed = False
        """`counted`: True if the run counts what the pass delivers. `closed`: True if the pass delivers no more."""
        self._place = place
        # One value, so that a signal handler that saves the state finds a batch as a whole or not at all.
        self._at = (start.samples, start.steps, start.ended, start.sampler, Tally(), Tally())

    @property
    def samples(self) -> int:
        """Number of delivered samples of the epoch."""
        return self._at[0]

    @property
    def steps(self) -> int:
        """Number of delivered batches of the epoch."""
        return self._at[1]

    @property
    def ended(self) -> bool:
        """True if no batch of the epoch is left."""
        return self._at[2]

    def hand_out(self, start: LoaderState) -> None:
        """Become the newest pass of the run, which is at the same position as when this pass was made.

        Args:
            start: The position of the run; it may have been loaded since.
        """
        self.start, self.number = start, next(numbers)

    def deliver(self, batch: IndexBatch, ids: Sequence[Any] | npt.NDArray[np.int64], *, drawn: bool) -> None:
        """Count one more delivered batch, and those directly before it that were left out.

        Args:
            batch: The global batch.
            ids: Samples in this process's slice of the batch, without padding.
            drawn: True if the samples are counted that the user's sampler drew.
        """
        samples, steps, _, _, tally, of_all = self._at
        passed, positions = batch.passed
        steps += passed + 1
        ended = steps == self.num_steps if batch.last is None else batch.last
        if drawn and len(batch.drawn):
            of_all = of_all.added(batch.drawn)
        samples += positions + batch.num_real
        self._at = (samples, steps, ended, batch.sampler_state, tally.added(ids), of_all)

    def end(self) -> None:
        """Note that the epoch has ended: no batch is left."""
        samples, steps, _, sampler, tally, of_all = self._at
        self._at = (samples, steps, True, sampler, tally, of_all)

    def mark(self) -> Mark:
        """Return the current position of the pass."""
        return self._at[0], self._at[4].total, self._at[5].total

    def legs(self, since: Mark) -> list[Leg]:
        """Return what was delivered since a mark."""
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
        """Return the position as a state, with a fingerprint and the epoch's certificate."""
        samples, steps, ended, sampler, *_ = self._at
        return LoaderState(
            epoch=self.epoch,
            samples=samples,
            steps=steps,
            ended=ended,
            segments=tuple(one for one in self._segments if one[0] < samples) or self._segments[:1],
            sampler=sampler,
            certificate=certificate,
            fingerprint=fingerprint,
        )
