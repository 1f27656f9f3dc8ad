"""Certificate of an epoch: whether each sample was delivered exactly once, in a run that was stopped and resumed.

An `Account` holds what was delivered of an epoch, by owner. Accounts add up (`added`): over the iterators of a rank and
over resumes. `merged` adds those of all ranks up, and `certify` compares the result with the order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.shard_plan import ShardPlan, skipped_positions
from paddle_shard.plan.shuffle import FINISH, HALF, MULTIPLY
from paddle_shard.plan.skips import Ranges, union, without
from paddle_shard.plan.step import Ids, as_ids


class Total(NamedTuple):
    """Number of samples, and sums that tell which they are. Totals add up."""

    expected: int = 0
    """Samples expected; greater than `num` if some were unreadable."""
    num: int = 0
    """Samples that were delivered."""
    sum_0: int = 0
    sum_1: int = 0
    """Two sums mod 2^64 of keyed hashes of the ids of the samples that were delivered."""


Owner = tuple[int, int, int]
"""(data rank, number of data ranks, where the run was resumed): whose slices were delivered.

After a resume on another mesh, ranks of one data rank may have loaded states that know different slices. What they
deliver from there on has another owner, so that each of them still holds the same for each owner that it knows."""
ALL: Owner = (-1, 1, 0)
"""The slices of all data ranks."""
DRAWN: Owner = (-2, 1, 0)
"""Samples that the user's sampler drew. Expected are the positions of its order, skipped ones included."""
UNKNOWN = "not known"
"""Marker in problems caused by missing information rather than by an error."""

_KEYS = np.array(
    [[derive_seed("certificate", number)] for number in range(2)], np.uint64
)
_MASK = (1 << 64) - 1
_CHUNK = 1 << 16


# Counting samples


def total_of(ids: Ids, expected: int | None = None) -> Total:
    """Return the total of some samples.

    With sums of the ids themselves, or their xor, a missed sample and repeated ones may cancel out. With sums of keyed
    hashes that happens only by chance, 1 in 2^128.

    Args:
        ids: Indices in the data set.
        expected: Number of samples expected; None: as many as there are.
    """
    words = as_ids(ids).astype(np.uint64)
    h = (words ^ _KEYS) * MULTIPLY  # [key, sample]
    for _ in range(2):
        h ^= h >> HALF
        h *= FINISH
    h ^= h >> HALF
    sums = np.add.reduce(h, axis=1, dtype=np.uint64).tolist()
    num = len(ids)
    return Total(num if expected is None else expected, num, *sums)


def plus(*totals: Total) -> Total:
    """Return the sum of some totals."""
    expected, num, sum_0, sum_1 = map(sum, zip(Total(), *totals, strict=True))
    return Total(expected, num, sum_0 & _MASK, sum_1 & _MASK)


def minus(total: Total, other: Total) -> Total:
    """Return a total without a part of it."""
    return plus(total, Total(*(-value for value in other)))


# Delivered samples


class Delivered(NamedTuple):
    """Samples of an epoch that one owner has delivered. It stays small, however often the epoch is begun again."""

    once: Ranges = ()
    """Ranges of the epoch's positions that were delivered; of a user's sampler, skipped ones too."""
    again: Ranges = ()
    """Those of them that were delivered more than once."""
    total: Total = Total()
    """Total of all deliveries."""


Account = Mapping[Owner, Delivered]
"""Owner -> delivered samples of an epoch."""


def added(*accounts: Account) -> Account:
    """Return the account of all that some accounts hold."""
    joined: dict[Owner, Delivered] = {}
    for account in accounts:
        for owner, more in account.items():
            if more == Delivered():
                continue
            before = joined.get(owner, Delivered())
            both = [
                (max(first, other_first), min(end, other_end))
                for first, end in before.once
                for other_first, other_end in more.once
            ]
            joined[owner] = Delivered(
                union([*before.once, *more.once]),
                union([*before.again, *more.again, *both]),
                plus(before.total, more.total),
            )
    return joined


def account_to_json(account: Account) -> list[Any]:
    """Return an account as lists: [data rank, number of data ranks, resumed at, once, again, total] for each owner."""
    rows = [
        [*owner, *delivered] for owner, delivered in sorted(account.items())
    ]
    # Without tuples: a state must be equal to what comes back from JSON.
    return list(json.loads(json.dumps(rows)))


def account_from_json(saved: Any) -> Account:
    """Return the account that was written as lists."""
    return {
        tuple(owner): Delivered(
            tuple(map(tuple, once)), tuple(map(tuple, again)), Total(*total)
        )
        for *owner, once, again, total in saved
    }


