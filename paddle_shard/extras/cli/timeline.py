"""Which job of a run delivered which positions of each epoch, as far as the run's record tells?

A `Job` is one start of the ranks. What it did between two loads of a state is a `Stretch`: it begins at a position that
another stretch has reached. The stretches from the last one back to the first are the run; what others delivered, or
these after the position at which the next one began, is not in the model that came out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.orders import ordering_of
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.plan.shard_plan import BatchSizes, ShardPlan, rows_of_sample
from paddle_shard.plan.skips import Ranges, steps_of_epoch
from paddle_shard.plan.state import LoaderState, sealed
from paddle_shard.samplers import PlanBatches


@dataclass(frozen=True)
class Job:
    """One start of the ranks, as its first line describes it."""

    number: int
    """From 1, in the order in which they began."""
    facts: dict[str, Any]

    @property
    def meshes(self) -> list[tuple[MeshLayout, list[str]]]:
        """Each mesh with its data axes."""
        found = [(one["axes"], one["process_ids"], one["data_axes"]) for one in self.facts["meshes"]]
        return [(MeshLayout(shape=axes.values(), axes=axes, process_ids=ids), data) for axes, ids, data in found]

    @property
    def holders(self) -> list[tuple[MeshLayout, list[str]]]:
        """The meshes whose ranks have the rows of a step; none if rows were dealt by cost (`balance=`)."""
        return [] if self.facts["dealt"] else self.meshes

    @property
    def unknown(self) -> str | None:
        """Why nobody but the loader knows its order; None if the record tells it."""
        if self.facts["order_of"] is not None:
            return f"the order is that of {self.facts['order_of']}"
        if ordering_of(self.facts["fingerprint"]) is None:
            return f"shuffle={self.facts['fingerprint']['shuffle']!r} is an order of your own"
        return None

    def parts_plan(self, **others: Any) -> PartsPlan | None:
        """Return how the batches of its stream are made of parts; None if it has none. `others`: see `batches`."""
        parts = self.facts["data"].get("num_parts")
        return None if parts is None else PartsPlan(num_parts=parts, **{**self.facts["plan"], **others})

    def batches(self, **others: Any) -> PlanBatches:
        """Return the order that this job served.

        Args:
            others: Another `batch_size`, or another number of data ranks, than it had.

        Raises:
            ArgumentError: Nobody but the loader knows it.
        """
        if (why := self.unknown) is not None:
            raise ArgumentError(f"job {self.number}: {why}, so the record has positions and no samples.")
        sizes = self.facts["sizes"] and BatchSizes(tuple(map(tuple, self.facts["sizes"])))
        return PlanBatches.of_run(self.facts["fingerprint"], sizes, **{**self.facts["plan"], **others})


@dataclass(frozen=True)
class Leg:
    """What a pass delivered, from one position to another, as far as it counts."""

    job: Job
    number: int
    """Of the pass."""
    start: LoaderState
    steps: int
    """Step of the epoch after the last one that was delivered."""
    samples: int
    """Position of the epoch after the last one that was delivered."""
    ended: bool = False
    """True if the pass came to the end of the epoch."""
    override: tuple[str, ...] = ()
    """What was another in the state that it was resumed from, as `load_state_dict` was told."""
    closed: bool = False
    """Whether a later pass has found that nothing is left of the epoch, as in larger batches with `tail="drop"`."""

    @property
    def skips(self) -> Ranges:
        """The skipped steps of its epoch."""
        return steps_of_epoch(tuple(map(tuple, self.job.facts["skip_steps"])), self.start.steps_before)

    def moved(self) -> bool:
        """Return whether it has delivered anything."""
        return self.steps > self.start.steps

    @cached_property
    def plan(self) -> ShardPlan:
        """The order of its epoch, as it was served; an ArgumentError if nobody but the loader knows it."""
        plan = self.job.batches().plan_of(self.start)
        if not self.closed or self.samples >= plan.num_served:
            return plan
        size = plan.batch_size
        return replace(plan, segments=(*(plan.segments or ((0, size),)), (self.samples, size)), ended=True)


@dataclass(frozen=True)
class Saved:
    """A position that a line tells."""

    line: dict[str, Any]
    state: LoaderState
    legs: tuple[Leg, ...]
    """What the run had delivered by then."""


@dataclass(kw_only=True)
class _Stretch:
    """Lines of a job, from a load on."""

    job: Job
    resumed: LoaderState | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    parent: tuple[_Stretch, int] | None = None
    """What it has continued, and how many lines of that there were by then; None: nothing that is known."""

    def state(self, at: int) -> LoaderState:
        """Return the state that a line holds, without what the loader alone needs."""
        fingerprint = self.job.facts["fingerprint"]
        now = {name: value for name, value in fingerprint.items() if name != "order_version"}
        saved = {**self.lines[at]["state"], "fingerprint": fingerprint, "sampler": None, "data": None}
        return LoaderState.from_dict(sealed(saved), now)

    def legs(self) -> Iterator[dict[int, Leg]]:
        """Yield the passes as of each line, one dict that is changed."""
        found: dict[int, Leg] = {}
        override = () if self.resumed is None else tuple(self.lines[0]["override"])
        for at, line in enumerate(self.lines):
            if line["line"] == "pass":
                start, number = self.state(at), line["begins"]
                found[number] = Leg(self.job, number, start, start.steps, start.samples, override=override)
            for number, steps, samples in line["passes"]:
                if number in found and steps > found[number].steps:
                    found[number] = replace(found[number], steps=steps, samples=samples)
            if line["line"] == "end" and line["ends"] in found:
                found[line["ends"]] = replace(found[line["ends"]], ended=True)
            yield found


@dataclass(kw_only=True)
class Timeline:
    """What a record tells of a run."""

    last: Job
    """The newest of those that belong to the run."""
    began_at: LoaderState | None
    """The position from which the oldest job was resumed, if no line tells how it was reached; None: it began anew."""
    legs: list[Leg] = field(default_factory=list)
    """What counts, in the order in which it was delivered."""
    open: Leg | None = None
    """The newest pass, if it has not come to its end: it may have delivered more than any line tells."""
    lost: list[Leg] = field(default_factory=list)
    """What was delivered and does not count, since no saved position holds it that the run was resumed from."""
    saved: list[Saved] = field(default_factory=list)
    """The positions on the way at which the state was saved, in order."""
    newest: dict[int, Saved] = field(default_factory=dict)
    """The newest position of each epoch that a line tells, with what its job knows to be delivered."""

    @property
    def epochs(self) -> list[int]:
        """The epochs of which something was delivered."""
        return sorted({leg.start.epoch for leg in self.legs})

    @property
    def untold(self) -> list[str]:
        """Return what has to be known of a run that had begun before any line tells of it."""
        at, what = self.began_at, "no line tells how it came there: what it had by then is not known."
        return [] if at is None else [f"The run was resumed at step {at.steps} of epoch {at.epoch}, and {what}"]

    def legs_of(self, epoch: int) -> list[Leg]:
        """Return what was delivered of an epoch."""
        return [leg for leg in self.legs if leg.start.epoch == epoch]

    @property
    def passes(self) -> list[tuple[Leg, float]]:
        """What was delivered, with the step before which it ends, told by a line or not."""
        found: list[tuple[Leg, float]] = [(leg, leg.steps) for leg in self.legs if leg is not self.open]
        if self.open is not None:
            found.append((self.open, math.inf if self.open.job.unknown is not None else self.open.plan.num_steps))
        return found


def timeline(lines: Sequence[dict[str, Any]]) -> Timeline:
    """Return what the lines of a record tell.

    Raises:
        ArgumentError: They tell nothing.
        StateError: A state in them is damaged, or of another version.
    """
    begun = [one for one in _stretches(lines) if one.lines]
    if not begun:
        raise ArgumentError("the record tells of no pass yet.")
    # What counts is the newest stretch, and what leads to it. A line of a load ends one stretch and begins the next.
    alive = [one for one in begun if all(line["line"] != "taken over" for line in one.lines)] or begun
    newest = max(reversed(alive), key=lambda one: (one.lines[-1]["number"], one.lines[0]["number"]))
    way, at = {id(newest): len(newest.lines)}, newest
    while at.parent is not None:
        at, upto = at.parent
        way[id(at)] = upto
    found = Timeline(last=newest.job, began_at=at.resumed)
    for stretch in begun:
        counted, legs = dict[int, Leg](), dict[int, Leg]()
        for at_line, legs in enumerate(stretch.legs()):
            if at_line < way.get(id(stretch), 0):
                line, counted = stretch.lines[at_line], dict(legs)
                if line["line"] in ("checkpoint", "end", "certificate"):
                    by_then = (*found.legs, *filter(Leg.moved, counted.values()))
                    told = found.newest[line["state"]["epoch"]] = Saved(line, stretch.state(at_line), by_then)
                    found.saved += [told] if line["line"] == "checkpoint" else []
        for leg in counted.values():
            if leg.moved():
                found.legs.append(leg)
            elif leg.ended or leg.start.ended:
                # That there was no more is told of the pass that delivered the last of it.
                for number, one in enumerate(found.legs):
                    if one.start.epoch == leg.start.epoch and one.samples == leg.start.samples and not one.ended:
                        found.legs[number] = replace(one, ended=True, closed=True)
        for leg in legs.values():
            upto_here = counted.get(leg.number, leg.start)
            start = replace(leg.start, steps=upto_here.steps, samples=upto_here.samples)
            found.lost += filter(Leg.moved, [replace(leg, start=start)])
        if stretch is newest and counted and not (last := counted[max(counted)]).ended:
            found.open = last
    return found


def _stretches(lines: Sequence[dict[str, Any]]) -> list[_Stretch]:
    """Return the stretches, each with what it has continued."""
    found, now = list[_Stretch](), dict[str, _Stretch]()
    for line in lines:
        if line["line"] == "begin":
            one = now[line["digest"]] = _Stretch(job=Job(len(now) + 1, line))
            found.append(one)
        elif line["job"] in now:  # else its first line is gone
            one = now[line["job"]]
            one.lines.append(line)
            if line["line"] == "resume":  # it also says how far the passes before it have come
                one = now[line["job"]] = _Stretch(job=one.job, lines=one.lines[-1:])
                one.resumed = one.state(0)
                one.parent = _reached_by(found, one.resumed)
                found.append(one)
    return found


def _reached_by(stretches: list[_Stretch], wanted: LoaderState) -> tuple[_Stretch, int] | None:
    """Return the newest stretch in which a state was saved, and the number of its lines by then.

    Another rank's state has another account, and so has one that was saved again after `certificate()`. But who has
    the same one comes first: two jobs may have come to the same position.
    """
    found: tuple[_Stretch, int] | None = None
    for one in reversed(stretches):
        for at, line in reversed(list(enumerate(one.lines))):
            # The epoch first: it takes long to read a whole state.
            if line["line"] != "checkpoint" or line["state"]["epoch"] != wanted.epoch:
                continue
            state = replace(one.state(at), fingerprint=wanted.fingerprint)
            if replace(state, certificate=wanted.certificate) == wanted:
                if state == wanted:
                    return one, at + 1
                found = found or (one, at + 1)
    return found


def places_in(run: Timeline, sample: Any) -> Iterator[tuple[Leg, int, int]]:
    """Yield (what has delivered it, step, row of the global batch) for each delivery of a sample.

    The newest pass may have delivered it after the newest line, too: at a step that is not before `leg.steps`.
    """
    passes, unknown = run.passes, list[ArgumentError]()
    for leg, end_step in passes:
        plan, ranks = leg.plan, leg.job.facts["plan"]["num_data_ranks"]
        try:
            found = list(rows_of_sample(plan, leg.start.epoch, sample, leg.skips))
        except ArgumentError as error:  # data that has grown has it later
            unknown.append(error)
            continue
        for step, row in found:
            # A short last batch that cannot be split was never delivered.
            if leg.start.steps <= step < end_step and plan.num_rows(step=step) % ranks == 0:
                yield leg, step, row
    if passes and len(unknown) == len(passes):
        raise unknown[-1]
