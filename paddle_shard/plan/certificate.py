"""Was each sample of an epoch delivered exactly once, in a run that was stopped and resumed?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.mixture import Mixing, source_and_index
from paddle_shard.plan.seeding import derive_seed
from paddle_shard.plan.skips import Skips

if TYPE_CHECKING:
    from paddle_shard.plan.shard_plan import ShardPlan

Total = tuple[int, int, int]
"""Number of samples, and two sums mod 2^64 of keyed hashes of their ids."""

_TOGETHER = 64
"""Batches whose samples are added at once."""
_KEYS = tuple(np.uint64(derive_seed("certificate", number)) for number in range(2))
_MULTIPLY = np.uint64(0x9E3779B97F4A7C15)
_FINISH = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_MASK = (1 << 64) - 1

ALL, DRAWN = -1, -2

_CHUNK = 1 << 16
_MOST = 16
"""Most legs of an owner that are kept one by one; if there are more, those inside others become one."""

Expected = Callable[[int, int], Total]
"""Returns the total of the real samples at positions [first, end)."""


# Counting samples


def id_sums(ids: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Return two sums mod 2^64 of keyed hashes of sample ids.

    With sums of the ids themselves, or their xor, a missed sample and repeated ones may cancel out. With these
    sums that happens only by chance, 1 in 2^128.
    """
    found = []
    for key in _KEYS:
        h = (ids.astype(np.uint64) ^ key) * _MULTIPLY
        for _ in range(2):
            h ^= h >> _SHIFT
            h *= _FINISH
        h ^= h >> _SHIFT
        found.append(int(np.add.reduce(h, dtype=np.uint64)))
    return found[0], found[1]


class Tally(NamedTuple):
    """Counts samples, in about a microsecond per batch. It is a value: adding samples returns a new one."""

    num_ids: int = 0
    summed: tuple[int, int] = (0, 0)
    """Sums of the samples that are not waiting."""
    waiting: Any = None
    """(samples, the waiting ones before them) that are not yet in the sums, or None."""
    num_waiting: int = 0
    """Number of waiting batches."""

    def added(self, ids: Sequence[Any] | npt.NDArray[np.int64]) -> Tally:
        """Return the tally with more samples, given by their indices in the data set."""
        found = Tally(self.num_ids + len(ids), self.summed, (ids, self.waiting), self.num_waiting + 1)
        return found if found.num_waiting < _TOGETHER else Tally(found.num_ids, found.total[1:])

    @property
    def total(self) -> Total:
        """Total of the samples so far."""
        waiting, found = self.waiting, []
        while waiting is not None:
            found.append(as_ids(waiting[0]))
            waiting = waiting[1]
        sums = id_sums(np.concatenate(found)) if found else (0, 0)
        return plus((self.num_ids, *self.summed), (0, *sums))


