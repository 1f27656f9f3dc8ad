"""Where does the run stand: which epoch, how far, and what has been delivered?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle.distributed as dist
import paddle.io

from paddle_shard.errors import ArgumentError, ArgumentTypeError, StateError
from paddle_shard.inputs.source import Source
from paddle_shard.place.field import FieldLayout
from paddle_shard.plan.certificate import Account, Certificate, merge
from paddle_shard.plan.history import History, grown, packed_override
from paddle_shard.plan.mixture import Drawn
from paddle_shard.plan.shard_plan import ShardPlan, Where
from paddle_shard.plan.skips import Skips
from paddle_shard.plan.state import LoaderState, checked_epoch
from paddle_shard.position.account import Delivered, gathered, proof
from paddle_shard.position.leaving_out import (
    LEFT,
    STILL_OPEN,
    left_out_of_plan,
    num_steps_left_out,
    numbers_of,
    stretches_of,
)
from paddle_shard.position.mixing import agree_on_weights, drawn_at, mixing_of
from paddle_shard.position.progress import PassProgress, numbers
from paddle_shard.samplers import IndexBatch, PlanBatches, UserBatches
from paddle_shard.samplers.places import place_in
from paddle_shard.say_once import say_once


class Run:
    """The epoch and the position of a loader's passes, and its saved state."""

    def __init__(self, source: Source, layout: FieldLayout, ranks: tuple[int, ...], timeout: float) -> None:
        """Begin at epoch 0, or at the epoch of the user's own sampler.

        Args:
            source: What the passes read.
            layout: Of the field that says which data rank this process is.
            ranks: The global ranks of the meshes.
            timeout: Seconds to wait for the other ranks when a certificate is made.
        """
        self._source, self._layout, self._ranks, self._timeout = source, layout, ranks, timeout
        self._sampler = source.custom_sampler
        # The epoch of Paddle's own sampler is the loader's: it moves on there, as Paddle moves it, and users set it.
        self._shared = isinstance(self._sampler, paddle.io.DistributedBatchSampler)
        self._seen = self._epoch = self._samplers_epoch() or 0
        self._resumed: LoaderState | None = None
        self._first_pass = 0
        """Number of the first pass since a state was loaded: earlier ones are not of this run any more."""
        self._newest: PassProgress | None = None
        """The pass that is the position of the run; None: the position is where a pass that is made now begins."""
        self._latest: PassProgress | None = None
        """The pass that was delivered from last, or came to its end."""
        indexed = source.stream is None and not source.item_is_batch
        self._place = (layout.data_rank, layout.num_data_ranks) if indexed and layout.on_mesh else None
        self._delivered = Delivered(self._place)
        self._num_steps: int | None = None
        self.skips = Skips()
        """What the user leaves out."""

    @property
    def _planned(self) -> PlanBatches | None:
        """The batches of the plan, unless the user's own sampler decides the order."""
        batches = self._source.batches
        return batches if isinstance(batches, PlanBatches) and not self._source.item_is_batch else None

    @property
    def plan(self) -> ShardPlan | None:
        """The order of the present epoch, unless the user's own sampler decides it."""
        return None if self._planned is None else self._planned.plan_of(self.epoch)

    # The epoch

    def _samplers_epoch(self) -> int | None:
        epoch = getattr(self._sampler, "epoch", None)
        return int(epoch) if isinstance(epoch, int | np.integer) else None

    @property
    def epoch(self) -> int:
        """The epoch that the next pass will serve."""
        now = self._samplers_epoch()
        if now is not None and (self._shared or now != self._seen):
            self._epoch = self._seen = now
        return self._epoch

    def set_epoch(self, epoch: int, others: Mapping[str, Any]) -> None:
        """Choose the epoch of the passes that begin from now on; the user's sampler is told."""
        epoch = checked_epoch(epoch)
        owners: list[Any] = [self._sampler, getattr(self._sampler, "sampler", None)]
        told = [sampler for sampler in owners if hasattr(sampler, "set_epoch")]
        if others and not told:
            raise ArgumentError(f"set_epoch: the loader's sampler takes no {sorted(others)}.")
        for sampler in told:
            sampler.set_epoch(epoch, **others)
        self._epoch, self._seen = epoch, self._samplers_epoch() or 0
        if self._newest is not None and self._newest.epoch != self._epoch:
            self._newest = None

    def is_outdated(self, progress: PassProgress) -> bool:
        """Return whether a state was loaded since a pass began: it is not of this run any more."""
        return progress.number < self._first_pass

    def finished(self, progress: PassProgress) -> None:
        """Move on to the next epoch, when a pass over this one has come to its end."""
        if self.is_outdated(progress):
            return
        if self._latest is None or progress.number >= self._latest.number:
            self._latest = progress
        if progress.steps == 0:
            say_once(
                "an epoch has ended without a batch: it is empty, or has less than fills one (tail='drop'). Use a "
                "smaller batch, or tail='pad' or 'fill'."
            )
        self._count(progress)
        progress.end()
        if isinstance(self._source.batches, UserBatches):
            self._source.batches.finished(progress.epoch)
        if progress.start is self._resumed:
            self._resumed = None
        if progress.epoch == self.epoch:
            self._epoch = progress.epoch + 1
            if self._shared:
                self._sampler.epoch = self._seen = self._epoch
            self._newest = None
        elif progress is self._newest:
            self._newest = None

    # The position

    def start(self) -> LoaderState:
        """Return where a pass that is made now begins."""
        return self._start_of(self.epoch)

    def _start_of(self, epoch: int) -> LoaderState:
        """Return the loaded position, until a pass from it has come to its end, or the beginning of an epoch."""
        if self._resumed is not None and self._resumed.epoch == epoch:
            return self._resumed
        return LoaderState(epoch=epoch)

    def say_if_begun_again(self, start: LoaderState) -> None:
        """Log, once, that a pass begins an epoch again that a loop before it has left."""
        left = self._newest
        if left is not None and left.closed and left.epoch == start.epoch and left.steps > start.steps:
            say_once(
                "a loop over this loader was left before its end, and the next one begins the same epoch again. Call "
                "loader.set_epoch(the next) before it; or keep the iterator, batches = iter(loader), to continue it."
            )

    def begin(self, start: LoaderState) -> PassProgress:
        """Return the progress of a pass that begins at a position."""
        source, plan = self._source, self._plan_from(start)
        num_steps = self.num_steps_or_none() if plan is None else plan.num_steps
        if source.stream is not None:
            left = source.stream.batches.steps_left(start)
            num_steps = None if left is None else start.steps + left
        if plan is not None:
            segments = plan.segments or ((0, plan.batch_size),)
        elif isinstance(source.batches, UserBatches) or source.batch_size is None:  # batches may be of any size
            segments = start.segments
        else:
            segments = start.continued(source.batch_size)
        return PassProgress(start, segments, self._place, num_steps, plan)

    def delivered(self, progress: PassProgress, batch: IndexBatch, ids: Sequence[Any] | npt.NDArray[np.int64]) -> None:
        """Note that a pass has delivered a batch.

        Args:
            progress: Of the pass.
            batch: The global batch.
            ids: The samples in this process's slice of it.
        """
        if not self.is_outdated(progress) and (self._newest is None or progress.number > self._newest.number):
            self._newest = self._latest = progress
        if not progress.counted:
            self._count(progress)
        progress.deliver(batch, ids, drawn=not self._source.split)

    def _count(self, progress: PassProgress) -> None:
        """Let what a pass delivers from here on count, if it is one of this run."""
        if not progress.counted and not self.is_outdated(progress):
            self._delivered.count(progress)
        progress.counted = True

    def num_batches(self) -> int:
        """Return how many batches a pass over the whole present epoch delivers."""
        plan = self.plan
        return self.num_steps() - (0 if plan is None else num_steps_left_out(plan, self.epoch, self.skips))

    def num_steps(self) -> int:
        """Return the steps of a whole epoch, counted once; those of the present one if epochs differ."""
        if self.plan is not None:
            return self.plan.num_steps
        if self._num_steps is None:
            self._num_steps = len(self._source.batches)
        return self._num_steps

    def num_steps_or_none(self) -> int | None:
        """Return the steps of a whole epoch if they are known without drawing a sampler to its end."""
        if self._num_steps is None and not self._source.batches.knows_length:
            return None
        try:
            return self.num_steps()
        except ArgumentTypeError:
            return None

    def state(self) -> LoaderState:
        """Return the position of the run."""
        batches = self._source.batches
        fingerprint, history = batches.fingerprint(), self.history
        if self._newest is not None:
            state = self._newest.state(fingerprint, self._delivered.legs(self._newest.epoch))
            return replace(state, history=history)
        start = self.start()
        legs = self._delivered.legs(start.epoch)
        start = replace(start, fingerprint=fingerprint, certificate=legs, history=history)
        if start.sampler is None and isinstance(batches, UserBatches):
            return replace(start, sampler=batches.snapshot())
        return start

    def resume_from(self, state: Mapping[str, Any], override: Collection[str]) -> None:
        """Move the run to a saved position."""
        fingerprint = self._source.batches.fingerprint()
        override = packed_override(state, fingerprint, override)
        resumed = LoaderState.from_dict(state, fingerprint, override)
        history = History.from_json(resumed.history)
        if isinstance(self._source.batches, PlanBatches):
            saved = state["fingerprint"]
            if any(saved.get(name) != fingerprint.get(name) for name in ("num_samples", "mixture")):
                history = grown(saved, history, self._source.batches.plan, resumed.epoch, resumed.samples)
            self._source.batches.resume(resumed, history)
        elif history != History():
            raise StateError("state is of another run: it is of a Mixture or of data that has grown; this is not.")
        skips = Skips.from_json((resumed.history or {}).get("skips"))
        self.skips = self.skips.joined(skips.stretches, skips.samples)
        self._resumed = resumed
        self._delivered = Delivered(self._place, self._resumed)
        self._newest = self._latest = None
        self._first_pass = next(numbers)
        self.set_epoch(self._resumed.epoch, {})

    # What is delivered

    def _plan_from(self, start: LoaderState) -> ShardPlan | None:
        return None if self._planned is None else self._planned.plan_of(start.epoch, start)

    def _plan_of(self, epoch: int) -> ShardPlan | None:
        """Return the order in which an epoch was, is or would be served, in this order."""
        done = self._newest or (self._latest if epoch != self.epoch else None)
        return done.plan if done is not None and done.epoch == epoch else self._plan_from(self._start_of(epoch))

    @property
    def history(self) -> dict[str, Any] | None:
        """The changes of the order, and what is left out, for JSON."""
        batches, skips = self._source.batches, self.skips.to_json()
        found = batches.history.to_json() if isinstance(batches, PlanBatches) else None
        return found if skips is None else {**(found or {"lengths": [], "segments": []}), "skips": skips}

    def set_weights(self, weights: Any) -> int:
        """Switch to other weights of a mixture; collective."""
        if self._planned is None:
            mixing_of(None, "set_weights()")
        assert self._planned is not None
        at = agree_on_weights(self._planned, weights, dist.get_rank(), self._ranks, self._timeout)
        for progress in {self._newest, self._latest} - {None}:
            assert progress is not None
            progress.plan = self._plan_from(progress.start)
        return at

    def sources(self) -> Mapping[str, Drawn]:
        """Return what was drawn of each source of a mixture, up to the last batch that was delivered."""
        last = self._newest or self._latest
        if last is not None:
            return drawn_at(last.plan, last.epoch, last.samples)
        start = self.start()
        return drawn_at(self._plan_from(start), start.epoch, start.samples)

    def _no_index(self) -> str | None:
        """Return why samples have no number of their own that all ranks know; None if they have one."""
        source = self._source
        if source.stream is not None:
            return "a stream, which has no index"
        if source.item_is_batch:
            return "a data set of whole batches (batch_size=None)"
        if source.split and self.plan is None:
            return "data that is split already, of which each rank numbers its own"
        return None

    def where(self, sample: Any, epoch: int | None) -> Where | list[Where] | None:
        """Return where a sample is delivered."""
        epoch = self.epoch if epoch is None else epoch
        plan = self._plan_of(epoch)
        if plan is None:
            own = self._no_index() or f"the loader's own {type(self._sampler).__name__}"
            raise ArgumentError(f"where() cannot be asked: the order is that of {own}.")
        if plan.ordering.own_ids:
            places = (self._delivered_at(plan, epoch, place) for place in plan.everywhere(epoch=epoch, sample=sample))
            return [place for place in places if place is not None]
        found = plan.where(epoch=epoch, sample=sample)
        return None if found is None else self._delivered_at(plan, epoch, found)

    def _delivered_at(self, plan: ShardPlan, epoch: int, place: Where) -> Where | None:
        """Return where a row of the plan is delivered; None if it is left out."""
        batch = left_out_of_plan(plan, epoch, place.step, self.skips)
        return None if batch is None else place_in(self._source.dealt(batch), place, plan.num_data_ranks)

    def skip(self, steps: Iterable[int], samples: Iterable[Any], epoch: int | None) -> None:
        """Leave out steps and samples, in passes that begin from now on."""
        if (why := self._no_index()) is not None and not self._source.item_is_batch:
            raise ArgumentError(f"skip() needs samples that have a number: this is {why}.")
        if self._newest is not None and not self._newest.closed:
            raise ArgumentError(STILL_OPEN)
        epoch = checked_epoch(self.epoch if epoch is None else epoch)
        start, left = self._start_of(epoch), self._newest
        if left is not None and left.epoch == epoch and left.steps > start.steps:
            raise ArgumentError(LEFT.format(epoch=epoch, step=left.steps))
        plan = self._plan_from(start)
        end = plan.num_steps if plan is not None else self.num_steps_or_none()
        stretches = list(stretches_of(steps, epoch, start, plan, self._source, end))
        self.skips = self.skips.joined(stretches, list(numbers_of(samples, plan)))

    def certificate(self) -> Certificate:
        """Return what all ranks have delivered of the epoch in which this run was last; collective."""
        if (why := self._no_index()) is not None:
            raise ArgumentError(f"certificate() cannot tell how often a sample should be delivered: this is {why}.")
        last = self._latest or self._resumed
        epoch = self.epoch if last is None else last.epoch
        plan = self._plan_from(self._start_of(epoch)) if self._latest is None else self._latest.plan
        # That of the epoch in which the run stands as well, for a state that is saved now.
        epochs = sorted({epoch, self.state().epoch})
        if dist.get_rank() not in self._ranks:
            raise ArgumentError(
                f"certificate(): global rank {dist.get_rank()} is on none of the loader's meshes, and has delivered "
                "nothing. Call it on the ranks of the meshes, all of them."
            )
        told = gathered([*map(self._delivered.account, epochs)], self._ranks, self._timeout, "certificate()")
        accounts = {one: [Account(*rank[at]) for rank in told] for at, one in enumerate(epochs)}
        own = f"the loader's {type(self._sampler).__name__}"
        found = proof(accounts[epoch], epoch, plan, self.skips, self._delivered.end(epoch), own)
        for one in epochs:
            self._delivered.replace(one, merge(accounts[one])[0])
        return found
