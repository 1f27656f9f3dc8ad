"""The position of a run: the current epoch, delivered samples, the saved state and the certificate."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import paddle.distributed as dist
import paddle.io

from paddle_shard.core.checks import check_count
from paddle_shard.core.warn_once import say_once
from paddle_shard.data.identity import differences
from paddle_shard.data.samplers.plan_batches import Batches
from paddle_shard.data.samplers.user_batches import owner_of, samplers
from paddle_shard.errors import ArgumentError, PeerLostError, StateError, described
from paddle_shard.placement.field import FieldLayout
from paddle_shard.plan.certificate import (
    DRAWN,
    Account,
    Certificate,
    Delivered,
    Owner,
    Total,
    account_from_json,
    account_to_json,
    added,
    certify,
    merged,
    minus,
    plus,
    total_of,
)
from paddle_shard.plan.mixture import Drawn, Mixing, drawn_of
from paddle_shard.plan.shard_plan import ShardPlan, Where, num_skipped, places_of
from paddle_shard.plan.skips import Ranges, steps_of_epoch
from paddle_shard.plan.state import DATA, LoaderState
from paddle_shard.plan.step import Ids, Step, as_ids
from paddle_shard.ranks.agreeing import gather_of
from paddle_shard.reading.source import Source
from paddle_shard.run.recorder import Recorder, position

_MOST_TEXT = 2000
"""Characters of an error that the record has."""
_SAME_ORDER = {"tail", "skip_steps"}
"""Names in `override` that do not change which samples are at the positions of an epoch."""
_MOST_RECENT = 256
"""Delivered batches whose samples are kept until they are added to the totals, all at once."""

_numbers = count(1)
"""Numbers the passes in the order in which they begin."""


class _Delivery(NamedTuple):
    """One delivered batch, and those before it: a list that grows by one assignment."""

    ids: Ids
    """Samples in this process's slice, without padding."""
    lost: int
    """Samples of the slice that could not be read."""
    drawn: Ids
    """Samples that the user's sampler drew for all ranks."""
    positions: int
    """Positions of the order that the batch, and the skipped steps before it, hold."""
    previous: _Delivery | None = None
    number: int = 0
    """Number of deliveries in the list."""


class Progress(NamedTuple):
    """The position of a pass, and its deliveries. It is replaced as a whole."""

    samples: int
    steps: int
    ended: bool
    sampler: Any
    """State of the user's own sampler after the newest batch."""
    totals: Mapping[Owner, Total] = MappingProxyType({})
    """Totals of the deliveries that are not in `recent`."""
    recent: _Delivery | None = None


