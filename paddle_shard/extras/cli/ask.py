"""Commands that answer from the record of a run: `verify`, `where` and `batch`."""

from __future__ import annotations

import argparse
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.answer import (
    EPOCH,
    RECORD,
    STEP,
    Answer,
    Rows,
    argument,
    command,
    deliveries_of,
    run_of,
    sample_of,
)
from paddle_shard.extras.cli.places import rows_of, samples_of, shapes_of
from paddle_shard.extras.cli.proof import proof_of
from paddle_shard.extras.cli.timeline import Delivery, Timeline, timeline
from paddle_shard.run.record_lines import read

_EXPLAINED = {
    "no": (
        "What does not count was delivered after the position from which the run was resumed. A job that was killed "
        "may have delivered more after its last line; the model does not know it either.\n"
    ),
    "other run": (
        "Other runs have other data, or another order, and are not verified. Give each run a record of its own.\n"
    ),
}
_SKIPS_UNREADABLE = (
    "With on_error='skip', a sample that could not be read was left out there. verify "
    "counts them; see the log."
)


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
    delivered = [_facts_of(one, "yes") for one in run.deliveries if not one.is_empty]
    for one in run.lost:
        is_of_run = one.job.facts["fingerprint"] == run.last_job.facts["fingerprint"]
        delivered.append(_facts_of(one, "no" if is_of_run else "other run"))

    text: list[str | Rows] = [
        *(damage or [f"{len(lines)} lines, of which none was changed or taken out"])
    ]
    for line in lines:
        if "mended" in line:
            text.append(
                f"before line {line['number']}, {line['mended']} bytes of a line that a crash had cut are gone"
            )
    text += [*run.notes, "", delivered]
    reasons = {row["counts"] for row in delivered}
    text += [_EXPLAINED[reason] for reason in _EXPLAINED if reason in reasons]
    for proof in proofs:
        text += [proof["text"], *(f"  ({note})" for note in proof["notes"])]
    values = {
        "lines": len(lines),
        "damage": damage,
        "epochs": proofs,
        "delivered": delivered,
    }
    failed = bool(damage) or any(proof["problems"] for proof in proofs)
    return Answer(values=values, text=text, failed=failed)


def _facts_of(one: Delivery, counts: str) -> dict[str, Any]:
    """Return a row of the table of deliveries."""
    plan = one.job.facts["plan"]
    return {
        "job": one.job.number,
        "mesh": shapes_of(one.job.meshes),
        "batch_size": plan and plan["batch_size"],
        "epoch": one.start.epoch,
        "counts": counts,
        "first_step": one.start.steps,
        "end_step": one.steps,
        "first_position": one.start.samples,
        "end_position": one.samples,
    }


def _place(one: Delivery, step: int) -> dict[str, Any]:
    """Return the job that delivered a step, or delivers it if it continues after its newest line."""
    recorded = "yes" if step < one.steps else "not yet"
    return {"job": one.job.number, "recorded": recorded}


def _notes(run: Timeline) -> list[str]:
    """Return the note on samples that could not be read, if the run leaves them out."""
    skips = any(
        one.job.facts["options"].get("on_error") == "skip" for one in run.deliveries
    )
    return [_SKIPS_UNREADABLE] if skips else []


@command(
    RECORD,
    argument(
        "--sample",
        "its index; of a mixture, source:index",
        type=sample_of,
        required=True,
    ),
)
def where(options: argparse.Namespace) -> Answer:
    """Show at which steps, on which ranks and in which rows a sample was delivered.

    example: paddle-shard where run.jsonl --sample 12345
    """
    run = run_of(options.record)
    places: list[dict[str, Any]] = []
    for one, step, row in run.places_of(options.sample):
        place = {"epoch": one.start.epoch, "step": step, "row": row}
        for group, rows in rows_of(one.plan, one.job.holders, step):
            if row in rows:
                share = {**group, "row_of_rank": rows.index(row)}
                places.append({**place, **_place(one, step), **share})
    if run.notes and not places:
        raise ArgumentError(f"sample {options.sample} is in no line. {run.notes[0]}")
    missing = f"sample {options.sample} was not delivered, says the record"
    if run.last_job.facts["skip_steps"]:
        missing += "; the run skips steps (skip_steps=)"
    notes = [*run.notes, *_notes(run)]
    values = {"sample": options.sample, "places": places, "notes": notes}
    return Answer(values=values, text=[places or missing, *notes])


@command(RECORD, STEP, EPOCH)
def batch(options: argparse.Namespace) -> Answer:
    """Show the samples that each rank got at a step.

    example: paddle-shard batch run.jsonl --step 3
    """
    run = run_of(options.record)
    deliveries = deliveries_of(run, options.epoch, options.step)
    epoch = deliveries[0].start.epoch
    delivered = []
    for one in deliveries:
        place = _place(one, options.step)
        for share in samples_of(
            one.plan, one.job.holders, epoch, options.step, one.skips
        ):
            delivered.append({**place, **share})
    notes = _notes(run)
    values = {
        "epoch": epoch,
        "step": options.step,
        "delivered": delivered,
        "notes": notes,
    }
    return Answer(values=values, text=[delivered, *notes])