def merged(
    accounts: Iterable[tuple[Account, Account]],
) -> tuple[Account, list[str]]:
    """Return what all ranks together know to be delivered, and the problems that were found.

    Replicas, which have the same data rank, must have delivered the same samples with all their iterators together;
    only one of them is counted. What all data ranks have delivered is that of `ALL`. If what a data rank delivered is
    missing, that of the others stays with its owners.

    Args:
        accounts: For each rank, what it knows from a saved state or the last certificate, and what it has delivered
            since then.
    """
    before, since = zip(*accounts, strict=True)
    problems: list[str] = []
    earlier = _joined(
        before,
        "the states that the ranks have loaded differ in what {} delivered: load states that were saved at the same "
        "step",
        problems,
    )
    new = _joined(
        since,
        "replicas of {} delivered different samples, or a different number",
        problems,
    )
    return added(_of_all(earlier, problems), _of_all(new, problems)), problems


def _joined(
    accounts: Iterable[Account], problem: str, problems: list[str]
) -> dict[Owner, Delivered]:
    """Return what each owner delivered by the accounts of all ranks; add a problem where they differ."""
    joined: dict[Owner, Delivered] = {}
    for account in accounts:
        for owner, delivered in account.items():
            if joined.setdefault(owner, delivered) != delivered:
                names = {ALL: "all data ranks", DRAWN: "the sampler"}
                problems.append(
                    problem.format(names.get(owner, f"data rank {owner[0]}"))
                )
    return joined


def _of_all(account: Account, problems: list[str]) -> Account:
    """Return an account in which the slices of all data ranks are put together, as far as all are known."""
    whole = {
        owner: account[owner] for owner in (ALL, DRAWN) if owner in account
    }
    splits = sorted({owner[1:] for owner in account if owner not in whole})
    totals: dict[Any, Total] = {}
    for num_data_ranks, resumed_at in splits:
        owners = [
            (rank, num_data_ranks, resumed_at) for rank in range(num_data_ranks)
        ]
        slices = {owner: account[owner] for owner in owners if owner in account}
        most = max(slices.values())
        # All data ranks must have delivered the same positions.
        positions = most[:2]
        missing = [
            owner[0]
            for owner in owners
            if owner not in slices or slices[owner][:2] != positions
        ]
        if missing:
            whole |= slices
            problems.append(
                f"what data ranks {missing} of {num_data_ranks} delivered in {ranges_text(most.once)} is {UNKNOWN}: "
                "call certificate() on all ranks before state_dict(), or load every rank's own state"
            )
            continue
        total = plus(*(delivered.total for delivered in slices.values()))
        steps = (resumed_at, *positions)
        if steps not in totals:
            totals[steps] = total
            more = {ALL: most._replace(total=total)}
            whole |= added({ALL: whole.get(ALL, Delivered())}, more)
        # A stage of a pipeline with another number of data ranks has delivered them, too.
        elif totals[steps] != total:
            problems.append(
                "pipeline stages with different numbers of data ranks delivered different samples"
            )
    return whole


def ranges_text(ranges: Ranges) -> str:
    """Return ranges of positions as text."""
    return ", ".join(f"[{first}, {end})" for first, end in ranges)


# The proof


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The deliveries of a run in an epoch, over all data ranks, iterators, restarts and meshes."""

    epoch: int
    num_samples: int
    """Samples that the epoch delivers: all except those that the tail drops."""
    dropped: int = 0
    """Samples that the tail drops; 0 if the order is that of the user's own sampler."""
    skipped: int = 0
    """Samples of the steps in `skip_steps=`."""
    delivered: int
    """Samples that were delivered, counted as often as they were."""
    missed: int
    """Missing deliveries, as far as the ranges tell. A sample that cannot be read is missing once for each time
    that its range was delivered. `delivered` is `num_samples - missed + repeated`."""
    to_come: int = 0
    """Samples behind all that was delivered, if nothing else is missing or wrong: the epoch may go on."""
    repeated: int
    """Deliveries beyond the first of each sample, including those of them that are missing."""
    problems: tuple[str, ...]
    """All findings against "exactly once"; empty if it is proved."""
    drawn_by: str | None = None
    """Name of the user's own sampler, or "the mixture", if it chose the samples. Each of its draws must be delivered
    once, so a sample is delivered as often as it was drawn. None: the samples are those of the data set."""

    @property
    def exact(self) -> bool:
        """True if each sample of the epoch was delivered exactly once."""
        return not self.problems

    def __str__(self) -> str:
        what = f"each of {self.num_samples} samples"
        if self.drawn_by is not None:
            what = f"each of {self.num_samples} draws of {self.drawn_by}"
        if self.dropped:
            total = self.num_samples + self.dropped + self.skipped
            what += f" (of {total}; tail='drop' leaves out {self.dropped})"
        if self.skipped:
            what += f" (and {self.skipped} are skipped by the user)"
        if self.exact:
            return f"epoch {self.epoch}: {what} exactly once"
        if self.to_come:
            some = f"{self.delivered} {what.removeprefix('each ')}"
            return f"epoch {self.epoch}: {some} delivered once, {self.to_come} to come"
        # If something is only missing in what is known, nothing is known to be wrong.
        if all(UNKNOWN in problem for problem in self.problems):
            what = f"not proved that {what} was delivered"
        else:
            what = f"NOT {what}"
        return f"epoch {self.epoch}: {what} exactly once: " + "; ".join(
            self.problems
        )