class PassProgress:
    """The position of one pass."""

    def __init__(
        self,
        start: LoaderState,
        segments: tuple[tuple[int, int], ...],
        place: Owner | None,
        num_steps: int | None,
        *,
        counts_draws: bool = False,
    ) -> None:
        """Begin at a position.

        Args:
            start: The state at which the pass begins.
            segments: (first position, batch size) of each stretch of the epoch.
            place: The owner of this process's deliveries; None if they are not counted.
            num_steps: Steps of the whole epoch; None if they are only known at its end.
            counts_draws: True if the user's sampler draws the samples of all data ranks.
        """
        self.start = start
        self.epoch = start.epoch
        self.number = next(_numbers)
        self.closed = False
        """True if the pass delivers no more."""
        self.finished = False
        """True if it has come to its end."""
        self.noted_at = 0.0
        """When the newest batch was handed to the user."""
        self._segments = segments
        self._place = place
        self._num_steps = num_steps
        self._counts_draws = counts_draws
        self.at = Progress(start.samples, start.steps, start.ended, start.sampler)
        """The position. A signal handler that saves the state finds a batch as a whole or not at all."""

    def deliver(self, step: Step, ids: Ids, lost: int) -> None:
        """Count one more delivered batch, and the skipped steps before it: one value, one assignment.

        Args:
            step: The step.
            ids: Samples in this process's slice of the batch, without padding.
            lost: Number of samples of the slice that could not be read.
        """
        skipped_steps, skipped_samples = step.skipped
        steps = self.at.steps + skipped_steps + 1
        ended = step.last if step.last is not None else steps == self._num_steps
        delivery = _Delivery(ids, lost, step.drawn, skipped_samples + step.num_real)
        self.noted_at = time.perf_counter()
        self._move(delivery, steps, ended=ended, sampler=step.sampler_state)

    def end(self, skipped_steps: int, skipped_samples: int) -> None:
        """Count the skipped steps after the last delivered batch."""
        delivery = _Delivery((), 0, (), skipped_samples)
        self._move(
            delivery, self.at.steps + skipped_steps, ended=True, sampler=self.at.sampler
        )

    def _move(
        self, delivery: _Delivery, steps: int, *, ended: bool, sampler: Any
    ) -> None:
        at = self.at
        previous = at.recent
        totals = at.totals
        if previous is not None and previous.number >= _MOST_RECENT:
            totals = self._totals(at)
            previous = None
        number = 1 if previous is None else previous.number + 1
        recent = delivery._replace(previous=previous, number=number)
        self.at = Progress(
            at.samples + delivery.positions, steps, ended, sampler, totals, recent
        )

    def _totals(self, at: Progress) -> Mapping[Owner, Total]:
        """Return the totals of all deliveries."""
        recent = []
        entry = at.recent
        while entry is not None:
            recent.append(entry)
            entry = entry.previous
        if not recent:
            return at.totals
        totals = dict(at.totals)
        if self._place is not None:
            total = _total(
                [entry.ids for entry in recent],
                sum(len(entry.ids) + entry.lost for entry in recent),
            )
            totals[self._place] = plus(totals.get(self._place, Total()), total)
        if self._counts_draws:
            total = _total(
                [entry.drawn for entry in recent],
                sum(entry.positions for entry in recent),
            )
            totals[DRAWN] = plus(totals.get(DRAWN, Total()), total)
        return totals

    def fold(self) -> Progress:
        """Add the recent deliveries to the totals; return the position."""
        at = self.at
        folded = at._replace(totals=self._totals(at), recent=None)
        if self.at is at:  # else a handler has delivered, or another thread
            self.at = folded
        return folded

    def account(self, since: Progress) -> Account:
        """Return the deliveries since an earlier, folded position of the pass."""
        at = self.fold()
        if at.samples == since.samples:
            return {}
        once = ((since.samples, at.samples),)
        return {
            owner: Delivered(once, (), minus(total, since.totals.get(owner, Total())))
            for owner, total in at.totals.items()
        }

    def state(self) -> LoaderState:
        """Return the position as a state, without what the whole run knows."""
        at = self.at
        segments = (
            tuple(segment for segment in self._segments if segment[0] < at.samples)
            or self._segments[:1]
        )
        return replace(
            self.start,
            samples=at.samples,
            steps=at.steps,
            ended=at.ended,
            sampler=at.sampler,
            segments=segments,
            certificate={},
        )


def _total(batches: list[Ids], belong: int) -> Total:
    """Return the total of the samples of some batches; they are hashed at once."""
    return total_of(
        np.concatenate(
            [as_ids(ids) for ids in batches if len(ids)] or [np.empty(0, np.int64)]
        ),
        belong,
    )


class EpochDeliveries(NamedTuple):
    """The deliveries of an epoch that this process knows of. It is replaced in one assignment."""

    known: Account = MappingProxyType({})
    """Those of a saved state, or of the last certificate."""
    own: Account = MappingProxyType({})
    """Those of closed passes since then."""
    passes: tuple[tuple[PassProgress, Progress], ...] = ()
    """The other passes, and the position of each at the last certificate, or at its beginning."""
    end: int | None = None
    """The position at which the user's sampler has ended; None if no pass has seen it."""

    def settled(self, *, open_too: bool = False) -> EpochDeliveries:
        """Return the same, with the closed passes, or all, added to `own`."""
        # Read once each: the garbage collector may close a pass at any moment.
        is_settled = [open_too or progress.closed for progress, _ in self.passes]
        if not any(is_settled):
            return self
        settled = [
            entry for done, entry in zip(is_settled, self.passes, strict=True) if done
        ]
        others = tuple(
            entry
            for done, entry in zip(is_settled, self.passes, strict=True)
            if not done
        )
        own = added(self.own, *(progress.account(since) for progress, since in settled))
        end = next(
            (
                progress.at.samples
                for progress, _ in reversed(self.passes)
                if progress.at.ended
            ),
            self.end,
        )
        return EpochDeliveries(self.known, own, others, end)


