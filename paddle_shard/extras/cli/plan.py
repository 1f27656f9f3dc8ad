"""`paddle-shard plan`: who would read what, and what is wrong with it? From flags, or from the record of a run."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paddle_shard.checks import check_count
from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.answer import Answer, Argument, Rows, command, parsed, run_of, with_hazards
from paddle_shard.extras.cli.hazards import MUCH, Hazard, carries_data, hazards_of, hazards_of_parts
from paddle_shard.extras.cli.page import page_of
from paddle_shard.extras.cli.places import (
    Meshes,
    groups_of,
    readers_of,
    reads_of_a_row,
    samples_of,
    shapes_of,
    shares_of,
)
from paddle_shard.extras.cli.svg import svg_of
from paddle_shard.plan.mesh import MeshLayout, grid_of
from paddle_shard.plan.mixture import Mixing, drawn_of
from paddle_shard.plan.orders import ORDERINGS, find_ordering
from paddle_shard.plan.parts import PartsPlan, chunks_of
from paddle_shard.plan.shard_plan import ShardPlan, facts_of_plan, num_skipped
from paddle_shard.plan.skips import Ranges
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.tails import TAILS
from paddle_shard.sources.files import is_missing, is_remote, matched
from paddle_shard.sources.mixture import Mixture
from paddle_shard.sources.shards import ShardSource
from paddle_shard.sources.webdataset import expand
from paddle_shard.stages.cut import chosen_num_parts
from paddle_shard.stages.stage import Opening

# Ranks of a mesh, and rows of a batch, that are looked at: each is held in memory.
_MOST_RANKS, _MOST_ROWS = 10**7, 10**8
# Arguments that a record answers itself.
_TOLD = "mesh", "data_axes", "batch_size", "samples", "source", "tail", "shuffle", "accumulation", "replicas"
_TOLD_BY_RECORD = "the record tells that. Leave it out, or the record."
_NOT_OF_FILES = "which samples are where in files that are not counted is not known here. Leave it out, or --files."
# Steps that a page draws.
_SHOWN_STEPS = 8
# Ranks of a mesh that is shown as a grid.
_MOST_SHOWN = 64


@dataclass(kw_only=True)
class Planned:
    """What is asked about."""

    meshes: Meshes
    holders: Meshes
    """Those that have the rows of a step; none if rows are dealt by costs that are not known here."""
    replicas: str
    plan: ShardPlan | None = None
    """The order; None if there is none, for a reason that is said or is a hazard."""
    plan_of_parts: PartsPlan | None = None
    """Of a stream."""
    epoch: int = 0
    step_of: tuple[ShardPlan, Meshes, Meshes, Ranges] | None = None
    """The plan, meshes, holders and skips of who has delivered the step that is asked about, if somebody has."""
    skips: Ranges = ()
    """The skipped steps of the epoch."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else programs are told."""
    hazards: list[Hazard] = field(default_factory=list)
    where: str = ""
    """Which files differ, for a hazard."""
    said: list[str | Rows] = field(default_factory=list)


# What is asked about


def mesh_of(text: str) -> MeshLayout:
    """Return the mesh that a user names: dp=4,mp=2, of the ranks 0 to 7, or dp=2,mp=1@3,1 of these ranks."""
    shape, ranks = parsed(r"(\w+=\d+(?:,\w+=\d+)*)(?:@(\d+(?:,\d+)*))?", text, "axes and sizes such as dp=4,mp=2")
    axes, numbers = zip(*(axis.split("=") for axis in shape.split(",")), strict=True)
    sizes = tuple(map(int, numbers))
    if math.prod(sizes) > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"has {math.prod(sizes)} ranks; at most {_MOST_RANKS} are looked at")
    ids = tuple(map(int, ranks.split(","))) if ranks else tuple(range(math.prod(sizes)))
    try:
        return MeshLayout(shape=sizes, axes=axes, process_ids=ids)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rows_of(text: str) -> int:
    """Return a number of rows that fits into memory."""
    found = int(text)
    if found > _MOST_ROWS:
        raise argparse.ArgumentTypeError(f"is {found}; at most {_MOST_ROWS} rows of a batch are looked at")
    return found


def with_data_axes(meshes: Sequence[MeshLayout], axes: str | None) -> Meshes:
    """Return meshes with their data axes: those that are named, or else the first one that is called like one.

    Raises:
        ArgumentError: None was named, and none is called like one.
    """
    found = []
    for mesh in meshes:
        likely = list(filter(carries_data, mesh.axes))[:1]
        if axes is None and not likely:
            raise ArgumentError(f"--data-axes is missing: which of {', '.join(mesh.axes)} split the rows of a batch?")
        named = likely if axes is None else filter(None, axes.split(","))
        found.append((mesh, [mesh.axes[axis] for axis in mesh.axis_indices(tuple(named))]))
    return found