def certify(
    accounts: Iterable[tuple[Account, Account]],
    epoch: int,
    plan: ShardPlan | None,
    skips: Ranges,
    end: int | None,
    drawn_by: str | None,
) -> Certificate:
    """Return what the accounts of all ranks prove of an epoch.

    Args:
        accounts: The account of each rank; see `merged`.
        epoch: The epoch.
        plan: Its order; None if a sampler of the user's own decides it.
        skips: The skipped steps of the epoch.
        end: The position at which the sampler has ended; None if no iterator has seen it.
        drawn_by: The sampler's name; not used if there is a plan.
    """
    account, problems = merged(accounts)
    delivered = account.get(ALL, Delivered())
    drawn = account.get(DRAWN, Delivered())
    is_known = set(account) <= {ALL, DRAWN}
    reached = delivered.once[-1][1] if delivered.once else 0
    # Of ranges that were delivered several times, only the number of samples is known.
    expected = delivered.total._replace(num=delivered.total.expected)
    where = f"positions {ranges_text(delivered.once)}"
    dropped = 0
    if plan is None:
        # An epoch that was drawn several times has skipped the same samples each time.
        num_drawn = sum(stop - first for first, stop in drawn.once)
        skipped = drawn.total.expected - drawn.total.num
        skipped = skipped * num_drawn // max(1, drawn.total.expected)
        num_samples = (reached if end is None else end) - skipped
        if is_known:
            expected = drawn.total
            where = "the sampler's batches"
    else:
        between = partial(total_of_plan, plan, epoch, skips)
        end = plan.num_served
        num_samples = between(0, end).num
        skipped = sum(
            total_of_plan(plan, epoch, (), *positions).num
            for positions in skipped_positions(plan, skips)
        )
        dropped = plan.num_samples - num_samples - skipped
        drawn_by = plan.ordering.drawn_by
        if not delivered.again:
            expected = plus(*(between(*stretch) for stretch in delivered.once))

    # Compare the positions, then the samples at them.
    gaps = [
        (
            first,
            stop,
            stop - first if plan is None else between(first, stop).num,
        )
        for first, stop in without(0, max(reached, end or 0), delivered.once)
    ]
    missed = sum(num for *_, num in gaps)
    problems += _position_problems(gaps, delivered.again, is_known=is_known)
    if end is None:
        problems.append(
            f"{drawn_by} has not ended after position {reached}, as far as this run has seen"
        )
    if end == 0:
        problems.append(
            "no sample was delivered: the data has none, or tail='drop' dropped all of them"
        )
    num = delivered.total.num
    if num != expected.num:
        problems.append(
            f"{where} hold {expected.num} samples, but {num} were delivered"
        )
        missed += max(0, expected.num - num)
    elif delivered.total[2:] != expected[2:]:
        problems.append(
            f"in {where}, some samples were missed and as many repeated"
        )
    return Certificate(
        epoch=epoch,
        num_samples=num_samples,
        dropped=dropped,
        skipped=skipped,
        delivered=num,
        missed=missed,
        to_come=missed
        if is_known
        and len(problems) == 1
        and [gap[0] for gap in gaps] == [reached]
        else 0,
        repeated=num - num_samples + missed,
        problems=tuple(dict.fromkeys(problems)),
        drawn_by=drawn_by,
    )


def _position_problems(
    gaps: list[tuple[int, int, int]], again: Ranges, *, is_known: bool
) -> Iterator[str]:
    """Yield a problem for each gap that holds samples, and for each range that was delivered again."""
    what = "were not delivered"
    if not is_known:
        what = f"are {UNKNOWN} to have been delivered by all data ranks"
    for first, stop, num in gaps:
        if num:
            yield f"positions [{first}, {stop}) {what}"
    for first, stop in again:
        yield f"positions [{first}, {stop}) were delivered again"


@lru_cache(maxsize=4)
def total_of_plan(
    plan: ShardPlan, epoch: int, skips: Ranges, first: int, end: int
) -> Total:
    """Return the total expected at positions [first, end) of a plan."""
    totals = []
    for range_first, range_end in without(
        first, end, skipped_positions(plan, skips)
    ):
        for start in range(range_first, range_end, _CHUNK):
            stop = min(start + _CHUNK, range_end)
            samples = plan.samples(epoch=epoch, first=start, end=stop)
            totals.append(total_of(samples))
    return plus(*totals)
