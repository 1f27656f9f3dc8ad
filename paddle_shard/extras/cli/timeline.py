"""The timeline of a run: which job delivered which positions of each epoch, as far as the record shows.

A job segment is the lines of one start of the ranks between two loads of a state. The run is the newest segment, and
back from each segment the newest one before it that saved the position from which it was resumed. What other segments
delivered, or these after that position, does not count: the model has not seen it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from paddle_shard.data.samplers.plan_batches import PlanBatches
from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.answer import Json
from paddle_shard.extras.cli.places import Meshes
from paddle_shard.plan.certificate import Account
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.orders import ordering_of
from paddle_shard.plan.shard_plan import BatchSizes, ShardPlan, rows_of_sample
from paddle_shard.plan.skips import Ranges, steps_of_epoch
from paddle_shard.plan.state import LoaderState, sealed

_WITH_STATES = ("checkpoint", "end", "certificate")
"""Kinds of lines that hold a state of the deliveries so far."""


@dataclass(frozen=True)
class RecordedJob:
    """One start of the ranks, as its first line describes it."""

    number: int
    """From 1, in the order in which they began."""
    first_line: Json

    @cached_property
    def meshes(self) -> Meshes:
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
            for mesh in self.first_line["meshes"]
        ]

    @property
    def holders(self) -> Meshes:
        """The meshes whose ranks hold the rows of a step; none if rows were balanced by cost (`balance=`)."""
        return [] if self.first_line["dealt"] else self.meshes

    @property
    def unknown_order(self) -> str | None:
        """Why only the loader knows its order; None if the record has it."""
        if self.first_line["order_of"] is not None:
            return f"the order is that of {self.first_line['order_of']}"
        if ordering_of(self.first_line["fingerprint"]) is None:
            return f"shuffle={self.first_line['fingerprint']['shuffle']!r} is an order of your own"
        return None

    def plan_of(self, start: LoaderState) -> ShardPlan:
        """Return the order of an epoch that this job serves from a position on.

        Raises:
            ArgumentError: Only the loader knows it.
        """
        if self.unknown_order is not None:
            raise ArgumentError(
                f"job {self.number}: {self.unknown_order}, so the record has positions and no samples."
            )
        sizes = self.first_line["sizes"]
        batches = PlanBatches.of_run(
            self.first_line["fingerprint"],
            sizes and BatchSizes(tuple(map(tuple, sizes))),
            **self.first_line["plan"],
        )
        return batches.plan_of(start)

    def state_in(self, line: Json) -> LoaderState:
        """Return the state in a line, without what only the loader needs."""
        order = self.first_line["fingerprint"]
        rest = {"fingerprint": order, "sampler": None, "data": None}
        return LoaderState.from_dict(sealed({**line["state"], **rest}), order)


@dataclass(kw_only=True)
class Delivery:
    """Positions of one epoch that one iterator of a job delivered."""

    job: RecordedJob
    start: LoaderState
    steps: int
    """Step of the epoch after the last one that was delivered."""
    samples: int
    """Position of the epoch after the last one that was delivered."""
    is_ended: bool
    """True if the iterator came to the end of the epoch."""
    is_open: bool = False
    """True if it may have delivered more than any line records: the newest one of the run, unless it has ended."""
    override: tuple[str, ...] = ()
    """Fields of the loaded state that differed, as `load_state_dict(override=)` accepted them."""

    @property
    def skips(self) -> Ranges:
        """The skipped steps of its epoch."""
        ranges = tuple(map(tuple, self.job.first_line["skip_steps"]))
        return steps_of_epoch(ranges, self.start.steps_before)

    @property
    def is_empty(self) -> bool:
        """True if no line records that it delivered anything."""
        return self.steps <= self.start.steps

    @property
    def end_step(self) -> int:
        """The step before which it ends, recorded or not."""
        return self.plan.num_steps if self.is_open else self.steps

    @cached_property
    def plan(self) -> ShardPlan:
        """The order of its epoch, as it was served; an ArgumentError if only the loader knows it."""
        return self.job.plan_of(self.start)


@dataclass(kw_only=True)
class Timeline:
    """The run in a record."""

    last_job: RecordedJob
    began_at: LoaderState | None
    """The position from which its first job resumed, if no line shows how it was reached; None: it started fresh."""
    deliveries: list[Delivery] = field(default_factory=list)
    """Deliveries that count, in their order; also empty ones, if they found the end of an epoch or are open."""
    lost: list[Delivery] = field(default_factory=list)
    """Deliveries that do not count, since no position from which the run was resumed holds them."""
    accounts: dict[int, Account] = field(default_factory=dict)
    """The deliveries of each epoch by its newest state."""

    @property
    def epochs(self) -> list[int]:
        """The epochs of which something was delivered, the one that was delivered from last as the last."""
        epochs = [
            delivery.start.epoch
            for delivery in self.deliveries
            if not delivery.is_empty
        ]
        return list(dict.fromkeys(reversed(epochs)))[::-1]

    @property
    def notes(self) -> list[str]:
        """A note for a run that began before its record."""
        if self.began_at is None:
            return []
        return [
            f"The run was resumed at step {self.began_at.steps} of epoch {self.began_at.epoch}, and no line shows "
            "how it came there: what was delivered before is not known."
        ]

    def places_of(self, sample: Any) -> Iterator[tuple[Delivery, int, int]]:
        """Yield (delivery, step, row of the global batch) for each delivery of a sample.

        Raises:
            ArgumentError: There is no such sample, or only the loader knows the order.
        """
        for delivery in self.deliveries:
            plan = delivery.plan
            try:
                rows = list(
                    rows_of_sample(
                        plan, delivery.start.epoch, sample, delivery.skips
                    )
                )
            except ArgumentError:
                if delivery is self.deliveries[-1]:
                    raise
                continue  # data that has grown has it later
            for step, row in rows:
                # A short last batch that cannot be split was never delivered.
                is_split = plan.num_rows(step=step) % plan.num_data_ranks == 0
                if (
                    delivery.start.steps <= step < delivery.end_step
                    and is_split
                ):
                    yield delivery, step, row


@dataclass(kw_only=True)
class _Segment:
    """Lines of a job, from a load on."""

    job: RecordedJob
    lines: list[Json] = field(default_factory=list)
    parent: _Segment | None = None
    """The segment that it continues; None if no line shows it."""
    num_parent_lines: int = 0
    """Number of lines of the parent that lead to it."""
    num_counted: int = 0
    """Number of lines that lead to the end of the run."""

    def deliveries(self, num_lines: int) -> dict[int, Delivery]:
        """Return the deliveries of the first lines, by the number of their iterator."""
        deliveries: dict[int, Delivery] = {}
        for line in self.lines[:num_lines]:
            if line["line"] == "pass":
                start = self.job.state_in(line)
                deliveries[line["begins"]] = Delivery(
                    job=self.job,
                    start=start,
                    steps=start.steps,
                    samples=start.samples,
                    is_ended=start.ended,
                    override=tuple(self.lines[0].get("override", ())),
                )
            for number, steps, samples in line["passes"]:
                delivery = deliveries.get(number)
                if delivery is not None and steps > delivery.steps:
                    delivery.steps = steps
                    delivery.samples = samples
            if line["line"] == "end" and line["ends"] in deliveries:
                deliveries[line["ends"]].is_ended = True
        return deliveries


def timeline(lines: Sequence[Json]) -> Timeline:
    """Return the run in the lines of a record.

    Raises:
        ArgumentError: There is none.
        StateError: A state in them is damaged, or of another version.
    """
    segments = [segment for segment in _segments(lines) if segment.lines]
    if not segments:
        raise ArgumentError("the record has no pass yet.")
    # The newest segment is the end of the run. Count the lines of each segment that lead to it.
    first = segments[-1]
    first.num_counted = len(first.lines)
    while first.parent is not None:
        first.parent.num_counted = first.num_parent_lines
        first = first.parent
    is_resumed = first.lines[0]["line"] == "resume"
    began_at = first.job.state_in(first.lines[0]) if is_resumed else None

    run = Timeline(last_job=segments[-1].job, began_at=began_at)
    counted = {}
    for segment in segments:
        counted = segment.deliveries(segment.num_counted)
        run.deliveries += counted.values()
        run.lost += _lost(segment, counted)
        for line in segment.lines[: segment.num_counted]:
            if line["line"] in _WITH_STATES:
                state = segment.job.state_in(line)
                run.accounts[state.epoch] = state.certificate
    for delivery in list(counted.values())[-1:]:
        delivery.is_open = not delivery.is_ended
    run.deliveries = [
        delivery
        for delivery in run.deliveries
        if delivery.is_open or delivery.is_ended or not delivery.is_empty
    ]
    return run


def _lost(
    segment: _Segment, counted: Mapping[int, Delivery]
) -> Iterator[Delivery]:
    """Yield what a segment delivered beyond what counts."""
    for number, delivery in segment.deliveries(len(segment.lines)).items():
        if number in counted:
            reached = counted[number]
            delivery.start = replace(
                delivery.start, steps=reached.steps, samples=reached.samples
            )
        if not delivery.is_empty:
            yield delivery


def _segments(lines: Sequence[Json]) -> list[_Segment]:
    """Return the segments, each with its parent. A line of a load ends one segment and begins the next."""
    segments: list[_Segment] = []
    current: dict[str, _Segment] = {}
    for line in lines:
        if line["line"] == "begin":
            current[line["digest"]] = _Segment(
                job=RecordedJob(len(current) + 1, line)
            )
            segments.append(current[line["digest"]])
        elif line["job"] in current:  # else its first line is gone
            segment = current[line["job"]]
            segment.lines.append(line)
            if line["line"] == "resume":
                parent, num_lines = _parent_of(segments, line)
                current[line["job"]] = _Segment(
                    job=segment.job,
                    lines=[line],
                    parent=parent,
                    num_parent_lines=num_lines,
                )
                segments.append(current[line["job"]])
    return segments


def _parent_of(
    segments: Sequence[_Segment], resume: Json
) -> tuple[_Segment | None, int]:
    """Return the newest segment that saved the position of a load, and the number of its lines by then."""
    for segment in reversed(segments):
        for number in range(len(segment.lines), 0, -1):
            line = segment.lines[number - 1]
            if line["line"] == "checkpoint" and _position(line) == _position(
                resume
            ):
                return segment, number
    return None, 0


def _position(line: Json) -> Json:
    """Return the state in a line without its certificate, which differs on another rank."""
    return {**line["state"], "certificate": None}