def _source_of(text: str) -> tuple[str, int, float]:
    name, samples, weight = parsed(r"(.+)=(\d+):(\d*\.?\d+)", text, "name=samples:weight such as web=1000:0.7")
    return name, int(samples), float(weight)


def planned(options: argparse.Namespace) -> Planned:
    """Return what the flags `PLANNED` ask about.

    Raises:
        ArgumentError: They do not say it.
    """
    for name in ("epoch", "workers", "ranks_per_host", "parts", "batch_size", "accumulation"):
        if (number := vars(options).get(name)) is not None:
            check_count(f"--{name.replace('_', '-')}", number, int(name not in ("epoch", "workers")))
    for needless, names, why in (
        (options.record, (*_TOLD, "seed"), _TOLD_BY_RECORD),
        (options.files and not options.record, ("samples", "source", "shuffle", "step"), _NOT_OF_FILES),
        (not options.files, ("parts",), "of which files? Give --files, too."),
    ):
        given = [f"--{name.replace('_', '-')}" for name in names if vars(options).get(name) not in (None, [])]
        if needless and given:
            raise ArgumentError(f"{', '.join(given)}: {why}")
    if options.record is not None:
        return _of_record(options)
    known = options.source or options.files or options.samples is not None
    if not (known and options.mesh and options.batch_size is not None):
        data = "--samples, or --source for each source of a mixture, or --files"
        raise ArgumentError(f"give a record; or --mesh, --batch-size, and the data: {data}.")
    meshes, samples = with_data_axes(options.mesh, options.data_axes), options.samples
    found = Planned(meshes=meshes, holders=meshes, replicas=options.replicas or "each", epoch=options.epoch or 0)
    cut: dict[str, Any] = {"tail": options.tail or "pad", "accumulation": options.accumulation or 1}
    cut["batch_size"] = options.batch_size * cut["accumulation"]
    cut["num_data_ranks"] = math.lcm(*(mesh.num_data_ranks(axes) for mesh, axes in meshes))
    shuffle = find_ordering({str(name): name for name in ORDERINGS}[options.shuffle or "False"])
    if options.source:
        sources = {name: range(count) for name, count, _ in options.source}
        if len(sources) < len(options.source):
            raise ArgumentError(f"--source: two of {[name for name, *_ in options.source]} have one name.")
        mixture = Mixture(sources, {name: weight for name, _, weight in options.source}, num_samples=samples)
        samples, shuffle = len(mixture), mixture.ordering(shuffle)
    try:
        if options.files:
            _look_at_files(options, found, cut)
        else:
            found.plan = ShardPlan(num_samples=samples, shuffle=shuffle, seed=options.seed or 0, **cut)
    except ArgumentError as error:
        what, _, remedy = str(error).partition(". ")
        found.hazards.append((f"{what}{'' if what.startswith(('batch_size', 'tail')) else found.where}", remedy))
    return found


def _of_record(options: argparse.Namespace) -> Planned:
    run = run_of(options.record)
    job = run.last
    newest = run.passes[-1][0] if run.passes else None
    parts = job.parts_plan()
    found = Planned(meshes=job.meshes, holders=job.holders, replicas=job.facts["options"]["replicas"])
    if job.unknown is not None or newest is None:
        found.said.append(f"There is no plan to show: {job.unknown or 'nothing was delivered yet'}.")
        if parts is not None:
            found.plan_of_parts = parts
            shares = [{**group, "parts": of} for group, of in shares_of(job.meshes, parts.parts_of)]
            found.facts["shares"] = _with_workers(found, shares, options)
            found.said.append(found.facts["shares"])
        return found
    found.epoch = newest.start.epoch if options.epoch is None else options.epoch
    plans = {leg.start.epoch: leg.plan for leg, _ in run.passes if leg.job.unknown is None}
    # An epoch that was never begun is what the newest job would make of it.
    found.plan = plans.get(found.epoch) or job.batches().plan_of(LoaderState(epoch=found.epoch))
    step = vars(options).get("step") or 0  # other commands than `plan` show no step
    for leg in run.legs_of(found.epoch):
        found.meshes, found.holders = leg.job.meshes, leg.job.holders  # those of its last job
        found.skips = leg.skips
        found.replicas = leg.job.facts["options"]["replicas"]
        if leg.start.steps <= step < leg.steps and leg.job.unknown is None:
            found.step_of = leg.plan, leg.job.meshes, leg.job.holders, leg.skips
    return found


def _names(files: Sequence[str]) -> list[str]:
    """Return the files that a user names, as streams find them: braces are those of tars."""
    return (expand if any("{" in name for name in files) else matched)(files)


