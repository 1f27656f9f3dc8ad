"""The timeline of a run: which job delivered which positions of each epoch, as far as the record tells.

A `Job` is one start of the ranks. A `_Segment` is its lines between two loads of a state, and begins at a position that
another segment has reached. The segments from the newest one back to the first are the run. What other segments
delivered, or these after the position at which the next one began, does not count: the model has not seen it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from paddle_shard.data.samplers import PlanBatches
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.orders import ordering_of
from paddle_shard.plan.shard_plan import BatchSizes, ShardPlan, rows_of_sample
from paddle_shard.plan.skips import Ranges, steps_of_epoch
from paddle_shard.plan.state import LoaderState, sealed


@dataclass(frozen=True)
class Job:
    """One start of the ranks, as its first line describes it."""

    number: int
    """From 1, in the order in which they began."""
    facts: dict[str, Any]

    @property
    def meshes(self) -> list[tuple[MeshLayout, list[str]]]:
        """Each mesh with its data axes."""
        return [
            (
                MeshLayout(
                    shape=mesh["axes"].values(),
                    axes=mesh["axes"],
                    process_ids=mesh["process_ids"],
                ),
                mesh["data_axes"],
            )
            for mesh in self.facts["meshes"]
        ]

    @property
    def holders(self) -> list[tuple[MeshLayout, list[str]]]:
        """The meshes whose ranks hold the rows of a step; none if rows were balanced by cost (`balance=`)."""
        return [] if self.facts["dealt"] else self.meshes

    @property
    def unknown(self) -> str | None:
        """Why only the loader knows its order; None if the record tells it."""
        if self.facts["order_of"] is not None:
            return f"the order is that of {self.facts['order_of']}"
        if ordering_of(self.facts["fingerprint"]) is None:
            return f"shuffle={self.facts['fingerprint']['shuffle']!r} is an order of your own"
        return None

    def batches(self) -> PlanBatches:
        """Return the order that this job served.

        Raises:
            ArgumentError: Only the loader knows it.
        """
        if self.unknown is not None:
            raise ArgumentError(
                f"job {self.number}: {self.unknown}, so the record has positions and no samples."
            )
        sizes = self.facts["sizes"] and BatchSizes(
            tuple(map(tuple, self.facts["sizes"]))
        )
        return PlanBatches.of_run(
            self.facts["fingerprint"], sizes, **self.facts["plan"]
        )


@dataclass(frozen=True)
class Leg:
    """Positions of one epoch that one loop of a job delivered."""

    job: Job
    number: int
    """Number of the loop."""
    start: LoaderState
    steps: int
    """Step of the epoch after the last one that was delivered."""
    samples: int
    """Position of the epoch after the last one that was delivered."""
    ended: bool = False
    """Whether the loop came to the end of the epoch."""
    override: tuple[str, ...] = ()
    """Fields of the loaded state that differed, as `load_state_dict(override=)` accepted them."""
    closed: bool = False
    """Whether a later loop found that nothing is left of the epoch, as in larger batches with `tail="drop"`."""

    @property
    def skips(self) -> Ranges:
        """The skipped steps of its epoch."""
        return steps_of_epoch(
            tuple(map(tuple, self.job.facts["skip_steps"])), self.start.steps_before
        )

    @property
    def moved(self) -> bool:
        """Whether it delivered anything."""
        return self.steps > self.start.steps

    @cached_property
    def plan(self) -> ShardPlan:
        """The order of its epoch, as it was served; an ArgumentError if only the loader knows it."""
        plan = self.job.batches().plan_of(self.start)
        if not self.closed or self.samples >= plan.num_served:
            return plan
        segments = plan.segments or ((0, plan.batch_size),)
        return replace(
            plan, segments=(*segments, (self.samples, plan.batch_size)), ended=True
        )


@dataclass(frozen=True)
class Saved:
    """A position that a line tells, with the legs by then."""

    state: LoaderState
    legs: tuple[Leg, ...]


@dataclass(kw_only=True)
class Timeline:
    """The run that a record tells of."""

    last: Job
    """Its newest job."""
    began_at: LoaderState | None
    """The position from which its first job was resumed, if no line tells how it was reached; None: it began anew."""
    legs: list[Leg] = field(default_factory=list)
    """What counts, in the order of delivery."""
    open: Leg | None = None
    """The newest leg, if its loop has not ended: it may have delivered more than any line tells."""
    lost: list[Leg] = field(default_factory=list)
    """What does not count, since no position that the run was resumed from holds it."""
    newest: dict[int, Saved] = field(default_factory=dict)
    """The newest position of each epoch."""

    @property
    def epochs(self) -> list[int]:
        """The epochs of which something was delivered."""
        return sorted({leg.start.epoch for leg in self.legs})

    @property
    def untold(self) -> list[str]:
        """A note for a run that had begun before any line tells of it."""
        at = self.began_at
        if at is None:
            return []
        what = "no line tells how it came there: what it had by then is not known."
        return [
            f"The run was resumed at step {at.steps} of epoch {at.epoch}, and {what}"
        ]

    def legs_of(self, epoch: int) -> list[Leg]:
        """Return what was delivered of an epoch."""
        return [leg for leg in self.legs if leg.start.epoch == epoch]

    @property
    def passes(self) -> list[tuple[Leg, int]]:
        """Each leg with the step before which it ends, whether a line tells it or not.

        Raises:
            ArgumentError: Only the loader knows the order of the newest one.
        """
        passes = [(leg, leg.steps) for leg in self.legs if leg is not self.open]
        if self.open is not None:
            passes.append((self.open, self.open.plan.num_steps))
        return passes


@dataclass(kw_only=True)
class _Segment:
    """Lines of a job, from a load on."""

    job: Job
    resumed: LoaderState | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    parent: _Segment | None = None
    """The segment that it continues; None if no line tells it."""
    num_parent_lines: int = 0
    """How many lines of the parent lead to it."""

    def state(self, number: int) -> LoaderState:
        """Return the state in a line, without what only the loader needs."""
        fingerprint = self.job.facts["fingerprint"]
        order = {
            name: value
            for name, value in fingerprint.items()
            if name != "order_version"
        }
        rest = {"fingerprint": fingerprint, "sampler": None, "data": None}
        return LoaderState.from_dict(
            sealed({**self.lines[number]["state"], **rest}), order
        )

    def legs(self) -> Iterator[dict[int, Leg]]:
        """Yield the legs by the number of their loop, as of each line."""
        legs: dict[int, Leg] = {}
        override = () if self.resumed is None else tuple(self.lines[0]["override"])
        for at, line in enumerate(self.lines):
            if line["line"] == "pass":
                start = self.state(at)
                number = line["begins"]
                legs[number] = Leg(
                    self.job,
                    number,
                    start,
                    start.steps,
                    start.samples,
                    override=override,
                )
            for number, steps, samples in line["passes"]:
                leg = legs.get(number)
                if leg is not None and steps > leg.steps:
                    legs[number] = replace(leg, steps=steps, samples=samples)
            if line["line"] == "end" and line["ends"] in legs:
                legs[line["ends"]] = replace(legs[line["ends"]], ended=True)
            yield dict(legs)


def timeline(lines: Sequence[dict[str, Any]]) -> Timeline:
    """Return the run that the lines of a record tell of.

    Raises:
        ArgumentError: They tell of none.
        StateError: A state in them is damaged, or of another version.
    """
    segments = [segment for segment in _segments(lines) if segment.lines]
    if not segments:
        raise ArgumentError("the record tells of no pass yet.")
    # The newest segment is the end of the run. Count the lines of each segment that lead to it.
    newest = segments[-1]
    num_counted = {id(newest): len(newest.lines)}
    first = newest
    while first.parent is not None:
        num_counted[id(first.parent)] = first.num_parent_lines
        first = first.parent

    run = Timeline(last=newest.job, began_at=first.resumed)
    for segment in segments:
        _add(run, segment, num_counted.get(id(segment), 0), is_newest=segment is newest)
    return run


def _add(
    run: Timeline, segment: _Segment, num_counted: int, *, is_newest: bool
) -> None:
    """Add the legs of a segment to a run; those of its first `num_counted` lines count."""
    counted: dict[int, Leg] = {}
    legs: dict[int, Leg] = {}
    for number, legs in enumerate(segment.legs()):
        if number >= num_counted:
            continue
        counted = legs
        line = segment.lines[number]
        if line["line"] in ("checkpoint", "end", "certificate"):
            by_then = (*run.legs, *(leg for leg in legs.values() if leg.moved))
            run.newest[line["state"]["epoch"]] = Saved(segment.state(number), by_then)
    for leg in counted.values():
        if leg.moved:
            run.legs.append(leg)
        elif leg.ended or leg.start.ended:
            _close(run, leg)
    for leg in legs.values():
        reached = counted.get(leg.number, leg.start)
        rest = replace(
            leg, start=replace(leg.start, steps=reached.steps, samples=reached.samples)
        )
        if rest.moved:
            run.lost.append(rest)
    if is_newest and counted:
        last = counted[max(counted)]
        run.open = None if last.ended else last


def _close(run: Timeline, empty: Leg) -> None:
    """Mark the leg that delivered the last of an epoch, of which a later, empty leg found the end."""
    for number, leg in enumerate(run.legs):
        if (
            leg.start.epoch == empty.start.epoch
            and leg.samples == empty.start.samples
            and not leg.ended
        ):
            run.legs[number] = replace(leg, ended=True, closed=True)


def _segments(lines: Sequence[dict[str, Any]]) -> list[_Segment]:
    """Return the segments, each with its parent. A line of a load ends one segment and begins the next."""
    segments: list[_Segment] = []
    current: dict[str, _Segment] = {}
    for line in lines:
        if line["line"] == "begin":
            segment = _Segment(job=Job(len(current) + 1, line))
            current[line["digest"]] = segment
            segments.append(segment)
        elif line["job"] in current:  # else its first line is gone
            segment = current[line["job"]]
            segment.lines.append(line)
            if line["line"] == "resume":
                segment = _Segment(job=segment.job, lines=segment.lines[-1:])
                segment.resumed = segment.state(0)
                segment.parent, segment.num_parent_lines = _parent_of(
                    segments, segment.resumed
                )
                current[line["job"]] = segment
                segments.append(segment)
    return segments


def _parent_of(
    segments: list[_Segment], wanted: LoaderState
) -> tuple[_Segment | None, int]:
    """Return the newest segment that saved a state, and the number of its lines by then.

    A state of another rank, or one saved again after `certificate()`, differs in its certificate. An equal state comes
    first, since two jobs may have reached one position.
    """
    similar: tuple[_Segment | None, int] = (None, 0)
    for segment in reversed(segments):
        for number, line in reversed(list(enumerate(segment.lines))):
            # The epoch first: reading a whole state takes long.
            if line["line"] != "checkpoint" or line["state"]["epoch"] != wanted.epoch:
                continue
            state = replace(segment.state(number), fingerprint=wanted.fingerprint)
            if state == wanted:
                return segment, number + 1
            if (
                similar[0] is None
                and replace(state, certificate=wanted.certificate) == wanted
            ):
                similar = (segment, number + 1)
    return similar


def places_in(run: Timeline, sample: Any) -> Iterator[tuple[Leg, int, int]]:
    """Yield (leg, step, row of the global batch) for each delivery of a sample.

    The newest leg may have delivered it after the newest line: at a step that is not before `leg.steps`.
    """
    errors: list[ArgumentError] = []
    for leg, end_step in run.passes:
        num_data_ranks = leg.job.facts["plan"]["num_data_ranks"]
        plan = leg.plan
        try:
            rows = list(rows_of_sample(plan, leg.start.epoch, sample, leg.skips))
        except ArgumentError as error:  # data that has grown has it later
            errors.append(error)
            continue
        for step, row in rows:
            # A short last batch that cannot be split was never delivered.
            if (
                leg.start.steps <= step < end_step
                and plan.num_rows(step=step) % num_data_ranks == 0
            ):
                yield leg, step, row
    if errors and len(errors) == len(run.passes):
        raise errors[-1]
