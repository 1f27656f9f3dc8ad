"""`paddle-shard plan`: who would read what, and what is wrong with it? From flags, or from the record of a run."""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddle_shard.cli.answer import Answer, Command, Hazard, Rows, run_of, with_hazards
from paddle_shard.cli.page import page_of, view_of
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.mixture import Mixing, drawn_of
from paddle_shard.plan.orders import ORDERINGS, find_ordering
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.skips import Skips
from paddle_shard.plan.state import LoaderState
from paddle_shard.plan.tails import TAILS
from paddle_shard.record.places import Meshes, groups_of, samples_of
from paddle_shard.record.timeline import Leg
from paddle_shard.sources.files import failures_named, local_size, matched, open_file
from paddle_shard.sources.host_cache import least_bytes
from paddle_shard.sources.mixture import Mixture
from paddle_shard.sources.shards import ShardSource
from paddle_shard.stages.cut import chosen_num_parts
from paddle_shard.stages.stage import Opening

_DATA_AXES = ("dp", "data", "fsdp", "sharding", "batch")
"""What an axis that carries data is usually called."""
_MOST_EPOCHS = 4
"""How often a source may be read in an epoch of its mixture before it is a hazard."""
_MUCH = 0.01
"""Share of the data that is dropped, or of the rows that are padding, which is a hazard."""
_MOST_SHOWN = 64
"""Ranks of a mesh that is shown as a grid."""


@dataclass(kw_only=True)
class _Planned:
    """What is asked about."""

    meshes: Meshes
    replicas: str
    plan: ShardPlan | None = None
    """The order; None if there is none, for a reason that is said or is a hazard."""
    skips: Skips = field(default_factory=Skips)
    epoch: int = 0
    view: dict[str, Any] = field(default_factory=dict)
    """What a page shows beside the plan, as arguments of `view_of`."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else programs are told."""
    hazards: list[Hazard] = field(default_factory=list)
    said: list[str | Rows] = field(default_factory=list)


# What is asked about


def mesh_of(text: str) -> MeshLayout:
    """Return the mesh that a user names: dp=4,mp=2, of the ranks 0 to 7, or dp=2,mp=1@3,1 of these ranks."""
    shape, _, ranks = text.partition("@")
    found = dict(entry.split("=") for entry in shape.split(",") if re.fullmatch(r"\w+=\d+", entry))
    if len(found) != len(shape.split(",")) or not re.fullmatch(r"(\d+(,\d+)*)?", ranks):
        raise argparse.ArgumentTypeError(f"must be axes and sizes such as dp=4,mp=2, got {text!r}")
    sizes = tuple(map(int, found.values()))
    ids = tuple(map(int, ranks.split(","))) if ranks else tuple(range(math.prod(sizes)))
    try:
        return MeshLayout(shape=sizes, axes=tuple(found), process_ids=ids)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def with_data_axes(meshes: Sequence[MeshLayout], axes: str | None) -> Meshes:
    """Return meshes with their data axes: those that are named, or else the first one that is called like one.

    Raises:
        ArgumentError: None was named, and none is called like one.
    """
    found = []
    for mesh in meshes:
        named = [axis for axis in mesh.axes if axis in _DATA_AXES][:1]
        if axes is not None:
            named = [axis for axis in axes.split(",") if axis]
        elif not named:
            raise ArgumentError(f"--data-axes is missing: which of {', '.join(mesh.axes)} split the rows of a batch?")
        found.append((mesh, [mesh.axes[axis] for axis in mesh.axis_indices(named)]))
    return found


def _source_of(text: str) -> tuple[str, int, float]:
    found = re.fullmatch(r"(.+)=(\d+):(\d*\.?\d+)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be name=samples:weight such as web=1000:0.7, got {text!r}")
    return found[1], int(found[2]), float(found[3])


