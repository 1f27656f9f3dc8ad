"""Was each sample of an epoch delivered exactly once, in a run that was stopped and resumed?

An `Account` says what was delivered of an epoch, and by whom. Accounts add up (`added`): over the passes of a rank and
over resumes. `merged` adds those of all ranks up, and `certify` holds the result against the order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.mixture import Mixing
from paddle_shard.plan.partition import slice_rows
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.shard_plan import ShardPlan, skipped_positions, steps_of_plan
from paddle_shard.plan.skips import Ranges, counted, union, without
from paddle_shard.plan.step import Ids, as_ids


class Total(NamedTuple):
    """Number of samples, and sums that tell which they are. Totals add up."""

    belong: int = 0
    """Samples that belong there. More than `num` if some could not be read."""
    num: int = 0
    """Samples that were delivered."""
    one: int = 0
    other: int = 0
    """`one` and `other`: two sums mod 2^64 of keyed hashes of the ids of the samples that were delivered."""


Owner = tuple[int, int, int]
"""(data rank, number of data ranks, where the run was resumed): whose slices were delivered.

After a resume on another mesh, ranks of one data rank may have loaded states that know different slices. What they
deliver from there on has an owner of its own, so that each of them still says the same of each owner that it knows."""
ALL: Owner = (-1, 1, 0)
"""The slices of all data ranks."""
DRAWN: Owner = (-2, 1, 0)
"""What the user's sampler drew. What belongs somewhere are the positions of its order, those left out included."""
UNKNOWN = "not known"
"""Is in each problem that tells of something missing in what this run knows, and of nothing wrong."""

_KEYS = np.array(
    [[derive_seed("certificate", number)] for number in range(2)], np.uint64
)
_MULTIPLY = np.uint64(0x9E3779B97F4A7C15)
_FINISH = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_MASK = (1 << 64) - 1
_CHUNK = 1 << 16


# Counting samples


def total_of(ids: Ids, belong: int | None = None) -> Total:
    """Return the total of some samples.

    With sums of the ids themselves, or their xor, a missed sample and repeated ones may cancel out. With sums of keyed
    hashes that happens only by chance, 1 in 2^128.

    Args:
        ids: Indices in the data set.
        belong: Number of samples that belong there; None: as many as there are.
    """
    h = (as_ids(ids).astype(np.uint64) ^ _KEYS) * _MULTIPLY  # [key, sample]
    for _ in range(2):
        h ^= h >> _SHIFT
        h *= _FINISH
    h ^= h >> _SHIFT
    sums = np.add.reduce(h, axis=1, dtype=np.uint64).tolist()
    return Total(len(ids) if belong is None else belong, len(ids), *sums)


def plus(*totals: Total) -> Total:
    """Return the sum of some totals."""
    belong, num, one, other = map(sum, zip(Total(), *totals, strict=True))
    return Total(belong, num, one & _MASK, other & _MASK)


def minus(total: Total, other: Total) -> Total:
    """Return a total without a part of it."""
    return plus(total, Total(*(-value for value in other)))


# What was delivered


class Delivered(NamedTuple):
    """What one owner has delivered of an epoch. It stays small, however often the epoch is begun again."""

    once: tuple[tuple[int, int], ...] = ()
    """Stretches [first, end) of the epoch's positions that were delivered: ascending, none touches the next."""
    again: tuple[tuple[int, int], ...] = ()
    """Those of them that were delivered more than once."""
    total: Total = Total()
    """Total of all deliveries."""


Account = Mapping[Owner, Delivered]
"""What was delivered of an epoch, by its owner."""


def added(*accounts: Account) -> Account:
    """Return the account of all that some accounts tell."""
    found: dict[Owner, Delivered] = {}
    for owner, more in (entry for account in accounts for entry in account.items()):
        if more == Delivered():
            continue
        sofar = found.get(owner, Delivered())
        both = [
            (max(one[0], two[0]), min(one[1], two[1]))
            for one in sofar.once
            for two in more.once
        ]
        found[owner] = Delivered(
            union([*sofar.once, *more.once]),
            union([*sofar.again, *more.again, *both]),
            plus(sofar.total, more.total),
        )
    return found


