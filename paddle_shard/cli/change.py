"""Commands that say how a run can be resumed otherwise: without some samples or steps, or on another mesh."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile, zip_longest
from typing import Any

from paddle_shard.cli.answer import EPOCH, RECORD, Answer, Rows, cell, command, legs_at, parsed, run_of, sample_of
from paddle_shard.cli.ask import told
from paddle_shard.cli.plan import MESH, rows_of, with_data_axes
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.orders import ordering_of
from paddle_shard.plan.partition import check_batch_size
from paddle_shard.plan.places import Meshes, shares_of
from paddle_shard.plan.shard_plan import end_of, num_steps_left_out, size_at
from paddle_shard.plan.state import LoaderState
from paddle_shard.record.timeline import Job, Leg, Saved, Timeline, places_in

# forget, skip


def _without(
    run: Timeline, hits: Sequence[tuple[Leg, int]], stretches: Sequence[tuple[int, int, int]], *others: str
) -> tuple[list[str], dict[str, Any]]:
    """Return the Python that resumes a run from before some steps, and what programs want to know of it.

    Args:
        run: The run.
        hits: The steps, each with what has delivered it.
        stretches: (epoch, first position, the one after the last) of what is left out, beside what the run left out.
        others: Further lines of Python.
    """

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
        if differ := [name for name in now if now[name] != state.fingerprint.get(name)]:
            lines[1:] = [f"loader.load_state_dict(state, override={differ!r})"]
            lines.append("# What the run was resumed with later holds from here on: what follows is in another order.")
    before = state.history.skips
    since = [one for one in run.history.skips.stretches if before.joined([one], ()).stretches != before.stretches]
    steps, rows = _in_steps(run, hits[0][0], state, [*since, *stretches])
    weights, left_out = _changed_since(run, state)
    left_out += filter(None, steps[: len(since)])
    lines += [*weights, *(["# The run has left this out since then:", *left_out] if left_out else [])]
    lines += [*filter(None, steps[len(since) :]), *others]
    scheduled = hits[0][0].job.facts["sizes"] is not None
    if rows is not None:
        of = "the run's schedule" if scheduled else f"{rows} rows"
        lines.insert(0, f"# Steps are counted in batches of {of}.")
    return lines, {"resume": place, "batch_size": None if scheduled else rows, "python": "\n".join(lines)}


def _changed_since(run: Timeline, state: LoaderState) -> tuple[list[str], list[str]]:
    """Return the Python that switches weights, and that leaves out samples, as the run has done since a state."""
    known, weights = {sample for sample, *_ in state.history.skips.samples}, list[str]()
    ids: list[Any] = [sample for sample, *_ in run.history.skips.samples if sample not in known]
    fingerprint = run.last.facts["fingerprint"]
    if "mixture" in fingerprint:
        mixing: Any = ordering_of(fingerprint)
        before_it: Any = ordering_of(state.fingerprint) if state.fingerprint else mixing
        ids = [mixing.named(sample) for sample in ids]

        def named(segments: Any) -> list[Any]:  # a source that came later has no weight before
            return [(one.first, dict(zip_longest(mixing.names, one.parts, fillvalue=0))) for one in segments]

        then, made = named(state.history.segments or before_it.segments), named(run.history.segments)
        alike = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(made, then, strict=False)))
        if 0 < alike == len(made) < len(then):  # what was set for later was taken back, as the last call does again
            alike -= 1
        weights = [f"loader.set_weights({parts!r}, at={first})" for first, parts in made[alike:]]
    return weights, [f"loader.skip(samples={ids!r})"] if ids else []


def _in_steps(
    run: Timeline, leg: Leg, state: LoaderState, stretches: Sequence[tuple[int, int, int]]
) -> tuple[list[str], int | None]:
    """Return the Python that leaves out each stretch after a state, or "", and the rows of the batches it counts.

    The batches are those that the job of a leg makes when it resumes from the state; or those of the newest job.

    Raises:
        ArgumentError: A stretch begins or ends within a batch.
    """
    if not stretches:
        return [], None
    for job, history in ((leg.job, leg.history), (run.last, run.history)):
        batches, lines, size = job.batches(history), list[str](), None
        for epoch, first, end in stretches:
            start = state if epoch == state.epoch else LoaderState(epoch=epoch)
            plan, at = batches.plan_of(start), max(first, start.samples)
            if epoch < state.epoch or at >= min(end, plan.num_served):
                lines.append("")
                continue
            steps = range(plan.step_of(position=at), min(plan.step_of(position=end - 1) + 1, plan.num_steps))
            last, size = end_of(plan, steps[-1]), size or size_at(plan, at)
            # What comes after the last step, tail="drop" leaves out anyway.
            ends = last == end or (last < end and steps.stop == plan.num_steps)
            if ends and plan.first_position(step=steps[0]) == at:
                lines.append(f"loader.skip(steps={steps!r}, epoch={epoch})")
        if len(lines) == len(stretches):
            return lines, size
    what = "batches of one size, from the saved state on, do not end where those end that are left out"
    raise ArgumentError(f"{what}, now or by the run. Give a stretch of one size; paddle-shard verify lists them.")


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
        what = f"--samples {options.samples}{f', line {number}' * (number > 0)}: {error}".rstrip(".")
        raise ArgumentError(f"{what}. It has a sample in each line: 17, or web:17 of a mixture.") from error
    if not hits and run.untold:
        raise ArgumentError(f"these samples are in no line. {run.untold[0]}")
    if not hits:
        said = "None of these samples was delivered, or they are left out already: nothing has to be undone."
        return Answer(found={"steps": [], "resume": None, "python": "", "notes": []}, said=[said])
    places = sorted({(leg.job.number, leg.start.epoch, step, told(leg, step)) for leg, step in hits})
    steps = [{"job": job, "epoch": epoch, "step": step, "told": line} for job, epoch, step, line in places]
    samples = list(given)
    lines, found = _without(run, hits, [], f"loader.skip(samples={samples!r})")
    what = f"{len(samples)} samples were delivered {len(hits)} times, in {len(steps)} steps"
    return Answer(found={"steps": steps, **found, "notes": run.untold}, said=[what, *run.untold, steps, *lines])


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
    run = run_of(options.record)
    hits = [(leg, step) for step in options.step for leg in legs_at(run, options.epoch, step)]
    first_leg, first_step = hits[0]
    job, epoch = first_leg.job, first_leg.start.epoch
    sized = job.facts["plan"] is None or job.facts["plan"]["batch_size"] is not None
    if "files" in job.facts["data"] or job.facts["options"]["is_dataset_splitted"] or not sized:
        raise ArgumentError(f"the steps of this run cannot be left out: {job.unknown}.")
    if job.unknown is None:
        by_step = {(step, leg.plan.first_position(step=step)) for leg, step in hits}
        if len(by_step) > len(options.step):
            what = "some of these steps were delivered more than once, with other samples each time"
            raise ArgumentError(f"{what}. paddle-shard batch shows them, and paddle-shard forget leaves samples out.")
        first, end = first_leg.plan.first_position(step=first_step), max(end_of(leg.plan, step) for leg, step in hits)
        lines, found = _without(run, hits, [(epoch, first, end)])
    else:
        comment = "# Steps are counted in batches of the size that the run had there."
        lines, found = _without(run, hits, [], comment, f"loader.skip(steps={options.step!r}, epoch={epoch})")
    return Answer(found=found, said=lines)


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
    if job.facts["options"]["is_dataset_splitted"] and count != order["num_data_ranks"]:
        what = "the data is split already: each rank loads its own state"
        raise ArgumentError(f"{what}, on a mesh with as many data ranks as before, {order['num_data_ranks']}.")
    if "batch_sampler" in known and "sampler" not in known and size != order["batch_size"]:
        raise ArgumentError(f"--batch-size: {job.unknown}, whose batches are its own.")
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
        gone = num_steps_left_out(plan, state.epoch, state.history.skips, state.steps)
        found["steps left in the epoch"] = 0 if state.ended else plan.num_steps - state.steps - gone
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