def _planned(options: argparse.Namespace) -> _Planned:
    if options.record is not None:
        return _of_record(options)
    if not options.mesh or options.batch_size is None or not (options.samples or options.source or options.files):
        data = "--samples, or --source for each source of a mixture, or --files"
        raise ArgumentError(f"give a record; or --mesh, --batch-size, and the data: {data}.")
    found = _Planned(meshes=with_data_axes(options.mesh, options.data_axes), replicas=options.replicas)
    found.epoch, times = options.epoch or 0, options.accumulation
    ranks = math.lcm(*(mesh.num_data_ranks(axes) for mesh, axes in found.meshes))
    cut = {"batch_size": options.batch_size * times, "num_data_ranks": ranks, "accumulation": times}
    samples = options.samples
    shuffle = find_ordering({str(name): name for name in ORDERINGS}[options.shuffle])
    if options.source:
        sources = {name: range(count) for name, count, _ in options.source}
        mixture = Mixture(sources, {name: weight for name, _, weight in options.source}, num_samples=samples)
        samples, shuffle = len(mixture), mixture.ordering(shuffle)
    try:
        if options.files:
            _look_at_files(options, found, cut)
        else:
            found.plan = ShardPlan(num_samples=samples, shuffle=shuffle, seed=options.seed, tail=options.tail, **cut)
    except ArgumentError as error:
        what, _, remedy = str(error).partition(". ")
        found.hazards.append((what, remedy))
    return found


def _of_record(options: argparse.Namespace) -> _Planned:
    run = run_of(options.record)
    job, newest = run.last, run.passes[-1][0] if run.passes else None
    found = _Planned(meshes=job.meshes, replicas=job.facts["options"]["replicas"])
    if options.files and (parts := job.facts["data"].get("num_parts")) is not None:
        plan = PartsPlan(num_parts=parts, tail=job.facts["fingerprint"]["tail"], **job.facts["plan"])
        _look_at_cache(options, found, plan)
    if job.unknown is not None or newest is None:
        found.said.append(f"There is no plan to show: {job.unknown or 'nothing was delivered yet'}.")
        return found
    found.epoch = newest.epoch if options.epoch is None else options.epoch
    start = newest.start if found.epoch == newest.epoch else LoaderState(epoch=found.epoch)
    found.plan, found.skips = job.batches(newest.history).plan_of(start), newest.skips
    legs = [leg for leg in run.legs if leg.moved() and leg.job.unknown is None]
    spans = [{"epoch": leg.epoch, "first": leg.start.samples, "end": leg.samples, "run": _name(leg)} for leg in legs]
    plans = {**{leg.epoch: leg.plan for leg in legs}, found.epoch: found.plan}
    found.view = {"plans": plans, "skips": newest.skips, "stretches": spans}
    return found


def _name(leg: Leg) -> str:
    """Return a job by its number and its meshes."""
    shapes = [",".join(f"{axis}={size}" for axis, size in zip(m.axes, m.shape, strict=True)) for m, _ in leg.job.meshes]
    return f"job {leg.job.number}: {' and '.join(shapes)}"


def _look_at_files(options: argparse.Namespace, found: _Planned, cut: dict[str, int]) -> None:
    """Look at files that are not counted, each of which belongs to one part as a whole."""
    source = ShardSource(matched(options.files), lambda name, skip: iter(()))
    parts = chosen_num_parts(source, options.batch_size, cut["num_data_ranks"])
    plan = PartsPlan(num_parts=parts, tail=options.tail, **cut)
    _look_at_cache(options, found, plan)
    sizes = source.part_sizes(Opening(parts=tuple(range(parts)), num_parts=parts, seed=options.seed, epoch=found.epoch))
    if sizes is None:
        found.said.append("The sizes of the files are not known here, and so neither is what the parts differ by.")
        return
    held = [plan.parts_of(data_rank) for data_rank in range(plan.num_data_ranks)]
    of_ranks = [{"data_rank": at, "parts": of, "bytes": sum(sizes[part] for part in of)} for at, of in enumerate(held)]
    found.said += [f"{source.num_shards} files in {parts} parts", of_ranks]
    mean = max(1, sum(sizes)) / parts
    lost = 1 - min(sizes) / mean if plan.ending.drops else 1 - mean / max(1, *sizes)
    if lost > _MUCH and (plan.ending.pads or plan.ending.drops):
        what = "of the data is dropped" if plan.ending.drops else "of all rows are padding"
        what = f"the parts differ in size: about {lost:.0%} {what}, since files that are not counted are not cut"
        found.hazards.append((what, "Count the samples (counts=True; for tars paddle-shard index), or use more files"))


