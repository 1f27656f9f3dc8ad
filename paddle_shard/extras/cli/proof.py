"""Proof that each sample of an epoch was delivered exactly once, as far as a record shows.

The record has the positions that all ranks delivered together. It also has sums of the ids that its writer read: of its
own rows, or of all rows where the run called `certificate()`. They are compared with the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.timeline import Delivery, Timeline
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
    deliveries = [
        delivery for delivery in run.deliveries if delivery.start.epoch == epoch
    ]
    newest = deliveries[-1]
    is_over = epoch != run.epochs[-1] or any(
        delivery.is_ended for delivery in deliveries
    )
    plan = None if newest.job.unknown_order is not None else newest.plan
    notes: list[str] = []

    # What was delivered, each range with the order and the skips of then.
    ranges = []
    before = run.began_at
    if before is not None and before.epoch == epoch and before.samples:
        ranges.append((0, before.samples, deliveries[0].skips, plan))
        notes.append(
            f"positions [0, {before.samples}) were delivered before this record begins, by the loaded state"
        )
    for delivery in deliveries:
        is_known = plan is not None and delivery.job.unknown_order is None
        order = delivery.plan if is_known else plan
        if order is not None and delivery.samples > order.num_positions:
            raise ArgumentError(
                f"the record is damaged: epoch {epoch} has {order.num_positions} positions, and a line has "
                f"{delivery.samples}."
            )
        if not delivery.is_empty:
            ranges.append(
                (delivery.start.samples, delivery.samples, delivery.skips, order)
            )
    account = account_of_all(epoch, ranges)
    delivered = account.get(ALL, Delivered())

    # What an open epoch has still to deliver is not missing.
    reached = max((end for _, end, *_ in ranges), default=0)
    if not is_over and plan is not None and reached < plan.num_served:
        rest = (reached, plan.num_served, newest.skips, plan)
        account = added(account, account_of_all(epoch, [rest]))
    seen_to = reached if newest.is_ended or not is_over else None
    certificate = certify(
        [(account, {})], epoch, plan, newest.skips, seen_to, "the loader's order"
    )

    if plan is None:
        notes.append(
            f"which samples these are is not known: {newest.job.unknown_order}"
        )
        problems = dict.fromkeys(_changed_orders(deliveries), 0)
    else:
        problems = dict(_compared_sums(run, deliveries, notes))
    num_unread = sum(problems.values())
    certificate = replace(
        certificate,
        problems=(*certificate.problems, *problems),
        delivered=delivered.total.num - num_unread,
        missed=certificate.missed + num_unread,
    )
    text = str(certificate)
    if not is_over:
        text += f", so far: at positions [0, {reached}), in {newest.steps} steps"
    if "files" in newest.job.first_line["data"]:
        text = text.replace(
            "samples that the loader's order drew", "positions of the stream"
        )
        notes.append(
            "rows of padding, and samples that could not be read, have positions, too"
        )
    fields = {**asdict(certificate), "repeated_positions": certificate.repeated}
    del fields["repeated"]
    return {**fields, "text": text, "notes": notes, "again": delivered.again}


def _changed_orders(deliveries: Sequence[Delivery]) -> Iterator[str]:
    """Yield a problem for each resume in the middle of an epoch with another order."""
    for delivery in deliveries:
        if delivery.override and delivery.start.samples:
            yield (
                f"whether the samples from position {delivery.start.samples} on are those that were left is {UNKNOWN}: "
                f"the run was resumed there with override={list(delivery.override)}"
            )


def _compared_sums(
    run: Timeline, deliveries: Sequence[Delivery], notes: list[str]
) -> Iterator[tuple[str, int]]:
    """Yield a problem, and how many samples were not read, for each owner whose sums differ from the order's."""
    epoch = deliveries[-1].start.epoch
    if epoch not in run.states:
        notes.append(
            "what was read is not compared: no state was saved in this epoch, and no pass has come to its end"
        )
        return
    for owner, delivered in sorted(run.states[epoch].certificate.items()):
        ranges = ", ".join(f"[{first}, {end})" for first, end in delivered.once)
        who = "all ranks" if owner == ALL else f"data rank {owner[0]} of {owner[1]}"
        where = f"what was read by {who} at positions {ranges}"
        expected = _expected_total(owner, delivered, deliveries)
        if owner != ALL and run.last_job.first_line["dealt"]:
            notes.append(f"{where} is not compared: rows are balanced (balance=)")
        elif expected is None:
            notes.append(
                f"{where} is not compared: some of it was delivered again, or before this record"
            )
        elif delivered.total.num < expected.num:
            num_unread = expected.num - delivered.total.num
            yield (
                f"{num_unread} samples of {who} at positions {ranges} could not be read",
                num_unread,
            )
        elif delivered.total != expected:
            yield f"{where} are other samples than those of the order", 0
        elif owner != ALL and owner[1] > 1:
            notes.append(f"the sums of {where} are those of the order; {_OTHERS}")


def _expected_total(
    owner: Owner, delivered: Delivered, deliveries: Sequence[Delivery]
) -> Total | None:
    """Return the total of the order where an owner delivered; None unless one delivery has each position."""
    epoch = deliveries[-1].start.epoch
    pieces = []
    for delivery in deliveries:
        if owner == ALL or delivery.job.first_line["data_rank"] == list(owner[:2]):
            for first, end in delivered.once:
                piece = (max(delivery.start.samples, first), min(delivery.samples, end))
                if piece[0] < piece[1]:
                    pieces.append((*piece, delivery.skips, delivery.plan))
    account = account_of_all(epoch, [(*piece[:3], None) for piece in pieces])
    covered = account.get(ALL, Delivered())
    if delivered.again or covered.again or covered.once != delivered.once:
        return None
    return plus(
        *(
            total_of_owner(owner, plan, epoch, skips, first, end)
            for first, end, skips, plan in pieces
        )
    )
