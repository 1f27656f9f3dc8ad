"""The order of a run as global batches (`Batches`), and the batches of a `ShardPlan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from paddle_shard.plan.order import Fingerprint
from paddle_shard.plan.orders import ordering_of
from paddle_shard.plan.shard_plan import BatchSizes, ShardPlan, global_batches
from paddle_shard.plan.skips import Ranges
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.step import (
    BalanceRows,
    GlobalBatch,
    RowsOf,
    Steps,
    rank_steps,
)


class Batches:
    """The global batches of any epoch, in the order of a plan, a sampler or a stream.

    Subclasses also have `fingerprint()`, what the order depends on (JSON-able).
    """

    __slots__ = ()

    steps_unknown: ClassVar[str] = ""
    """Why `known_steps` may be None, and the fix, for an error."""

    on_training_thread: ClassVar[bool] = False
    """Whether the steps are made on the thread of the training loop."""

    def plan_of(self, start: LoaderState) -> ShardPlan | None:
        """Return the plan of the epoch of a position; None if no plan decides the order."""
        return None

    def known_steps(self, start: LoaderState) -> int | None:
        """Return the steps of the epoch of a position; None if they are not known without drawing it to its end."""
        raise NotImplementedError

    def steps_between(self, first: int, end: int) -> int | None:
        """Return the steps of the epochs [first, end); None if they are not known."""
        if first >= end:
            return 0
        steps = self.known_steps(LoaderState(epoch=first))
        return None if steps is None else steps * (end - first)

    def resume(self, state: LoaderState) -> None:
        """Check that a run can continue from a saved position with the fingerprint of these batches."""

    def snapshot(self) -> dict[str, Any] | None:
        """Return the state of the user's own sampler while no pass is open; None if it has none."""
        return None

    def finished(self, epoch: int) -> None:
        """Take note that a pass over an epoch was delivered to its end."""


class IndexBatches(Batches):
    """The global batches of data with an index, and the steps of a rank."""

    __slots__ = ()

    balance_rows: BalanceRows | None
    """Assigns rows to data ranks by cost; None: they stay in their order."""

    def batches(self, start: LoaderState) -> Iterator[GlobalBatch]:
        """Iterate over the global batches of an epoch, independently of any other iteration.

        Args:
            start: The epoch, and the position in it to begin at.
        """
        raise NotImplementedError

    def steps(
        self,
        start: LoaderState,
        rows_of: RowsOf,
        skips: Ranges = (),
        **looks: Any,
    ) -> Steps:
        """Yield the steps of one rank from a position on; see `rank_steps`."""
        return rank_steps(
            self.batches(start),
            start.epoch,
            rows_of,
            skips=skips,
            balance_rows=self.balance_rows,
            **looks,
        )


@dataclass(eq=False)
class PlanBatches(IndexBatches):
    """The batches of a plan."""

    plan: ShardPlan
    """The plan of the data set."""
    packed: Fingerprint | None = None
    """Fingerprint of the rows of a packed data set, or of the packed sources of a mixture."""
    sizes: BatchSizes | None = None
    """The batch sizes of the run; None: always that of the plan."""
    balance_rows: BalanceRows | None = None
    """See `IndexBatches`."""

    @staticmethod
    def of_run(
        fingerprint: Fingerprint, sizes: BatchSizes | None, **cut: Any
    ) -> PlanBatches:
        """Return the batches of a run, for what a saved state or a record holds of it.

        Args:
            fingerprint: See `fingerprint`; of an order of this package.
            sizes: The batch sizes of the run, if they change.
            cut: The batch size, the accumulation and the number of data ranks.
        """
        same = {
            name: fingerprint[name] for name in ("num_samples", "seed", "tail")
        }
        plan = ShardPlan(
            shuffle=ordering_of(fingerprint) or False, **same, **cut
        )
        return PlanBatches(plan, fingerprint.get("packed"), sizes)

    def known_steps(self, start: LoaderState) -> int:
        """See `Batches`."""
        return self.plan_of(start).num_steps

    def steps_between(self, first: int, end: int) -> int:
        """See `Batches`."""
        if self.sizes is None:
            return self.plan.num_steps * (end - first)
        return sum(
            self.known_steps(LoaderState(epoch=epoch))
            for epoch in range(first, end)
        )

    def plan_of(self, start: LoaderState) -> ShardPlan:
        """Return the plan of an epoch.

        Args:
            start: The epoch, and the position in it at which a pass begins, perhaps with another batch size.
        """
        plan = self.plan
        if self.sizes is None:
            segments = start.continued(plan.batch_size)
        else:
            origin = max(0, start.epoch) * plan.num_samples
            (_, size), *later = self.sizes.segments(
                origin=origin, position=start.samples, end=plan.num_positions
            )
            segments = (*start.continued(size), *(() if start.ended else later))
        if len(segments) < 2 and segments[0][1] == plan.batch_size:
            return plan
        return replace(
            plan,
            batch_size=segments[-1][1],
            segments=segments,
            ended=start.ended,
        )

    def batches(self, start: LoaderState) -> Iterator[GlobalBatch]:
        """Iterate over the global batches of an epoch; any position costs the same to begin at."""
        plan = self.plan_of(start)
        steps = range(start.steps, 0 if start.ended else plan.num_steps)
        return global_batches(plan, start.epoch, steps)

    def fingerprint(self) -> Fingerprint:
        """Return what the order depends on: JSON-able, without the batch size."""
        packed = {"packed": self.packed} if self.packed else {}
        return {**self.plan.fingerprint(), **packed}
