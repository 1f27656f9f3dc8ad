"""What does a plan look like? Makes a page of HTML that draws it, and needs nothing else: no network, no Paddle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.blocks import BlockOrder, Blocks
from paddle_shard.plan.mesh import Axes, MeshLayout, replica_groups
from paddle_shard.plan.mixture import Mixing
from paddle_shard.plan.orders import PaddleOrdering, PaddleSequential, Sequential, Shuffled
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.plan.places import shapes_of
from paddle_shard.plan.shard_plan import ShardPlan, skipped_positions
from paddle_shard.plan.shuffle import VERSION
from paddle_shard.record.timeline import Leg, Timeline
from paddle_shard.shown import Page

MAX_SAMPLES = 1 << 52
"""Most samples of a page: numbers of JavaScript are exact up to 2^53, and so are sums of two positions."""
MAX_TABLE = 1 << 22
"""Most samples in Paddle's order, which is a table that the page has to draw."""

# The orders that `order.js` computes.
_KINDS: dict[type, str] = {
    **{Sequential: "sequential", PaddleSequential: "sequential", Shuffled: "shuffled"},
    **{Blocks: "blocks", PaddleOrdering: "paddle", Mixing: "mixture"},
}
FILES = Path(__file__).parent / "page"
SCRIPTS = ("drawing.js", "order.js", "page.js")