def account_of_all(
    epoch: int, stretches: Iterable[tuple[int, int, Ranges, ShardPlan | None]]
) -> Account:
    """Return the account of positions that all data ranks have delivered, as they were drawn.

    Args:
        epoch: The epoch.
        stretches: (first position, position after the last, the skipped steps, the order by which they were
            delivered; None if it is not known, so that only the number of samples is).
    """
    found: list[Account] = []
    for first, end, skips, plan in stretches:
        total = (
            Total(end - first, end - first)
            if plan is None
            else total_of_plan(plan, epoch, skips)(first, end)
        )
        found.append(dict.fromkeys((ALL, DRAWN), Delivered(((first, end),), (), total)))
    return added(*found)


def account_to_json(account: Account) -> list[Any]:
    """Return an account as lists: [data rank, number of data ranks, resumed at, once, again, total] for each owner."""
    rows = [[*owner, *delivered] for owner, delivered in sorted(account.items())]
    return list(
        json.loads(json.dumps(rows))
    )  # without tuples: a state must be equal to what comes back from JSON


def account_from_json(saved: Any) -> Account:
    """Return the account that was written as lists.

    Raises:
        ValueError: It is damaged, or a TypeError.
    """
    found: dict[Owner, Delivered] = {}
    for data_rank, count, resumed_at, once, again, (belong, num, one, other) in saved:
        owner = counted(data_rank, DRAWN[0]), counted(count, 1), counted(resumed_at)
        if owner in found:
            raise ValueError(saved)
        found[owner] = Delivered(
            tuple((counted(first), counted(end, first + 1)) for first, end in once),
            tuple((counted(first), counted(end, first + 1)) for first, end in again),
            Total(counted(belong), counted(num), counted(one), counted(other)),
        )
    return found


def merged(accounts: Iterable[tuple[Account, Account]]) -> tuple[Account, list[str]]:
    """Return what all ranks together know to be delivered, and the problems that were found.

    Replicas, which have the same data rank, must have delivered the same samples with all their passes together; only
    one of them is counted. What all data ranks have delivered is that of `ALL`. If what a data rank delivered is
    missing, that of the others stays with its owners.

    Args:
        accounts: Of each rank, what it knows from a saved state or the last certificate, and what it has delivered
            itself since then.
    """
    problems: list[str] = []
    known: dict[Owner, Delivered] = {}
    own: dict[Owner, Delivered] = {}
    for before, since in accounts:
        for owner, delivered in before.items():
            if known.setdefault(owner, delivered) != delivered:
                problems.append(
                    f"the states that the ranks have loaded differ in what {_named(owner)} delivered: load states that "
                    "were saved at the same step"
                )
        for owner, delivered in since.items():
            if own.setdefault(owner, delivered) != delivered:
                problems.append(
                    "the samplers drew different samples on some ranks"
                    if owner == DRAWN
                    else f"replicas of {_named(owner)} delivered different samples, or a different number"
                )
    return added(_of_all(known, problems), _of_all(own, problems)), problems


def _named(owner: Owner) -> str:
    return {ALL: "all data ranks", DRAWN: "the sampler"}.get(
        owner, f"data rank {owner[0]}"
    )


def _of_all(account: Account, problems: list[str]) -> Account:
    """Return an account in which the slices of all data ranks are put together, as far as all are known."""
    found: dict[Owner, Delivered] = {
        owner: account[owner] for owner in (ALL, DRAWN) if owner in account
    }
    stages: dict[Any, Total] = {}
    for run in sorted({owner[1:] for owner in account if owner not in found}):
        count, slices = (
            run[0],
            {
                owner[0]: account[owner]
                for owner in account
                if owner[1:] == run and owner[0] >= 0
            },
        )
        most = max(
            slices.values()
        )  # any of them, if all data ranks have delivered the same positions
        missing = [
            rank
            for rank in range(count)
            if rank not in slices or slices[rank][:2] != most[:2]
        ]
        if missing:
            found |= {(rank, *run): delivered for rank, delivered in slices.items()}
            problems.append(
                f"what data ranks {missing} of {count} delivered in {_shown(most.once)} is {UNKNOWN}: call "
                "certificate() on all ranks before state_dict(), or load every rank's own state"
            )
            continue
        total, steps = (
            plus(*(delivered.total for delivered in slices.values())),
            (run[1], *most[:2]),
        )
        if (
            steps in stages
        ):  # a stage of a pipeline with another number of data ranks has delivered them, too
            if stages[steps] != total:
                problems.append(
                    "pipeline stages with different numbers of data ranks delivered different samples"
                )
            continue
        stages[steps] = total
        found |= added(
            {ALL: found.get(ALL, Delivered())}, {ALL: Delivered(*most[:2], total)}
        )
    return found


