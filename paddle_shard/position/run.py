"""Where does the run stand: which epoch, how far, and what has been delivered?"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import paddle.distributed as dist
import paddle.io

from paddle_shard.checks import check_count
from paddle_shard.errors import ArgumentError, PeerLostError, StateError, described
from paddle_shard.inputs.identity import differences
from paddle_shard.inputs.source import Source
from paddle_shard.place.field import FieldLayout
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
from paddle_shard.plan.mixture import MAX_DRAWS, Drawn, Mixing, drawn_of
from paddle_shard.plan.shard_plan import ShardPlan, Where, num_steps_left_out, places_of
from paddle_shard.plan.skips import Skips
from paddle_shard.plan.state import DATA, History, LoaderState
from paddle_shard.plan.step import Ids, Step
from paddle_shard.plan.weights import integer_weights
from paddle_shard.position.leaving_out import numbers_of, stretches_of
from paddle_shard.ranks.agreeing import gather_of
from paddle_shard.record.recorder import Recorder, position
from paddle_shard.samplers.user_batches import owner_of, samplers
from paddle_shard.say_once import say_once

_CONTINUED = {DATA, "mixture", "num_samples", "packed", "tail"}
"""Names in `override` with which an epoch that was begun goes on with the samples that are left."""
_MOST_TEXT = 2000
"""Characters of an error that the record has."""

# What the passes have delivered

numbers = count(1)
"""Numbers the passes, and the events between them, in the order in which they occur."""


class PassProgress:
    """The position of one pass, and what it has delivered."""

    def __init__(
        self, start: LoaderState, segments: tuple[tuple[int, int], ...], place: Owner | None, num_steps: int | None
    ) -> None:
        """Begin at a position.

        Args:
            start: The state at which the pass begins.
            segments: (first position, batch size) of each stretch of the epoch.
            place: Who owns what this process delivers; None if it is not counted.
            num_steps: Steps of the whole epoch; None if they are only known at its end.
        """
        self.start, self.epoch = start, start.epoch
        self._place, self._num_steps = place, num_steps
        self.number = next(numbers)
        self.closed = False
        """True if the pass delivers no more."""
        self.noted_at = 0.0
        """When the newest batch was noted here, and handed to the user."""
        self.at = replace(start, segments=segments, certificate={})
        """The position, and what was delivered in this pass. It is one value, so that a signal handler that saves the
        state finds a batch as a whole or not at all."""

    def deliver(self, batch: Step, ids: Ids, lost: int, *, drawn: bool) -> None:
        """Count one more delivered batch, and those directly before it that were left out.

        Args:
            batch: The global batch.
            ids: Samples in this process's slice of the batch, without padding.
            lost: How many samples of the slice could not be read.
            drawn: True if the samples are counted that the user's sampler drew.
        """
        at, (passed, positions) = self.at, batch.passed
        steps, positions = at.steps + passed + 1, positions + batch.num_real
        samples = at.samples + positions
        ended = steps == self._num_steps if batch.last is None else batch.last
        totals: dict[Owner, Total] = {}
        if self._place is not None:
            totals[self._place] = total_of(ids, len(ids) + lost)
        if drawn and len(batch.drawn):
            totals[DRAWN] = total_of(batch.drawn, positions)
        account, once = dict(at.certificate), ((self.start.samples, samples),)
        for owner, total in totals.items():
            account[owner] = Delivered(once, (), plus(account.get(owner, Delivered()).total, total))
        found = replace(at, samples=samples, steps=steps, ended=ended, sampler=batch.sampler_state, certificate=account)
        self.noted_at = time.perf_counter()
        self.at = found

    def account(self, since: LoaderState) -> Account:
        """Return what was delivered since an earlier position of the pass."""
        at = self.at  # read once: another thread may deliver
        if at.samples == since.samples:
            return {}
        once, before = ((since.samples, at.samples),), since.certificate
        return {
            owner: Delivered(once, (), minus(found.total, before.get(owner, Delivered()).total))
            for owner, found in at.certificate.items()
        }

    def state(self) -> LoaderState:
        """Return the position as a state, without what the whole run knows."""
        at = self.at
        return replace(at, segments=tuple(one for one in at.segments if one[0] < at.samples) or at.segments[:1])


class OfEpoch(NamedTuple):
    """What this process knows of the deliveries of an epoch.

    It is replaced in one assignment, as the position of a pass is.
    """

    known: Account = MappingProxyType({})
    """What a saved state, or the last certificate, says."""
    own: Account = MappingProxyType({})
    """What the closed passes have delivered since then."""
    passes: tuple[tuple[PassProgress, LoaderState], ...] = ()
    """The other passes, and where each was at the last certificate, or when it began."""
    end: int | None = None
    """The position at which the user's sampler has ended; None if no pass has seen it."""

    def settled(self, *, open_too: bool = False) -> OfEpoch:
        """Return the same, with the closed passes, or all, added to `own`."""
        # Asked once each: the garbage collector may close a pass at any moment.
        asked = [(open_too or progress.closed, (progress, since)) for progress, since in self.passes]
        done = [entry for is_done, entry in asked if is_done]
        if not done:
            return self
        own = added(self.own, *(progress.account(since) for progress, since in done))
        end = next((progress.at.samples for progress, _ in reversed(self.passes) if progress.at.ended), self.end)
        return OfEpoch(self.known, own, tuple(entry for is_done, entry in asked if not is_done), end)


