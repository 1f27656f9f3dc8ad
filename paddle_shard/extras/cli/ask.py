"""Commands that answer from the record of a run: was all delivered once, where was a sample, what was in a step?"""

from __future__ import annotations

import argparse
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.answer import EPOCH, RECORD, Answer, Rows, check_epoch, command, legs_at, run_of, sample_of
from paddle_shard.extras.cli.places import rows_of, samples_of, shapes_of, shares_of
from paddle_shard.extras.cli.proof import proof_of
from paddle_shard.extras.cli.timeline import Leg, Timeline, places_in, timeline
from paddle_shard.record.lines import read

_LOST = (
    "What does not count was delivered after the position from which the run was resumed. A job that was killed may "
    "have delivered more after its last line; the model does not know it either.\n"
)
_OTHERS = "Other runs have other data, or another order: nothing is said of them. Give each run a record of its own.\n"


@command(RECORD)
def verify(options: argparse.Namespace) -> Answer:
    """Was each sample delivered exactly once, over all jobs, and was no line of the record changed?

    example: paddle-shard verify run.jsonl
    """
    lines, damage = read(options.record)
    try:
        run = timeline(lines)
        proofs = [proof_of(run, epoch) for epoch in run.epochs]
    except Exception:  # whatever lines that were changed lead to
        if not damage:
            raise
        return Answer(found={"damage": damage}, said=damage, failed=True)
    known = 0 if run.began_at is None or not run.legs else run.legs[0].job.number  # earlier ones may have led to it
    unlike = {leg.job.number for leg in run.lost if leg.job.facts["fingerprint"] != run.last.facts["fingerprint"]}
    others, legs = unlike - {leg.job.number for leg in run.legs}, [_facts(leg, "yes") for leg in run.legs]
    for leg in run.lost:
        job = leg.job.number
        legs.append(_facts(leg, "other run" if job in others else "no" if job >= known else "not known"))
    said: list[str | Rows] = [*(damage or [f"{len(lines)} lines, of which none was changed or taken out"])]
    mended = [(line["number"], line["mended"]) for line in lines if "mended" in line]
    said += [f"before line {at}, {cut} bytes of a line that a crash had cut are gone" for at, cut in mended]
    said += [*run.untold, "", legs, *([_LOST] if any(leg["counts"] == "no" for leg in legs) else [])]
    said += [_OTHERS] * bool(others)
    for proof in proofs:
        said += [proof["text"], *(f"  ({note})" for note in proof["notes"])]
    found = {"lines": len(lines), "damage": damage, "epochs": proofs, "delivered": legs}
    return Answer(found=found, said=said, failed=bool(damage) or any(proof["problems"] for proof in proofs))


def _facts(leg: Leg, counts: str) -> dict[str, Any]:
    size = leg.job.facts["plan"] and leg.job.facts["plan"]["batch_size"]
    found = {"job": leg.job.number, "mesh": shapes_of(leg.job.meshes), "batch_size": size, "epoch": leg.start.epoch}
    found |= {"counts": counts, "first_step": leg.start.steps, "end_step": leg.steps}
    return found | {"first_position": leg.start.samples, "end_position": leg.samples}


def told(leg: Leg, step: int) -> str:
    """Return whether a line tells that a step was delivered; if not, the pass delivers it there if it goes on."""
    return "yes" if step < leg.steps else "not yet"


@command(
    RECORD, ("--sample", {"type": sample_of, "required": True, "help": "its index; of a mixture, source:index"}), EPOCH
)
def where(options: argparse.Namespace) -> Answer:
    """At which steps, on which ranks and in which rows was a sample delivered?

    example: paddle-shard where run.jsonl --sample 12345
    """
    run, places = run_of(options.record), list[dict[str, Any]]()
    notes = [*run.untold, *_unread(run)]
    if options.epoch is not None:
        check_epoch(run, options.epoch)
    for leg, step, row in places_in(run, options.sample):
        if options.epoch not in (None, leg.start.epoch):
            continue
        place = {"epoch": leg.start.epoch, "step": step, "row": row, "job": leg.job.number, "told": told(leg, step)}
        shares = rows_of(leg.plan, leg.job.holders, step)
        places += [{**place, **group, "row_of_rank": rows.index(row)} for group, rows in shares if row in rows]
    if run.untold and not places:
        raise ArgumentError(f"sample {options.sample} is in no line. {run.untold[0]}")
    what = f"sample {options.sample} was not delivered, says the record"
    what += "; the run skips steps (skip_steps=)" * bool(run.last.facts["skip_steps"])
    return Answer(found={"sample": options.sample, "places": places, "notes": notes}, said=[places or what, *notes])


def _unread(run: Timeline) -> list[str]:
    """Return what has to be known of the samples of a run that leaves out those that cannot be read."""
    said = "With on_error='skip', a sample that could not be read was left out there. verify counts them; see the log."
    return [said] * any(leg.job.facts["options"].get("on_error") == "skip" for leg in run.legs)


@command(RECORD, ("--step", {"type": int, "required": True, "help": "step of the epoch, from 0"}), EPOCH)
def batch(options: argparse.Namespace) -> Answer:
    """Which samples did each rank get at a step?

    example: paddle-shard batch run.jsonl --step 3
    """
    run = run_of(options.record)
    legs, notes, found = legs_at(run, options.epoch, options.step), _unread(run), list[dict[str, Any]]()
    for leg in legs:
        if (plan := leg.job.parts_plan()) is None:
            rows = samples_of(leg.plan, leg.job.holders, leg.start.epoch, options.step, leg.skips)
        else:
            first = leg.start.samples // plan.num_parts + (options.step - leg.start.steps) * plan.samples_per_part
            span = {"first_in_each": first, "end_in_each": first + plan.samples_per_part}
            rows = [{**group, "parts": parts, **span} for group, parts in shares_of(leg.job.meshes, plan.parts_of)]
        found += [{"job": leg.job.number, "told": told(leg, options.step), **row} for row in rows]
    told_all = {"epoch": legs[0].start.epoch, "step": options.step, "delivered": found, "notes": notes}
    return Answer(found=told_all, said=[found, *notes])