def view_of(
    plan: ShardPlan | PartsPlan,
    mesh: MeshLayout,
    data_axes: Axes,
    *,
    plans: Mapping[int, ShardPlan] | None = None,
    skips: Sequence[tuple[int, int, int]] = (),
    stretches: Sequence[Mapping[str, Any]] = (),
    dealt: bool = False,
    files: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what the page needs to know about a plan, as JSON values.

    Args:
        plan: The plan of all epochs that `plans` does not have; or that of a stream, of which parts are shown.
        mesh: The mesh that reads it, or one of several: then the plan's data ranks are their least common multiple.
        data_axes: The axes that the batch is split over.
        plans: The plans of epochs with segments of their own, or another length.
        skips: (epoch, first position, end) of skipped steps.
        stretches: What a run has delivered: {"epoch": 0, "first": 0, "end": 512, "run": "dp=4"} and so on. `first` and
            `end` are positions, and `run` names the job that delivered them. Its own "mesh" and "data_axes" may follow,
            with "accumulation" and "dealt"; and "counts": False if the run was resumed from before it.
        dealt: Whether rows are dealt by costs (`balance=`), so that nobody knows here who has which.
        files: Names of the files of a stream.

    Raises:
        ArgumentError: The page cannot compute the order.
    """
    parts, known = (plan, None) if isinstance(plan, PartsPlan) else (None, plan)
    if known is not None and known.num_positions > MAX_SAMPLES:
        raise ArgumentError(f"num_samples must be at most 2^52 for a page, got {known.num_samples}.")
    data_ranks = mesh.num_data_ranks(data_axes)
    if plan.num_data_ranks % data_ranks:
        what = f"data_axes: {data_axes!r} have {data_ranks} data ranks on the mesh {mesh.shape} of {mesh.axes}"
        over = f"which do not divide the plan's num_data_ranks={plan.num_data_ranks}"
        raise ArgumentError(f"{what}, {over}. Name the axes that the plan is for.")
    epochs = {str(epoch): one for epoch, one in (plans or {}).items()}
    meshes = dict[tuple[MeshLayout, tuple[int, ...]], int]()
    found = {
        "version": 1,
        "orderVersion": VERSION,
        "seed": "" if known is None else repr(known.seed),
        "batchSize": plan.batch_size,
        "dataRanks": data_ranks,
        "accumulation": plan.accumulation,
        "tail": str(plan.tail),
        "order": {"kind": "stream"} if known is None else _order(known),
        "epochs": {} if known is None else {epoch: _epoch(one) for epoch, one in {"any": known, **epochs}.items()},
        "dealt": dealt,
        "parts": parts and parts.num_parts,
        "files": files,
        "at": (0, 0),  # epoch and step that are shown first
        "mesh": _mesh(mesh, data_axes, parts),
        "skips": {"stretches": skips, "samples": []},
        "stretches": [_stretch(stretch, meshes) for stretch in stretches],
        "meshes": [_mesh(*one, parts) for one in meshes],
    }
    return dict(json.loads(json.dumps(found)))  # without tuples


def life_of(run: Timeline) -> dict[str, Any]:
    """Return what the page of a run shows beside its plan, as arguments of `view_of`: each leg on its job's first mesh.

    Args:
        run: What a record tells.
    """
    stretches = [_of_leg(leg, True) for leg in run.legs] + [_of_leg(leg, False) for leg in run.lost]
    plans = {leg.start.epoch: leg.plan for leg, _ in run.passes if leg.job.unknown is None}
    facts = run.last.facts
    skips = [
        (leg.start.epoch, *positions)
        for leg, _ in run.passes
        if leg.job.unknown is None
        for positions in skipped_positions(leg.plan, leg.skips)
    ]
    files = facts["data"].get("files", ())
    return {"plans": plans, "skips": skips, "stretches": stretches, "dealt": facts["dealt"], "files": files}


def _of_leg(leg: Leg, counts: bool) -> dict[str, Any]:
    job, facts, (mesh, data_axes) = leg.job, leg.job.facts, leg.job.meshes[0]
    found: dict[str, Any] = {"epoch": leg.start.epoch, "first": leg.start.samples, "end": leg.samples, "counts": counts}
    found |= {"run": f"job {job.number}: {shapes_of(job.meshes)}", "mesh": mesh, "data_axes": data_axes}
    return {**found, "accumulation": facts["plan"]["accumulation"] if facts["plan"] else 1, "dealt": facts["dealt"]}


def page_of(view: Mapping[str, Any], hazards: Iterable[tuple[str, str]] = ()) -> Page:
    """Return the page that shows a view: HTML that loads nothing.

    Args:
        view: See `view_of`.
        hazards: What is wrong, and what would help.
    """
    text = {name: (FILES / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)}
    items = "".join(f"<li><strong>{escape(what)}.</strong> {escape(remedy)}</li>" for what, remedy in hazards)
    put = {name: text[name] for name in SCRIPTS} | {
        "CSS": text["page.css"],
        "HAZARDS": f'<ul id="hazards" aria-label="Hazards">{items}</ul>' if items else "",
        "VIEW": json.dumps(view).replace("<", "\\u003c"),
    }
    # All at once: names of sources may be anything, also what looks like one of the marks, or the end of a script.
    marks = "|".join(re.escape(f"__{name}__") for name in put)
    return Page(re.sub(marks, lambda found: put[found[0].strip("_")], text["page.html"]))


def _mesh(mesh: MeshLayout, data_axes: Axes, parts: PartsPlan | None) -> dict[str, Any]:
    """Return a mesh; of a stream, with the parts of each data rank."""
    count, names = mesh.num_data_ranks(data_axes), [mesh.axes[axis] for axis in mesh.axis_indices(data_axes)]
    data_rank = {rank: at for at, group in enumerate(replica_groups(mesh, names)) for rank in group}
    return {
        "axes": mesh.axes,
        "shape": mesh.shape,
        "dataAxes": names,
        "ranks": mesh.process_ids,
        "dataRanks": [data_rank[rank] for rank in mesh.process_ids],
        "count": count,
        "parts": parts and [parts.parts_of(data_rank, count) for data_rank in range(count)],
    }


def _stretch(stretch: Mapping[str, Any], meshes: dict[tuple[MeshLayout, tuple[int, ...]], int]) -> dict[str, Any]:
    """Return a stretch with the place of its mesh in `meshes`, to which it is added if it is a new one."""
    found = {name: value for name, value in stretch.items() if name not in ("mesh", "data_axes")}
    if "mesh" in stretch:
        mesh = stretch["mesh"], stretch["mesh"].axis_indices(stretch["data_axes"])
        found["mesh"] = meshes.setdefault(mesh, len(meshes))
    return found


def _order(plan: ShardPlan) -> dict[str, Any]:
    """Return which order the page computes, and what it depends on."""
    ordering, kind = plan.ordering, _KINDS.get(type(plan.ordering))
    if kind is None:
        what = f"shuffle: a page cannot compute the order of {ordering!r}"
        raise ArgumentError(f"{what}, only the orders of this package.")
    if kind == "paddle" and plan.num_positions > MAX_TABLE:
        what = f"shuffle='paddle' with {plan.num_samples} samples: a page draws Paddle's order as a table"
        way_out = "Make the page of fewer samples, or with shuffle=True."
        raise ArgumentError(f"{what}, of at most {MAX_TABLE} samples. {way_out}")
    settings = ordering.fingerprint(num_data_ranks=plan.num_data_ranks, accumulation=plan.accumulation)
    found = {"kind": kind, "padsFirst": ordering.pads_first, **settings.get("mixture", settings)}
    if isinstance(ordering, Mixing):  # names as `derive_key` spells them
        lengths = list(ordering.segments[0].lengths)
        segments = [{"from": one.first, "weights": list(one.parts), "lengths": lengths} for one in ordering.segments]
        found |= {"keys": list(map(repr, ordering.names)), "lengths": [], "segments": segments}
    return found


def _epoch(plan: ShardPlan) -> dict[str, Any]:
    """Return the steps of an epoch."""
    found = {
        "samples": plan.num_samples,
        "positions": plan.num_positions,
        "served": plan.num_served,
        "steps": plan.num_steps,
        "lastRows": plan.num_rows(step=plan.num_steps - 1) if plan.num_steps else 0,
        "segments": plan.segments or [[0, plan.batch_size]],
    }
    if isinstance(plan.ordering, Blocks):
        order = plan.order(epoch=0)
        assert isinstance(order, BlockOrder)
        found |= {"width": order.width, "parts": order.num_parts}
    return found
