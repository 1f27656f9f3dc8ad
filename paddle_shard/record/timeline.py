"""Which job of a run delivered which positions of each epoch, as far as the run's record tells?

A `Job` is one start of the ranks. What it did between two loads of a state is a `Stretch`: it begins at a position that
another stretch has reached. The stretches from the last one back to the first are the run; what others delivered, or
these after the position at which the next one began, is not in the model that came out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from paddle_shard.errors import ArgumentError, StateError
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.orders import ordering_of
from paddle_shard.plan.shard_plan import BatchSizes, ShardPlan
from paddle_shard.plan.skips import Skips
from paddle_shard.plan.state import History, LoaderState
from paddle_shard.samplers import PlanBatches


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start of the ranks, as its first line describes it."""

    number: int
    """From 1, in the order in which they began."""
    facts: dict[str, Any]

    @property
    def meshes(self) -> list[tuple[MeshLayout, list[str]]]:
        """Each mesh with its data axes."""
        found = []
        for mesh in self.facts["meshes"]:
            axes = mesh["axes"]
            layout = MeshLayout(shape=tuple(axes.values()), axes=tuple(axes), process_ids=tuple(mesh["process_ids"]))
            found.append((layout, mesh["data_axes"]))
        return found

    @property
    def unknown(self) -> str | None:
        """Why nobody but the loader knows its order; None if the record tells it."""
        if self.facts["order_of"] is not None:
            return f"the order is that of {self.facts['order_of']}"
        if ordering_of(self.facts["fingerprint"]) is None:
            return f"shuffle={self.facts['fingerprint']['shuffle']!r} is an order of your own"
        return None

    def batches(self, history: History, **others: Any) -> PlanBatches:
        """Return the order that this job served.

        Args:
            history: What was changed in the run.
            others: Another `batch_size`, or another number of data ranks, than it had.

        Raises:
            ArgumentError: Nobody but the loader knows it.
        """
        if (why := self.unknown) is not None:
            raise ArgumentError(f"job {self.number}: {why}, so the record has positions and no samples.")
        known, order = self.facts["fingerprint"], {**self.facts["plan"], **others}
        ordering = ordering_of(known)
        assert ordering is not None
        plan = ShardPlan(
            num_samples=known["num_samples"],
            batch_size=order["batch_size"],
            num_data_ranks=order["num_data_ranks"],
            shuffle=ordering,
            seed=known["seed"],
            tail=known["tail"],
            accumulation=order["accumulation"],
        )
        sizes = order["sizes"] and BatchSizes(tuple((first, rows) for first, rows in order["sizes"]))
        found = PlanBatches(plan, {name: known[name] for name in ("packed",) if name in known}, sizes or None)
        found.resume(LoaderState(history=history, fingerprint=found.fingerprint()))
        return found

    def state(self, line: dict[str, Any], history: Any) -> LoaderState:
        """Return the state that a line holds, without what the loader alone needs.

        Raises:
            StateError: The line is damaged, or of another version.
        """
        known = {"fingerprint": self.facts["fingerprint"], "history": history, "sampler": None, "contents": []}
        fingerprint = {name: value for name, value in self.facts["fingerprint"].items() if name != "order_version"}
        try:
            return LoaderState.from_dict({**line["state"], **known}, fingerprint)
        except StateError as error:
            raise StateError(f"line {line['number']}: {error}") from None


@dataclass(frozen=True, kw_only=True)
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
    history: History = field(default_factory=History)
    """What was changed in the run: the weights as of its end, and what is left out as of its beginning."""

    @property
    def epoch(self) -> int:
        """The epoch."""
        return self.start.epoch

    @property
    def skips(self) -> Skips:
        """What it left out."""
        return self.history.skips

    @cached_property
    def plan(self) -> ShardPlan:
        """The order of its epoch, as it was served; an ArgumentError if nobody but the loader knows it."""
        return self.job.batches(self.history).plan_of(self.start)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A position that a line tells, and at which the state was saved or an epoch has ended."""

    line: dict[str, Any]
    job: Job
    state: LoaderState
    legs: tuple[Leg, ...]
    """What the run had delivered by then."""


@dataclass(kw_only=True)
class _Stretch:
    """Lines of a job, from a load on."""

    job: Job
    resumed: LoaderState | None = None
    lines: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    """Each with the history of the run by then, as JSON."""
    parent: tuple[_Stretch, int] | None = None
    """What it has continued, and how many lines of that there were by then; None: nothing that is known."""

    def state(self, at: int) -> LoaderState:
        """Return the state that a line holds."""
        line, history = self.lines[at]
        return self.job.state(line, line["was"] if line["line"] == "resume" else history)

    def legs(self, end: int | None = None) -> dict[int, Leg]:
        """Return the passes that have delivered something, as of one of its lines; None: as of the last one."""
        found: dict[int, Leg] = {}
        for at, (line, history) in enumerate(self.lines[:end]):
            if line["line"] == "pass":
                start = self.state(at)
                found[line["begins"]] = Leg(
                    job=self.job,
                    number=line["begins"],
                    start=start,
                    steps=start.steps,
                    samples=start.samples,
                    history=start.history,
                )
            for number, steps, samples in line.get("passes", ()):
                if number in found:
                    now = replace(History.from_json(history), skips=found[number].skips)
                    found[number] = replace(found[number], steps=steps, samples=samples, history=now)
            if line["line"] == "end" and line["ends"] in found:
                found[line["ends"]] = replace(found[line["ends"]], ended=True)
        return {number: leg for number, leg in found.items() if leg.steps > leg.start.steps}

    def line_of(self) -> list[tuple[_Stretch, int]]:
        """Return what leads to this stretch, itself included, each with the number of its lines that count."""
        found: list[tuple[_Stretch, int]] = [(self, len(self.lines))]
        while (parent := found[0][0].parent) is not None:
            found.insert(0, parent)
        return found


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What a record tells of a run."""

    jobs: tuple[Job, ...]
    last: Job
    """The newest of those that belong to the run."""
    legs: tuple[Leg, ...]
    """What counts, in the order in which it was delivered."""
    lost: tuple[Leg, ...]
    """What was delivered and does not count, since no saved position holds it that the run was resumed from."""
    saved: tuple[Saved, ...]
    """The positions on the way, in order."""
    began_at: LoaderState | None
    """The position from which the oldest job was resumed, if no line tells how it was reached; None: it began anew."""

    @property
    def checkpoints(self) -> list[Saved]:
        """Those of the positions at which the state was saved."""
        return [saved for saved in self.saved if saved.line["line"] == "checkpoint"]

    @property
    def epochs(self) -> list[int]:
        """The epochs of which something was delivered."""
        return sorted({leg.epoch for leg in self.legs})

    def legs_of(self, epoch: int, step: int | None = None) -> list[Leg]:
        """Return what was delivered of an epoch, or what has delivered one of its steps."""
        return [
            leg for leg in self.legs if leg.epoch == epoch and (step is None or leg.start.steps <= step < leg.steps)
        ]


