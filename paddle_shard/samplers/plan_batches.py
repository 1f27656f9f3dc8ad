"""What does a run ask of its batches, and how does a `ShardPlan` become them?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from paddle_shard.errors import StateError
from paddle_shard.plan.mixture import Mixing, first_sample
from paddle_shard.plan.orders import ordering_of
from paddle_shard.plan.shard_plan import BatchSizes, ShardPlan, global_batch
from paddle_shard.plan.skips import Skips
from paddle_shard.plan.state import History, LoaderState, grown
from paddle_shard.plan.step import Deal, GlobalBatch, RowsOf, Step, rank_steps


class Batches:
    """The global batches of any epoch: what a run asks of them, be their order a plan's, a sampler's or a stream's.

    It also asks for `fingerprint()`, what the order depends on (JSON-able), and where `known_steps` does not tell, for
    `len()`.
    """

    __slots__ = ()

    @property
    def history(self) -> History:
        """What was changed in the run, but for what is left out."""
        return History()

    @property
    def on_training_thread(self) -> bool:
        """Whether the steps are made on the thread of the training loop, which may change what comes next."""
        return False

    def plan_of(self, start: LoaderState) -> ShardPlan | None:
        """Return the plan of the epoch of a position; None if no plan decides the order."""
        return None

    def known_steps(self, start: LoaderState) -> int | None:
        """Return the steps of the epoch of a position; None if they are not known without drawing it to its end."""
        raise NotImplementedError

    def resume(self, state: LoaderState) -> None:
        """Continue a run from a saved position, which has the fingerprint and the history of the run until then.

        Raises:
            StateError: The order of that run cannot be continued here.
        """
        if state.history.lengths or state.history.segments:
            raise StateError("state is of another run: it is of a Mixture or of data that has grown; this is not.")

    def unlike_before(self, state: LoaderState) -> str:
        """Return why a run that is resumed between two epochs goes on in another order than without a stop; or ""."""
        return ""

    def explained(self, saved: Any) -> str:
        """Return in words how a stream differs from what a saved fingerprint says of it; "" if that cannot be told."""
        return ""

    def snapshot(self) -> dict[str, Any] | None:
        """Return the state of the user's own sampler while no pass is open; None if it has none."""
        return None

    def finished(self, epoch: int) -> None:
        """Take note that a pass over an epoch was delivered to its end."""


class IndexBatches(Batches):
    """The global batches of data with an index, and what a rank reads of them."""

    __slots__ = ()

    deal: Deal | None
    """Deals rows to the data ranks by cost; None: they stay in their order."""

    def batches(self, start: LoaderState) -> Iterator[GlobalBatch]:
        """Iterate over the global batches of an epoch, independently of any other iteration.

        Args:
            start: The epoch, and the position in it to begin at.
        """
        raise NotImplementedError

    def steps(self, start: LoaderState, rows_of: RowsOf, skips: Skips, **looks: Any) -> Iterator[Step]:
        """Yield the steps of one rank from a position on; see `rank_steps`."""
        batches, deal = self.batches(start), self.deal
        return rank_steps(batches, start.epoch, start.samples, rows_of, skips=skips, deal=deal, **looks)