# The run


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
        self._source, self.ranks, self._timeout = source, ranks, timeout
        self._sampler = source.custom_sampler
        # The epoch of Paddle's own sampler is the loader's: it moves on there, as Paddle moves it, and users set it.
        self._shared = isinstance(self._sampler, paddle.io.DistributedBatchSampler)
        self._seen = self._epoch = self._samplers_epoch() or 0
        self._resumed: LoaderState | None = None
        self.first_pass = self._epoch_set = 0
        """Number of the first pass since a state was loaded: earlier ones are not of this run any more; and since the
        user has chosen the epoch."""
        self._newest: PassProgress | None = None
        """The pass that is the position of the run; None: the position is where a pass that is made now begins."""
        self._latest: PassProgress | None = None
        """The pass that was delivered from last, or came to its end."""
        indexed = source.stream is None and not source.item_is_batch
        self._place = (layout.data_rank, layout.num_data_ranks, 0) if indexed and layout.on_mesh else None
        self._epochs: dict[int, OfEpoch] = {}
        self._num_steps: int | None = None
        """Steps of an epoch of a sampler that had to be drawn to its end; counted once."""
        self.skips = Skips()
        """What the user leaves out."""
        self.identity: Mapping[str, Any] | None = None
        """What the data holds; None until the first iterator of the run begins."""
        self.recorder: Recorder | None = None
        """Writes the record of the run, if the user wants one and this rank is the one that writes it."""
        self._told: Any = None
        """The position at which the state was saved, if the newest line of the record tells that."""

    @property
    def plan(self) -> ShardPlan | None:
        """The order of the present epoch as this run serves it, unless the user's own sampler decides it."""
        return self._plan_from(self._present())

    def _present(self) -> LoaderState:
        """Return where the pass that is the position of the run began; if there is none, where the next one begins."""
        newest = self._newest
        return self.start() if newest is None or newest.epoch != self.epoch else newest.start

    @property
    def delivered_at(self) -> float:
        """When the newest batch was handed over since a state was loaded, by `time.perf_counter`; 0.0: none was."""
        return 0.0 if self._latest is None else self._latest.noted_at

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
            raise ArgumentError(f"set_epoch: the loader's sampler takes no {sorted(others)}.")
        loaded = self._resumed
        if loaded and loaded.samples and not loaded.ended and self._latest is None and epoch != loaded.epoch:
            say_once(
                f"set_epoch({epoch}): the loaded state stands in epoch {loaded.epoch}, after {loaded.samples} samples, "
                f"which no loop has continued yet. Begin with set_epoch({loaded.epoch}), or leave it out, to continue."
            )
        self._epoch, self._seen, self._epoch_set = epoch, self._samplers_epoch() or 0, next(numbers)
        if self._newest is not None and self._newest.epoch != self._epoch:
            self._newest = None

    def _tell_samplers(self, epoch: int, others: Mapping[str, Any] = MappingProxyType({})) -> int:
        """Call `set_epoch` of the user's samplers; return how many have one."""
        told = [sampler for sampler in samplers(self._sampler) if callable(getattr(sampler, "set_epoch", None))]
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

    def finished(self, progress: PassProgress) -> None:
        """Move on to the next epoch, when a pass over this one has come to its end."""
        if progress.number < self.first_pass:
            return
        if self._latest is None or progress.number >= self._latest.number:
            self._latest = progress
        if progress.at.steps == 0:
            say_once(
                "an epoch has ended without a batch: it is empty, or has less than fills one (tail='drop'). Use a "
                "smaller batch, or tail='pad' or 'fill'."
            )
        progress.at = replace(progress.at, ended=True)
        self._note("end", self._counted(progress.state()), ends=progress.number)
        self._source.batches.finished(progress.epoch)
        if progress.start is self._resumed:
            self._resumed = None
        if progress.epoch == self.epoch:
            self._epoch = progress.epoch + 1
            self._tell_samplers(self._epoch)  # as a run does that is resumed here
            if self._shared and owner_of(self._sampler) is not None:
                self._sampler.epoch = self._epoch
            self._seen = self._samplers_epoch() or 0
            self._newest = None
        elif progress is self._newest:
            self._newest = None

    # The position

    def start(self, epoch: int | None = None) -> LoaderState:
        """Return where a pass over an epoch, or the present one, begins if it is made now.

        That is the loaded position, until a pass from it has come to its end, or the beginning of the epoch.
        """
        epoch = self.epoch if epoch is None else epoch
        if self._resumed is not None and self._resumed.epoch == epoch:
            return self._resumed
        return LoaderState(epoch=epoch)

    def begin(self, start: LoaderState) -> PassProgress:
        """Return the progress of a pass that begins at a position."""
        source, plan, segments = self._source, self._plan_from(start), start.segments
        if plan is not None:
            segments = plan.segments or ((0, plan.batch_size),)
        elif source.stream is not None and source.batch_size is not None:  # those of others may be of any size
            segments = start.continued(source.batch_size)
        progress = PassProgress(start, segments, self._place, source.batches.known_steps(start))
        self._note("pass", start, begins=progress.number)
        # Of closed passes only the sums are kept. A copy, since a signal handler may use the loader in between.
        for epoch, found in list(self._epochs.items()):
            self._epochs[epoch] = found.settled()
        found = self._epochs.get(start.epoch, OfEpoch())
        self._epochs[start.epoch] = found._replace(passes=(*found.passes, (progress, progress.at)))
        return progress

    def delivered(self, progress: PassProgress, step: Step, ids: Ids, lost: int) -> None:
        """Note that a pass has delivered a batch.

        Args:
            progress: Of the pass.
            step: The step of the batch.
            ids: The samples in this process's slice of it.
            lost: How many more could not be read.
        """
        before = self._newest
        if progress.number >= self.first_pass and (before is None or progress.number > before.number):
            # Only now is the one before closed: `batches = iter(loader)` lets go of it after the next one has begun.
            left = before if before is not None and before.closed and before.number > self._epoch_set else None
            if left is not None and left.epoch == step.epoch and left.at.steps > progress.start.steps:
                say_once(
                    "a loop over this loader was left before its end, and the next one begins the same epoch again. "
                    "Call loader.set_epoch(the next) before it; or keep the iterator, batches = iter(loader), to "
                    "continue it."
                )
            self._newest = self._latest = progress
        progress.deliver(step, ids, lost, drawn=not self._source.split)

    def _of_epoch(self, epoch: int) -> OfEpoch:
        """Return what this process knows of the deliveries of an epoch, with all passes added up."""
        return self._epochs.get(epoch, OfEpoch()).settled(open_too=True)

    def num_batches(self) -> int:
        """Return how many batches a pass over the whole present epoch delivers."""
        plan, found = self.plan, self.num_steps_or_none(self._present())
        if found is None:
            found = self._num_steps = len(self._source.batches)
        return found if plan is None else found - num_steps_left_out(plan, self.epoch, self.skips)

    def num_steps_or_none(self, start: LoaderState) -> int | None:
        """Return the steps of the whole epoch of a position, if a sampler need not be drawn to its end for it."""
        known: int | None = self._source.batches.known_steps(start)
        return self._num_steps if known is None else known

    @property
    def history(self) -> History:
        """What was changed in the run: the order, and what is left out."""
        history: History = self._source.batches.history
        return replace(history, skips=self.skips)

    def state(self) -> LoaderState:
        """Return the position of the run."""
        batches, newest = self._source.batches, self._newest
        state = self.start() if newest is None else newest.state()
        if newest is None and state.sampler is None:
            state = replace(state, sampler=batches.snapshot())
        state = replace(self._counted(state), fingerprint=batches.fingerprint(), history=self.history)
        known = None if self._resumed is None else self._resumed.data
        return replace(state, data=known if self.identity is None else self.identity)

    def _counted(self, state: LoaderState) -> LoaderState:
        """Return a position with all that this process knows of the deliveries of its epoch."""
        found = self._of_epoch(state.epoch)
        return replace(state, certificate=added(found.known, found.own))

    def save(self) -> dict[str, Any]:
        """Return the position of the run as the user saves it."""
        state = self.state()
        told = state.epoch, state.samples, state.steps, state.ended, state.history
        if self._told != told:
            self._note("checkpoint", state)
            self._told = told
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
        history, self._told = self.history, None
        if state is not None:
            facts |= position(state)
        self.recorder.note(kind, history.to_json(), **{"passes": self._reached(), **facts})

    def _reached(self) -> list[tuple[int, int, int]]:
        """Return (number, steps, samples) of the passes that are not settled."""
        passes = [progress for found in list(self._epochs.values()) for progress, _ in found.passes]
        return [(one.number, one.at.steps, one.at.samples) for one in passes]

    def failed(self, progress: PassProgress, error: BaseException) -> None:
        """Note that a pass has failed."""
        self._note("error", of=progress.number, error=described(error)[:_MOST_TEXT])

    def resume_from(self, state: Mapping[str, Any], override: Collection[str]) -> None:
        """Move the run to a saved position."""
        batches = self._source.batches
        resumed = LoaderState.from_dict(state, batches.fingerprint(), override, batches.explained)
        reached = self._reached()
        batches.resume(resumed)
        if unlike := batches.unlike_before(resumed):
            say_once(unlike)
        then, now = resumed.fingerprint, batches.fingerprint()
        # Of data that has grown, and of other weights, the epoch that was begun is continued.
        others = [name for name in override if name not in _CONTINUED and then.get(name) != now.get(name)]
        if resumed.samples and not resumed.ended and others:
            what = "stream" if "stream" in others else "order"
            why = batches.explained(then.get("stream")) or f"the {what} is not that of the state"
            say_once(
                f"override={others}: {why}. "
                f"Epoch {resumed.epoch} was begun, and the {resumed.samples} samples that it has delivered are left "
                f"out by their positions in the {what} as it is now. If other samples are there, samples of this epoch "
                "are lost, and others are delivered twice; later epochs are whole. A state from the end of an epoch "
                "does not have this."
            )
        self.skips = self.skips.joined(resumed.history.skips.stretches, resumed.history.skips.samples)
        self._compare_identity(resumed.data, self.identity)
        self._resumed = resumed
        if self._place is not None:
            self._place = (*self._place[:2], resumed.samples)
        self._epochs = {resumed.epoch: OfEpoch(resumed.certificate, end=resumed.samples if resumed.ended else None)}
        self._newest = self._latest = None
        self.first_pass = next(numbers)
        self.set_epoch(resumed.epoch, {})
        self._note("resume", resumed, was=resumed.history.to_json(), override=sorted(override), passes=reached)

    # What the data holds

    def note_identity(self, identity: Mapping[str, Any]) -> None:
        """Note what the data holds, when the first iterator of the run begins.

        Raises:
            StateError: It is not what a loaded state knows of it.
        """
        self._compare_identity(None if self._resumed is None else self._resumed.data, identity)
        self.identity = identity

    @staticmethod
    def _compare_identity(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> None:
        if saved is not None and now is not None and (differ := differences(saved, now)):
            raise StateError(
                f"the data is not what it was when the state was saved: {differ}. Give the loader the data of the "
                f"state; or, to resume with this data, load_state_dict(state, override=[{DATA!r}])."
            )

    # What is delivered

    def _plan_from(self, start: LoaderState) -> ShardPlan | None:
        # An item that is a whole batch is none of the samples that a plan tells users about.
        return None if self._source.item_is_batch else self._source.batches.plan_of(start)

    def _mixing(self, plan: ShardPlan | None, what: str) -> Mixing:
        """Return the order of a mixture; refuse other data sets."""
        if plan is None or not isinstance(plan.ordering, Mixing):
            raise ArgumentError(f"{what} is for a loader over a paddle_shard.Mixture, with its own order.")
        return plan.ordering

    def set_weights(self, weights: Any, at: int | None) -> int:
        """Switch to other weights of a mixture; collective.

        Args:
            weights: Name -> weight of each source, the same on all ranks.
            at: The position of the run; None: the first one that no rank has requested.

        Returns:
            The position of the run.

        Raises:
            ArgumentError: The weights do not fit the sources, are not the same on all ranks, or the position was
                requested already; on all ranks.
        """
        batches = self._source.batches
        mixing = self._mixing(self._plan_from(LoaderState()), "set_weights()")
        position = self.state()
        if at is not None:
            at = check_count("at", at, 0, MAX_DRAWS)
        parts = list(integer_weights(mixing.names, weights, mixing.segments[-1].lengths))
        after = f"step {position.steps} of epoch {position.epoch}"
        said = {"parts": parts, "drawn": batches.drawn, "after": after, "at": at}
        found = gathered(said, self.ranks, self._timeout, "set_weights()")
        for rank, one in zip(self.ranks, found, strict=True):
            if one["parts"] != found[0]["parts"]:
                raise ArgumentError(
                    f"set_weights(): the weights must be the same on all ranks, got {found[0]['parts']} (in parts of "
                    f"the sum) on global rank {self.ranks[0]} and {one['parts']} on global rank {rank}."
                )
            if one["after"] != found[0]["after"]:
                raise ArgumentError(
                    f"set_weights(): called before {found[0]['after']} on global rank {self.ranks[0]}, and before "
                    f"{one['after']} on global rank {rank}. Call it on all ranks at the same step."
                )
            if one["at"] != found[0]["at"]:
                raise ArgumentError(
                    f"set_weights(): at is {found[0]['at']} on global rank {self.ranks[0]}, and {one['at']} on global "
                    f"rank {rank}. Give the same on all ranks."
                )
        drawn = max(int(one["drawn"]) for one in found)
        if at is not None and at < drawn:
            raise ArgumentError(
                f"set_weights(): at={at}, but a rank has requested the samples of the run up to {drawn} already. Give "
                f"at={drawn} or later, call it earlier, or leave at out."
            )
        at = drawn if at is None else at
        batches.set_weights(at, tuple(found[0]["parts"]))
        self._note("weights", at=at, weights=dict(zip(mixing.names, found[0]["parts"], strict=True)))
        return at

    def sources(self) -> Mapping[str, Drawn]:
        """Return what was drawn of each source of a mixture, up to the last batch that was delivered."""
        last = self._newest or self._latest
        start, at = (self.start(), self.start()) if last is None else (last.start, last.at)
        plan = self._plan_from(start)
        mixing = self._mixing(plan, "sources()")
        assert plan is not None
        return drawn_of(mixing, mixing.first_position(start.epoch, plan.num_samples) + at.samples)

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
        done = self._newest or (self._latest if epoch != self.epoch else None)
        # As the epoch was, is, or would be served.
        plan = self._plan_from(done.start if done is not None and done.epoch == epoch else self.start(epoch))
        if plan is None:
            raise ArgumentError(f"where() cannot be asked: the order is that of {self.no_order()}.")
        return places_of(plan, epoch, sample, self.skips, self._source.batches.deal)

    def skip(self, steps: Iterable[int], samples: Iterable[Any], epoch: int | None) -> None:
        """Leave out steps and samples, in passes that begin from now on."""
        if (why := self._no_index()) is not None and not self._source.item_is_batch:
            raise ArgumentError(f"skip() needs samples that have a number: this is {why}.")
        if self._newest is not None and not self._newest.closed:
            raise ArgumentError(
                "skip(): an iterator of the loader is open, which has read ahead. Close it, or load a state: what is "
                "left out holds for iterators that are made afterwards."
            )
        epoch = check_count("epoch", self.epoch if epoch is None else epoch, 0)
        start, left = self.start(epoch), self._newest
        if left is not None and left.epoch == epoch and left.at.steps > start.steps:
            raise ArgumentError(
                f"skip(): a loop over epoch {epoch} was left at step {left.at.steps}, and the next one would begin the "
                "epoch again. Load a state first (loader.load_state_dict(loader.state_dict()) continues it), or choose "
                "another epoch."
            )
        plan = self._plan_from(start)
        stretches = list(stretches_of(steps, start, plan, self._source, self.num_steps_or_none(start)))
        now, length = self.start(), 0 if plan is None else self._source.batches.plan.num_samples
        found = [(one, now.epoch, now.samples) for one in numbers_of(samples, plan, length)]
        self.skips = self.skips.joined(stretches, found)
        self._note("skip", stretches=stretches, num_samples=len(found))

    def certificate(self) -> Certificate:
        """Return what all ranks have delivered of the epoch in which this run was last; collective."""
        if (why := self._no_index()) is not None:
            raise ArgumentError(f"certificate() cannot tell how often a sample should be delivered: this is {why}.")
        last = self._latest or self._resumed
        epoch = self.epoch if last is None else last.epoch
        plan = self._plan_from(self.start(epoch) if self._latest is None else self._latest.start)
        # That of the epoch in which the run stands as well, for a state that is saved now.
        of_epochs = {one: self._of_epoch(one) for one in sorted({epoch, self.state().epoch})}
        # A rank that has delivered nothing says so: its replicas must have delivered nothing, too.
        nothing = {} if self._place is None else {self._place: Delivered()}
        said = [(account_to_json(one.known), account_to_json({**nothing, **one.own})) for one in of_epochs.values()]
        told = gathered(said, self.ranks, self._timeout, "certificate()")
        accounts = {
            one: [(account_from_json(known), account_from_json(own)) for known, own in (rank[at] for rank in told)]
            for at, one in enumerate(of_epochs)
        }
        end, drawn_by = of_epochs[epoch].end, f"the loader's {type(self._sampler).__name__}"
        if (length := self._source.batches.fingerprint().get("num_samples")) is not None:
            drawn_by += f" over a data set of {length}"  # it may have drawn a part of it only
        found = certify(accounts[epoch], epoch, plan, self.skips, end, drawn_by)
        for one in accounts:  # what all ranks have delivered replaces what this one has
            of_one = self._epochs.get(one, OfEpoch())
            passes = tuple((progress, progress.at) for progress, _ in of_one.passes)
            self._epochs[one] = OfEpoch(merged(accounts[one])[0], passes=passes, end=of_one.end)
        if last is not None:
            self._note("certificate", self._counted(last if isinstance(last, LoaderState) else last.state()))
        return found


def gathered(said: Any, ranks: tuple[int, ...], timeout: float | None, call: str) -> list[Any]:
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
        return [json.loads(one) for one in gather_of(ranks, json.dumps(said), timeout, call)]
    except PeerLostError as lost:
        lost.args = (f"{call}: every rank of the meshes must call it, at the same step. {lost}",)
        raise