def _shown(stretches: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"[{first}, {end})" for first, end in stretches)


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
    """Missing deliveries, as far as the stretches tell. A sample that cannot be read is missing once for each time
    that its stretch was delivered. `delivered` is `num_samples - missed + repeated`."""
    repeated: int
    """Deliveries beyond the first of each sample, including those of them that are missing."""
    problems: tuple[str, ...]
    """All findings against "exactly once"; empty if it is proved."""
    drawn_by: str | None = None
    """Name of the user's own sampler, if it chose the samples. Each of its draws must be delivered once, so a sample
    is delivered as often as it was drawn. None: the samples are those of the data set."""

    sources: Mapping[str, int] | None = None
    """Of a mixture: how many samples of each source the epoch delivers; they add up to `num_samples`."""

    @property
    def exact(self) -> bool:
        """True if each sample of the epoch was delivered exactly once."""
        return not self.problems

    def __str__(self) -> str:
        what = f"each of {self.num_samples} samples"
        if self.dropped:
            what += f" (of {self.num_samples + self.dropped + self.skipped}; tail='drop' leaves out {self.dropped})"
        if self.skipped:
            what += f" (and {self.skipped} are skipped by the user)"
        if self.drawn_by is not None:
            what += f" that {self.drawn_by} drew"
        if self.exact:
            return f"epoch {self.epoch}: {what} exactly once"
        known = not any(UNKNOWN in problem for problem in self.problems)
        if (
            not self.delivered and self.num_samples and known
        ):  # a finished job that was started again asks, too
            return (
                f"epoch {self.epoch} has not begun, as far as this run knows: "
                + "; ".join(self.problems)
            )
        if all(
            UNKNOWN in problem for problem in self.problems
        ):  # nothing is known to be wrong
            what = f"not proved that {what} was delivered"
        else:
            what = f"NOT {what}"
        return f"epoch {self.epoch}: {what} exactly once: " + "; ".join(self.problems)


def certify(
    accounts: Iterable[tuple[Account, Account]],
    epoch: int,
    plan: ShardPlan | None,
    skips: Ranges,
    end: int | None = None,
    drawn_by: str = "",
) -> Certificate:
    """Return what the accounts of all ranks prove of an epoch.

    Args:
        accounts: Of each rank, see `merged`.
        epoch: The epoch.
        plan: Its order; None if a sampler of the user's own decides it.
        skips: The skipped steps of the epoch.
        end: The position at which the sampler has ended; None if no pass has seen it.
        drawn_by: The sampler's name.
    """
    found, problems = merged(accounts)
    delivered, drawn = found.get(ALL, Delivered()), found.get(DRAWN, Delivered())
    known, num = set(found) <= {ALL, DRAWN}, delivered.total.num
    # Of stretches that were delivered several times, only the number of samples is known.
    wanted, what = (
        delivered.total._replace(num=delivered.total.belong),
        f"positions {_shown(delivered.once)}",
    )
    if plan is None:
        size: Callable[[int, int], int] = lambda first, end: end - first  # noqa: E731
        # An epoch that was drawn several times has left out the same samples each time.
        positions = sum(end - first for first, end in drawn.once)
        skipped = (
            (drawn.total.belong - drawn.total.num)
            * positions
            // max(1, drawn.total.belong)
        )
        num_samples = (
            max([(0, 0), *delivered.once])[1] if end is None else end
        ) - skipped
        if known:
            wanted, what = drawn.total, "the sampler's batches"
    else:
        belongs, end = total_of_plan(plan, epoch, skips), plan.num_served
        size = lambda first, end: belongs(first, end).num  # noqa: E731
        num_samples = size(0, end)
        skipped = (
            total_of_plan(plan, epoch, ())(0, end).num - num_samples if skips else 0
        )
        if not delivered.again:
            wanted = plus(*(belongs(*stretch) for stretch in delivered.once))
    at = missed = 0
    for first, stop in (*delivered.once, (end or 0, end or 0)):
        if first > at and size(at, first):
            missed += size(at, first)
            gap = (
                "were not delivered"
                if known
                else f"are {UNKNOWN} to have been delivered by all data ranks"
            )
            problems.append(f"positions [{at}, {first}) {gap}")
        at = max(at, stop)
    problems += [
        f"positions [{first}, {stop}) were delivered again"
        for first, stop in delivered.again
    ]
    if end is None:
        problems.append(
            f"{drawn_by} has not ended after position {at}, as far as this run has seen"
        )
    if end == 0:
        problems.append(
            "no sample was delivered: the data has none, or tail='drop' dropped all of them"
        )
    if num != wanted.num:
        problems.append(f"{what} hold {wanted.num} samples, but {num} were delivered")
        missed += max(0, wanted.num - num)
    elif delivered.total[2:] != wanted[2:]:
        problems.append(f"in {what}, some samples were missed and as many repeated")
    return Certificate(
        epoch=epoch,
        num_samples=num_samples,
        dropped=0 if plan is None else plan.num_samples - num_samples - skipped,
        skipped=skipped,
        delivered=num,
        missed=missed,
        repeated=num - num_samples + missed,
        problems=tuple(dict.fromkeys(problems)),
        drawn_by=drawn_by if plan is None else None,
        sources=None if plan is None else _of_sources(plan, epoch, skips),
    )


