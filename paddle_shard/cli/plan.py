"""`paddle-shard plan`: who would read what, and what is wrong with it? From flags, or from the record of a run."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paddle_shard.cli.answer import Answer, Command, numbers, run_of, samples_shown, table
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.mixture import Mixing, drawn_of
from paddle_shard.plan.orders import find_ordering
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.skips import Skips
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.tails import TAILS
from paddle_shard.record.places import groups_of, samples_at, shares_of
from paddle_shard.sources.files import matched
from paddle_shard.sources.mixture import Mixture
from paddle_shard.sources.shards import ShardSource
from paddle_shard.stages.cut import chosen_num_parts
from paddle_shard.stages.stage import Opening

DATA_AXES = ("dp", "data", "fsdp", "sharding", "batch")
"""What an axis that carries data is usually called."""
_MOST_EPOCHS = 4
"""How often a source may be read in an epoch of its mixture before it is a hazard."""
_MUCH = 0.01
"""Share of the data that is dropped, or of the rows that are padding, which is a hazard."""
_MOST_SHOWN = 64


@dataclass(kw_only=True)
class Planned:
    """What is asked about."""

    meshes: list[tuple[MeshLayout, list[str]]]
    """Each mesh with its data axes."""
    plan: ShardPlan | None = None
    """The order; None if there is none, for a reason that is among the hazards or the notes."""
    replicas: str = "each"
    workers: int = 0
    skips: Skips = field(default_factory=Skips)
    hazards: list[tuple[str, str]] = field(default_factory=list)
    """Each with its remedy."""
    notes: list[str] = field(default_factory=list)


# What is asked about


def mesh_of(text: str) -> MeshLayout:
    """Return the mesh that a user names: dp=4,mp=2, of the ranks 0 to 7, or dp=2,mp=1@3,1 of these ranks."""
    shape, _, ranks = text.partition("@")
    entries = re.findall(r"(\w+)=(\d+)(?:,|$)", shape)
    if ",".join(f"{axis}={size}" for axis, size in entries) != shape or not re.fullmatch(r"[\d,]*", ranks):
        raise argparse.ArgumentTypeError(f"must be axes and sizes such as dp=4,mp=2, got {text!r}")
    sizes = [int(size) for _, size in entries]
    ids = tuple(map(int, ranks.split(","))) if ranks else tuple(range(math.prod(sizes)))
    try:
        return MeshLayout(shape=tuple(sizes), axes=tuple(axis for axis, _ in entries), process_ids=ids)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _source_of(text: str) -> tuple[str, int, float]:
    found = re.fullmatch(r"(.+)=(\d+):([\d.]+)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be name=samples:weight such as web=1000:0.7, got {text!r}")
    return found[1], int(found[2]), float(found[3])


def mesh_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the arguments that name meshes."""
    how = "axes and sizes in row-major order: dp=4,mp=2; of other ranks than 0, 1, ..: dp=2,mp=1@3,1"
    parser.add_argument("--mesh", type=mesh_of, action="append", required=required, help=f"{how}; once for each mesh")
    parser.add_argument("--data-axes", metavar="AXES", help="axes that split the rows: dp or dp,sharding; '' for none")


def with_data_axes(meshes: list[MeshLayout], axes: str | None) -> list[tuple[MeshLayout, list[str]]]:
    """Return meshes with their data axes: those that are named, or else the first one that is called like one.

    Raises:
        ArgumentError: None was named, and none is called like one.
    """
    found = []
    for mesh in meshes:
        usual = [axis for axis in mesh.axes if axis in DATA_AXES][:1]
        if axes is None and not usual:
            raise ArgumentError(f"--data-axes is missing: which of {', '.join(mesh.axes)} split the rows of a batch?")
        named = usual if axes is None else [axis for axis in axes.split(",") if axis]
        found.append((mesh, [mesh.axes[axis] for axis in mesh.axis_indices(named)]))
    return found