class PlanBatches(IndexBatches):
    """The batches of a plan, whose mixture may get other weights during a run."""

    def __init__(
        self,
        plan: ShardPlan,
        packed: dict[str, Any] | None = None,
        sizes: BatchSizes | None = None,
        data: Any = None,
    ) -> None:
        """Begin a run.

        Args:
            plan: The plan of the data set as it is now.
            packed: Fingerprint of the rows of a packed data set, or of the packed sources of a mixture: JSON-able.
            sizes: The batch sizes of the run; None: always that of the plan.
            data: The data set, whose length the plan has; None: it is not here.
        """
        self._packed, self._sizes = packed or {}, sizes
        self.deal: Deal | None = None
        self.plan = plan
        """The plan without the changes of the run."""
        self.data = data
        self.drawn = 0
        """Position of a mixture's run after the last sample that this process has requested."""
        self._changed: tuple[History, ShardPlan] = History(), plan
        """The changes of the run, and the plan with them: one value, as passes in other threads look at it."""

    @staticmethod
    def of_run(fingerprint: Mapping[str, Any], sizes: BatchSizes | None, history: History, **cut: Any) -> PlanBatches:
        """Return the batches of a run, of which a saved state or a record tells this, with all its changes.

        Args:
            fingerprint: See `fingerprint`; of an order of this package.
            sizes: See `__init__`.
            history: What was changed in the run.
            cut: The batch size, the accumulation and the number of data ranks.
        """
        same = {name: fingerprint[name] for name in ("num_samples", "seed", "tail")}
        plan = ShardPlan(shuffle=ordering_of(fingerprint) or False, **same, **cut)
        found = PlanBatches(plan, fingerprint.get("packed"), sizes)
        found.resume(LoaderState(history=history, fingerprint=found.fingerprint()))
        return found

    @property
    def history(self) -> History:
        """See `Batches`."""
        return self._changed[0]

    @property
    def on_training_thread(self) -> bool:
        """See `Batches`: the weights of a mixture change between two steps."""
        return isinstance(self.plan.ordering, Mixing)

    def known_steps(self, start: LoaderState) -> int:
        """See `Batches`."""
        return self.plan_of(start).num_steps

    def plan_of(self, start: LoaderState) -> ShardPlan:
        """Return the plan of an epoch, with all changes of the run.

        Args:
            start: The epoch, and the position in it at which a pass begins, perhaps with another batch size.
        """
        history, plan = self._changed
        length = history.length(self.plan.num_samples, start.epoch)
        if length != plan.num_samples:
            plan = replace(plan, num_samples=length)
        if self._sizes is None:
            segments = start.continued(plan.batch_size)
        else:
            origin = first_sample(history.lengths, self.plan.num_samples, start.epoch)
            (_, size), *later = self._sizes.segments(origin=origin, at=start.samples, end=plan.num_positions)
            segments = *start.continued(size), *(() if start.ended else later)
        if len(segments) < 2 and segments[0][1] == plan.batch_size:
            return plan
        return replace(plan, batch_size=segments[-1][1], segments=segments, ended=start.ended)

    def batches(self, start: LoaderState) -> Iterator[GlobalBatch]:
        """Iterate over the global batches of an epoch; any position costs the same to begin at."""
        changed, plan, epoch = self._changed, self.plan_of(start), start.epoch
        for step in range(start.steps, 0 if start.ended else plan.num_steps):
            if changed is not self._changed:  # the weights of a mixture were switched since the last step
                changed, plan = self._changed, self.plan_of(start)
            found = global_batch(plan, epoch, step)
            if isinstance(plan.ordering, Mixing):
                end = plan.first_position(step=step) + found.step.num_real
                # The largest, since passes may read the same epoch, or an earlier one, at once.
                self.drawn = max(self.drawn, plan.ordering.first_position(epoch, plan.num_samples) + end)
            yield found

    def fingerprint(self) -> dict[str, Any]:
        """Return what the order depends on: JSON-able, without the batch size."""
        return self.plan.fingerprint() | ({"packed": self._packed} if self._packed else {})

    def resume(self, state: LoaderState) -> None:
        """See `Batches`; what was requested before is forgotten."""
        history, saved, now = state.history, state.fingerprint, self.fingerprint()
        if any(saved.get(name) != now.get(name) for name in ("num_samples", "mixture")):
            history = grown(saved, self.plan, state)
        self._changed = history, history.plan(self.plan)
        plan = self.plan_of(LoaderState(epoch=state.epoch))
        if isinstance(plan.ordering, Mixing):
            self._packed = {**saved.get("packed", {}), **self._packed}  # of a source that is gone, too
            self.drawn = plan.ordering.first_position(state.epoch, plan.num_samples) + state.samples

    def set_weights(self, at: int, parts: tuple[int, ...]) -> None:
        """Mix with other weights from a position of the run on.

        Args:
            at: The position; no sample from there on was requested.
            parts: Integer weight of each source.
        """
        history, plan = self._changed
        assert isinstance(plan.ordering, Mixing)
        history = replace(history, segments=plan.ordering.switched(at, parts))
        self._changed = history, history.plan(self.plan)