def total_of_plan(
    plan: ShardPlan, epoch: int, skips: Ranges
) -> Callable[[int, int], Total]:
    """Return the function that tells what belongs at positions [first, end) of a plan."""
    return cache(
        lambda first, end: plus(*map(total_of, _kept(plan, epoch, skips, first, end)))
    )


def total_of_owner(
    owner: Owner, plan: ShardPlan, epoch: int, skips: Ranges, first: int, end: int
) -> Total:
    """Return the total of the rows of a data rank, or of all, in the steps at positions [first, end) of a plan."""
    data_rank, count, _ = owner
    if owner == ALL or count == 1:
        return total_of_plan(plan, epoch, skips)(first, end)
    steps = range(plan.step_of(position=first), plan.step_of(position=end - 1) + 1)
    mine = steps_of_plan(
        plan,
        epoch,
        steps,
        lambda rows, micro: slice_rows(rows, count, data_rank, micro),
        skips,
    )
    return plus(
        *(
            total_of(np.asarray(one.ids)[slice(None) if one.real is None else one.real])
            for one in mine
        )
    )


def _kept(
    plan: ShardPlan, epoch: int, skips: Ranges, first: int, end: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the real samples at positions [first, end) that are not skipped, in any order."""
    skipped = skipped_positions(plan, skips)
    if (
        (first, end) == (0, plan.num_positions)
        and not isinstance(plan.ordering, Mixing)
        and not skipped
    ):
        # These are all samples. The order of the data set takes half the time of a shuffled one.
        for start in range(0, plan.num_samples, _CHUNK):
            yield np.arange(start, min(start + _CHUNK, plan.num_samples))
        return
    order = plan.order(epoch=epoch)
    for kept_first, kept_end in without(first, end, skipped):
        for start in range(kept_first, kept_end, _CHUNK):
            ids = order.between(start, min(start + _CHUNK, kept_end))
            yield ids[ids < plan.num_samples] if plan.ordering.pads_first else ids


def _of_sources(plan: ShardPlan, epoch: int, skips: Ranges) -> Mapping[str, int] | None:
    """Return how many samples of each source of a mixture an epoch delivers; None for other data sets."""
    if not isinstance(plan.ordering, Mixing):
        return None
    names = plan.ordering.names
    first = epoch * plan.num_samples
    counts = np.zeros(len(names), np.int64)
    for kept_first, kept_end in without(
        0, plan.num_served, skipped_positions(plan, skips)
    ):
        counts += plan.ordering.draws.counts(
            first + kept_end
        ) - plan.ordering.draws.counts(first + kept_first)
    return dict(zip(names, counts.tolist(), strict=True))