def timeline(lines: Sequence[dict[str, Any]]) -> Timeline:
    """Return what the lines of a record tell.

    Raises:
        ArgumentError: They tell nothing, or are damaged.
        StateError: A state in them is of another version.
    """
    try:
        stretches, jobs = _stretches(lines)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, StateError):
            raise
        raise ArgumentError(
            f"the record is damaged: {type(error).__name__}: {error}. See paddle-shard verify."
        ) from error
    begun = [one for one in stretches if one.resumed is not None or one.legs()]
    if not begun:
        raise ArgumentError("the record tells of no batch yet: no pass has come to its end, and no state was saved.")
    # A line of a load ends one stretch and begins the next.
    way = max(begun, key=lambda one: (one.lines[-1][0]["number"], one.lines[0][0]["number"])).line_of()
    legs: list[Leg] = []
    saved: list[Saved] = []
    lost = [leg for one in stretches if one not in [stretch for stretch, _ in way] for leg in one.legs().values()]
    for stretch, end in way:
        for at, (line, _) in enumerate(stretch.lines[:end]):
            if line["line"] in ("checkpoint", "end"):
                by_then = (*legs, *stretch.legs(at + 1).values())
                saved.append(Saved(line=line, job=stretch.job, state=stretch.state(at), legs=by_then))
        counted = stretch.legs(end)
        legs += counted.values()
        for number, leg in stretch.legs().items():
            begins = counted.get(number)
            if begins is None:
                lost.append(leg)
            elif begins.steps < leg.steps:
                start = replace(leg.start, steps=begins.steps, samples=begins.samples)
                lost.append(replace(leg, start=start))
    lost.sort(key=lambda leg: (leg.job.number, leg.number))
    return Timeline(
        jobs=tuple(jobs),
        last=way[-1][0].job,
        legs=tuple(legs),
        lost=tuple(lost),
        saved=tuple(saved),
        began_at=way[0][0].resumed,
    )


def _stretches(lines: Sequence[dict[str, Any]]) -> tuple[list[_Stretch], list[Job]]:
    """Return the stretches, each with what it has continued, and the jobs."""
    found: list[_Stretch] = []
    jobs: list[Job] = []
    now: dict[str, _Stretch] = {}
    histories: dict[str, Any] = {}
    for line in lines:
        if line["line"] == "begin":
            jobs.append(Job(number=len(jobs) + 1, facts=line))
            now[line["digest"]] = _Stretch(job=jobs[-1])
            found.append(now[line["digest"]])
            continue
        job = line["job"]
        if job not in now:  # its first line is gone
            continue
        histories[job] = line.get("history", histories.get(job))
        now[job].lines.append((line, histories[job]))
        if line["line"] == "resume":  # it also says how far the passes before it have come
            now[job] = _Stretch(job=now[job].job, lines=[(line, histories[job])])
            now[job].resumed = resumed = now[job].state(0)
            now[job].parent = _reached_by(found, resumed)
            found.append(now[job])
    return found, jobs


def _reached_by(stretches: list[_Stretch], wanted: LoaderState) -> tuple[_Stretch, int] | None:
    """Return the newest stretch in which a state was saved, and the number of its lines by then."""
    found = None
    for one in reversed(stretches):
        for at, (line, _) in reversed(list(enumerate(one.lines))):
            # The epoch first: it takes long to read a whole state.
            if line["line"] != "checkpoint" or line["state"]["epoch"] != wanted.epoch:
                continue
            state = replace(one.state(at), fingerprint=wanted.fingerprint)
            if state == wanted:
                return one, at + 1
            # Another rank's state has another account, and so has one that was saved again after `certificate()`.
            if found is None and replace(state, certificate=wanted.certificate) == wanted:
                found = one, at + 1
    return found
