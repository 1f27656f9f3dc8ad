"""Commands that say how a run can be resumed otherwise: without some samples or steps, or on another mesh."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paddle_shard.cli.answer import Answer, Command, leg_of, numbers, run_of, table
from paddle_shard.cli.ask import meshes_of, of_record, sample_of
from paddle_shard.cli.plan import mesh_arguments, with_data_axes
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.partition import check_batch_size
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.plan.state import LoaderState
from paddle_shard.record.places import groups_of, places_in
from paddle_shard.record.timeline import Job, Leg, Saved, Timeline

# forget, skip


def _newest_before(run: Timeline, hits: Sequence[tuple[Leg, int]]) -> Saved | None:
    """Return the newest saved state before which none of some steps was delivered."""
    for saved in reversed(run.checkpoints):
        reached = {(leg.job.number, leg.number): leg.steps for leg in saved.legs}
        if not any(step < reached.get((leg.job.number, leg.number), 0) for leg, step in hits):
            return saved
    return None


def _resumed_without(run: Timeline, hits: Sequence[tuple[Leg, int]], skip: str) -> tuple[list[str], dict[str, Any]]:
    """Return the Python that resumes a run from before some steps, and where that is."""
    saved = _newest_before(run, hits)
    if saved is None:
        return ["# No state was saved before that: begin the run again, with a new loader.", skip], {}
    state, line = saved.state, saved.line
    place = {"epoch": state.epoch, "step": state.steps, "line": line["number"], "time": line["time"]}
    where = f"step {state.steps} of epoch {state.epoch} (line {line['number']} of the record, {line['time']})"
    said = [f"# Load the model and the state that were saved before {where}:", "loader.load_state_dict(state)", skip]
    return said, place


def _samples_in(path: str) -> list[Any]:
    try:
        with open(path) as file:
            return [sample_of(line.strip()) for line in file if line.strip()]
    except (OSError, UnicodeError, argparse.ArgumentTypeError) as error:
        raise ArgumentError(
            f"--samples {path}: {error}. It has a sample in each line: 17, or web:17 of a mixture."
        ) from None


def _forget(options: argparse.Namespace) -> Answer:
    run, samples = run_of(options.record), _samples_in(options.samples)
    hits = [(leg, step, sample) for sample in samples for leg, step, _, _ in places_in(run, sample)]
    steps = sorted({(leg.job.number, leg.epoch, step) for leg, step, _ in hits})
    lines, place = _resumed_without(run, [(leg, step) for leg, step, _ in hits], f"loader.skip(samples={samples!r})")
    said = [f"{len(samples)} samples were delivered {len(hits)} times, in {len(steps)} steps:"]
    said += [table(["job", "epoch", "step"], steps), "", *lines] if steps else [f"\nloader.skip(samples={samples!r})"]
    found = {"steps": [{"job": job, "epoch": epoch, "step": step} for job, epoch, step in steps]}
    return Answer(text="\n".join(said), found={**found, "resume": place, "python": "\n".join(lines)})


def _steps_of(text: str) -> range:
    first, dash, last = text.partition("-")
    if not (first.isdigit() and (last.isdigit() or not dash)):
        raise argparse.ArgumentTypeError(f"must be a step or a stretch of them such as 3 or 3-6, got {text!r}")
    return range(int(first), int(last or first) + 1)


def _skip(options: argparse.Namespace) -> Answer:
    run = run_of(options.record)
    hits = []
    for step in options.step:
        epoch, legs = leg_of(run, options.epoch, step)
        hits += [(leg, step) for leg in legs]
    if (why := hits[0][0].job.unknown) is not None and hits[0][0].job.facts["data"].get("num_parts"):
        raise ArgumentError(f"a stream has no steps that can be left out: {why}.")
    shown = f"[{options.step[0]}]" if len(options.step) == 1 else f"range({options.step[0]}, {options.step[-1] + 1})"
    lines, place = _resumed_without(run, hits, f"loader.skip(steps={shown}, epoch={epoch})")
    sizes = sorted({leg.job.facts["plan"]["batch_size"] for leg, _ in hits if leg.job.facts["plan"]})
    lines.insert(0, f"# Steps are those of batches of {' or '.join(map(str, sizes))} rows.")
    return Answer(text="\n".join(lines), found={"resume": place, "python": "\n".join(lines)})


def _forget_arguments(parser: argparse.ArgumentParser) -> None:
    of_record(parser)
    parser.add_argument(
        "--samples", required=True, metavar="FILE", help="a sample in each line: 17, or web:17 of a mixture"
    )


def _skip_arguments(parser: argparse.ArgumentParser) -> None:
    of_record(parser)
    parser.add_argument("--step", type=_steps_of, required=True, help="a step of the epoch, or a stretch: 3 or 3-6")
    parser.add_argument("--epoch", type=int, help="the epoch; may be left out if the run has one only")


# diff


def _diff(options: argparse.Namespace) -> Answer:
    run = run_of(options.record)
    job, meshes = run.last, with_data_axes(options.mesh, options.data_axes)
    saved = run.checkpoints[-1].state if run.checkpoints else LoaderState()
    before, after = _described(job, job.meshes, saved, None), _described(job, meshes, saved, options.batch_size)
    ranks = sorted({*before["ranks"], *after["ranks"]})
    rows = [[rank, before["ranks"].get(rank, "-"), after["ranks"].get(rank, "-")] for rank in ranks]
    names = [name for name in before if name != "ranks"]
    said = [
        f"resumed at step {saved.steps} of epoch {saved.epoch} (position {saved.samples}): the order stays, the mesh changes",
        table(["", "before", "after"], [[name, before[name], after[name]] for name in names]),
        "",
        table(["rank", f"before ({meshes_of(job)})", "after"], rows),
    ]
    same = {str(rank): [one, other] for rank, one, other in rows}
    found = {"at": {"epoch": saved.epoch, "step": saved.steps, "position": saved.samples}, "ranks": same}
    return Answer(text="\n".join(said), found={**found, **{name: [before[name], after[name]] for name in names}})


def _described(
    job: Job, meshes: list[tuple[MeshLayout, list[str]]], state: LoaderState, batch_size: int | None
) -> dict[str, Any]:
    """Return what each rank would have, and how the epoch would go on.

    Raises:
        ArgumentError: The loader would refuse it.
        StateError: The state could not be loaded there.
    """
    order, data = job.facts["plan"], job.facts["data"]
    if order is None:
        raise ArgumentError("each item of the data set is a global batch: its rows are only known when it is read.")
    count, times = math.lcm(*(mesh.num_data_ranks(axes) for mesh, axes in meshes)), order["accumulation"]
    size = order["batch_size"] if batch_size is None else batch_size * times
    known = dict(job.facts["fingerprint"])
    if "num_data_ranks" in known:  # an order that is bound to the number of its readers
        known["num_data_ranks"] = count
    known.pop("order_version")
    LoaderState.from_dict(replace(state, fingerprint=job.facts["fingerprint"]).to_dict(), known)
    found: dict[str, Any] = {"data ranks": count, "rows of a step": size}
    if size is not None:
        check_batch_size(size, count, times)
    parts: PartsPlan | None = None
    if data.get("num_parts"):
        parts = PartsPlan(batch_size=size, num_parts=data["num_parts"], num_data_ranks=count, accumulation=times)
    elif job.unknown is None:
        batches = job.batches(state.history, batch_size=size, num_data_ranks=count)
        plan = batches.plan_of(state)
        found["steps left in the epoch"] = 0 if state.ended else plan.num_steps - state.steps
        found["rows of the last step"] = plan.num_rows(step=plan.num_steps - 1)
    found["ranks"] = {}
    for number, (mesh, axes) in enumerate(meshes):
        for data_rank, ranks in enumerate(groups_of(mesh, axes)):
            what = f"data rank {data_rank}"
            if size is not None:
                what += f", {size // mesh.num_data_ranks(axes)} rows"
            if parts is not None:
                what += f", parts {numbers(parts.parts_of(data_rank, mesh.num_data_ranks(axes)))}"
            for rank in ranks:
                already = found["ranks"].get(rank)
                found["ranks"][rank] = what if already in (None, what) else f"{already}; mesh {number}: {what}"
    return found


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    of_record(parser)
    mesh_arguments(parser, required=True)
    parser.add_argument("--batch-size", type=int, help="rows of a global batch, before accumulation; else as it was")


COMMANDS = {
    "skip": Command(
        does="Which lines of Python resume the run without some of its steps?",
        example="run.jsonl --epoch 0 --step 1200-1229",
        arguments=_skip_arguments,
        answer=_skip,
    ),
    "forget": Command(
        does="In which steps were some samples, and which lines of Python resume the run without them?",
        example="run.jsonl --samples ids.txt",
        arguments=_forget_arguments,
        answer=_forget,
    ),
    "diff": Command(
        does="What changes for each rank if the run resumes from its last saved state on another mesh?",
        example="run.jsonl --mesh dp=2,mp=4 --data-axes dp",
        arguments=_diff_arguments,
        answer=_diff,
    ),
}
"""The commands, by name."""