def as_ids(indices: Sequence[Any] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return numbers for a data set's indices: ints unchanged, others from a hash of their `repr`."""
    if isinstance(indices, np.ndarray):
        return indices
    try:
        found = np.array(indices)
    except ValueError:  # tuples of several lengths
        found = np.array(None)
    if found.dtype.kind == "i" and found.ndim == 1:
        return found.astype(np.int64, copy=False)
    numbers = [index if isinstance(index, int) else derive_seed("id", index) for index in indices]
    return np.array(numbers, dtype=object).astype(np.uint64).view(np.int64)


def plus(one: Total, other: Total, times: int = 1) -> Total:
    """Return a total plus `times` another one; -1 subtracts it."""
    return one[0] + times * other[0], (one[1] + times * other[1]) & _MASK, (one[2] + times * other[2]) & _MASK


# What was delivered


class Leg(NamedTuple):
    """The deliveries at one stretch of positions of an epoch's order."""

    epoch: int
    first: int
    end: int
    data_rank: int
    """Data rank whose slices these are. `ALL`: the slices of all data ranks. `DRAWN`: what the user's sampler drew."""
    num_data_ranks: int
    """Number of data ranks at that time; 1 for `ALL` and `DRAWN`."""
    num: int
    one: int
    other: int
    """`num`, `one` and `other` are the total of the samples."""
    times: int = 1
    """Number of times that the stretch was delivered; the total covers all. -k: the leg holds k stretches inside it."""

    @property
    def total(self) -> Total:
        """Total of the samples."""
        return self.num, self.one, self.other

    @property
    def owner(self) -> tuple[int, int, int]:
        """Key of the owner; legs of one owner can be added up."""
        return self.epoch, self.data_rank, self.num_data_ranks

    def joined(self, leg: Leg, times: int) -> Leg:
        """Return the leg that spans both stretches and holds the samples of both."""
        total = plus(self.total, leg.total)
        return Leg(self.epoch, min(self.first, leg.first), max(self.end, leg.end), *self.owner[1:], *total, times)


class Account(NamedTuple):
    """The knowledge of one rank about the deliveries of an epoch."""

    place: tuple[int, int] | None
    """(its data rank, number of data ranks); None if it holds none of the data."""
    known: Sequence[Leg]
    """Legs from a saved state, or legs of all ranks from the last certificate."""
    own: Sequence[Leg]
    """Legs that this rank itself has delivered since then."""


# Merging legs


def folded(legs: Iterable[Leg]) -> list[Leg]:
    """Return the same deliveries in fewer legs: one for a stretch that was delivered several times.

    The legs stay few, however often an epoch is restarted: if an owner has many, those inside others become one leg,
    which no longer tells the stretches apart.
    """
    found: dict[Any, Leg] = {}
    for leg in legs:
        key = (leg[:5] if leg.times > 0 else leg.owner), leg.times > 0
        found[key] = leg if key not in found else found[key].joined(leg, found[key].times + leg.times)
    owners: dict[Any, list[Leg]] = defaultdict(list)
    for leg in sorted(found.values()):
        owners[leg.owner].append(leg)
    few: list[Leg] = []
    for own in owners.values():
        inside = None
        for leg in own:
            around = (o for o in own if o != leg and o.times > 0 and o.first <= leg.first and leg.end <= o.end)
            if len(own) <= _MOST or (leg.times > 0 and next(around, None) is None):
                few.append(leg)
                continue
            times = -abs(leg.times)
            inside = leg._replace(times=times) if inside is None else inside.joined(leg, inside.times + times)
        few += [] if inside is None else [inside]
    return few


# Combining what the ranks know


def merge(accounts: Iterable[Account]) -> tuple[list[Leg], list[str]]:
    """Return what all ranks together know to be delivered, and the problems that were found.

    Replicas, which have the same data rank, must have delivered the same samples with all their iterators together;
    only one of them is counted. Known legs are the same on every rank that has them, and are counted once. A stretch
    that every data rank has delivered becomes one leg of `ALL`, and adjacent legs are joined. If a data rank's leg of
    a stretch is missing, the stretch stays in pieces.
    """
    problems: list[str] = []
    known: set[Leg] = set()
    drawn: set[Leg] = set()
    replicas: dict[tuple[int, int], set[Leg]] = {}
    for place, before, own in accounts:
        known |= {Leg(*leg) for leg in before}
        since = {Leg(*leg) for leg in own}
        drawn |= {leg for leg in since if leg.data_rank == DRAWN}
        mine = since - drawn
        if place is not None and replicas.setdefault((place[0], place[1]), mine) != mine:
            problems.append(f"replicas of data rank {place[0]} delivered different samples, or a different number")
    whole: list[Leg] = []
    pieces: list[Leg] = []
    for legs in (known, drawn.union(*replicas.values())):
        _put_together(legs, whole, pieces, problems)
    chained: list[Leg] = []
    for leg in sorted(whole):
        before = [o for o in chained if (o.end, o.owner, o.times) == (leg.first, leg.owner, leg.times) and o.times > 0]
        if before:
            chained.remove(before[0])
            leg = before[0].joined(leg, leg.times)
        chained.append(leg)
    return folded([*chained, *pieces]), problems


def _put_together(legs: set[Leg], whole: list[Leg], pieces: list[Leg], problems: list[str]) -> None:
    """Add what all data ranks have delivered to `whole`, and what only some have delivered to `pieces`."""
    stretches: dict[Any, dict[int, Leg]] = defaultdict(dict)
    for leg in sorted(legs):
        kind = min(leg.data_rank, 0)  # ALL, DRAWN, or 0 for one data rank, even if there is only one
        of_ranks = stretches[(leg.first, leg.end, leg.num_data_ranks, leg.times, kind)]
        if leg.data_rank in of_ranks:
            who = "the samplers drew" if kind == DRAWN else f"replicas of data rank {leg.data_rank} delivered"
            problems.append(f"{who} different samples on some ranks in [{leg.first}, {leg.end})")
        of_ranks[leg.data_rank] = leg
    for (first, end, num_ranks, times, kind), of_ranks in sorted(stretches.items()):
        if kind < 0:
            whole.append(of_ranks[kind])
            continue
        missing = sorted(set(range(num_ranks)) - set(of_ranks))
        if missing:
            problems.append(
                f"what data ranks {missing} of {num_ranks} delivered in [{first}, {end}) is not known: call "
                "certificate() on all ranks before state_dict(), or load every rank's own state"
            )
            pieces += of_ranks.values()
            continue
        total = (0, 0, 0)
        for leg in of_ranks.values():
            total = plus(total, leg.total)
        whole.append(Leg(leg.epoch, first, end, ALL, 1, *total, times))


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
    """Samples that you leave out (`loader.skip`)."""
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
        return f"epoch {self.epoch}: NOT {what} exactly once: " + "; ".join(self.problems)


def certify(
    accounts: Iterable[Account],
    epoch: int,
    num_positions: int | None,
    expected: Expected | None,
    drawn_by: str | None = None,
    num_samples: int | None = None,
    skipped: int = 0,
) -> Certificate:
    """Return what the accounts of all ranks prove of an epoch.

    Args:
        accounts: The accounts of all ranks.
        epoch: The epoch.
        num_positions: Positions of its order that are served. None: the end of the sampler has not been seen.
        expected: Returns what belongs at the positions. None: only a sampler knows, so the draws are compared.
        drawn_by: The sampler's name.
        num_samples: Number of samples in the data set. None: only a sampler knows which of them it draws.
        skipped: Number of samples that the user leaves out. With a sampler of the user's own, its draws tell.
    """
    legs, problems = merge(accounts)
    skipped = _not_drawn(legs) if expected is None else skipped
    whole = [leg for leg in legs if leg.data_rank == ALL]
    size = (lambda first, end: end - first) if expected is None else (lambda first, end: expected(first, end)[0])
    at = missed = repeated = 0
    known = all(leg.data_rank in (ALL, DRAWN) for leg in legs)
    left_out = "were not delivered" if known else "are not known to have been delivered by all data ranks"
    for leg in whole:
        stretch = f"positions [{leg.first}, {leg.end})"
        if leg.times < 0:
            repeated += leg.num
            problems.append(f"in {stretch}, {leg.num} samples were delivered again, in {-leg.times} stretches")
            continue
        if leg.first > at and size(at, leg.first):
            missed += size(at, leg.first)
            problems.append(f"positions [{at}, {leg.first}) {left_out}")
        elif leg.first < at:
            repeated += size(leg.first, min(at, leg.end))
            problems.append(f"positions [{leg.first}, {min(at, leg.end)}) were delivered again")
        if leg.times > 1:
            repeated += (leg.times - 1) * size(leg.first, leg.end)
            problems.append(f"{stretch} were delivered {leg.times} times")
        at = max(at, leg.end)
    if num_positions is None:
        problems.append(f"{drawn_by} has not ended after position {at}, as far as this run has seen")
    elif at < num_positions and size(at, num_positions):
        missed += size(at, num_positions)
        problems.append(f"positions [{at}, {num_positions}) {left_out}")
    if num_positions == 0:
        problems.append("no sample was delivered: the data has none, or tail='drop' dropped all of them")
    for what, wanted, found in _compared(legs, expected):
        if found[0] != wanted[0]:
            problems.append(f"{what} hold {wanted[0]} samples, but {found[0]} were delivered")
            missed, repeated = missed + max(0, wanted[0] - found[0]), repeated + max(0, found[0] - wanted[0])
        elif found != wanted:
            problems.append(f"in {what}, some samples were missed and as many repeated")
    served = size(0, at if num_positions is None else num_positions)
    return Certificate(
        epoch=epoch,
        num_samples=served if expected is not None else served - skipped,
        dropped=0 if num_samples is None else num_samples - served - skipped,
        skipped=skipped,
        delivered=sum(leg.num for leg in whole),
        missed=missed,
        repeated=repeated,
        problems=tuple(dict.fromkeys(problems)),
        drawn_by=drawn_by,
    )


def _not_drawn(legs: Iterable[Leg]) -> int:
    """Return how many positions that the user's sampler served hold samples that the user leaves out."""
    at = left_out = 0
    for leg in sorted(leg for leg in legs if leg.data_rank == DRAWN and leg.times > 0):
        if leg.first >= at:
            left_out, at = left_out + leg.end - leg.first - leg.num // leg.times, leg.end
    return left_out


def _compared(legs: Sequence[Leg], expected: Expected | None) -> Iterable[tuple[str, Total, Total]]:
    """Yield (positions, what belongs there, what was delivered)."""
    zero = (0, 0, 0)
    if expected is not None:
        for leg in legs:
            if leg.data_rank == ALL and leg.times > 0:
                belongs = plus(zero, expected(leg.first, leg.end), leg.times)
                yield f"positions [{leg.first}, {leg.end})", belongs, leg.total
    elif all(leg.data_rank in (ALL, DRAWN) for leg in legs):  # no pieces, so everything is known
        totals = {ALL: zero, DRAWN: zero}
        for leg in legs:
            totals[leg.data_rank] = plus(totals[leg.data_rank], leg.total)
        yield "the sampler's batches", totals[DRAWN], totals[ALL]


def expected_of_plan(plan: ShardPlan, epoch: int, skips: Skips) -> Expected:
    """Return the function that tells `certify` what belongs at the positions of a plan."""
    in_any_order = not plan.ordering.own_ids and not skips.concerns(epoch)

    @cache
    def expected(first: int, end: int) -> Total:
        if first == 0 and end == plan.num_positions and in_any_order:
            chunks: Iterable[npt.NDArray[np.int64]] = (
                np.arange(start, min(start + _CHUNK, plan.num_samples)) for start in range(0, plan.num_samples, _CHUNK)
            )
        else:
            chunks = (skips.kept(plan, epoch, start, min(start + _CHUNK, end)) for start in range(first, end, _CHUNK))
        total = (0, 0, 0)
        for chunk in chunks:
            total = plus(total, (len(chunk), *id_sums(chunk)))
        return total

    return expected


def proof(
    accounts: list[Account], epoch: int, plan: ShardPlan | None, skips: Skips, end: int | None, drawn_by: str
) -> Certificate:
    """Return what the accounts of all ranks prove of an epoch.

    Args:
        accounts: The accounts.
        epoch: The epoch.
        plan: Its order; None if a sampler of the user's own decides it.
        skips: What the user leaves out.
        end: The position at which the sampler has ended; None if no pass has seen it.
        drawn_by: The sampler's name.
    """
    if plan is None:
        return certify(accounts, epoch, end, None, drawn_by)
    expected, skipped = expected_of_plan(plan, epoch, skips), 0
    if skips.concerns(epoch):
        all_of_it = expected_of_plan(plan, epoch, Skips())
        skipped = all_of_it(0, plan.num_served)[0] - expected(0, plan.num_served)[0]
    found = certify(accounts, epoch, plan.num_served, expected, num_samples=plan.num_samples, skipped=skipped)
    if not isinstance(plan.ordering, Mixing):
        return found
    names = plan.ordering.names
    if skips.concerns(epoch):
        counts = np.zeros(len(names), np.int64)
        for start in range(0, plan.num_served, _CHUNK):
            kept = skips.kept(plan, epoch, start, min(start + _CHUNK, plan.num_served))
            counts += np.bincount(source_and_index(kept)[0], minlength=len(names))
    else:
        first = plan.ordering.first_position(epoch, plan.num_samples)
        counts = plan.ordering.counts(first + plan.num_served) - plan.ordering.counts(first)
    return replace(found, sources=dict(zip(names, counts.tolist(), strict=True)))
