"""Was each sample of a run delivered exactly once, as far as its record tells?

The record has the positions that all ranks delivered together. It also has sums of the ids that its writer has really
read: of its own rows, or of all rows where the run called `certificate()`. They are compared with what belongs there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from paddle_shard.plan.certificate import (
    ALL,
    DRAWN,
    Account,
    Delivered,
    Owner,
    Total,
    added,
    certify,
    plus,
    total_of,
    total_of_plan,
)
from paddle_shard.plan.partition import slice_rows
from paddle_shard.plan.shard_plan import global_batch
from paddle_shard.plan.step import rank_steps
from paddle_shard.record.timeline import Leg, Timeline


@dataclass(kw_only=True)
class Proof:
    """What a record proves of an epoch."""

    epoch: int
    text: str
    """The whole of it, in a sentence."""
    problems: list[str] = field(default_factory=list)
    """What speaks against "exactly once"; empty if it is proved."""
    notes: list[str] = field(default_factory=list)
    """What cannot be known, and why."""
    complete: bool = False
    """True if the epoch has ended."""
    num_samples: int | None = None
    """Samples that the epoch delivers; None if nobody but the loader knows it."""
    delivered: int | None = None
    """Samples that were delivered, as often as they were."""
    missed: tuple[tuple[int, int], ...] = ()
    """Stretches [first, end) of positions that were not delivered."""
    again: tuple[tuple[int, int], ...] = ()
    """Stretches that were delivered more than once."""


def proof_of(run: Timeline, epoch: int) -> Proof:
    """Return what the record proves of an epoch."""
    legs, before, notes = run.legs_of(epoch), run.began_at, list[str]()
    stretches = [(leg.start.samples, leg.samples) for leg in legs]
    if before is not None and before.epoch == epoch and before.samples:
        stretches.insert(0, (0, before.samples))
        notes.append(f"positions [0, {before.samples}) were delivered before this record begins, says the loaded state")
    open_end = run.legs[-1].epoch == epoch and not legs[-1].ended
    if legs[-1].job.unknown is not None:
        return _of_positions(legs, stretches, notes, open_end)
    plan, skips = legs[-1].plan, legs[-1].skips
    belongs = total_of_plan(plan, epoch, skips)
    delivered = _all_of(stretches, belongs)[ALL]
    at, end = delivered.once[-1][1], plan.num_served
    to_come = [(at, end)] if open_end and at < end else []
    found = certify([(_all_of([*stretches, *to_come], belongs), {})], epoch, plan, skips)
    problems = [*found.problems, *_other_samples(run, epoch, notes)]
    text = f"epoch {epoch}: NOT each of {found.num_samples} samples exactly once" if problems else str(found)
    if to_come and not problems:
        text = f"epoch {epoch}: each of {delivered.total.num} samples exactly once so far, of {found.num_samples}"
    return Proof(
        epoch=epoch,
        text=text,
        problems=problems,
        notes=notes,
        complete=not open_end,
        num_samples=found.num_samples,
        delivered=delivered.total.num,
        missed=_gaps(delivered.once, 0 if to_come else end),
        again=delivered.again,
    )


def _all_of(stretches: list[tuple[int, int]], belongs: Callable[[int, int], Total]) -> Account:
    """Return the account of stretches that all data ranks have delivered."""
    return added(*({ALL: Delivered(((first, end),), (), belongs(first, end))} for first, end in stretches))


def _gaps(once: tuple[tuple[int, int], ...], end: int) -> tuple[tuple[int, int], ...]:
    """Return the stretches between some, and up to an end."""
    ends, firsts = [0, *(stop for _, stop in once)], [*(first for first, _ in once), end]
    return tuple((stop, first) for stop, first in zip(ends, firsts, strict=True) if stop < first)


def _of_positions(legs: list[Leg], stretches: list[tuple[int, int]], notes: list[str], open_end: bool) -> Proof:
    """Return what is known of an epoch whose order only the loader knows."""
    delivered = _all_of(stretches, lambda first, end: Total(end - first, end - first))[ALL]
    missed, epoch = _gaps(delivered.once, 0), legs[-1].epoch
    problems = [f"positions [{first}, {end}) were not delivered" for first, end in missed]
    problems += [f"positions [{first}, {end}) were delivered again" for first, end in delivered.again]
    if not open_end and not any(leg.ended for leg in legs):
        problems.append(f"no pass has come to the end of the epoch after position {delivered.once[-1][1]}")
    end = delivered.once[-1][1]
    how = "NOT each exactly once" if problems else "each exactly once" + (", so far" if open_end else ", to its end")
    notes.append(f"which samples these are is not known: {legs[-1].job.unknown}")
    return Proof(
        epoch=epoch,
        text=f"epoch {epoch}: positions [0, {end}) in {legs[-1].steps} steps, {how}",
        problems=problems,
        notes=notes,
        complete=not open_end,
        missed=missed,
        again=delivered.again,
    )


def _other_samples(run: Timeline, epoch: int, notes: list[str]) -> Iterator[str]:
    """Yield what the sums of the ids that were read say against the order."""
    newest = next((one for one in reversed(run.saved) if one.state.epoch == epoch), None)
    if newest is None:
        notes.append("what was read is not compared: no state was saved in this epoch, and no pass has come to its end")
        return
    for owner, found in sorted(newest.state.certificate.items()):
        if owner == DRAWN:
            continue
        whose = "all ranks" if owner == ALL else f"data rank {owner[0]} of {owner[1]}"
        if found.again:
            notes.append(f"what {whose} read is not compared: some of it was delivered again")
            continue
        wanted, known = Total(), 0
        for first, end, leg in _parts(newest.legs, epoch, owner, found.once):
            if leg.job.facts["dealt"] and owner != ALL:
                break
            known += end - first
            wanted = plus(wanted, _total(leg, owner, first, end))
        where = f"positions {', '.join(f'[{first}, {end})' for first, end in found.once)}"
        if known != sum(end - first for first, end in found.once):
            why = (
                "rows are dealt by cost (balance=)"
                if newest.job.facts["dealt"]
                else "this record does not tell who it was"
            )
            notes.append(f"what {whose} read at {where} is not compared: {why}")
        elif found.total.num < wanted.num:
            yield f"{wanted.num - found.total.num} samples of {whose} at {where} could not be read"
        elif found.total != wanted:
            yield f"at {where}, {whose} read other samples than those of the order"
        elif owner != ALL and owner[1] > 1:
            notes.append(
                f"at {where}, the sums of what {whose} read are those of the order; the others made the same steps "
                "(loader.certificate() before state_dict() compares theirs, too)"
            )


def _parts(
    legs: tuple[Leg, ...], epoch: int, owner: Owner, stretches: tuple[tuple[int, int], ...]
) -> Iterator[tuple[int, int, Leg]]:
    """Yield the pieces of some stretches, each with what has delivered it."""
    for leg in legs:
        if leg.epoch != epoch or (owner != ALL and leg.job.facts["data_rank"] != list(owner[:2])):
            continue
        for first, end in stretches:
            begin, stop = max(first, leg.start.samples), min(end, leg.samples)
            if begin < stop:
                yield begin, stop, leg


def _total(leg: Leg, owner: Owner, first: int, end: int) -> Total:
    """Return the total of the rows of a data rank, or of all, at positions [first, end) of what was delivered."""
    plan, skips, epoch = leg.plan, leg.skips, leg.epoch
    if owner == ALL or owner[1] == 1:
        return total_of_plan(plan, epoch, skips)(first, end)
    steps = range(plan.step_of(position=first), plan.step_of(position=end - 1) + 1)
    batches = (global_batch(plan, epoch, step) for step in steps)
    mine = rank_steps(
        batches, epoch, first, lambda rows, micro: slice_rows(rows, owner[1], owner[0], micro), skips=skips
    )
    ids = (np.asarray(step.ids)[slice(None) if step.real is None else step.real] for step in mine)
    return plus(*map(total_of, ids))
