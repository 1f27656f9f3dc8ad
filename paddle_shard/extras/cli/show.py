"""`paddle-shard show`: where a sample was delivered, and which samples each rank got at a step."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.answer import (
    RECORD,
    Answer,
    Json,
    Rows,
    argument,
    cell,
    command,
    sample_of,
)
from paddle_shard.extras.cli.places import rows_of, samples_of
from paddle_shard.extras.cli.timeline import Delivery, Timeline, timeline
from paddle_shard.run.record_lines import read_record

_SKIPS_UNREADABLE = (
    "With on_error='skip', a sample that could not be read was left out there. verify "
    "counts them; see the log."
)


@command(
    RECORD,
    argument(
        "--sample",
        "show where it was delivered: its index; of a mixture, source:index",
        type=sample_of,
    ),
    argument(
        "--step", "show the samples of this step of an epoch, from 0", type=int
    ),
    argument("--epoch", "the epoch, if several have the step", type=int),
)
def show(options: argparse.Namespace) -> Answer:
    """Show where a sample was delivered, or the samples that each rank got at a step.

    example: paddle-shard show run.jsonl --epoch 0 --step 3
    """
    lines, problems = read_record(options.record)
    for problem in problems:
        print(f"{options.record}: {problem}", file=sys.stderr)
    run = timeline(lines)
    if options.sample is not None:
        values = _places_of(run, options.sample)
    elif options.step is not None:
        values = _shares_of(run, options.epoch, options.step)
    else:
        raise ArgumentError("give --sample or --step.")
    on_error = [
        delivery.job.first_line["options"].get("on_error")
        for delivery in run.deliveries
    ]
    notes = [*run.notes, *[_SKIPS_UNREADABLE] * ("skip" in on_error)]
    text: list[str | Rows] = [values["delivered"], *notes]
    if not values["delivered"]:
        text[0] = f"sample {options.sample} was not delivered, by the record"
    return Answer(values={**values, "notes": notes}, text=text)


def _places_of(run: Timeline, sample: Any) -> Json:
    """Return the deliveries of a sample."""
    places = []
    for delivery, step, row in run.places_of(sample):
        place = {"epoch": delivery.start.epoch, "step": step, "row": row}
        for group, rows in rows_of(delivery.plan, delivery.job.holders, step):
            if row in rows:
                share = {**group, "row_of_rank": rows.index(row)}
                places.append({**place, **_recorded(delivery, step), **share})
    if run.notes and not places:
        raise ArgumentError(f"sample {sample} is in no line. {run.notes[0]}")
    return {"sample": sample, "delivered": places}


def _shares_of(run: Timeline, epoch: int | None, step: int) -> Json:
    """Return the samples of each replica group at a step.

    Raises:
        ArgumentError: The step was not delivered; or several epochs have it and `epoch` is None.
    """
    deliveries = [
        delivery
        for delivery in run.deliveries
        if delivery.start.steps <= step < delivery.end_step
        and epoch in (None, delivery.start.epoch)
    ]
    epochs = sorted({delivery.start.epoch for delivery in deliveries})
    if len(epochs) > 1:
        raise ArgumentError(
            f"--epoch is missing: the epochs {cell(epochs)} have step {step}. Give one of them."
        )
    if not deliveries:
        what = f"step {step} was not delivered, by the record; paddle-shard verify lists what was."
        raise ArgumentError(" ".join([what, *run.notes]))
    shares = []
    for delivery in deliveries:
        groups = samples_of(
            delivery.plan, delivery.job.holders, epochs[0], step, delivery.skips
        )
        shares += [{**_recorded(delivery, step), **group} for group in groups]
    return {"epoch": epochs[0], "step": step, "delivered": shares}


def _recorded(delivery: Delivery, step: int) -> Json:
    """Return the job that delivered a step, or delivers it if it continues after its newest line."""
    recorded = "yes" if step < delivery.steps else "not yet"
    return {"job": delivery.job.number, "recorded": recorded}