def _planned(options: argparse.Namespace) -> Planned:
    if options.record is not None:
        return _of_record(options)
    if not options.mesh or options.batch_size is None or not (options.samples or options.source or options.files):
        raise ArgumentError(
            "give a record; or --mesh, --batch-size, and the data: --samples, or --source for each source of a "
            "mixture, or --files."
        )
    meshes = with_data_axes(options.mesh, options.data_axes)
    found = Planned(meshes=meshes, replicas=options.replicas, workers=options.workers)
    if options.files:
        _of_files(options, found)
        return found
    samples, shuffle = options.samples, find_ordering({"no": False, "yes": True}.get(options.shuffle, options.shuffle))
    if options.source:
        sources = {name: range(count) for name, count, _ in options.source}
        mixture = Mixture(sources, {name: weight for name, _, weight in options.source}, num_samples=samples)
        samples, shuffle = len(mixture), mixture.ordering(shuffle)
    try:
        found.plan = ShardPlan(
            num_samples=samples,
            batch_size=options.batch_size * options.accumulation,
            num_data_ranks=_unit(meshes),
            shuffle=shuffle,
            seed=options.seed,
            tail=options.tail,
            accumulation=options.accumulation,
        )
    except ArgumentError as error:
        found.hazards.append(_in_two(error))
    return found


def _unit(meshes: list[tuple[MeshLayout, list[str]]]) -> int:
    """Return the number of data ranks of a plan for all meshes."""
    return math.lcm(*(mesh.num_data_ranks(axes) for mesh, axes in meshes))


def _in_two(error: ArgumentError) -> tuple[str, str]:
    """Return what an error says, and its way out."""
    what, _, way_out = str(error).partition(". ")
    return what, way_out


def _of_record(options: argparse.Namespace) -> Planned:
    run = run_of(options.record)
    facts, newest = run.last.facts, run.legs[-1] if run.legs else None
    found = Planned(meshes=run.last.meshes, workers=facts["workers"], replicas=facts["options"]["replicas"])
    if run.last.unknown is not None or newest is None:
        found.notes.append(f"{run.last.unknown or 'nothing was delivered yet'}: there is no plan to show")
        return found
    start = newest.start if options.epoch in (None, newest.epoch) else LoaderState(epoch=options.epoch)
    found.plan, found.skips = run.last.batches(newest.history).plan_of(start), newest.skips
    return found


def _of_files(options: argparse.Namespace, found: Planned) -> None:
    """Look at files that are not counted, each of which belongs to one part as a whole."""
    source, count = ShardSource(matched(options.files), lambda name, skip: iter(())), _unit(found.meshes)
    try:
        parts = chosen_num_parts(source, options.batch_size, count)
        plan = PartsPlan(batch_size=options.batch_size, num_parts=parts, num_data_ranks=count, tail=options.tail)
    except ArgumentError as error:
        found.hazards.append(_in_two(error))
        return
    opening = Opening(parts=tuple(range(parts)), num_parts=parts, seed=options.seed, epoch=options.epoch or 0)
    sizes = source.part_sizes(opening)
    found.notes.append(f"{source.num_shards} files in {parts} parts")
    if sizes is None:
        found.notes.append("their sizes are not known here, so neither is what the parts differ by")
        return
    for data_rank in range(plan.num_data_ranks):
        held = plan.parts_of(data_rank)
        found.notes.append(f"data rank {data_rank}: parts {numbers(held)}, {sum(sizes[part] for part in held)} bytes")
    mean = max(1, sum(sizes)) / parts
    lost = 1 - min(sizes) / mean if plan.ending.drops else 1 - mean / max(1, *sizes)
    if lost > _MUCH and (plan.ending.pads or plan.ending.drops):
        what = "of the data is dropped" if plan.ending.drops else "of all rows are padding"
        text = f"the parts differ in size: about {lost:.0%} {what}, since files that are not counted are not cut"
        found.hazards.append((text, "Count the samples (counts=True; for tars paddle-shard index), or use more files"))


# What is wrong with it