def _look_at_files(options: argparse.Namespace, found: Planned, cut: dict[str, Any]) -> None:
    """Look at files that are not counted, each of which belongs to one part as a whole."""
    names = _names(options.files)
    source = ShardSource(names, lambda name, skip: iter(()))
    if gone := list(filter(is_missing, names)):
        what = f"{gone[0]} does not exist" + f", nor do {len(gone) - 1} more of the files" * (len(gone) > 1)
        found.hazards.append((what, "Correct the paths"))
        return
    if not any(is_remote(name) or re.search(r"\.(gz|tgz|bz2|xz)$", name) for name in names):
        counted = "Such files are counted when the stream is made, unless index=False or counts=False says not to"
        found.where = f". ({counted})"
    known = sorted((size, name) for size, name in zip(source.sizes(), names, strict=True) if size is not None)
    if known and known[-1][0] > (1 + MUCH) * known[0][0]:
        (least, small), (most, large) = known[0], known[-1]
        found.where = f". The largest is {large} with {most} bytes, the smallest {small} with {least}{found.where}"
    parts = options.parts or chosen_num_parts(source, options.batch_size, cut["num_data_ranks"])
    plan = found.plan_of_parts = PartsPlan(num_parts=parts, **cut)
    opening = Opening(parts=tuple(range(parts)), num_parts=parts, seed=options.seed or 0, epoch=found.epoch)
    sizes = source.part_sizes(opening)
    held = [(at, plan.parts_of(at)) for at in range(plan.num_data_ranks)]
    shares = [{"data_rank": at, "parts": of, "bytes": sizes and sum(sizes[one] for one in of)} for at, of in held]
    found.facts |= {"files": source.num_shards, "parts": parts}
    found.facts["bytes"] = of_ranks = _with_workers(found, shares, options)
    found.said += [f"{source.num_shards} files in {parts} parts", of_ranks]
    if sizes is None:
        found.said.append("The sizes of the files are not known here, and so neither is what the parts differ by.")
        return
    found.hazards += hazards_of_parts(plan, sizes, found.where)


def _with_workers(found: Planned, shares: Rows, options: argparse.Namespace) -> Rows:
    """Return who holds which parts, with the parts of each of its workers; those that would get none are a hazard."""
    workers = vars(options).get("workers", 0)  # other commands than `plan` ask for none
    if not workers:
        return shares
    if (idle := workers - (held := min(len(share["parts"]) for share in shares))) > 0:
        what = f"{workers} workers of each rank share {held} parts: {idle} of them read nothing"
        found.hazards.append((what, f"num_workers={held}, or more parts (in_parts(), larger batches)"))
    return [{**one, "parts of each worker": [[*of] for of in chunks_of(one["parts"], workers)]} for one in shares]


def hazards_in(asked: Planned, ranks_per_host: int | None) -> list[Hazard]:
    """Return what is wrong with what is asked about, and what would help."""
    dealt, how = not asked.holders, (asked.replicas, ranks_per_host, asked.epoch)
    return [*asked.hazards, *hazards_of(asked.plan, asked.meshes, *how, dealt=dealt)]


# How it is shown

_AXES = "axes and sizes in row-major order: dp=4,mp=2; of other ranks than 0, 1, ..: dp=2,mp=1@3,1; once for each mesh"
MESH: Sequence[Argument] = [
    ("--mesh", {"type": mesh_of, "action": "append", "default": [], "help": _AXES}),
    ("--data-axes", {"metavar": "AXES", "help": "axes that split the rows: dp or dp,sharding; '' for none"}),
]
"""The arguments that name meshes."""
_SOURCE = {"type": _source_of, "action": "append", "help": "a source of a mixture, as samples and weight: web=1000:0.7"}
PLANNED: Sequence[Argument] = [
    ("record", {"nargs": "?", "metavar": "RECORD", "help": "the file of shard_dataloader(record=); or flags:"}),
    *MESH,
    ("--batch-size", {"type": rows_of, "help": "rows of a global batch, before accumulation"}),
    ("--samples", {"type": int, "help": "length of the data set; of a mixture, samples of an epoch"}),
    ("--source", _SOURCE),
    ("--files", {"nargs": "+", "metavar": "FILE", "help": "files of a stream that are not counted; patterns, too"}),
    ("--parts", {"type": int, "help": "parts of the stream of --files (in_parts()); by default as it chooses them"}),
    ("--ranks-per-host", {"type": int, "help": "ranks that share a leader; else all do"}),
    ("--tail", {"choices": list(TAILS), "help": "pad, unless another is named"}),
    ("--shuffle", {"nargs": "?", "const": "True", "choices": list(map(str, ORDERINGS))}),
    ("--seed", {"type": int, "help": "0, unless another is given"}),
    ("--accumulation", {"type": rows_of, "help": "micro-batches of a step"}),
    ("--replicas", {"choices": ["each", "leader"]}),
    ("--epoch", {"type": int, "help": "the epoch; by default the first one, or the newest of a record"}),
]
"""The arguments of commands that begin with a plan."""


