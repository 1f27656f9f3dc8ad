"""Commands that answer from the record of a run: `verify`, `where` and `batch`."""

from __future__ import annotations

import argparse
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.answer import (
    EPOCH,
    RECORD,
    Answer,
    Rows,
    command,
    legs_at,
    run_of,
    sample_of,
)
from paddle_shard.extras.cli.places import rows_of, samples_of, shapes_of
from paddle_shard.extras.cli.proof import proof_of
from paddle_shard.extras.cli.timeline import Leg, Timeline, places_in, timeline
from paddle_shard.run.record_lines import read

_LOST = (
    "What does not count was delivered after the position from which the run was resumed. A job that was killed may "
    "have delivered more after its last line; the model does not know it either.\n"
)
_OTHER_RUN = "Other runs have other data, or another order, and are not verified. Give each run a record of its own.\n"


@command(RECORD)
def verify(options: argparse.Namespace) -> Answer:
    """Verify that each sample was delivered exactly once, over all jobs, and that no line of the record was changed.

    example: paddle-shard verify run.jsonl
    """
    lines, damage = read(options.record)
    try:
        run = timeline(lines)
        proofs = [proof_of(run, epoch) for epoch in run.epochs]
    except Exception:  # whatever changed lines lead to
        if not damage:
            raise
        return Answer(values={"damage": damage}, text=damage, failed=True)
    legs = [_facts_of_leg(leg, "yes") for leg in run.legs] + [
        _facts_of_leg(leg, _why_lost(run, leg)) for leg in run.lost
    ]
    reasons = {leg["counts"] for leg in legs}

    text: list[str | Rows] = [
        *(damage or [f"{len(lines)} lines, of which none was changed or taken out"])
    ]
    text += [
        f"before line {line['number']}, {line['mended']} bytes of a line that a crash had cut are gone"
        for line in lines
        if "mended" in line
    ]
    text += [*run.untold, "", legs]
    if "no" in reasons:
        text.append(_LOST)
    if "other run" in reasons:
        text.append(_OTHER_RUN)
    for proof in proofs:
        text += [proof["text"], *(f"  ({note})" for note in proof["notes"])]
    return Answer(
        values={
            "lines": len(lines),
            "damage": damage,
            "epochs": proofs,
            "delivered": legs,
        },
        text=text,
        failed=bool(damage) or any(proof["problems"] for proof in proofs),
    )


def _why_lost(run: Timeline, leg: Leg) -> str:
    """Return whether a lost leg does not count, is of another run, or may have led to this one."""
    differs = leg.job.facts["fingerprint"] != run.last.facts["fingerprint"]
    if differs and leg.job not in [counted.job for counted in run.legs]:
        return "other run"
    is_after_start = (
        run.began_at is None or not run.legs or leg.job.number >= run.legs[0].job.number
    )
    return "no" if is_after_start else "not known"


def _facts_of_leg(leg: Leg, counts: str) -> dict[str, Any]:
    plan = leg.job.facts["plan"]
    return {
        "job": leg.job.number,
        "mesh": shapes_of(leg.job.meshes),
        "batch_size": plan and plan["batch_size"],
        "epoch": leg.start.epoch,
        "counts": counts,
        "first_step": leg.start.steps,
        "end_step": leg.steps,
        "first_position": leg.start.samples,
        "end_position": leg.samples,
    }


def _told(leg: Leg, step: int) -> str:
    """Return whether a line tells that a step was delivered; if not, the leg delivers it if it continues."""
    return "yes" if step < leg.steps else "not yet"


def _notes(run: Timeline) -> list[str]:
    """Return the note on samples that could not be read, if the run leaves them out."""
    if all(leg.job.facts["options"].get("on_error") != "skip" for leg in run.legs):
        return []
    return [
        "With on_error='skip', a sample that could not be read was left out there. verify counts them; see the log."
    ]


@command(
    RECORD,
    (
        "--sample",
        {
            "type": sample_of,
            "required": True,
            "help": "its index; of a mixture, source:index",
        },
    ),
)
def where(options: argparse.Namespace) -> Answer:
    """Show at which steps, on which ranks and in which rows a sample was delivered.

    example: paddle-shard where run.jsonl --sample 12345
    """
    run = run_of(options.record)
    places: list[dict[str, Any]] = []
    for leg, step, row in places_in(run, options.sample):
        place = {
            "epoch": leg.start.epoch,
            "step": step,
            "row": row,
            "job": leg.job.number,
            "told": _told(leg, step),
        }
        for group, rows in rows_of(leg.plan, leg.job.holders, step):
            if row in rows:
                places.append({**place, **group, "row_of_rank": rows.index(row)})
    if run.untold and not places:
        raise ArgumentError(f"sample {options.sample} is in no line. {run.untold[0]}")
    missing = f"sample {options.sample} was not delivered, says the record"
    if run.last.facts["skip_steps"]:
        missing += "; the run skips steps (skip_steps=)"
    notes = [*run.untold, *_notes(run)]
    values = {"sample": options.sample, "places": places, "notes": notes}
    return Answer(values=values, text=[places or missing, *notes])


@command(
    RECORD,
    ("--step", {"type": int, "required": True, "help": "step of the epoch, from 0"}),
    EPOCH,
)
def batch(options: argparse.Namespace) -> Answer:
    """Show the samples that each rank got at a step.

    example: paddle-shard batch run.jsonl --step 3
    """
    run = run_of(options.record)
    legs = legs_at(run, options.epoch, options.step)
    delivered = [
        {"job": leg.job.number, "told": _told(leg, options.step), **share}
        for leg in legs
        for share in samples_of(
            leg.plan, leg.job.holders, leg.start.epoch, options.step, leg.skips
        )
    ]
    notes = _notes(run)
    values = {
        "epoch": legs[0].start.epoch,
        "step": options.step,
        "delivered": delivered,
        "notes": notes,
    }
    return Answer(values=values, text=[delivered, *notes])