def _look_at_cache(options: argparse.Namespace, found: _Planned, plan: PartsPlan) -> None:
    """Say how many bytes a host's copies of the files need; its ranks follow each other."""
    given, names = options.cache_bytes, matched(options.files)
    sizes = [local_size(name) if given is None else _size_of(name) for name in names]  # servers are asked if need be
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        found.said.append("How large cache_bytes must be is not known: --cache-bytes asks the servers for the sizes.")
        return
    ranks = sorted({rank for mesh, _ in found.meshes for rank in mesh.process_ids})
    each, files = options.ranks_per_host or len(ranks), 0
    for start in range(0, len(ranks), each):
        readers = Counter[int]()
        for group in groups_of(found.meshes):
            here = len(set(ranks[start : start + each]).intersection(group["ranks"]))
            mesh, axes = found.meshes[group["mesh"]]
            for part in plan.parts_of(group["data_rank"], mesh.num_data_ranks(axes)):
                readers[part] += min(1, here) if found.replicas == "leader" else here
        # Ranks that read the same part are not at the same row: one may be in the next file already.
        files = max(files, sum(min(2, number) for number in readers.values()))
    found.facts["least cache_bytes"] = least = least_bytes(known, files)
    found.said.append(
        f"cache_bytes={least} is enough for {each} ranks of a host, which read up to {files} files at once"
    )
    if given is not None and given < least:
        what = f"cache_bytes={given} is too little for {each} ranks of a host: some files are read from their servers"
        found.hazards.append((f"{what}, by each process that needs them", f"cache_bytes={least} has room for all"))


def _size_of(name: str) -> int | None:
    with failures_named(name, lambda: ("asking for its size", None)):
        file, size = open_file(name)
        file.close()
        return size


# What is wrong with it


def _hazards(asked: _Planned) -> Iterator[Hazard]:
    yield from asked.hazards
    for mesh, axes in asked.meshes:
        for axis, size in zip(mesh.axes, mesh.shape, strict=True):
            if axis in _DATA_AXES and axis not in axes and size > 1:
                what = f"axis {axis!r} of {size} ranks carries no data: all of them get the same rows"
                yield what, f"shard_dims={[*axes, axis]!r} splits the rows over it, too"
        each = len(mesh.process_ids) // mesh.num_data_ranks(axes)
        if each > 1 and asked.replicas == "each":
            what = f"{each} ranks of each replica group all read, transform and collate the same samples"
            yield what, 'replicas="leader" lets one rank on each host read for the others'
    if (plan := asked.plan) is None:
        return
    few, ranks = plan.num_samples, plan.num_data_ranks
    if few < ranks:
        what = f"{ranks} data ranks share {few} samples: {ranks - few} of them get nothing but padding"
        yield what, f"Use a mesh with at most {few} data ranks"
    dropped = plan.num_positions - plan.num_served
    if dropped > _MUCH * few:
        what = f"tail={plan.tail!r} drops {dropped} of {few} samples in each epoch"
        yield what, "tail='pad' serves them, and a smaller batch drops fewer"
    advice = plan.ordering.advice(few, ranks, max(1, plan.batch_size // plan.accumulation))
    if advice is not None:
        what, _, way_out = advice.partition(". The order")
        yield what, f"The order{way_out}"
    if not isinstance(plan.ordering, Mixing):
        return
    lengths = dict(zip(plan.ordering.names, plan.ordering.segments[-1].lengths, strict=True))
    for name, drawn in drawn_of(plan.ordering, few).items():
        if drawn.drawn > _MOST_EPOCHS * lengths[name] > 0:
            what = f"source {name!r} has {lengths[name]} samples, and an epoch draws {drawn.drawn}"
            share = _MOST_EPOCHS * lengths[name] / few
            remedy = f"A share of {share:.2g} instead of {drawn.weight:.2g} is {_MOST_EPOCHS} times"
            yield f"{what}: each {drawn.epochs} times", remedy


# How it is shown


def _plan(options: argparse.Namespace) -> Answer:
    asked = _planned(options)
    found: dict[str, Any] = {"meshes": list(groups_of(asked.meshes)), **asked.facts}
    said = [*(line for number in range(len(asked.meshes)) for line in _grid(asked.meshes, number)), *asked.said]
    if (plan := asked.plan) is not None:
        facts = found["plan"] = _facts(plan, asked)
        said.append([{"what": name, "number": value} for name, value in facts.items()])
        if options.step is not None:
            found["step"] = samples_of(plan, asked.meshes, asked.epoch, options.step, asked.skips)
            said += [f"epoch {asked.epoch}, step {options.step}", found["step"]]
    if options.html is not None:
        if plan is None:
            raise ArgumentError(
                "--html: there is no plan to draw: a record of one, or --samples or --source, is needed."
            )
        options.html.write_text(page_of(view_of(plan, *asked.meshes[0], **asked.view)), encoding="utf-8")
        said.append(f"{options.html} shows it, in a browser")
    return with_hazards(found, said, list(_hazards(asked)))


def _grid(meshes: Meshes, number: int) -> tuple[str, Rows]:
    """Return a mesh as a grid, whose columns are its last axis: each rank with its data rank."""
    mesh, axes = meshes[number]
    groups = [group for group in groups_of(meshes) if group["mesh"] == number]
    shape = ", ".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.shape, strict=True))
    head = f"mesh {number}: {shape}; {' and '.join(axes) or 'nothing'} splits the rows: {len(groups)} data ranks"
    if len(mesh.process_ids) > _MOST_SHOWN:
        return head, groups[:_MOST_SHOWN]
    data_rank = {rank: group["data_rank"] for group in groups for rank in group["ranks"]}
    rows: list[dict[str, Any]] = []
    for rank in mesh.process_ids:
        *place, last = mesh.coordinate(rank)
        if last == 0:
            rows.append({"ranks": ", ".join(f"{axis} {at}" for axis, at in zip(mesh.axes, place, strict=False))})
        rows[-1][f"{mesh.axes[-1]} {last}"] = f"{rank} (data rank {data_rank[rank]})"
    return head, rows


