"""`paddle-shard plan`: the plan of a run that is described by flags, or by its record."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.answer import Answer, Hazard, Rows, command, parsed, run_of
from paddle_shard.extras.cli.hazards import carries_data, hazards_of_meshes, hazards_of_plan
from paddle_shard.extras.cli.page import page_of, svg_of
from paddle_shard.extras.cli.places import Meshes, groups_of, samples_of, shapes_of
from paddle_shard.plan.mesh import MeshLayout, grid_of
from paddle_shard.plan.mixture import Mixing, drawn_of
from paddle_shard.plan.orders import ORDERINGS, find_ordering
from paddle_shard.plan.shard_plan import ShardPlan, facts_of_plan, num_steps_left_out
from paddle_shard.plan.skips import Skips
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.tails import TAILS
from paddle_shard.sources.mixture import Mixture

_MOST_RANKS = 10**6
"""Ranks of a mesh, all of which are held in memory."""
_MOST_ROWS = 10**8
"""Rows of a batch, all of which are held in memory."""
_MOST_SHOWN = 64
"""Ranks of a mesh that is shown as a grid; replica groups of a larger one that are listed."""
_STEPS_OF_PAGE = 8
_RECORDED = ("mesh", "data_axes", "batch_size", "samples", "source", "tail", "shuffle", "seed", "accumulation")
"""Flags that a record answers."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan on its meshes."""

    meshes: Meshes
    holders: Meshes
    """Meshes whose ranks hold the rows; none if rows are balanced by costs that are not known here."""
    plan: ShardPlan | None
    """None if there is none: `text` or `hazards` say why."""
    epoch: int = 0
    skips: Skips = field(default_factory=Skips)
    hazards: Sequence[Hazard] = ()
    text: Sequence[str] = ()

    def samples(self, step: int) -> list[dict[str, Any]]:
        """Return each replica group with its samples of a step."""
        assert self.plan is not None
        return samples_of(self.plan, self.holders, self.epoch, step, self.skips)

    def picture(self, step: int) -> str:
        """Return the SVG of a step."""
        return svg_of(self.meshes, self.samples(step), f"epoch {self.epoch}, step {step}")


# Arguments


def mesh_of(text: str) -> MeshLayout:
    """Return the mesh that a user names: dp=4,mp=2 with the ranks 0 to 7, or dp=2,mp=1@3,1 with these ranks."""
    shape, ranks = parsed(r"(\w+=\d+(?:,\w+=\d+)*)(?:@(\d+(?:,\d+)*))?", text, "axes and sizes such as dp=4,mp=2")
    axes, numbers = zip(*(axis.split("=") for axis in shape.split(",")), strict=True)
    sizes = tuple(map(int, numbers))
    num_ranks = math.prod(sizes)
    if num_ranks > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"has {num_ranks} ranks; at most {_MOST_RANKS} are supported")
    process_ids = map(int, ranks.split(",")) if ranks else range(num_ranks)
    try:
        return MeshLayout(shape=sizes, axes=axes, process_ids=tuple(process_ids))
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count_of(least: int) -> Callable[[str], int]:
    """Return the argument type of ints of at least `least`."""

    def count(text: str) -> int:
        number = int(text)
        if not least <= number <= _MOST_ROWS:
            raise argparse.ArgumentTypeError(f"must be an int from {least} to {_MOST_ROWS}, got {number}")
        return number

    return count


def source_of(text: str) -> tuple[str, int, float]:
    """Return the source of a mixture that a user names: name=samples:weight."""
    name, samples, weight = parsed(r"(.+)=(\d+):(\d*\.?\d+)", text, "name=samples:weight such as web=1000:0.7")
    return name, int(samples), float(weight)


MESH = (
    "--mesh",
    {
        "type": mesh_of,
        "action": "append",
        "default": [],
        "help": "axes and sizes in row-major order: dp=4,mp=2; with its ranks: dp=2,mp=1@3,1; once for each mesh",
    },
)
STEP = ("--step", {"type": count_of(0), "help": "step of the epoch, from 0"})


