"""Commands that answer from the record of a run: was all delivered once, and where was a sample?"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from paddle_shard.cli.answer import Answer, Command, leg_of, numbers, run_of, samples_shown, table
from paddle_shard.plan.parts import PartsPlan
from paddle_shard.record.lines import read
from paddle_shard.record.places import places_in, samples_at, shares_of
from paddle_shard.record.proof import proof_of
from paddle_shard.record.timeline import Job, Leg, timeline


def of_record(parser: argparse.ArgumentParser) -> None:
    """Add the argument that most commands have."""
    parser.add_argument("record", metavar="RECORD", help="the file of shard_dataloader(record=)")


# verify


def _verify(options: argparse.Namespace) -> Answer:
    lines, damage = read(options.record)
    run = timeline(lines)
    proofs = [proof_of(run, epoch) for epoch in run.epochs]
    rows = [_of_leg(leg, "") for leg in run.legs] + [_of_leg(leg, "does not count") for leg in run.lost]
    said = [f"{options.record}: {problem}" for problem in damage] or [
        f"{len(lines)} lines, none was changed or taken out"
    ]
    said += [_mended(line) for line in lines if "mended" in line]
    if run.began_at is not None:
        at = run.began_at
        said.append(f"job 1 of the run was resumed from step {at.steps} of epoch {at.epoch}, which no line tells of")
    said += ["", table(["job", "mesh", "batch", "epoch", "steps", "positions", ""], rows), ""]
    if run.lost:
        said.append(
            "What does not count was delivered after the position from which the run was resumed. A job that was"
        )
        said.append("killed may have delivered more after its last line: the model does not know it either.\n")
    for proof in proofs:
        said += [proof.text, *(f"  {problem}" for problem in proof.problems), *(f"  ({note})" for note in proof.notes)]
    found = {
        "lines": len(lines),
        "damage": damage,
        "epochs": [asdict(proof) for proof in proofs],
        "delivered": [_leg_facts(leg) for leg in run.legs],
        "lost": [_leg_facts(leg) for leg in run.lost],
    }
    return Answer(text="\n".join(said), found=found, failed=bool(damage) or any(proof.problems for proof in proofs))


def _mended(line: dict[str, Any]) -> str:
    return f"before line {line['number']}, {line['mended']} bytes of a line that was cut by a crash were taken off"


def meshes_of(job: Job) -> str:
    """Return the meshes of a job as users write them."""
    meshes = (",".join(f"{axis}={size}" for axis, size in mesh["axes"].items()) for mesh in job.facts["meshes"])
    return " and ".join(meshes)


def _of_leg(leg: Leg, what: str) -> list[Any]:
    steps, positions = f"{leg.start.steps} to {leg.steps - 1}", f"[{leg.start.samples}, {leg.samples})"
    size = leg.job.facts["plan"] and leg.job.facts["plan"]["batch_size"]
    return [leg.job.number, meshes_of(leg.job), size or "", leg.epoch, steps, positions, what]


def _leg_facts(leg: Leg) -> dict[str, Any]:
    return {
        "job": leg.job.number,
        "meshes": leg.job.facts["meshes"],
        "epoch": leg.epoch,
        "steps": [leg.start.steps, leg.steps],
        "positions": [leg.start.samples, leg.samples],
        "ended": leg.ended,
    }


# where


def sample_of(text: str) -> Any:
    """Return the sample that a user names: 17, or web:17 of a mixture."""
    source, colon, index = text.rpartition(":")
    if not index.isdigit():
        raise argparse.ArgumentTypeError(f"must be an index such as 17, or source:index of a mixture, got {text!r}")
    return (source, int(index)) if colon else int(index)


def _where(options: argparse.Namespace) -> Answer:
    run, places = run_of(options.record), list[dict[str, Any]]()
    for leg, step, row, shares in places_in(run, options.sample):
        if options.epoch in (None, leg.epoch):
            place = {"epoch": leg.epoch, "step": step, "row": row, "job": leg.job.number}
            ranks = [] if leg.job.facts["dealt"] else [_share(share, share.rows.index(row)) for share in shares]
            places.append({**place, "on": ranks})
    rows = [
        [
            place["epoch"],
            place["step"],
            place["row"],
            place["job"],
            on["mesh"],
            on["data_rank"],
            numbers(on["ranks"]),
            on["row"],
        ]
        for place in places
        for on in place["on"] or [{"mesh": "dealt", "data_rank": "by", "ranks": [], "row": "cost"}]
    ]
    head = ["epoch", "step", "row of the batch", "job", "mesh", "data rank", "ranks", "row of the rank"]
    text = table(head, rows) if rows else f"sample {options.sample} was not delivered, says the record"
    return Answer(text=text, found={"sample": options.sample, "places": places})


def _share(share: Any, row: int) -> dict[str, Any]:
    return {"mesh": share.mesh, "data_rank": share.data_rank, "ranks": list(share.ranks), "row": row}


def _where_arguments(parser: argparse.ArgumentParser) -> None:
    of_record(parser)
    parser.add_argument("--sample", type=sample_of, required=True, help="its index; of a mixture, source:index")
    parser.add_argument("--epoch", type=int, help="only this epoch")


# batch


def _batch(options: argparse.Namespace) -> Answer:
    run = run_of(options.record)
    epoch, legs = leg_of(run, options.epoch, options.step)
    found = [
        _stream_batch(leg, options.step) if leg.job.facts["data"].get("num_parts") else _rows(leg, options.step)
        for leg in legs
    ]
    said = []
    for one in found:
        said.append(f"epoch {epoch}, step {options.step}, job {one['job']}")
        what = "parts" if "positions" in one else "samples"
        rows = [[on["mesh"], on["data_rank"], numbers(on["ranks"]), samples_shown(on[what])] for on in one["on"]]
        said.append(
            table(["mesh", "data rank", "ranks", what], rows) if rows else f"samples: {samples_shown(one['samples'])}"
        )
        if "positions" in one:
            said.append(f"each part: positions [{one['positions'][0]}, {one['positions'][1]}) of it")
    return Answer(text="\n".join(said), found={"epoch": epoch, "step": options.step, "delivered": found})


def _rows(leg: Leg, step: int) -> dict[str, Any]:
    """Return the samples of a step, and of each rank."""
    plan, on = leg.plan, list[dict[str, Any]]()
    samples = samples_at(plan, leg.epoch, step, leg.skips)
    if not leg.job.facts["dealt"]:
        for share in shares_of(leg.job.meshes, plan.num_rows(step=step), plan.micro_size(step=step)):
            of_share = {"mesh": share.mesh, "data_rank": share.data_rank, "ranks": list(share.ranks)}
            on.append({**of_share, "samples": [samples[row] for row in share.rows]})
    return {"job": leg.job.number, "samples": samples, "on": on}


def _stream_batch(leg: Leg, step: int) -> dict[str, Any]:
    """Return the parts that each rank reads, and the positions in each of them."""
    order, data, on = leg.job.facts["plan"], leg.job.facts["data"], []
    names = ("batch_size", "num_data_ranks", "accumulation")
    plan = PartsPlan(num_parts=data["num_parts"], **{name: order[name] for name in names})
    first = leg.start.samples // plan.num_parts + (step - leg.start.steps) * plan.samples_per_part
    for share in shares_of(leg.job.meshes, order["batch_size"], plan.micro_rows):
        count = leg.job.meshes[share.mesh][0].num_data_ranks(leg.job.meshes[share.mesh][1])
        of_share = {"mesh": share.mesh, "data_rank": share.data_rank, "ranks": list(share.ranks)}
        on.append({**of_share, "parts": list(plan.parts_of(share.data_rank, count))})
    return {"job": leg.job.number, "positions": [first, first + plan.samples_per_part], "on": on}


def _batch_arguments(parser: argparse.ArgumentParser) -> None:
    of_record(parser)
    parser.add_argument("--step", type=int, required=True, help="step of the epoch, from 0")
    parser.add_argument("--epoch", type=int, help="the epoch; may be left out if the run has one only")


COMMANDS = {
    "verify": Command(
        does="Was each sample delivered exactly once, over all jobs, and was no line of the record changed?",
        example="run.jsonl",
        arguments=of_record,
        answer=_verify,
    ),
    "where": Command(
        does="At which steps, on which ranks and in which rows was a sample delivered?",
        example="run.jsonl --sample 12345",
        arguments=_where_arguments,
        answer=_where,
    ),
    "batch": Command(
        does="Which samples did each rank get at a step?",
        example="run.jsonl --epoch 0 --step 3",
        arguments=_batch_arguments,
        answer=_batch,
    ),
}
"""The commands, by name."""
