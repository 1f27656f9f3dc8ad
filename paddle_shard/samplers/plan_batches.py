"""What are the batches of an epoch of data with an index, and how does a `ShardPlan` become them?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from paddle_shard.plan.mixture import Mixing
from paddle_shard.plan.shard_plan import ShardPlan, global_batch
from paddle_shard.plan.skips import Skips
from paddle_shard.plan.state import History, LoaderState
from paddle_shard.plan.step import Deal, GlobalBatch, RowsOf, Step, rank_steps
from paddle_shard.plan.stretches import BatchSizes
from paddle_shard.plan.weights import Segment


class IndexBatches:
    """All global batches of any epoch, and what a rank reads of them."""

    deal: Deal | None
    """How rows are dealt to the data ranks by cost; None: they stay in their order."""

    @property
    def knows_length(self) -> bool:
        """True if `len` costs nothing."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on every rank."""
        raise NotImplementedError

    def epoch(self, epoch: int, resumed: LoaderState | None = None) -> Iterator[GlobalBatch]:
        """Iterate over the global batches of an epoch, independently of any other iteration.

        Args:
            epoch: The epoch.
            resumed: A position in this epoch to begin at.
        """
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order depends on: JSON-able, without the batch size."""
        raise NotImplementedError

    def steps(self, start: LoaderState, rows_of: RowsOf, skips: Skips, *, compared: bool = False) -> Iterator[Step]:
        """Yield the steps of one rank from a position on; see `rank_steps`."""
        batches = self.epoch(start.epoch, start)
        return rank_steps(batches, start.epoch, start.samples, rows_of, skips=skips, deal=self.deal, compared=compared)


class PlanBatches(IndexBatches):
    """The batches of a plan, whose mixture may get other weights during a run."""

    def __init__(self, plan: ShardPlan, data: Mapping[str, Any] | None = None, sizes: BatchSizes | None = None) -> None:
        """Begin a run.

        Args:
            plan: The plan of the data set as it is now.
            data: What the data set's samples depend on, for the fingerprint: JSON-able.
            sizes: The batch sizes of the run; None: always that of the plan.
        """
        self._data, self._sizes = dict(data or {}), sizes
        self.deal: Deal | None = None
        self.plan = plan
        """The plan without the changes of the run."""
        self._history, self._changed = History(), plan
        self._drawn = 0

    @property
    def history(self) -> History:
        """The changes of the run."""
        return self._history

    @history.setter
    def history(self, history: History) -> None:
        self._history, self._changed = history, history.plan(self.plan)

    @property
    def knows_length(self) -> bool:
        """Always True."""
        return True

    def __len__(self) -> int:
        return self.plan.num_steps

    def plan_of(self, epoch: int, resumed: LoaderState | None = None) -> ShardPlan:
        """Return the plan of an epoch, with all changes of the run.

        Args:
            epoch: The epoch.
            resumed: The position in the epoch at which a pass begins, perhaps with another batch size.
        """
        plan, length = self._changed, self._history.length(self.plan.num_samples, epoch)
        if length != plan.num_samples:
            plan = replace(plan, num_samples=length)
        resumed = LoaderState(epoch=epoch) if resumed is None else resumed
        segments = self._segments(plan, resumed)
        if len(segments) < 2 and segments[0][1] == plan.batch_size:
            return plan
        ended = resumed.ended and segments[-1][0] == resumed.samples
        return replace(plan, batch_size=segments[-1][1], segments=segments, ended=ended)

    def _segments(self, plan: ShardPlan, resumed: LoaderState) -> tuple[tuple[int, int], ...]:
        """Return the stretches of an epoch that resumes from a saved position, perhaps with another batch size."""
        if self._sizes is None or resumed.ended:
            return resumed.continued(plan.batch_size)
        length = self.plan.num_samples
        if self._history.lengths:
            origin = sum(self._history.length(length, epoch) for epoch in range(resumed.epoch))
        else:
            origin = resumed.epoch * length
        (_, size), *later = self._sizes.segments(origin=origin, at=resumed.samples, end=plan.num_positions)
        return (*resumed.continued(size), *later)

    def epoch(self, epoch: int, resumed: LoaderState | None = None) -> Iterator[GlobalBatch]:
        """Iterate over the global batches of an epoch; any position costs the same to begin at."""
        plan, history, first = self.plan_of(epoch, resumed), self.history, 0
        if resumed is not None:
            if resumed.ended:
                return
            first = resumed.steps
        for step in range(first, plan.num_steps):
            if history is not self.history:
                plan, history = self.plan_of(epoch, resumed), self.history
            found = global_batch(plan, epoch, step)
            if isinstance(plan.ordering, Mixing):
                end = plan.first_position(step=step) + found.num_real
                self._drawn = max(self._drawn, plan.ordering.first_position(epoch, plan.num_samples) + end)
            yield found

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order depends on."""
        return self.plan.fingerprint() | self._data

    # Mixtures

    @property
    def drawn(self) -> int:
        """Position of the run after the last sample that this process has requested."""
        return self._drawn

    def resume(self, state: LoaderState, history: History) -> None:
        """Continue a run from a saved position: what was requested before is forgotten.

        Args:
            state: The position.
            history: The changes of the run until then.
        """
        self.history = history
        plan = self.plan_of(state.epoch)
        if isinstance(plan.ordering, Mixing):
            self._drawn = plan.ordering.first_position(state.epoch, plan.num_samples) + state.samples

    def set_weights(self, at: int, parts: tuple[int, ...]) -> None:
        """Mix with other weights from a position of the run on.

        Args:
            at: The position; no sample from there on was requested.
            parts: Integer weight of each source.
        """
        mixing = self._changed.ordering
        assert isinstance(mixing, Mixing)
        past = [segment for segment in mixing.segments if segment.first < at]
        lengths = mixing.segments[mixing.segment_at(at)].lengths
        self.history = replace(self.history, segments=(*past, Segment(at, parts, lengths)))