# What is planned


def planned_by_flags(options: argparse.Namespace) -> Planned:
    """Return the plan that flags describe.

    Raises:
        ArgumentError: Flags are missing, or two sources have one name.
    """
    if not options.mesh or options.batch_size is None or not (options.source or options.samples is not None):
        data = "--samples, or --source for each source of a mixture"
        raise ArgumentError(f"give a record; or --mesh, --batch-size, and the data: {data}.")
    meshes = [(mesh, _data_axes(mesh, options.data_axes)) for mesh in options.mesh]
    samples = options.samples
    shuffle = find_ordering({str(name): name for name in ORDERINGS}[options.shuffle or "False"])
    if options.source:
        lengths = {name: range(length) for name, length, _ in options.source}
        if len(lengths) < len(options.source):
            raise ArgumentError(f"--source: two of {[name for name, *_ in options.source]} have one name.")
        mixture = Mixture(lengths, {name: weight for name, _, weight in options.source}, num_samples=samples)
        samples = len(mixture)
        shuffle = mixture.ordering(shuffle)
    plan = None
    hazards = []
    accumulation = options.accumulation or 1
    try:
        plan = ShardPlan(
            num_samples=samples,
            batch_size=options.batch_size * accumulation,
            num_data_ranks=math.lcm(*(mesh.num_data_ranks(axes) for mesh, axes in meshes)),
            tail=options.tail or "pad",
            shuffle=shuffle,
            seed=options.seed or 0,
            accumulation=accumulation,
        )
    except ArgumentError as error:
        what, _, remedy = str(error).partition(". ")
        hazards.append(Hazard(what, remedy))
    return Planned(meshes=meshes, holders=meshes, plan=plan, epoch=options.epoch or 0, hazards=hazards)


def _data_axes(mesh: MeshLayout, named: str | None) -> list[str]:
    """Return the data axes of a mesh: those that the user names, or else the first one with a usual name."""
    if named is not None:
        return [mesh.axes[axis] for axis in mesh.axis_indices(tuple(filter(None, named.split(","))))]
    likely = list(filter(carries_data, mesh.axes))[:1]
    if not likely:
        raise ArgumentError(f"--data-axes is missing: which of {', '.join(mesh.axes)} split the rows of a batch?")
    return likely


def planned_by_record(options: argparse.Namespace) -> Planned:
    """Return the plan of an epoch as the job served it that delivered a step, or else the newest one.

    Raises:
        ArgumentError: A flag is given that the record answers.
    """
    given = [f"--{name.replace('_', '-')}" for name in _RECORDED if vars(options)[name] not in (None, [])]
    if given:
        raise ArgumentError(f"{', '.join(given)}: the record tells that. Leave it out, or the record.")
    run = run_of(options.record)
    job = run.last
    if job.unknown is not None or not run.passes:
        text = f"There is no plan to show: {job.unknown or 'nothing was delivered yet'}."
        return Planned(meshes=job.meshes, holders=job.holders, plan=None, text=[text])
    newest, _ = run.passes[-1]
    epoch = newest.start.epoch if options.epoch is None else options.epoch
    plan = None
    skips = newest.history.skips
    for leg, end in run.passes:
        delivered_step = leg.start.steps <= (options.step or 0) < end
        if leg.start.epoch == epoch and leg.job.unknown is None and (plan is None or delivered_step):
            job = leg.job
            plan = leg.plan
            skips = leg.history.skips
    if plan is None:  # an epoch that was never begun
        plan = job.batches(newest.history).plan_of(LoaderState(epoch=epoch))
    return Planned(meshes=job.meshes, holders=job.holders, plan=plan, epoch=epoch, skips=skips)


# The command