def _hazards(asked: Planned) -> Iterator[tuple[str, str]]:
    yield from asked.hazards
    plan = asked.plan
    for mesh, axes in asked.meshes:
        for axis, size in zip(mesh.axes, mesh.shape, strict=True):
            if axis in DATA_AXES and axis not in axes and size > 1:
                what = f"axis {axis!r} of {size} ranks carries no data: all of them get the same rows"
                yield what, f"shard_dims={[*axes, axis]!r} splits the rows over it, too"
        each = len(mesh.process_ids) // mesh.num_data_ranks(axes)
        if each > 1 and asked.replicas == "each":
            yield (
                f"{each} ranks of each replica group all read, transform and collate the same samples",
                'replicas="leader" lets one rank on each host read for the others',
            )
    if plan is None:
        return
    short = plan.num_samples
    if short < plan.num_data_ranks:
        idle = plan.num_data_ranks - short
        what = f"{plan.num_data_ranks} data ranks share {short} samples: {idle} of them get nothing but padding"
        yield what, f"Use a mesh with at most {short} data ranks"
    dropped = plan.num_positions - plan.num_served
    if dropped > _MUCH * plan.num_samples:
        what = f"tail={plan.tail!r} drops {dropped} of {plan.num_samples} samples in each epoch"
        yield what, "tail='pad' serves them, or a smaller batch drops fewer"
    advice = plan.ordering.advice(plan.num_samples, plan.num_data_ranks, max(1, plan.batch_size // plan.accumulation))
    if advice is not None:
        yield advice, "See above"
    if isinstance(plan.ordering, Mixing):
        for name, drawn in drawn_of(plan.ordering, plan.num_samples).items():
            length = plan.ordering.segments[-1].lengths[plan.ordering.names.index(name)]
            if length and drawn.drawn > _MOST_EPOCHS * length:
                what = (
                    f"source {name!r} has {length} samples, and an epoch draws {drawn.drawn}: each {drawn.epochs} times"
                )
                share = _MOST_EPOCHS * length / plan.num_samples
                yield what, f"A share of {share:.2g} would draw each {_MOST_EPOCHS} times; it has {drawn.weight:.2g}"


# How it is shown


def _plan(options: argparse.Namespace) -> Answer:
    asked = _planned(options)
    hazards = list(_hazards(asked))
    said: list[str] = []
    found: dict[str, Any] = {"meshes": [_mesh_facts(mesh, axes) for mesh, axes in asked.meshes]}
    for number, (mesh, axes) in enumerate(asked.meshes):
        said += [_grid(number, mesh, axes), ""]
    if asked.plan is not None:
        facts = _facts(asked.plan, asked)
        found["plan"] = facts
        said += [table(["what", ""], facts.items()), ""]
        if options.step is not None:
            found["step"] = _step(asked, options.epoch or 0, options.step)
            rows = (
                [one["mesh"], one["data_rank"], numbers(one["ranks"]), samples_shown(one["samples"])]
                for one in found["step"]
            )
            said += [
                f"epoch {options.epoch or 0}, step {options.step}:",
                table(["mesh", "data rank", "ranks", "samples"], rows),
                "",
            ]
    found |= {"notes": asked.notes, "hazards": [{"what": what, "remedy": remedy} for what, remedy in hazards]}
    said += asked.notes
    said += [f"HAZARD: {what.rstrip('.')}. {remedy.rstrip('.')}." for what, remedy in hazards] or [
        "no hazard was found"
    ]
    return Answer(text="\n".join(said), found=found, failed=bool(hazards))


def _mesh_facts(mesh: MeshLayout, axes: list[str]) -> dict[str, Any]:
    shape = dict(zip(mesh.axes, mesh.shape, strict=True))
    return {"axes": shape, "data_axes": axes, "data_ranks": [list(ranks) for ranks in groups_of(mesh, axes)]}


def _grid(number: int, mesh: MeshLayout, axes: list[str]) -> str:
    """Return a mesh as a grid, whose columns are its last axis: each rank with its data rank."""
    shape = ", ".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.shape, strict=True))
    groups = groups_of(mesh, axes)
    over = " and ".join(axes) or "nothing"
    head = f"mesh {number}: {shape}; the rows of a batch are split over {over}: {len(groups)} data ranks"
    if len(mesh.process_ids) > _MOST_SHOWN:
        few = ([data_rank, numbers(sorted(ranks))] for data_rank, ranks in enumerate(groups[:_MOST_SHOWN]))
        more = f"\n... and {len(groups) - _MOST_SHOWN} more" if len(groups) > _MOST_SHOWN else ""
        return f"{head}\n{table(['data rank', 'ranks'], few)}{more}"
    data_rank = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
    cells = [f"{rank} (data rank {data_rank[rank]})" for rank in mesh.process_ids]
    width, last = mesh.shape[-1], mesh.axes[-1]
    rows = []
    for at in range(0, len(cells), width):
        place = mesh.coordinate(mesh.process_ids[at])[:-1]
        named = ", ".join(f"{axis} {one}" for axis, one in zip(mesh.axes, place, strict=False))
        rows.append([named, *cells[at : at + width]])
    return f"{head}\n{table(['', *(f'{last} {one}' for one in range(width))], rows)}"


