"""Proof that each sample of an epoch was delivered exactly once, as far as a record tells.

The record has the positions that all ranks delivered together. It also has sums of the ids that its writer read: of its
own rows, or of all rows where the run called `certificate()`. They are compared with the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.timeline import Leg, Timeline
from paddle_shard.plan.certificate import (
    ALL,
    UNKNOWN,
    Delivered,
    Owner,
    Total,
    account_of_all,
    added,
    certify,
    plus,
    total_of_owner,
)

_OTHERS = "the others made the same steps; with loader.certificate() before state_dict(), their sums are compared, too"


def proof_of(run: Timeline, epoch: int) -> dict[str, Any]:
    """Return the fields of the `Certificate` of an epoch, over all jobs of a run.

    Its `repeated` is called "repeated_positions": under another order they may have other samples. Also its "text",
    "notes" on what is not known and why, and "again": the ranges [first, end) of positions that were delivered more
    than once.
    """
    legs = run.legs_of(epoch)
    newest = legs[-1]
    is_open = run.legs[-1].start.epoch == epoch and not any(leg.ended for leg in legs)
    plan = None if newest.job.unknown is not None else newest.plan
    notes: list[str] = []

    # What was delivered, each range with the order and the skips of then.
    ranges = []
    before = run.began_at
    if before is not None and before.epoch == epoch and before.samples:
        ranges.append((0, before.samples, legs[0].skips, plan))
        notes.append(
            f"positions [0, {before.samples}) were delivered before this record begins, says the loaded state"
        )
    for leg in legs:
        is_known = leg.job.unknown is None
        if is_known and leg.samples > leg.plan.num_positions:
            what = f"epoch {epoch} has {leg.plan.num_positions} positions, and a line tells of {leg.samples}"
            raise ArgumentError(f"the record is damaged: {what}.")
        order = leg.plan if plan is not None and is_known else plan
        ranges.append((leg.start.samples, leg.samples, leg.skips, order))
    account = account_of_all(epoch, ranges)
    delivered = account[ALL]

    # What an open epoch has still to deliver is not missing.
    reached = delivered.once[-1][1]
    if is_open and plan is not None and reached < plan.num_served:
        rest = (reached, plan.num_served, newest.skips, plan)
        account = added(account, account_of_all(epoch, [rest]))
    seen_to = reached if is_open or newest.ended else None
    found = certify(
        [(account, {})], epoch, plan, newest.skips, seen_to, "the loader's order"
    )

    if plan is None:
        notes.append(f"which samples these are is not known: {newest.job.unknown}")
    problems = dict(
        _changed_orders(legs) if plan is None else _compared_sums(run, epoch, notes)
    )
    found = replace(found, problems=(*found.problems, *problems))
    text = str(found)
    if is_open:
        text += f", so far: at positions [0, {reached}), in {newest.steps} steps"
    if "files" in newest.job.facts["data"]:
        text = text.replace(
            "samples that the loader's order drew", "positions of the stream"
        )
        notes.append(
            "rows of padding, and samples that could not be read, have positions, too"
        )
    unread = sum(problems.values())
    facts = asdict(
        replace(
            found, delivered=delivered.total.num - unread, missed=found.missed + unread
        )
    )
    facts["repeated_positions"] = facts.pop("repeated")
    return {**facts, "text": text, "notes": notes, "again": delivered.again}


def _changed_orders(legs: Sequence[Leg]) -> Iterator[tuple[str, int]]:
    """Yield a problem, and 0 unread samples, for each resume in the middle of an epoch with another order."""
    for leg in legs:
        if leg.override and leg.start.samples:
            what = f"whether the samples from position {leg.start.samples} on are those that were left is"
            yield (
                f"{what} {UNKNOWN}: the run was resumed there with override={list(leg.override)}",
                0,
            )


def _compared_sums(
    run: Timeline, epoch: int, notes: list[str]
) -> Iterator[tuple[str, int]]:
    """Yield a problem, and how many samples were not read, for each owner whose sums differ from the order's."""
    newest = run.newest.get(epoch)
    if newest is None:
        notes.append(
            "what was read is not compared: no state was saved in this epoch, and no pass has come to its end"
        )
        return
    for owner, delivered in sorted(newest.state.certificate.items()):
        legs = [leg for leg in newest.legs if leg.start.epoch == epoch]
        if owner != ALL:
            legs = [
                leg for leg in legs if leg.job.facts["data_rank"] == list(owner[:2])
            ]
        where = "all ranks" if owner == ALL else f"data rank {owner[0]} of {owner[1]}"
        where += f" at positions {', '.join(f'[{first}, {end})' for first, end in delivered.once)}"
        expected = _expected_total(owner, delivered, legs, epoch)
        if owner != ALL and run.last.facts["dealt"]:
            notes.append(
                f"what was read by {where} is not compared: rows are balanced by cost (balance=)"
            )
        elif expected is None:
            why = "some of it was delivered again, or before this record"
            notes.append(f"what was read by {where} is not compared: {why}")
        elif delivered.total.num < expected.num:
            unread = expected.num - delivered.total.num
            yield f"{unread} samples of {where} could not be read", unread
        elif delivered.total != expected:
            yield f"{where} read other samples than those of the order", 0
        elif owner != ALL and owner[1] > 1:
            notes.append(
                f"the sums of what was read by {where} are those of the order; {_OTHERS}"
            )


def _expected_total(
    owner: Owner, delivered: Delivered, legs: Sequence[Leg], epoch: int
) -> Total | None:
    """Return the total of the order at the positions that an owner delivered; None unless one leg had each of them."""
    pieces = [
        (max(leg.start.samples, first), min(leg.samples, end), leg)
        for leg in legs
        for first, end in delivered.once
        if max(leg.start.samples, first) < min(leg.samples, end)
    ]
    account = account_of_all(
        epoch, [(first, end, leg.skips, None) for first, end, leg in pieces]
    )
    covered = account.get(ALL, Delivered())
    if delivered.again or covered.again or covered.once != delivered.once:
        return None
    return plus(
        *(
            total_of_owner(owner, leg.plan, epoch, leg.skips, first, end)
            for first, end, leg in pieces
        )
    )