def _facts(plan: ShardPlan, asked: _Planned) -> dict[str, int]:
    """Return numbers of an epoch, by what they count."""
    last, padding = plan.num_steps - 1, plan.num_positions - plan.num_samples
    readers = [len(group["ranks"]) for group in groups_of(asked.meshes)]
    if plan.num_steps and not plan.ordering.pads_first:
        padding = plan.padding(step=last)
    return {
        "samples of an epoch": plan.num_samples,
        "steps of an epoch": plan.num_steps,
        "rows of a step": plan.batch_size,
        "rows of a data rank": plan.batch_size // plan.num_data_ranks,
        "rows of the last step": plan.num_rows(step=last) if plan.num_steps else 0,
        "rows of padding in an epoch": padding,
        "samples dropped in an epoch": plan.num_positions - plan.num_served,
        "reads of each sample": max(readers) if asked.replicas == "each" else 1,
    }


_AXES = "axes and sizes in row-major order: dp=4,mp=2; of other ranks than 0, 1, ..: dp=2,mp=1@3,1; once for each mesh"
MESH: Sequence[tuple[str, dict[str, Any]]] = [
    ("--mesh", {"type": mesh_of, "action": "append", "default": [], "help": _AXES}),
    ("--data-axes", {"metavar": "AXES", "help": "axes that split the rows: dp or dp,sharding; '' for none"}),
]
"""The arguments that name meshes."""
_SOURCE = {"type": _source_of, "action": "append", "help": "a source of a mixture, as samples and weight: web=1000:0.7"}
_ARGUMENTS: Sequence[tuple[str, dict[str, Any]]] = [
    ("record", {"nargs": "?", "metavar": "RECORD", "help": "the file of shard_dataloader(record=); or flags:"}),
    *MESH,
    ("--batch-size", {"type": int, "help": "rows of a global batch, before accumulation"}),
    ("--samples", {"type": int, "help": "length of the data set; of a mixture, samples of an epoch"}),
    ("--source", _SOURCE),
    ("--files", {"nargs": "+", "metavar": "FILE", "help": "files of a stream that are not counted; patterns, too"}),
    ("--cache-bytes", {"type": int, "help": "is it enough for copies of --files? Asks servers how large they are"}),
    ("--ranks-per-host", {"type": int, "help": "ranks that share a cache; else all do"}),
    ("--tail", {"choices": list(TAILS), "default": "pad"}),
    ("--shuffle", {"nargs": "?", "const": "True", "default": "False", "choices": list(map(str, ORDERINGS))}),
    ("--seed", {"type": int, "default": 0}),
    ("--accumulation", {"type": int, "default": 1, "help": "micro-batches of a step"}),
    ("--replicas", {"choices": ["each", "leader", "auto"], "default": "each"}),
    ("--epoch", {"type": int, "help": "the epoch that is shown"}),
    ("--step", {"type": int, "help": "also show the samples of each rank at this step"}),
    ("--html", {"type": Path, "metavar": "FILE", "help": "also draw it, as a page that any browser opens"}),
]
_DOES = "Who would read what, and what is wrong with it? Exits with 1 if there is a hazard."
_EXAMPLE = "--samples 50000 --batch-size 256 --mesh dp=4,mp=2 --data-axes dp --shuffle --step 3"
COMMANDS = {"plan": Command(_DOES, _EXAMPLE, _ARGUMENTS, _plan)}
"""The command, by name."""
