"""`Run`: the position of a run, its saved state, its record and its certificate."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import paddle.distributed as dist

from paddle_shard.core.warn_once import warn_once
from paddle_shard.data.identity import describe_changes
from paddle_shard.data.samplers.plan_batches import Batches
from paddle_shard.errors import (
    ArgumentError,
    ArgumentTypeError,
    PeerLostError,
    StateError,
    described,
)
from paddle_shard.placement.field import FieldLayout
from paddle_shard.plan.certificate import (
    Certificate,
    Delivered,
    account_from_json,
    account_to_json,
    certify,
    merged,
)
from paddle_shard.plan.mixture import Drawn, Mixing, drawn_of
from paddle_shard.plan.shard_plan import (
    ShardPlan,
    Where,
    num_skipped_steps,
    places_of,
    skipped_positions,
)
from paddle_shard.plan.skips import Ranges, steps_of_epoch
from paddle_shard.plan.state import DATA, LoaderState
from paddle_shard.plan.step import Ids, Step
from paddle_shard.ranks.agreeing import gather_payloads
from paddle_shard.reading.source import Source
from paddle_shard.run.epochs import EpochCounter
from paddle_shard.run.progress import EpochDeliveries, IteratorProgress, numbers
from paddle_shard.run.recorder import Recorder, position

_MOST_TEXT = 2000
"""Characters of an error that the record has."""
_SAME_ORDER = {"tail", "skip_steps"}
"""Names in `override` that do not change which samples are at the positions of an epoch."""


class Run:
    """The position of a loader's iterators, and its saved state."""

    def __init__(
        self,
        source: Source,
        layout: FieldLayout,
        ranks: tuple[int, ...],
        timeout: float,
        skip_steps: Ranges = (),
    ) -> None:
        """Begin at epoch 0, or at the epoch of the user's own sampler.

        Args:
            source: The data and its order.
            layout: Layout of the field that says which data rank this process is.
            ranks: The global ranks of the meshes.
            timeout: Seconds to wait for the other ranks when a certificate is made.
            skip_steps: The skipped steps of the run.
        """
        self._source = source
        self.ranks = ranks
        self._timeout = timeout
        self._skip_steps = skip_steps
        self._num_data_ranks = layout.num_data_ranks
        self._counter = EpochCounter(source.custom_sampler)
        self._newest: IteratorProgress | None = None
        """The position: the newest iterator since a state was loaded that has delivered a batch or finished."""
        self._resumed: LoaderState | None = None
        """The loaded state, until an iterator from it has finished."""
        self._steps_known = (0, 0)
        """(epoch, steps of the run before it)."""
        self._first_number = 0
        """Number of the first iterator since a state was loaded: earlier ones do not move the run."""
        self._epoch_set_at = 0
        """Number of the newest iterator when the user last chose the epoch."""
        self.identity: Mapping[str, Any] | None = None
        """The identity of the data, as JSON; None before the first iterator of the run."""
        has_index = source.stream is None and not source.item_is_batch
        self._owner = None
        """Owner of what this process delivers; None if samples are not counted."""
        if has_index and layout.on_mesh:
            self._owner = (layout.data_rank, layout.num_data_ranks, 0)
        self._deliveries: dict[int, EpochDeliveries] = {}
        """What this process knows of the deliveries of each epoch."""
        self.recorder: Recorder | None = None
        """Writes the record of the run, if the user wants one and this rank is the one that writes it."""
        self._recorded: Any = None
        """The position at which the state was saved, if the newest line of the record has it."""

    @property
    def plan(self) -> ShardPlan | None:
        """The order of the present epoch as this run serves it, unless the user's own sampler decides it."""
        return self._plan_from(self._present())

    def _current(self) -> IteratorProgress | None:
        """Return the iterator that is the position of the run; None: that is where the next one begins."""
        newest = self._newest
        if newest is None or newest.finished or newest.epoch != self.epoch:
            return None
        return newest

    def _present(self) -> LoaderState:
        current = self._current()
        return self.start() if current is None else current.start

    @property
    def delivered_at(self) -> float:
        """When the newest batch was handed over since a state was loaded, by `time.perf_counter`; 0.0: none was."""
        return 0.0 if self._newest is None else self._newest.delivered_at

    # The data and the schedule

    def note_identity(self, identity: Mapping[str, Any]) -> None:
        """Set the identity of the data, when the first iterator of the run begins.

        Raises:
            StateError: It is not that of the loaded state.
        """
        saved = None if self._resumed is None else self._resumed.data
        self._compare_identity(saved, identity)
        self.identity = identity

    @staticmethod
    def _compare_identity(
        saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None
    ) -> None:
        if (
            saved is not None
            and now is not None
            and (how := describe_changes(saved, now))
        ):
            raise StateError(
                f"the data is not what it was when the state was saved: {how}. Give the loader the data of the state; "
                f"or, to resume with this data, load_state_dict(state, override=[{DATA!r}])."
            )

    def skips(self, start: LoaderState) -> Ranges:
        """Return the skipped steps of the epoch of a position."""
        return steps_of_epoch(self._skip_steps, start.steps_before)

    def _fingerprint(self) -> dict[str, Any]:
        fingerprint = dict(self._source.batches.fingerprint())
        # With data that is split already, each rank's state is of its own rows.
        if self._source.split and self._source.stream is None:
            fingerprint["num_data_ranks"] = self._num_data_ranks
        if self._skip_steps:
            fingerprint["skip_steps"] = [
                list(skipped) for skipped in self._skip_steps
            ]
        return fingerprint

    def _steps_before(self, epoch: int) -> int:
        """Return the steps of the run before an epoch."""
        batches: Batches = self._source.batches
        first, steps_before = self._steps_known
        if epoch < first:
            first, steps_before = 0, 0
        if epoch == first or self._source.stream is not None:
            return steps_before
        start = LoaderState(epoch=first)
        if self._resumed is not None and self._resumed.epoch == first:
            start = self._resumed  # perhaps with other batch sizes
        of_first = start.steps if start.ended else batches.known_steps(start)
        of_others = batches.steps_between(first + 1, epoch)
        if of_first is not None and of_others is not None:
            return steps_before + of_first + of_others
        if self._skip_steps:
            raise ArgumentError(
                f"skip_steps: the steps of the run before epoch {epoch} are not known, as the loader's "
                f"{type(self._source.custom_sampler).__name__} does not tell how many steps epochs have. Serve the "
                "epochs in their order."
            )
        return steps_before

    # The epoch

    @property
    def epoch(self) -> int:
        """The epoch that the next iterator will serve."""
        return self._counter.epoch

    def set_epoch(self, epoch: int, others: Mapping[str, Any]) -> None:
        """Choose the epoch of the iterators that begin from now on, also for the user's sampler."""
        epoch = self._counter.set(epoch, others)
        self._epoch_set_at = next(numbers)
        loaded = self._resumed
        if loaded is None or self._newest is not None:
            return
        if loaded.samples and not loaded.ended and epoch != loaded.epoch:
            warn_once(
                f"set_epoch({epoch}): the loaded state stands in epoch {loaded.epoch}, after {loaded.samples} samples, "
                f"which no loop has continued yet. Begin with set_epoch({loaded.epoch}), or leave it out, to continue."
            )

    def finished(
        self,
        progress: IteratorProgress,
        skipped_steps: int,
        skipped_samples: int,
    ) -> None:
        """Move on to the next epoch, when an iterator over this one has come to its end.

        Args:
            progress: Progress of the iterator.
            skipped_steps: Steps skipped after the last delivered batch.
            skipped_samples: Their samples.
        """
        if progress.number < self._first_number:
            return
        progress.end(skipped_steps, skipped_samples)
        if progress.position.steps == 0:
            warn_once(
                "an epoch has ended without a batch: it is empty, or has less than fills one (tail='drop'). Use a "
                "smaller batch, or tail='pad' or 'fill'."
            )
        self._note("end", self._counted(progress.state()), ends=progress.number)
        self._source.batches.finished(progress.epoch)
        if progress.start is self._resumed:
            self._resumed = None
        is_current = progress.epoch == self.epoch
        if is_current:
            steps = progress.start.steps_before + progress.position.steps
            self._steps_known = (progress.epoch + 1, steps)
            self._counter.move_to(progress.epoch + 1)
        progress.finished = True
        if (
            self._newest is None
            or is_current
            or progress.number >= self._newest.number
        ):
            self._newest = progress

    # The position

    def start(self, epoch: int | None = None) -> LoaderState:
        """Return where an iterator over an epoch, or the present one, begins if it is made now.

        That is the loaded position, until an iterator from it has finished, or the beginning of the epoch.
        """
        epoch = self.epoch if epoch is None else epoch
        if self._resumed is not None and self._resumed.epoch == epoch:
            return self._resumed
        return LoaderState(epoch=epoch, steps_before=self._steps_before(epoch))

    def begin(self, start: LoaderState) -> IteratorProgress:
        """Return the progress of an iterator that begins at a position."""
        source = self._source
        plan = self._plan_from(start)
        segments = start.segments
        skipped: Ranges = ()
        if plan is not None:
            skipped = skipped_positions(plan, self.skips(start))
            segments = plan.segments or ((0, plan.batch_size),)
        # Batches of a user's sampler may be of any size.
        elif source.stream is not None and source.batch_size is not None:
            segments = start.continued(source.batch_size)
        is_drawn = (
            source.stream is None and source.batches.plan_of(start) is None
        )
        progress = IteratorProgress(
            start,
            segments,
            self._owner,
            source.batches.known_steps(start),
            skipped=skipped,
            counts_draws=is_drawn and not source.split,
        )
        self._note("pass", start, begins=progress.number)
        # Only the sums of closed iterators are kept. A copy, since a signal handler may use the loader in between.
        for epoch, deliveries in list(self._deliveries.items()):
            self._deliveries[epoch] = deliveries.settled()
        deliveries = self._deliveries.get(start.epoch, EpochDeliveries())
        self._deliveries[start.epoch] = deliveries._replace(
            iterators=(*deliveries.iterators, (progress, progress.position))
        )
        return progress

    def delivered(
        self, progress: IteratorProgress, step: Step, ids: Ids, num_unread: int
    ) -> None:
        """Count a delivered batch of an iterator.

        Args:
            progress: Progress of the iterator.
            step: The step of the batch.
            ids: The samples in this process's slice of it.
            num_unread: Number of samples of the slice that could not be read.
        """
        number = (
            self._first_number
            if self._newest is None
            else self._newest.number + 1
        )
        if progress.number >= number:
            self._warn_if_begun_again(progress)
            self._newest = progress
        progress.deliver(step, ids, num_unread)

    def _warn_if_begun_again(self, progress: IteratorProgress) -> None:
        """Warn if an iterator begins the epoch that the one before has left before its end."""
        # Only now is the one before closed: `batches = iter(loader)` lets go of it after the next has begun.
        before = self._newest
        if (
            before is not None
            and before.number > self._epoch_set_at
            and before.closed
            and not before.finished
            and before.epoch == progress.epoch
            and before.position.steps > progress.start.steps
        ):
            warn_once(
                "a loop over this loader was left before its end, and the next one begins the same epoch again. "
                "Call loader.set_epoch(the next) before it; or keep the iterator, batches = iter(loader), to "
                "continue it."
            )

    def num_batches(self) -> int:
        """Return how many batches an iterator over the whole present epoch delivers."""
        batches: Batches = self._source.batches
        num_steps = batches.known_steps(self._present())
        if num_steps is None:  # a TypeError, so that list(loader) works
            raise ArgumentTypeError(f"len(loader): {batches.steps_unknown}")
        return num_steps - num_skipped_steps(
            num_steps, self.skips(self._present())
        )

    def state(self) -> LoaderState:
        """Return the position of the run."""
        current = self._current()
        state = self.start() if current is None else current.state()
        if current is None and state.sampler is None:
            state = replace(state, sampler=self._source.batches.snapshot())
        data = self.identity
        if data is None and self._resumed is not None:
            data = self._resumed.data
        return replace(
            self._counted(state), fingerprint=self._fingerprint(), data=data
        )

    def _of_epoch(self, epoch: int) -> EpochDeliveries:
        """Return what this process knows of the deliveries of an epoch, with those of all iterators settled."""
        return self._deliveries.get(epoch, EpochDeliveries()).settled(
            open_too=True
        )

    def _counted(self, state: LoaderState) -> LoaderState:
        """Return a position with all that this process knows of the deliveries of its epoch."""
        return replace(state, certificate=self._of_epoch(state.epoch).account)

    def save(self) -> dict[str, Any]:
        """Return the position of the run as the user saves it."""
        state = self.state()
        place = (state.epoch, state.samples, state.steps, state.ended)
        if self._recorded != place:
            self._note("checkpoint", state)
            self._recorded = place
        return state.to_dict()

    def _note(
        self, kind: str, state: LoaderState | None = None, **facts: Any
    ) -> None:
        """Write a line of the record.

        Args:
            kind: What has happened.
            state: The position that it is about.
            facts: What else the line has: JSON-able.
        """
        if self.recorder is None:
            return
        self._recorded = None
        if state is not None:
            facts |= position(state)
        self.recorder.note(kind, **{"passes": self._reached(), **facts})

    def _reached(self) -> list[tuple[int, int, int]]:
        """Return (number, steps, samples) of the iterators that are not settled."""
        return [
            (
                progress.number,
                progress.position.steps,
                progress.position.samples,
            )
            for deliveries in list(self._deliveries.values())
            for progress, _ in deliveries.iterators
        ]

    def failed(self, progress: IteratorProgress, error: BaseException) -> None:
        """Record that an iterator has failed."""
        self._note(
            "error", of=progress.number, error=described(error)[:_MOST_TEXT]
        )

    def resume_from(
        self, state: Mapping[str, Any], override: Collection[str]
    ) -> None:
        """Move the run to a saved position."""
        fingerprint = self._fingerprint()
        resumed = LoaderState.from_dict(state, fingerprint, override)
        self._source.batches.resume(resumed)
        reached = self._reached()
        others = [
            name
            for name in override
            if name not in _SAME_ORDER
            and resumed.fingerprint.get(name) != fingerprint.get(name)
        ]
        if resumed.samples and not resumed.ended and others:
            what = "stream" if "stream" in others else "order"
            warn_once(
                f"override={others}: the {what} is not that of the state. "
                f"Epoch {resumed.epoch} was begun, and the {resumed.samples} samples that it has delivered are left "
                f"out by their positions in the {what} as it is now. If other samples are there, samples of this epoch "
                "are lost, and others are delivered twice; later epochs are whole. A state from the end of an epoch "
                "does not have this."
            )
        self._compare_identity(resumed.data, self.identity)
        self._resumed = resumed
        self._steps_known = (resumed.epoch, resumed.steps_before)
        if self._owner is not None:
            self._owner = (*self._owner[:2], resumed.samples)
        end = resumed.samples if resumed.ended else None
        deliveries = EpochDeliveries(resumed.certificate, end=end)
        self._deliveries = {resumed.epoch: deliveries}
        self._newest = None
        self._first_number = next(numbers)
        self.set_epoch(resumed.epoch, {})
        self._note("resume", resumed, override=sorted(override), passes=reached)

    # The order

    def _plan_from(self, start: LoaderState) -> ShardPlan | None:
        # An item that is a whole batch is none of the samples that a plan shows to users.
        if self._source.item_is_batch:
            return None
        batches: Batches = self._source.batches
        return batches.plan_of(start)

    def sources(self) -> Mapping[str, Drawn]:
        """Return what was drawn of each source of a mixture, up to the last batch that was delivered."""
        newest = self._newest
        start = self.start() if newest is None else newest.start
        samples = start.samples if newest is None else newest.position.samples
        plan = self._plan_from(start)
        if plan is None or not isinstance(plan.ordering, Mixing):
            raise ArgumentError(
                "sources() is for a loader over a paddle_shard.Mixture, with its own order."
            )
        return drawn_of(plan.ordering, start.epoch * plan.num_samples + samples)

    def _no_index(self) -> str | None:
        """Return why samples have no number of their own that all ranks know; None if they have one."""
        source = self._source
        has_index = source.stream is None and not source.item_is_batch
        if has_index and (self.plan is not None or not source.split):
            return None
        return (
            "a stream, whole batches, or data that is split already: samples have no number that all ranks "
            "know"
        )

    def no_order(self) -> str | None:
        """Return whose order it is, if no plan knows it; None if one does."""
        if self._plan_from(LoaderState()) is not None:
            return None
        sampler = type(self._source.custom_sampler).__name__
        return self._no_index() or f"the loader's own {sampler}"

    def where(
        self, sample: Any, epoch: int | None
    ) -> Where | list[Where] | None:
        """Return where a sample is delivered."""
        epoch = self.epoch if epoch is None else epoch
        newest = self._newest
        start = self.start(epoch)
        if newest is not None and newest.epoch == epoch:
            start = newest.start  # as the epoch was, or is, served
        plan = self._plan_from(start)
        if plan is None:
            raise ArgumentError(
                f"where() cannot be asked: the order is that of {self.no_order()}."
            )
        return places_of(
            plan,
            epoch,
            sample,
            self.skips(start),
            is_balanced=self._source.batches.balance_rows is not None,
        )

    def certificate(self) -> Certificate:
        """Return what all ranks have delivered of the epoch in which this run was last; collective."""
        if (why := self._no_index()) is not None:
            raise ArgumentError(
                f"certificate() cannot tell how often a sample should be delivered: this is {why}."
            )
        newest = self._newest
        last = self._resumed if newest is None else newest.state()
        epoch = self.epoch if last is None else last.epoch
        start = self.start(epoch) if newest is None else newest.start

        deliveries = self._of_epoch(epoch)
        # A rank that has delivered nothing says so: its replicas must have delivered nothing, too.
        nothing = {} if self._owner is None else {self._owner: Delivered()}
        account = [
            account_to_json(deliveries.loaded),
            account_to_json({**nothing, **deliveries.since}),
        ]
        accounts = [
            (account_from_json(earlier), account_from_json(since))
            for earlier, since in gathered(
                account, self.ranks, self._timeout, "certificate()"
            )
        ]
        certificate = certify(
            accounts,
            epoch,
            self._plan_from(start),
            self.skips(start),
            deliveries.end,
            f"the loader's {type(self._source.custom_sampler).__name__}",
        )

        # What all ranks have delivered replaces what this one has.
        before = self._deliveries.get(epoch, EpochDeliveries())
        self._deliveries[epoch] = EpochDeliveries(
            loaded=merged(accounts)[0],
            iterators=tuple(
                (progress, progress.fold()) for progress, _ in before.iterators
            ),
            end=before.end,
        )
        if last is not None:
            self._note("certificate", self._counted(last))
        return certificate


def gathered(
    value: Any, ranks: tuple[int, ...], timeout: float | None, call: str
) -> list[Any]:
    """Return the values of some ranks, this one included, as JSON values; collective over them.

    Raises:
        ArgumentError: This rank is none of them.
        PeerLostError: Another rank has not made the call.
    """
    rank = dist.get_rank()
    if rank not in ranks:
        raise ArgumentError(
            f"{call}: global rank {rank} is on none of the loader's meshes, and has delivered nothing. Call it on the "
            "ranks of the meshes, all of them."
        )
    try:
        return list(
            map(
                json.loads,
                gather_payloads(ranks, json.dumps(value), timeout, call),
            )
        )
    except PeerLostError as lost:
        lost.args = (
            f"{call}: every rank of the meshes must call it, at the same step. {lost}",
        )
        raise
