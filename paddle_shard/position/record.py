"""What has this process delivered since its run began, through all of its passes?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.certificate import DRAWN, NOTHING, Account, Delivered, Total, added, plus, total_of
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.step import Step

numbers = count()
"""Numbers the passes, and the events between them, in the order in which they occur."""


class Standing(NamedTuple):
    """How far a pass has come, counted in what it has delivered.

    It is one value, so that a signal handler that saves the state finds a batch as a whole or not at all.
    """

    samples: int
    """Samples of the epoch, also those from before the pass."""
    steps: int
    """Batches of the epoch, too."""
    ended: bool
    """True if no batch of the epoch is left."""
    sampler: Any = None
    """State of the user's own sampler."""
    mine: Total = NOTHING
    """What this process delivered in the pass."""
    drawn: Total = NOTHING
    """What the user's sampler drew for it."""


class PassProgress:
    """The position of one pass, and what it has delivered."""

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
        self._segments, self._place = segments, place
        self.number = next(numbers)
        self.num_steps = num_steps
        self.counted = self.closed = False
        """`counted`: True if the run counts what the pass delivers. `closed`: True if the pass delivers no more."""
        self.at = Standing(start.samples, start.steps, start.ended, start.sampler)

    def deliver(self, batch: Step, ids: Sequence[Any] | npt.NDArray[np.int64], lost: int, *, drawn: bool) -> None:
        """Count one more delivered batch, and those directly before it that were left out.

        Args:
            batch: The global batch.
            ids: Samples in this process's slice of the batch, without padding.
            lost: How many samples of the slice could not be read.
            drawn: True if the samples are counted that the user's sampler drew.
        """
        at, (passed, positions) = self.at, batch.passed
        steps, positions = at.steps + passed + 1, positions + batch.num_real
        ended = steps == self.num_steps if batch.last is None else batch.last
        mine = at.mine if self._place is None else plus(at.mine, total_of(ids, len(ids) + lost))
        of_all = plus(at.drawn, total_of(batch.drawn, positions)) if drawn and len(batch.drawn) else at.drawn
        self.at = Standing(at.samples + positions, steps, ended, batch.sampler_state, mine, of_all)

    def account(self, since: Standing) -> Account:
        """Return what was delivered since an earlier standing of the pass."""
        at, found = self.at, dict[Any, Delivered]()
        stretches = ((since.samples, at.samples),)
        if at.samples > since.samples and self._place is not None:
            found[self._place] = Delivered(stretches, (), plus(at.mine, since.mine, -1))
        if at.samples > since.samples and at.drawn != NOTHING:
            found[DRAWN] = Delivered(stretches, (), plus(at.drawn, since.drawn, -1))
        return found

    def state(self) -> LoaderState:
        """Return the position as a state, without what the whole run knows."""
        at = self.at
        return LoaderState(
            epoch=self.epoch,
            samples=at.samples,
            steps=at.steps,
            ended=at.ended,
            segments=tuple(one for one in self._segments if one[0] < at.samples) or self._segments[:1],
            sampler=at.sampler,
        )


class OfEpoch(NamedTuple):
    """What this process knows of the deliveries of an epoch."""

    known: Account = MappingProxyType({})
    """What a saved state, or the last certificate, says."""
    own: Account = MappingProxyType({})
    """What the closed passes have delivered since then."""
    passes: tuple[tuple[PassProgress, Standing], ...] = ()
    """The other passes, and where each was at the last certificate, or when it was added."""
    end: int | None = None
    """The position at which the user's sampler has ended; None if no pass has seen it."""

    def settled(self, *, open_too: bool = False) -> OfEpoch:
        """Return the same, with the closed passes, or all, added to `own`."""
        done: list[tuple[PassProgress, Standing]] = []
        kept: list[tuple[PassProgress, Standing]] = []
        for entry in self.passes:  # asked once each: a pass may be closed by the garbage collector at any moment
            (done if open_too or entry[0].closed else kept).append(entry)
        if not done:
            return self
        own = added(self.own, *(progress.account(since) for progress, since in done))
        end = next((progress.at.samples for progress, _ in reversed(self.passes) if progress.at.ended), self.end)
        return OfEpoch(self.known, own, tuple(kept), end)


class Deliveries:
    """What this process has delivered, with one entry for each epoch.

    An entry is replaced in one assignment. A pass counts what it delivers in one assignment, too. So a signal handler
    that saves the state finds a batch as a whole or not at all.
    """

    def __init__(self, loaded: LoaderState | None = None) -> None:
        """Begin to count.

        Args:
            loaded: The state that the run resumes from. It says what was delivered before.
        """
        self._epochs: dict[int, OfEpoch] = {}
        self._open: set[int] = set()
        if loaded is not None:
            end = loaded.samples if loaded.ended else None
            self._epochs[loaded.epoch] = OfEpoch(loaded.certificate, end=end)

    def count(self, progress: PassProgress) -> None:
        """Count what a pass delivers from now on. Of closed passes only the sums are kept."""
        for epoch in sorted(self._open):
            self._epochs[epoch] = self._epochs[epoch].settled()
        found = self._epochs.get(progress.epoch, OfEpoch())
        self._epochs[progress.epoch] = found._replace(passes=(*found.passes, (progress, progress.at)))
        # This is last, since a signal handler may raise at any line, and each epoch in `_open` must have an entry.
        self._open = {epoch for epoch in self._open if self._epochs[epoch].passes} | {progress.epoch}

    def of(self, epoch: int) -> OfEpoch:
        """Return what this process knows of the deliveries of an epoch, with all passes added up."""
        return self._epochs.get(epoch, OfEpoch()).settled(open_too=True)

    def replace(self, epoch: int, known: Account) -> None:
        """Replace what this rank has delivered by what all ranks have."""
        found = self._epochs.get(epoch, OfEpoch())
        passes = tuple((progress, progress.at) for progress, _ in found.passes)
        self._epochs[epoch] = OfEpoch(known, passes=passes, end=found.end)
