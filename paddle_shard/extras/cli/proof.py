"""Proof that each sample of an epoch was delivered exactly once, as far as a record shows.

The record has the positions that all ranks delivered together. Where the run called `certificate()`, it also has sums
of the ids that all ranks read, which are compared with the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.answer import Json
from paddle_shard.extras.cli.timeline import Delivery, Timeline
from paddle_shard.plan.certificate import (
    ALL,
    DRAWN,
    UNKNOWN,
    Account,
    Delivered,
    Total,
    added,
    certify,
    ranges_text,
    total_of_plan,
)
from paddle_shard.plan.shard_plan import ShardPlan, skipped_positions
from paddle_shard.plan.skips import Ranges, without


def proof_of(run: Timeline, epoch: int) -> Json:
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
    notes = []

    # Delivered ranges, each with the order and the skips of its time.
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
                (
                    delivery.start.samples,
                    delivery.samples,
                    delivery.skips,
                    order,
                )
            )
    account = account_of_all(epoch, ranges)
    delivered = account.get(ALL, Delivered())

    # The rest of an open epoch is not missing.
    reached = max((end for _, end, *_ in ranges), default=0)
    if not is_over and plan is not None and reached < plan.num_served:
        rest = (reached, plan.num_served, newest.skips, plan)
        account = added(account, account_of_all(epoch, [rest]))
    seen_to = reached if newest.is_ended or not is_over else None
    certificate = certify(
        [(account, {})],
        epoch,
        plan,
        newest.skips,
        seen_to,
        "the loader's order",
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
        text += (
            f", so far: at positions [0, {reached}), in {newest.steps} steps"
        )
    if "files" in newest.job.first_line["data"]:
        text = text.replace(
            "draws of the loader's order", "positions of the stream"
        )
        notes.append(
            "rows of padding, and samples that could not be read, have positions, too"
        )
    fields = {**asdict(certificate), "repeated_positions": certificate.repeated}
    del fields["repeated"]
    return {**fields, "text": text, "notes": notes, "again": delivered.again}


def account_of_all(
    epoch: int, stretches: Iterable[tuple[int, int, Ranges, ShardPlan | None]]
) -> Account:
    """Return the account of positions that all data ranks have delivered, as they were drawn.

    Args:
        epoch: The epoch.
        stretches: (first position, position after the last, the skipped steps, the order by which they were
            delivered; None if it is not known, so that only the number of samples is).
    """
    accounts: list[Account] = []
    for first, end, skips, plan in stretches:
        total = Total(end - first, end - first)
        skipped: Ranges = ()
        if plan is not None:
            total = total_of_plan(plan, epoch, skips, first, end)
            skipped = skipped_positions(plan, skips)
        delivered = Delivered(tuple(without(first, end, skipped)), (), total)
        accounts.append(dict.fromkeys((ALL, DRAWN), delivered))
    return added(*accounts)


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
    """Yield a problem, and how many samples were not read, if the sums of all ranks differ from those of the order."""
    epoch = deliveries[-1].start.epoch
    account = run.accounts.get(epoch, {})
    # A single data rank has all rows.
    whole = [
        {ALL: delivered}
        for owner, delivered in account.items()
        if owner != DRAWN and owner[1] == 1
    ]
    read = added(*whole).get(ALL)
    if read is None:
        notes.append(
            "what was read is not compared: the record has no sums of all ranks. Call loader.certificate() before "
            "state_dict()"
        )
        return
    ranges = ranges_text(read.once)
    expected = _expected_total(read, deliveries)
    if expected is None:
        notes.append(
            f"what was read at positions {ranges} is not compared: some of it was delivered again, or before this "
            "record"
        )
    elif read.total.num < expected.num:
        num_unread = expected.num - read.total.num
        yield (
            f"{num_unread} samples at positions {ranges} could not be read",
            num_unread,
        )
    elif read.total != expected:
        yield (
            f"what was read at positions {ranges} is not what the order has there",
            0,
        )


def _expected_total(
    read: Delivered, deliveries: Sequence[Delivery]
) -> Total | None:
    """Return the total of the order where all ranks delivered; None unless one delivery has each position."""
    pieces = []
    for delivery in deliveries:
        for first, end in read.once:
            piece = (
                max(delivery.start.samples, first),
                min(delivery.samples, end),
            )
            if piece[0] < piece[1]:
                pieces.append((*piece, delivery.skips, delivery.plan))
    expected = account_of_all(deliveries[-1].start.epoch, pieces)
    covered = expected.get(ALL, Delivered())
    if read.again or covered.again or covered.once != read.once:
        return None
    return covered.total
