"""Was each sample of a run delivered exactly once, as far as its record tells?

The record has the positions that all ranks delivered together. It also has sums of the ids that its writer has really
read: of its own rows, or of all rows where the run called `certificate()`. They are compared with what belongs there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.timeline import Leg, Timeline
from paddle_shard.plan.certificate import ALL, UNKNOWN, Delivered, account_of_all, added, certify, plus, total_of_owner

_OTHERS = "the others made the same steps; with loader.certificate() before state_dict(), their sums are compared, too"


def proof_of(run: Timeline, epoch: int) -> dict[str, Any]:
    """Return what the record proves of an epoch: the fields of a `Certificate`, of what all jobs have delivered.

    Its `repeated` is called "repeated_positions": under another order they may have other samples. Also its "text",
    "notes" with what cannot be known and why, and "again": the stretches [first, end) of positions that were delivered
    more than once.
    """
    legs, before, notes = run.legs_of(epoch), run.began_at, list[str]()
    newest, is_open = legs[-1], run.legs[-1].start.epoch == epoch and not any(leg.ended for leg in legs)
    plan = None if newest.job.unknown is not None else newest.plan
    # What was left out when it was delivered may be less than what is left out now, and the order another.
    orders = [leg.plan if plan is not None and leg.job.unknown is None else plan for leg in legs]
    stretches = [(leg.start.samples, leg.samples, leg.skips, by) for leg, by in zip(legs, orders, strict=True)]
    if before is not None and before.epoch == epoch and before.samples:
        stretches.insert(0, (0, before.samples, legs[0].skips, plan))
        notes.append(f"positions [0, {before.samples}) were delivered before this record begins, says the loaded state")
    for leg in legs:  # else all positions up to there would be counted, however many
        if leg.job.unknown is None and leg.samples > leg.plan.num_positions:
            what = f"epoch {epoch} has {leg.plan.num_positions} positions, and a line tells of {leg.samples}"
            raise ArgumentError(f"the record is damaged: {what}.")
    end = 0 if plan is None else plan.num_served
    delivered = (account := account_of_all(epoch, stretches))[ALL]
    at = delivered.once[-1][1]
    # What the epoch that the run is in has still to deliver is not missing.
    to_come = [(at, end, newest.skips, plan)] if is_open and at < end else []
    account = added(account, account_of_all(epoch, to_come))
    seen_to = at if is_open or newest.ended else None
    found = certify([(account, {})], epoch, plan, newest.skips, seen_to, "the loader's order")
    if plan is None:
        notes.append(f"which samples these are is not known: {newest.job.unknown}")
    others = dict(_other_orders(legs) if plan is None else _other_samples(run, epoch, notes))
    found = replace(found, problems=(*found.problems, *others))
    text = f"{found}, so far: at positions [0, {at}), in {newest.steps} steps" if is_open else str(found)
    if "files" in newest.job.facts["data"]:
        text = text.replace("samples that the loader's order drew", "positions of the stream")
        notes.append("rows of padding, and samples that could not be read, have positions, too")
    unread = sum(others.values())
    found = replace(found, delivered=delivered.total.num - unread, missed=found.missed + unread)
    facts = {"repeated_positions" if name == "repeated" else name: value for name, value in asdict(found).items()}
    return {**facts, "text": text, "notes": notes, "again": delivered.again}


def _other_orders(legs: Sequence[Leg]) -> Iterator[tuple[str, int]]:
    """Yield where a run went on in the middle of an epoch with another order, as it was told to; see below."""
    for leg in legs:
        if leg.override and leg.start.samples:
            what = f"whether the samples from position {leg.start.samples} on are those that were left is"
            yield f"{what} {UNKNOWN}: the run was resumed there with override={list(leg.override)}", 0


def _other_samples(run: Timeline, epoch: int, notes: list[str]) -> Iterator[tuple[str, int]]:
    """Yield what the sums of the ids that were read say against the order, and how many samples could not be read."""
    if (newest := run.newest.get(epoch)) is None:
        notes.append("what was read is not compared: no state was saved in this epoch, and no pass has come to its end")
        return
    legs = [leg for leg in newest.legs if leg.start.epoch == epoch]
    for owner, found in sorted(newest.state.certificate.items()):
        whose = "all ranks" if owner == ALL else f"data rank {owner[0]} of {owner[1]}"
        where = f"{whose} at positions {', '.join(f'[{first}, {end})' for first, end in found.once)}"
        mine = [leg for leg in legs if owner == ALL or leg.job.facts["data_rank"] == list(owner[:2])]
        cut = [(max(leg.start.samples, a), min(leg.samples, b), leg) for leg in mine for a, b in found.once]
        pieces = [(first, end, leg) for first, end, leg in cut if first < end]
        known = account_of_all(epoch, [(first, end, leg.skips, None) for first, end, leg in pieces])
        # Each position is that of one pass, so that it is known which one has delivered it.
        once = known.get(ALL, Delivered())[:2] == (found.once, ())
        wanted = plus(*(total_of_owner(owner, leg.plan, epoch, leg.skips, *piece) for *piece, leg in pieces))
        not_compared = f"what was read by {where} is not compared"
        if owner != ALL and run.last.facts["dealt"]:
            notes.append(f"{not_compared}: rows are dealt by cost (balance=)")
        elif found.again or not once:
            notes.append(f"{not_compared}: some of it was delivered again, or before this record")
        elif found.total.num < wanted.num:
            unread = wanted.num - found.total.num
            yield f"{unread} samples of {where} could not be read", unread
        elif found.total != wanted:
            yield f"{where} read other samples than those of the order", 0
        elif owner != ALL and owner[1] > 1:
            notes.append(f"the sums of what was read by {where} are those of the order; {_OTHERS}")
