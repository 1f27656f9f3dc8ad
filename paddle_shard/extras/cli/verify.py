"""`paddle-shard verify`: whether each sample was delivered exactly once, as far as the record of a run shows."""

from __future__ import annotations

import argparse

from paddle_shard.extras.cli.answer import RECORD, Answer, Json, Rows, command
from paddle_shard.extras.cli.places import shapes_of
from paddle_shard.extras.cli.proof import proof_of
from paddle_shard.extras.cli.timeline import Delivery, timeline
from paddle_shard.run.record_lines import read_record

_EXPLAINED = {
    "no": (
        "What does not count was delivered after the position from which the run was resumed. A job that was killed "
        "may have delivered more after its last line; the model does not know it either.\n"
    ),
    "other run": (
        "Other runs have other data, or another order, and are not verified. Give each run a record of its own.\n"
    ),
}


@command(RECORD)
def verify(options: argparse.Namespace) -> Answer:
    """Verify that each sample was delivered exactly once, over all jobs, and that no line of the record was changed.

    example: paddle-shard verify run.jsonl
    """
    lines, damage = read_record(options.record)
    try:
        run = timeline(lines)
        proofs = [proof_of(run, epoch) for epoch in run.epochs]
    except Exception:  # whatever changed lines lead to
        if not damage:
            raise
        return Answer(values={"damage": damage}, text=damage, failed=True)
    delivered = [
        _row_of(delivery, "yes")
        for delivery in run.deliveries
        if not delivery.is_empty
    ]
    for delivery in run.lost:
        is_of_run = (
            delivery.job.first_line["fingerprint"]
            == run.last_job.first_line["fingerprint"]
        )
        delivered.append(_row_of(delivery, "no" if is_of_run else "other run"))

    text: list[str | Rows] = [
        *(
            damage
            or [f"{len(lines)} lines, of which none was changed or taken out"]
        )
    ]
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


def _row_of(delivery: Delivery, counts: str) -> Json:
    """Return a row of the table of deliveries."""
    plan = delivery.job.first_line["plan"]
    return {
        "job": delivery.job.number,
        "mesh": shapes_of(delivery.job.meshes),
        "batch_size": plan and plan["batch_size"],
        "epoch": delivery.start.epoch,
        "counts": counts,
        "first_step": delivery.start.steps,
        "end_step": delivery.steps,
        "first_position": delivery.start.samples,
        "end_position": delivery.samples,
    }
