"""Commands that say how a run can be resumed otherwise: without some samples or steps, or on another mesh."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile, zip_longest
from typing import Any

from paddle_shard.cli.answer import EPOCH, RECORD, Answer, Rows, cell, command, leg_of, parsed, run_of, sample_of
from paddle_shard.cli.ask import told
from paddle_shard.cli.plan import MESH, rows_of, with_data_axes
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.orders import ordering_of
from paddle_shard.plan.partition import check_batch_size
from paddle_shard.plan.places import Meshes, shares_of
from paddle_shard.plan.shard_plan import end_of, size_at
from paddle_shard.plan.state import LoaderState
from paddle_shard.record.timeline import Job, Leg, Saved, Timeline, places_in

# forget, skip


def _without(run: Timeline, hits: Sequence[tuple[Leg, int]], skip: str) -> tuple[list[str], dict[str, Any]]:
    """Return the Python that resumes a run from before some steps, and what programs want to know of it."""

    def before_all(saved: Saved) -> bool:
        reached = {(leg.job.number, leg.number): leg.steps for leg in saved.legs}
        return all(step >= reached.get((leg.job.number, leg.number), 0) for leg, step in hits)

    lines = ["# No state was saved before that: begin the run again, with a new loader."]
    place, state = None, LoaderState()
    if (saved := next(filter(before_all, reversed(run.saved)), None)) is not None:
        state, line = saved.state, saved.line
        place = {"epoch": state.epoch, "step": state.steps, "line": line["number"], "time": line["time"]}
        where = f"at step {state.steps} of epoch {state.epoch} (line {line['number']}, {line['time']})"
        if (step := line.get("saved_as")) is not None:
            place["saved_as"], where = step, f"{where} by Checkpoints.save({step})"
        lines = [f"# Load the model and the state that were saved {where}:", "loader.load_state_dict(state)"]
        now = run.last.facts["fingerprint"]
        if others := [name for name in now if now[name] != state.fingerprint.get(name)]:
            lines[1:] = [f"loader.load_state_dict(state, override={others!r})"]
            lines.append("# What the run was resumed with later holds from here on: what follows is in another order.")
    lines += [*_left_out_since(run, state), skip]
    return lines, {"resume": place, "python": "\n".join(lines)}


def _left_out_since(run: Timeline, state: LoaderState) -> list[str]:
    """Return the Python that changes what the run has changed since a state: the state does not know it."""
    before, now, job = state.history.skips, run.history.skips, run.last
    known = {sample for sample, *_ in before.samples}
    ids: list[Any] = [sample for sample, *_ in now.samples if sample not in known]
    weights = list[str]()
    if "mixture" in job.facts["fingerprint"]:
        mixing: Any = ordering_of(job.facts["fingerprint"])
        before_it: Any = ordering_of(state.fingerprint) if state.fingerprint else mixing
        ids = [mixing.named(sample) for sample in ids]

        def named(segments: Any) -> list[Any]:  # a source that came later has no weight before
            return [(one.first, dict(zip_longest(mixing.names, one.parts, fillvalue=0))) for one in segments]

        then, made = named(state.history.segments or before_it.segments), named(run.history.segments)
        alike = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(made, then, strict=False)))
        if 0 < alike == len(made) < len(then):  # what was set for later was taken back, as the last call does again
            alike -= 1
        weights = [f"loader.set_weights({parts!r}, at={first})" for first, parts in made[alike:]]
    lines = [f"loader.skip(samples={ids!r})"] if ids else []
    for epoch, first, end in now.stretches:
        if before.joined([(epoch, first, end)], ()).stretches == before.stretches or epoch < state.epoch:
            continue
        legs = run.legs_of(epoch)
        plan = legs[-1].plan if legs else job.batches(state.history).plan_of(LoaderState(epoch=epoch))
        at = max(first, state.samples if epoch == state.epoch else 0)
        if at < end:
            steps = range(plan.step_of(position=at), plan.step_of(position=end - 1) + 1)
            lines.append(f"loader.skip(steps={steps!r}, epoch={epoch})")
    return [*weights, *(["# The run has left this out since then:", *lines] if lines else [])]


@command(
    RECORD,
    ("--samples", {"required": True, "metavar": "FILE", "help": "a sample in each line: 17, or web:17 of a mixture"}),
)
def forget(options: argparse.Namespace) -> Answer:
    """In which steps were some samples, and which lines of Python resume the run without them?

    example: paddle-shard forget run.jsonl --samples ids.txt
    """
    run, given, hits, number = run_of(options.record), dict[Any, None](), list[tuple[Leg, int]](), 0
    try:
        with open(options.samples) as file:
            for line in file:
                number += 1
                if line.strip() and (sample := sample_of(line.strip())) not in given:
                    given[sample] = None
                    hits += [(leg, step) for leg, step, _ in places_in(run, sample)]
    except (OSError, UnicodeError, ArgumentError, argparse.ArgumentTypeError) as error:
        raise_if_a_handlers(error)
        what = f"--samples {options.samples}{f', line {number}' * (number > 0)}: {error}".rstrip(".")
        raise ArgumentError(f"{what}. It has a sample in each line: 17, or web:17 of a mixture.") from error
    if not hits:
        said = "None of these samples was delivered, or they are left out already: nothing has to be undone."
        return Answer(found={"steps": [], "resume": None, "python": ""}, said=[said])
    places = sorted({(leg.job.number, leg.epoch, step, told(leg, step)) for leg, step in hits})
    steps = [{"job": job, "epoch": epoch, "step": step, "told": line} for job, epoch, step, line in places]
    samples = list(given)
    lines, found = _without(run, hits, f"loader.skip(samples={samples!r})")
    what = f"{len(samples)} samples were delivered {len(hits)} times, in {len(steps)} steps"
    return Answer(found={"steps": steps, **found}, said=[what, steps, *lines])


def _steps_of(text: str) -> range:
    first, last = parsed(r"(\d+)(?:-(\d+))?", text, kind := "a step or a stretch of them such as 3 or 3-6")
    if int(first) > int(last or first):
        raise argparse.ArgumentTypeError(f"must be {kind}, got {text!r}")
    return range(int(first), int(last or first) + 1)


@command(
    RECORD,
    ("--step", {"type": _steps_of, "required": True, "help": "a step of the epoch, or a stretch: 3 or 3-6"}),
    EPOCH,
)
def skip(options: argparse.Namespace) -> Answer:
    """Which lines of Python resume the run without some of its steps?

    example: paddle-shard skip run.jsonl --epoch 0 --step 1200-1229
    """
    run, hits, epoch = run_of(options.record), list[tuple[Leg, int]](), options.epoch
    for step in options.step:
        epoch, legs = leg_of(run, epoch, step)
        hits += [(leg, step) for leg in legs]
    (leg, first_step), job, steps = hits[0], hits[0][0].job, options.step
    if "files" in job.facts["data"]:
        raise ArgumentError(f"the steps of a stream cannot be left out: {job.unknown}.")
    size, rows = "of the size that the run had there", None
    if job.unknown is None:  # counted as the job goes on that is resumed from before them
        first, end = leg.plan.first_position(step=first_step), max(end_of(one.plan, step) for one, step in hits)
        rows = size_at(leg.plan, first)
        size = f"of {rows} rows"
        steps = range(first_step, min(leg.plan.step_of(position=end - 1) + 1, leg.plan.num_steps))
        # What comes after the last step, tail="drop" leaves out anyway.
        if (last := end_of(leg.plan, steps[-1])) > end or (last < end and steps.stop < leg.plan.num_steps):
            what = f"the batches of these steps are of several sizes, and batches {size} do not end where they end"
            way_out = "Give a stretch that was delivered in batches of one size; paddle-shard verify lists them."
            raise ArgumentError(f"--step: {what}. {way_out}")
    comment = f"# Steps are counted in batches {size}."
    lines, found = _without(run, hits, f"loader.skip(steps={steps!r}, epoch={epoch})")
    found |= {"batch_size": rows, "python": f"{comment}\n{found['python']}"}
    return Answer(found=found, said=[comment, *lines])


# diff


@command(
    RECORD,
    *MESH,
    ("--batch-size", {"type": rows_of, "help": "rows of a global batch, before accumulation; else as it was"}),
)
def diff(options: argparse.Namespace) -> Answer:
    """What changes for each rank if the run resumes from its last saved state on another mesh?

    example: paddle-shard diff run.jsonl --mesh dp=2,mp=4
    """
    run = run_of(options.record)
    if options.data_axes is not None and not options.mesh:
        raise ArgumentError("--data-axes are those of a --mesh, which is missing.")
    state = run.saved[-1].state if run.saved else LoaderState()
    before, ranks = _described(run.last, run.last.meshes, state, None)
    meshes = with_data_axes(options.mesh, options.data_axes) if options.mesh else run.last.meshes
    after, new_ranks = _described(run.last, meshes, state, options.batch_size)
    whole = _beside("what", before, after)
    of_ranks = sorted(_beside("rank", ranks, new_ranks), key=lambda row: row["rank"])
    where = f"The run resumes at step {state.steps} of epoch {state.epoch}, position {state.samples}. Its order stays."
    found = {"epoch": state.epoch, "step": state.steps, "position": state.samples, "run": whole, "ranks": of_ranks}
    return Answer(found=found, said=[where, whole, of_ranks])


def _beside(name: str, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Rows:
    return [{name: one, "before": before.get(one), "after": after.get(one)} for one in {**before, **after}]


def _described(
    job: Job, meshes: Meshes, state: LoaderState, batch_size: int | None
) -> tuple[dict[str, Any], dict[int, str]]:
    """Return how the run would continue, and what each rank would have.

    Raises:
        ArgumentError: The loader would refuse it.
        StateError: The state could not be loaded there.
    """
    order, known = job.facts["plan"], dict(job.facts["fingerprint"])
    if order is None:
        raise ArgumentError("each item of the data set is a global batch: its rows are only known when it is read.")
    count, times = math.lcm(*(mesh.num_data_ranks(axes) for mesh, axes in meshes)), order["accumulation"]
    size = order["batch_size"] if batch_size is None else batch_size * times
    if "num_data_ranks" in known:  # an order that is bound to the number of its readers
        known["num_data_ranks"] = count
    del known["order_version"]
    LoaderState.from_dict(replace(state, fingerprint=job.facts["fingerprint"]).to_dict(), known)
    found = {"data ranks": count, "rows of a step": size}
    if size is not None:
        check_batch_size(size, count, times)
    parts = job.parts_plan(batch_size=size, num_data_ranks=count)
    if parts is None and job.unknown is None:
        plan = job.batches(state.history, batch_size=size, num_data_ranks=count).plan_of(state)
        if batch_size is None:  # the next one, as a schedule may have changed it
            found["rows of a step"] = size = size_at(plan, state.samples)
        found["steps left in the epoch"] = 0 if state.ended else plan.num_steps - state.steps
        found["rows of the last step"] = plan.num_rows(step=plan.num_steps - 1)

    def has(data_rank: int, num_data_ranks: int) -> str:
        rows = "" if size is None else f", {size // num_data_ranks} rows"
        held = "" if parts is None else f", parts {cell(parts.parts_of(data_rank, num_data_ranks))}"
        return f"data rank {data_rank}{rows}{held}"

    ranks = dict[int, str]()
    for group, what in shares_of(meshes, has):
        for rank in group["ranks"]:
            ranks[rank] = what if ranks.get(rank, what) == what else f"{ranks[rank]}; mesh {group['mesh']}: {what}"
    return found, ranks