class Run:
    """The epoch and the position of a loader's passes, and its saved state."""

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
            layout: Of the field that says which data rank this process is.
            ranks: The global ranks of the meshes.
            timeout: Seconds to wait for the other ranks when a certificate is made.
            skip_steps: The skipped steps of the run.
        """
        self._source = source
        self.ranks = ranks
        self._timeout = timeout
        self._skip_steps = skip_steps
        self._num_data_ranks = layout.num_data_ranks
        self._sampler = source.custom_sampler
        # The epoch of Paddle's own sampler is the loader's: it moves on there, as Paddle moves it, and users set it.
        self._shared = isinstance(self._sampler, paddle.io.DistributedBatchSampler)
        self._epoch = self._seen = self._samplers_epoch() or 0
        self._resumed: LoaderState | None = None
        """The loaded state, until a pass from it has come to its end."""
        self._newest: PassProgress | None = None
        """The newest pass that has delivered a batch or come to its end."""
        self._steps_known = (0, 0)
        """(epoch, steps of the run before it)."""
        self.first_pass = 0
        """Number of the first pass since a state was loaded: earlier ones do not move the run."""
        self._epoch_set = 0
        """Number of the passes when the user last chose the epoch."""
        self.identity: Mapping[str, Any] | None = None
        """The identity of the data, as JSON; None before the first iterator of the run."""
        indexed = source.stream is None and not source.item_is_batch
        self._place = (
            (layout.data_rank, layout.num_data_ranks, 0)
            if indexed and layout.on_mesh
            else None
        )
        self._epochs: dict[int, EpochDeliveries] = {}
        self._num_steps: int | None = None
        """Steps of an epoch of a sampler that had to be drawn to its end; counted once."""
        self.recorder: Recorder | None = None
        """Writes the record of the run, if the user wants one and this rank is the one that writes it."""
        self._recorded: Any = None
        """The position at which the state was saved, if the newest line of the record has it."""

    @property
    def plan(self) -> ShardPlan | None:
        """The order of the present epoch as this run serves it, unless the user's own sampler decides it."""
        return self._plan_from(self._present())

    def _current(self) -> PassProgress | None:
        """Return the pass that is the position of the run; None: that is where the next pass begins."""
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
        return 0.0 if self._newest is None else self._newest.noted_at

    # The data and the schedule

    def note_identity(self, identity: Mapping[str, Any]) -> None:
        """Set the identity of the data, when the first iterator of the run begins.

        Raises:
            StateError: It is not that of the loaded state.
        """
        self._compare_identity(
            None if self._resumed is None else self._resumed.data, identity
        )
        self.identity = identity

    @staticmethod
    def _compare_identity(
        saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None
    ) -> None:
        if saved is not None and now is not None and (how := differences(saved, now)):
            raise StateError(
                f"the data is not what it was when the state was saved: {how}. Give the loader the data of the state; "
                f"or, to resume with this data, load_state_dict(state, override=[{DATA!r}])."
            )

    def skips(self, start: LoaderState) -> Ranges:
        """Return the skipped steps of the epoch of a position."""
        return steps_of_epoch(self._skip_steps, start.steps_before)

    def _fingerprint(self) -> dict[str, Any]:
        fingerprint: dict[str, Any] = self._source.batches.fingerprint()
        if (
            self._source.split and self._source.stream is None
        ):  # each rank's state is of its own rows
            fingerprint = {**fingerprint, "num_data_ranks": self._num_data_ranks}
        if self._skip_steps:
            fingerprint = {
                **fingerprint,
                "skip_steps": [list(skipped) for skipped in self._skip_steps],
            }
        return fingerprint

    def _steps_before(self, epoch: int) -> int:
        """Return the steps of the run before an epoch."""
        batches: Batches = self._source.batches
        first, steps_before = (
            self._steps_known if epoch >= self._steps_known[0] else (0, 0)
        )
        if epoch == first or self._source.stream is not None:
            return steps_before
        start = self._resumed
        if start is not None and start.epoch == first:  # perhaps with other batch sizes
            of_first = start.steps if start.ended else batches.known_steps(start)
            between = [of_first, batches.steps_between(first + 1, epoch)]
        else:
            between = [batches.steps_between(first, epoch)]
        known = [steps for steps in between if steps is not None]
        if len(known) < len(between):
            if self._skip_steps:
                raise ArgumentError(
                    f"skip_steps: the steps of the run before epoch {epoch} are not known, as the loader's "
                    f"{type(self._sampler).__name__} does not tell how many steps epochs have. Serve the epochs in "
                    "their order."
                )
            return steps_before
        return steps_before + sum(known)

    # The epoch

    def _samplers_epoch(self) -> int | None:
        epoch = getattr(self._sampler, "epoch", None)
        return int(epoch) if isinstance(epoch, int | np.integer) else None

    @property
    def epoch(self) -> int:
        """The epoch that the next pass will serve."""
        # A user may set the epoch of the sampler instead: it counts if it is not the one that was seen last.
        now = self._samplers_epoch()
        if now is not None and (self._shared or now != self._seen):
            self._epoch = self._seen = now
        return self._epoch

    def set_epoch(self, epoch: int, others: Mapping[str, Any]) -> None:
        """Choose the epoch of the passes that begin from now on; the user's sampler is told."""
        epoch = check_count("epoch", epoch, 0)
        if self._tell_samplers(epoch, others) == 0 and others:
            raise ArgumentError(
                f"set_epoch: the loader's sampler takes no {sorted(others)}."
            )
        loaded = self._resumed
        if (
            loaded
            and loaded.samples
            and not loaded.ended
            and self._newest is None
            and epoch != loaded.epoch
        ):
            say_once(
                f"set_epoch({epoch}): the loaded state stands in epoch {loaded.epoch}, after {loaded.samples} samples, "
                f"which no loop has continued yet. Begin with set_epoch({loaded.epoch}), or leave it out, to continue."
            )
        self._epoch = epoch
        self._epoch_set = next(_numbers)
        self._seen = self._samplers_epoch() or 0

    def _tell_samplers(
        self, epoch: int, others: Mapping[str, Any] = MappingProxyType({})
    ) -> int:
        """Call `set_epoch` of the user's samplers; return how many have one."""
        told = [
            sampler
            for sampler in samplers(self._sampler)
            if callable(getattr(sampler, "set_epoch", None))
        ]
        for sampler in list(told):
            try:
                inspect.signature(sampler.set_epoch).bind(epoch, **others)
            except (TypeError, ValueError) as error:  # the latter: it does not tell
                if not others and isinstance(error, TypeError):
                    told.remove(sampler)
                    say_once(
                        f"{type(sampler).__name__}.set_epoch takes other arguments than the epoch ({error}), so it is "
                        "not told of the epochs. Let the others have defaults, or call loader.set_epoch(epoch, "
                        "name=value)."
                    )
                    continue
            sampler.set_epoch(epoch, **others)
        return len(told)

    def finished(
        self, progress: PassProgress, skipped_steps: int, skipped_samples: int
    ) -> None:
        """Move on to the next epoch, when a pass over this one has come to its end.

        Args:
            progress: Of the pass.
            skipped_steps: Steps skipped after the last delivered batch.
            skipped_samples: Their samples.
        """
        if progress.number < self.first_pass:
            return
        progress.end(skipped_steps, skipped_samples)
        steps_before = progress.start.steps_before
        if progress.at.steps == 0:
            say_once(
                "an epoch has ended without a batch: it is empty, or has less than fills one (tail='drop'). Use a "
                "smaller batch, or tail='pad' or 'fill'."
            )
        self._note("end", self._counted(progress.state()), ends=progress.number)
        self._source.batches.finished(progress.epoch)
        if progress.start is self._resumed:
            self._resumed = None
        is_current = progress.epoch == self.epoch
        if is_current:
            self._steps_known = (progress.epoch + 1, steps_before + progress.at.steps)
            self._epoch = progress.epoch + 1
            self._tell_samplers(self._epoch)  # as a run does that is resumed here
            if self._shared and owner_of(self._sampler) is not None:
                self._sampler.epoch = self._epoch
            self._seen = self._samplers_epoch() or 0
        progress.finished = True
        if self._newest is None or is_current or progress.number >= self._newest.number:
            self._newest = progress

    # The position

    def start(self, epoch: int | None = None) -> LoaderState:
        """Return where a pass over an epoch, or the present one, begins if it is made now.

        That is the loaded position, until a pass from it has come to its end, or the beginning of the epoch.
        """
        epoch = self.epoch if epoch is None else epoch
        if self._resumed is not None and self._resumed.epoch == epoch:
            return self._resumed
        return LoaderState(epoch=epoch, steps_before=self._steps_before(epoch))

    def begin(self, start: LoaderState) -> PassProgress:
        """Return the progress of a pass that begins at a position."""
        source = self._source
        plan = self._plan_from(start)
        segments = start.segments
        if plan is not None:
            segments = plan.segments or ((0, plan.batch_size),)
        elif (
            source.stream is not None and source.batch_size is not None
        ):  # those of others may be of any size
            segments = start.continued(source.batch_size)
        known = source.batches.known_steps(start)
        draws = (
            source.stream is None
            and not source.split
            and source.batches.plan_of(start) is None
        )
        progress = PassProgress(start, segments, self._place, known, counts_draws=draws)
        self._note("pass", start, begins=progress.number)
        # Of closed passes only the sums are kept. A copy, since a signal handler may use the loader in between.
        for epoch, found in list(self._epochs.items()):
            self._epochs[epoch] = found.settled()
        found = self._epochs.get(start.epoch, EpochDeliveries())
        self._epochs[start.epoch] = found._replace(
            passes=(*found.passes, (progress, progress.at))
        )
        return progress

    def delivered(
        self, progress: PassProgress, step: Step, ids: Ids, lost: int
    ) -> None:
        """Count a delivered batch of a pass.

        Args:
            progress: Of the pass.
            step: The step of the batch.
            ids: The samples in this process's slice of it.
            lost: Number of samples of the slice that could not be read.
        """
        newest = self._newest
        if progress.number >= self.first_pass and (
            newest is None or progress.number > newest.number
        ):
            # Only now is the one before closed: `batches = iter(loader)` lets go of it after the next has begun.
            if (
                newest is not None
                and newest.number > self._epoch_set
                and self._is_begun_again(newest, progress)
            ):
                say_once(
                    "a loop over this loader was left before its end, and the next one begins the same epoch again. "
                    "Call loader.set_epoch(the next) before it; or keep the iterator, batches = iter(loader), to "
                    "continue it."
                )
            self._newest = progress
        progress.deliver(step, ids, lost)

    def _is_begun_again(self, before: PassProgress, progress: PassProgress) -> bool:
        was_left = before.closed and not before.finished
        return (
            was_left
            and before.epoch == progress.epoch
            and before.at.steps > progress.start.steps
        )

    def _of_epoch(self, epoch: int) -> EpochDeliveries:
        """Return what this process knows of the deliveries of an epoch, with all passes added up."""
        return self._epochs.get(epoch, EpochDeliveries()).settled(open_too=True)

    def num_batches(self) -> int:
        """Return how many batches a pass over the whole present epoch delivers."""
        found = self.num_steps_or_none(self._present())
        if found is None:
            found = self._num_steps = len(self._source.batches)
        return found - num_skipped(found, self.skips(self._present()))

    def num_steps_or_none(self, start: LoaderState) -> int | None:
        """Return the steps of the whole epoch of a position, if a sampler need not be drawn to its end for it."""
        known: int | None = self._source.batches.known_steps(start)
        return self._num_steps if known is None else known

    def state(self) -> LoaderState:
        """Return the position of the run."""
        current = self._current()
        state = self.start() if current is None else current.state()
        if current is None and state.sampler is None:
            state = replace(state, sampler=self._source.batches.snapshot())
        known = None if self._resumed is None else self._resumed.data
        data = known if self.identity is None else self.identity
        return replace(self._counted(state), fingerprint=self._fingerprint(), data=data)

    def _counted(self, state: LoaderState) -> LoaderState:
        """Return a position with all that this process knows of the deliveries of its epoch."""
        found = self._of_epoch(state.epoch)
        return replace(state, certificate=added(found.known, found.own))

    def save(self) -> dict[str, Any]:
        """Return the position of the run as the user saves it."""
        state = self.state()
        told = state.epoch, state.samples, state.steps, state.ended
        if self._recorded != told:
            self._note("checkpoint", state)
            self._recorded = told
        return state.to_dict()

    def _note(self, kind: str, state: LoaderState | None = None, **facts: Any) -> None:
        """Write a line of the record.

        Args:
            kind: What has happened.
            state: The position that it is about.
            facts: What else is to be told: JSON-able.
        """
        if self.recorder is None:
            return
        self._recorded = None
        if state is not None:
            facts |= position(state)
        self.recorder.note(kind, **{"passes": self._reached(), **facts})

    def _reached(self) -> list[tuple[int, int, int]]:
        """Return (number, steps, samples) of the passes that are not settled."""
        passes = [
            progress
            for found in list(self._epochs.values())
            for progress, _ in found.passes
        ]
        return [(one.number, one.at.steps, one.at.samples) for one in passes]

    def failed(self, progress: PassProgress, error: BaseException) -> None:
        """Note that a pass has failed."""
        self._note("error", of=progress.number, error=described(error)[:_MOST_TEXT])

    def resume_from(self, state: Mapping[str, Any], override: Collection[str]) -> None:
        """Move the run to a saved position."""
        batches = self._source.batches
        resumed = LoaderState.from_dict(state, self._fingerprint(), override)
        batches.resume(resumed)
        reached = self._reached()
        then = resumed.fingerprint
        now = self._fingerprint()
        others = [
            name
            for name in override
            if name not in _SAME_ORDER and then.get(name) != now.get(name)
        ]
        if resumed.samples and not resumed.ended and others:
            what = "stream" if "stream" in others else "order"
            say_once(
                f"override={others}: the {what} is not that of the state. "
                f"Epoch {resumed.epoch} was begun, and the {resumed.samples} samples that it has delivered are left "
                f"out by their positions in the {what} as it is now. If other samples are there, samples of this epoch "
                "are lost, and others are delivered twice; later epochs are whole. A state from the end of an epoch "
                "does not have this."
            )
        self._compare_identity(resumed.data, self.identity)
        self._resumed = resumed
        self._steps_known = (resumed.epoch, resumed.steps_before)
        if self._place is not None:
            self._place = (*self._place[:2], resumed.samples)
        end = resumed.samples if resumed.ended else None
        self._epochs = {resumed.epoch: EpochDeliveries(resumed.certificate, end=end)}
        self._newest = None
        self.first_pass = next(_numbers)
        self.set_epoch(resumed.epoch, {})
        self._note("resume", resumed, override=sorted(override), passes=reached)

    # Deliveries

    def _plan_from(self, start: LoaderState) -> ShardPlan | None:
        # An item that is a whole batch is none of the samples that a plan tells users about.
        return (
            None if self._source.item_is_batch else self._source.batches.plan_of(start)
        )

    def sources(self) -> Mapping[str, Drawn]:
        """Return what was drawn of each source of a mixture, up to the last batch that was delivered."""
        newest = self._newest
        start = self.start() if newest is None else newest.start
        samples = start.samples if newest is None else newest.at.samples
        plan = self._plan_from(start)
        if plan is None or not isinstance(plan.ordering, Mixing):
            raise ArgumentError(
                "sources() is for a loader over a paddle_shard.Mixture, with its own order."
            )
        return drawn_of(
            plan.ordering,
            start.epoch * plan.num_samples + samples,
        )

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

    def no_order(self) -> str | None:
        """Return whose order it is, if no plan knows it; None if one does."""
        if self._plan_from(LoaderState()) is not None:
            return None
        return self._no_index() or f"the loader's own {type(self._sampler).__name__}"

    def where(self, sample: Any, epoch: int | None) -> Where | list[Where] | None:
        """Return where a sample is delivered."""
        epoch = self.epoch if epoch is None else epoch
        newest = self._newest
        if (
            newest is not None
            and newest.epoch == epoch
            and (epoch != self.epoch or not newest.finished)
        ):
            start = newest.start  # as the epoch was, or is, served
        else:
            start = self.start(epoch)
        plan = self._plan_from(start)
        if plan is None:
            raise ArgumentError(
                f"where() cannot be asked: the order is that of {self.no_order()}."
            )
        return places_of(
            plan, epoch, sample, self.skips(start), self._source.batches.deal
        )

    def certificate(self) -> Certificate:
        """Return what all ranks have delivered of the epoch in which this run was last; collective."""
        if (why := self._no_index()) is not None:
            raise ArgumentError(
                f"certificate() cannot tell how often a sample should be delivered: this is {why}."
            )
        newest = self._newest
        last = newest or self._resumed
        epoch = self.epoch if last is None else last.epoch
        start = self.start(epoch) if newest is None else newest.start
        plan = self._plan_from(start)
        # That of the epoch in which the run stands as well, for a state that is saved now.
        of_epochs = {
            one: self._of_epoch(one) for one in sorted({epoch, self.state().epoch})
        }
        # A rank that has delivered nothing says so: its replicas must have delivered nothing, too.
        nothing = {} if self._place is None else {self._place: Delivered()}
        said = [
            (account_to_json(one.known), account_to_json({**nothing, **one.own}))
            for one in of_epochs.values()
        ]
        told = gathered(said, self.ranks, self._timeout, "certificate()")
        accounts = {
            one: [
                (account_from_json(known), account_from_json(own))
                for known, own in (rank[at] for rank in told)
            ]
            for at, one in enumerate(of_epochs)
        }
        end, drawn_by = (
            of_epochs[epoch].end,
            f"the loader's {type(self._sampler).__name__}",
        )
        if (
            length := self._source.batches.fingerprint().get("num_samples")
        ) is not None:
            drawn_by += (
                f" over a data set of {length}"  # it may have drawn a part of it only
            )
        found = certify(accounts[epoch], epoch, plan, self.skips(start), end, drawn_by)
        for one in accounts:  # what all ranks have delivered replaces what this one has
            of_one = self._epochs.get(one, EpochDeliveries())
            passes = tuple((progress, progress.fold()) for progress, _ in of_one.passes)
            self._epochs[one] = EpochDeliveries(
                merged(accounts[one])[0], passes=passes, end=of_one.end
            )
        if last is not None:
            self._note(
                "certificate",
                self._counted(last if isinstance(last, LoaderState) else last.state()),
            )
        return found


def gathered(
    said: Any, ranks: tuple[int, ...], timeout: float | None, call: str
) -> list[Any]:
    """Return what each of some ranks says, this one included, as JSON values; collective over them.

    Raises:
        ArgumentError: This rank is none of them.
        PeerLostError: Another rank has not made the call.
    """
    if dist.get_rank() not in ranks:
        raise ArgumentError(
            f"{call}: global rank {dist.get_rank()} is on none of the loader's meshes, and has delivered nothing. Call "
            "it on the ranks of the meshes, all of them."
        )
    try:
        return [
            json.loads(one) for one in gather_of(ranks, json.dumps(said), timeout, call)
        ]
    except PeerLostError as lost:
        lost.args = (
            f"{call}: every rank of the meshes must call it, at the same step. {lost}",
        )
        raise