def _facts(plan: ShardPlan, asked: Planned) -> dict[str, Any]:
    last = plan.num_steps - 1
    rows, padding = (plan.num_rows(step=last), 0) if plan.num_steps else (0, 0)
    if rows:
        padding = plan.num_positions - plan.num_samples if plan.ordering.pads_first else plan.padding(step=last)
    readers = max((len(ranks) for mesh, axes in asked.meshes for ranks in groups_of(mesh, axes)), default=1)
    return {
        "samples of an epoch": plan.num_samples,
        "steps of an epoch": plan.num_steps,
        "rows of a step": plan.batch_size,
        "rows of a data rank": plan.batch_size // plan.num_data_ranks,
        "rows of the last step": rows,
        "rows of padding in an epoch": padding,
        "samples dropped in an epoch": plan.num_positions - plan.num_served,
        "reads of each sample": readers if asked.replicas == "each" else 1,
        "workers of a rank": asked.workers,
    }


def _step(asked: Planned, epoch: int, step: int) -> list[dict[str, Any]]:
    """Return the samples of each rank at a step; None for a row that is not real."""
    assert asked.plan is not None
    plan, found = asked.plan, []
    samples = samples_at(plan, epoch, step, asked.skips)
    for share in shares_of(asked.meshes, plan.num_rows(step=step), plan.micro_size(step=step)):
        place = {"mesh": share.mesh, "data_rank": share.data_rank, "ranks": list(share.ranks)}
        found.append({**place, "samples": [samples[row] for row in share.rows]})
    return found


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", nargs="?", metavar="RECORD", help="the file of shard_dataloader(record=); or flags:")
    mesh_arguments(parser, required=False)
    parser.add_argument("--batch-size", type=int, help="rows of a global batch, before accumulation")
    parser.add_argument("--samples", type=int, help="length of the data set; of a mixture, samples of an epoch")
    how = "a source of a mixture: web=1000:0.7 (samples, weight); once for each"
    parser.add_argument("--source", type=_source_of, action="append", help=how)
    parser.add_argument(
        "--files", nargs="+", metavar="FILE", help="files of a stream that are not counted; patterns, too"
    )
    parser.add_argument("--tail", choices=list(TAILS), default="pad")
    parser.add_argument("--shuffle", nargs="?", const="yes", default="no", choices=["no", "yes", "blocks", "paddle"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--workers", type=int, default=0, help="worker processes of a rank")
    parser.add_argument("--replicas", choices=["each", "leader", "auto"], default="each")
    parser.add_argument("--epoch", type=int, help="the epoch that is shown")
    parser.add_argument("--step", type=int, help="also show the samples of each rank at this step")


COMMANDS = {
    "plan": Command(
        does="Who would read what, and what is wrong with it? Exits with 1 if there is a hazard.",
        example="--samples 50000 --batch-size 256 --mesh dp=4,mp=2 --data-axes dp --shuffle --step 3",
        arguments=_arguments,
        answer=_plan,
    )
}
"""The command, by name."""
