"""How does a `ShardPlan` become the batches of an epoch?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.batch_sizes import BatchSizes
from paddle_shard.plan.history import History, switched
from paddle_shard.plan.mixture import Mixing
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.state import LoaderState


class PlanBatch(NamedTuple):
    """A global batch that computes only the indices that a rank asks for."""

    plan: ShardPlan
    epoch: int
    step: int
    num_rows: int
    """Rows of the global batch, padding included."""
    micro_size: int
    """Rows of each of its micro-batches."""
    num_real: int
    """Positions of the order that the batch serves."""
    all_real: bool
    """True if no row is padding; False also if that is not known."""
    sampler_state: None = None
    last: None = None
    drawn: tuple[int, ...] = ()
    passed: tuple[int, int] = (0, 0)
    load: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, plan: ShardPlan, epoch: int, step: int) -> PlanBatch:
        """Return the batch of a step."""
        num_rows = plan.num_rows(step=step)
        num_real = min(num_rows, plan.num_positions - plan.first_position(step=step))
        all_real = not plan.ordering.pads_first and num_real == num_rows
        return cls(plan, epoch, step, num_rows, plan.micro_size(step=step), num_real, all_real)

    def take(self, rows: Rows | range) -> Rows:
        """Return the data set's indices at some rows."""
        return self.plan.take(epoch=self.epoch, step=self.step, rows=rows)

    def valid(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of some rows are real."""
        return self.plan.valid(epoch=self.epoch, step=self.step, rows=rows)

    def num_left_out(self, rows: Rows) -> int:
        """Return 0: no sample is left out."""
        return 0


class PlanBatches:
    """The batches of a plan, whose mixture may get other weights during a run."""

    def __init__(self, plan: ShardPlan, data: Mapping[str, Any] | None = None, sizes: BatchSizes | None = None) -> None:
        """Begin a run.

        Args:
            plan: The plan of the data set as it is now.
            data: What the data set's samples depend on, for the fingerprint: JSON-able.
            sizes: The batch sizes of the run; None: always that of the plan.
        """
        self._data, self._sizes = dict(data or {}), sizes
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

    def untouched(self) -> PlanBatches:
        """Return batches of which an iteration changes nothing here."""
        found = PlanBatches(self.plan, self._data, self._sizes)
        found._history, found._changed = self._history, self._changed
        return found

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
        origin = self._history.first_sample(self.plan.num_samples, resumed.epoch)
        (_, size), *later = self._sizes.segments(origin=origin, at=resumed.samples, end=plan.num_positions)
        return (*resumed.continued(size), *later)

    def epoch(self, epoch: int, resumed: LoaderState | None = None) -> Iterator[PlanBatch]:
        """Iterate over the global batches of an epoch; any position costs the same to begin at."""
        plan, history, first = self.plan_of(epoch, resumed), self.history, 0
        if resumed is not None:
            if resumed.ended:
                return
            first = resumed.steps
        known, last, sizes = not plan.ordering.pads_first, plan.num_steps - 1, (0, 0)
        for step in range(first, last + 1):
            if history is not self.history:
                plan, history = self.plan_of(epoch, resumed), self.history
            if step in (first, last) or step <= plan.alike_from:
                sizes = plan.num_rows(step=step), plan.micro_size(step=step)
            num_rows, micro_size = sizes
            num_real = min(num_rows, plan.num_positions - plan.first_position(step=step))
            if isinstance(plan.ordering, Mixing):
                end = plan.first_position(step=step) + num_real
                self._drawn = max(self._drawn, plan.ordering.first_position(epoch, plan.num_samples) + end)
            yield PlanBatch(plan, epoch, step, num_rows, micro_size, num_real, known and num_real == num_rows)

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
        self.history = replace(self.history, segments=switched(mixing, at, parts))