@command(
    ("record", {"nargs": "?", "metavar": "RECORD", "help": "the file of shard_dataloader(record=); or flags:"}),
    MESH,
    ("--data-axes", {"metavar": "AXES", "help": "axes that split the rows: dp or dp,sharding; '' for none"}),
    ("--batch-size", {"type": count_of(1), "help": "rows of a global batch, before accumulation"}),
    ("--samples", {"type": int, "help": "length of the data set; of a mixture, samples of an epoch"}),
    ("--source", {"type": source_of, "action": "append", "help": "a source of a mixture: web=samples:weight"}),
    ("--tail", {"choices": list(TAILS), "help": "pad, unless another is named"}),
    ("--shuffle", {"nargs": "?", "const": "True", "choices": list(map(str, ORDERINGS))}),
    ("--seed", {"type": int, "help": "0, unless another is given"}),
    ("--accumulation", {"type": count_of(1), "help": "micro-batches of a step"}),
    ("--epoch", {"type": count_of(0), "help": "the epoch; by default the first one, or the newest of a record"}),
    STEP,
    (
        "--html",
        {"type": Path, "metavar": "FILE", "help": "also write the answer as a page, with the steps from --step on"},
    ),
    ("--svg", {"type": Path, "metavar": "FILE", "help": "also draw the mesh and the step"}),
)
def plan(options: argparse.Namespace) -> Answer:
    """Show which rank reads what, and hazards of the plan. Exits with 1 if there is a hazard.

    example: paddle-shard plan --samples 50000 --batch-size 256 --mesh dp=4,mp=2 --data-axes dp --shuffle --step 3
    """
    asked = planned_by_flags(options) if options.record is None else planned_by_record(options)
    values: dict[str, Any] = {"meshes": list(groups_of(asked.meshes))}
    text: list[str | Rows] = [*_mesh_sections(asked.meshes), *asked.text]
    hazards = [*asked.hazards, *hazards_of_meshes(asked.meshes)]
    if asked.plan is not None:
        skipped = num_steps_left_out(asked.plan, asked.epoch, asked.skips)
        values["plan"] = {**facts_of_plan(asked.plan), "steps left out of an epoch": skipped}
        text.append([{"what": name, "number": value} for name, value in values["plan"].items()])
        if isinstance(asked.plan.ordering, Mixing):
            sources = drawn_of(asked.plan.ordering, asked.plan.num_samples)
            values["sources"] = [{"source": name, **asdict(drawn)} for name, drawn in sources.items()]
            text.append(values["sources"])
        if options.step is not None:
            values["step"] = asked.samples(options.step)
            text += [f"epoch {asked.epoch}, step {options.step}", values["step"]]
        hazards += hazards_of_plan(asked.plan, asked.epoch, is_balanced=not asked.holders)
    answer = Answer(values=values, text=text, hazards=hazards)
    _draw(asked, answer, options)
    return answer


def _mesh_sections(meshes: Meshes) -> list[str | Rows]:
    """Return each mesh in a line and as a grid of its ranks; for a large mesh, its first replica groups."""
    text: list[str | Rows] = []
    for number, (mesh, axes) in enumerate(meshes):
        split = f"rows split over {' and '.join(axes) or 'nothing'}: {mesh.num_data_ranks(axes)} data ranks"
        text.append(f"mesh {number}: {shapes_of([(mesh, axes)])}; {split}")
        is_small = len(mesh.process_ids) <= _MOST_SHOWN
        text.append(grid_of(mesh, axes) if is_small else list(groups_of([(mesh, axes)]))[:_MOST_SHOWN])
    return text


def _draw(asked: Planned, answer: Answer, options: argparse.Namespace) -> None:
    """Write the page and the picture that were asked for.

    Raises:
        ArgumentError: There is no step to draw.
    """
    if options.html is None and options.svg is None:
        return
    if asked.plan is None or not asked.plan.num_steps:
        raise ArgumentError("--html and --svg: no step is known that could be drawn. Leave them out to see why.")
    step = options.step or 0
    if options.html is not None:
        pictures = [asked.picture(number) for number in range(step, asked.plan.num_steps)[:_STEPS_OF_PAGE]]
        options.html.write_text(page_of(f"Plan of epoch {asked.epoch}", answer, pictures), encoding="utf-8")
    if options.svg is not None:
        options.svg.write_text(asked.picture(step), encoding="utf-8")