def _picture(plan: ShardPlan, meshes: Meshes, holders: Meshes, skips: Ranges, epoch: int, step: int) -> str:
    return svg_of(meshes, samples_of(plan, holders, epoch, step, skips), f"epoch {epoch}, step {step}")


@command(
    *PLANNED,
    ("--workers", {"type": int, "default": 0, "help": "worker processes of each rank (num_workers=)"}),
    ("--step", {"type": int, "help": "also show the samples of each rank at this step"}),
    ("--html", {"type": Path, "metavar": "FILE", "help": "also draw it, as a page that any browser opens"}),
    ("--svg", {"type": Path, "metavar": "FILE", "help": "also draw the mesh and the step, as a picture for a paper"}),
)
def plan(options: argparse.Namespace) -> Answer:
    """Who would read what, and what is wrong with it? Exits with 1 if there is a hazard.

    example: paddle-shard plan --samples 50000 --batch-size 256 --mesh dp=4,mp=2 --data-axes dp --shuffle --step 3
    """
    asked = planned(options)
    found: dict[str, Any] = {"meshes": list(groups_of(asked.meshes)), **asked.facts}
    said: list[str | Rows] = []
    for number, (mesh, axes) in enumerate(asked.meshes):
        how = f"{' and '.join(axes) or 'nothing'} {'split' if len(axes) > 1 else 'splits'} the rows"
        said.append(f"mesh {number}: {shapes_of([(mesh, axes)])}; {how}: {mesh.num_data_ranks(axes)} data ranks")
        few, groups = len(mesh.process_ids) <= _MOST_SHOWN, [one for one in found["meshes"] if one["mesh"] == number]
        said.append(grid_of(mesh, axes) if few else groups[:_MOST_SHOWN])
    parts, reading = asked.plan_of_parts, readers_of(asked.meshes, asked.replicas, options.ranks_per_host)
    workers = options.workers if parts is None else min(options.workers, parts.num_parts // parts.num_data_ranks)
    found["reading processes"] = len(reading) * max(1, workers)
    who = f"{found['reading processes']} processes read" + " (workers)" * (options.workers > 0)
    if asked.replicas != "each":
        hosts = f"{options.ranks_per_host or 'all'} ranks share a host"
        who += f", one of the ranks of a host that get the same rows: {hosts} (--ranks-per-host)"
    said += [who, *asked.said]
    if (plan := asked.plan) is not None:
        reads = reads_of_a_row(asked.meshes, reading)
        gone = num_skipped(plan.num_steps, asked.skips)
        found["plan"] = {**facts_of_plan(plan), "steps left out of an epoch": gone, "reads of each row": reads}
        said.append([{"what": name, "number": value} for name, value in found["plan"].items()])
        if isinstance(plan.ordering, Mixing):
            sources = drawn_of(plan.ordering, plan.num_samples)  # in the first epoch
            found["sources"] = [{"source": name, **asdict(one)} for name, one in sources.items()]
            said.append(found["sources"])
        of, meshes, holders, skips = asked.step_of or (plan, asked.meshes, asked.holders, asked.skips)
        if options.step is not None:
            found["step"] = samples_of(of, holders, asked.epoch, options.step, skips)
            said += [f"epoch {asked.epoch}, step {options.step}", found["step"]]
    hazards, drawn, step = hazards_in(asked, options.ranks_per_host), plan or asked.plan_of_parts, options.step or 0
    if options.html is not None and drawn is not None:
        steps = range(step, min(step + _SHOWN_STEPS, plan.num_steps)) if plan is not None else ()
        pictures = [_picture(of, meshes, holders, skips, asked.epoch, number) for number in steps]
        options.html.write_text(page_of(f"Plan of epoch {asked.epoch}", said, pictures, hazards), encoding="utf-8")
        said.append(f"{options.html} shows it, in a browser")
    elif options.html is not None:
        hazards.append((f"{options.html} is not drawn: the order is not known here, or no plan fits", ""))
    if options.svg is not None and (plan is None or not plan.num_steps):
        hazards.append((f"{options.svg} is not drawn: there is no step", ""))
    elif options.svg is not None:
        options.svg.write_text(_picture(of, meshes, holders, skips, asked.epoch, step), encoding="utf-8")
        said.append(f"{options.svg} is the picture of step {step}")
    return with_hazards(found, said, hazards)
