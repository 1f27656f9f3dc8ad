"""How often is each sample delivered: by a plan, and in a run that was stopped and gone on from?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.partition import slice_rows
from paddle_shard.plan.seeding import derive_seed

if TYPE_CHECKING:
    from paddle_shard.plan.shard_plan import ShardPlan

EXACT_MAX = 1 << 22
"""Up to so many samples a plan's deliveries are counted one by one."""

_CHUNK = 1 << 16
_TOGETHER = 64
"""Batches whose samples are added at once."""
_KEYS = tuple(np.uint64(derive_seed("certificate", number)) for number in range(2))
_MULTIPLY = np.uint64(0x9E3779B97F4A7C15)
_FINISH = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_MASK = (1 << 64) - 1

Sums = tuple[int, int]
Leg = tuple[Any, ...]
"""(epoch, first position, end position, data rank, data ranks, count, sum, sum) of what one data rank delivered;
data rank -1: of all of them together. Positions are those of the epoch's order."""


# By a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How often a plan delivers each sample in an epoch, padding rows aside."""

    num_samples: int
    delivered: int
    """Real rows over all steps and data ranks."""
    missed: int
    """Samples that no data rank delivers; what "drop" drops is among them."""
    repeated: int
    """Deliveries beyond the first of a sample."""
    padding: int
    """Rows of padding."""
    counted: bool
    """True: each delivery was counted. False, for long data sets: the slices of the first, the last and some
    steps between were checked to be disjoint and whole, and the order to be undone by its inverse there."""


def coverage(plan: ShardPlan, epoch: int) -> Coverage:
    """Return how often the data ranks of a plan, put together, deliver each sample."""
    if plan.num_positions <= EXACT_MAX:
        seen, padding = np.zeros(plan.num_samples, np.int64), 0
        for step in range(plan.num_steps):
            for indices, real in _deliveries(plan, epoch, step):
                np.add.at(seen, indices[real], 1)
                padding += int((~real).sum())
        delivered = int(seen.sum())
        missed, repeated = int((seen == 0).sum()), int(np.maximum(seen - 1, 0).sum())
        return Coverage(
            num_samples=plan.num_samples,
            delivered=delivered,
            missed=missed,
            repeated=repeated,
            padding=padding,
            counted=True,
        )
    steps = sorted({step for step in (0, 1, plan.num_steps // 2, plan.num_steps - 1) if 0 <= step < plan.num_steps})
    order, repeated = plan.order(epoch=epoch), 0
    for step in steps:
        parts = list(_deliveries(plan, epoch, step))
        real = np.concatenate([indices[valid] for indices, valid in parts])
        first, rows = plan.first_position(step=step), np.arange(plan.num_rows(step=step))
        wanted = plan.take(epoch=epoch, step=step, rows=rows)[plan.valid(epoch=epoch, step=step, rows=rows)]
        if sorted(real.tolist()) != sorted(wanted.tolist()):
            raise AssertionError(f"the slices of step {step} (positions from {first}) are not its global batch")
        positions = (first + rows) % plan.num_positions
        if (order.inverse(order(positions)) != positions).any():
            raise AssertionError(f"the order of epoch {epoch} is not undone by its inverse at step {step}")
        repeated += len(real) - len(np.unique(real))
    last = plan.num_steps - 1
    end = plan.first_position(step=last) + plan.num_rows(step=last) if plan.num_steps else 0
    delivered = min(end, plan.num_samples)
    padding = max(0, end - plan.num_positions) + plan.num_positions - plan.num_samples
    return Coverage(
        num_samples=plan.num_samples,
        delivered=delivered,
        missed=plan.num_samples - delivered,
        repeated=repeated,
        padding=padding,
        counted=False,
    )


def _deliveries(
    plan: ShardPlan, epoch: int, step: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
    num_rows, micro_size = plan.num_rows(step=step), plan.micro_size(step=step)
    for data_rank in range(plan.num_data_ranks):
        rows = slice_rows(num_rows, plan.num_data_ranks, data_rank, micro_size)
        yield plan.take(epoch=epoch, step=step, rows=rows), plan.valid(epoch=epoch, step=step, rows=rows)


# In a run


def id_sums(ids: npt.NDArray[np.int64]) -> Sums:
    """Return two sums mod 2^64 of keyed hashes of sample ids.

    Sums of ids, or their xor, accept that one sample is missed and others repeated so that it cancels; for
    these no such set can be found but by chance, 1 in 2^128.
    """
    words = ids.astype(np.uint64)
    return _one_sum(words, _KEYS[0]), _one_sum(words, _KEYS[1])


def _one_sum(words: npt.NDArray[np.uint64], key: np.uint64) -> int:
    h = (words ^ key) * _MULTIPLY
    for _ in range(2):
        h ^= h >> _SHIFT
        h *= _FINISH
    h ^= h >> _SHIFT
    return int(np.add.reduce(h, dtype=np.uint64))


class Tally(NamedTuple):
    """Counts what one data rank delivers, at about a microsecond a batch. A value: what is added makes another one."""

    num_ids: int = 0
    summed: Sums = (0, 0)
    """Of what is not waiting."""
    waiting: Any = None
    """(samples, those before them) that are not yet in the sums, or None."""
    num_waiting: int = 0
    """Batches of them."""

    def added(self, ids: Sequence[Any] | npt.NDArray[np.int64]) -> Tally:
        """Return the count with some more samples, by whatever the data set is indexed with."""
        found = Tally(self.num_ids + len(ids), self.summed, (ids, self.waiting), self.num_waiting + 1)
        return found if found.num_waiting < _TOGETHER else Tally(found.num_ids, found.sums)

    @property
    def sums(self) -> Sums:
        """The sums so far."""
        waiting, found = self.waiting, []
        while waiting is not None:
            found.append(as_ids(waiting[0]))
            waiting = waiting[1]
        return plus(self.summed, id_sums(np.concatenate(found))) if found else self.summed


def as_ids(indices: Sequence[Any] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return numbers for a data set's indices: ints as they are, others by their `repr`."""
    if isinstance(indices, np.ndarray):
        return indices
    if all(type(index) is int for index in indices):
        return np.array(indices, np.int64)
    numbers = [index if isinstance(index, int) else derive_seed("id", index) for index in indices]
    return np.array(numbers, dtype=object).astype(np.uint64).view(np.int64)


def plus(one: Sums, other: Sums) -> Sums:
    """Add sums mod 2^64."""
    return (one[0] + other[0]) & _MASK, (one[1] + other[1]) & _MASK


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What a run has delivered of an epoch, over all data ranks, stops and meshes."""

    epoch: int
    num_samples: int
    """Samples that the epoch delivers: all, but for what the tail drops."""
    delivered: int
    """Samples that were delivered, counted as often as they were."""
    missed: int
    """Samples that were not delivered, as far as the stretches tell."""
    repeated: int
    """Samples that were delivered again, as far as the stretches tell."""
    problems: tuple[str, ...]
    """Everything that speaks against "exactly once"; empty where it is proved."""

    @property
    def exact(self) -> bool:
        """Whether each sample of the epoch was delivered exactly once."""
        return not self.problems

    def __str__(self) -> str:
        if self.exact:
            return f"epoch {self.epoch}: each of {self.num_samples} samples exactly once"
        return f"epoch {self.epoch}: NOT each of {self.num_samples} samples exactly once: " + "; ".join(self.problems)


def merge_legs(legs: Iterable[Leg]) -> tuple[list[Leg], list[str]]:
    """Put the legs of all ranks together: one for each stretch of positions, and what is wrong with them.

    Replicas must have delivered the same; of each group one is counted. Stretches that follow each other
    become one. A stretch of which a data rank's leg is missing stays in pieces.
    """
    problems: list[str] = []
    by_part: dict[Leg, Leg] = {}
    for leg in sorted(set(map(tuple, legs))):
        part = tuple(leg[:5])
        if part in by_part and by_part[part] != leg[5:]:
            problems.append(f"replicas of data rank {leg[3]} delivered different samples in {list(leg[1:3])}")
        by_part[part] = leg[5:]
    stretches: dict[Leg, dict[int, Leg]] = defaultdict(dict)
    for (epoch, first, end, data_rank, count), tally in by_part.items():
        stretches[(epoch, first, end, count)][data_rank] = tally
    whole: list[Leg] = []
    pieces: list[Leg] = []
    for (epoch, first, end, num_ranks), tallies in sorted(stretches.items()):
        missing = sorted(set(range(num_ranks)) - set(tallies)) if -1 not in tallies else []
        if missing:
            problems.append(
                f"what data ranks {missing} of {num_ranks} delivered in [{first}, {end}) is not known: call "
                "certificate() on all ranks before state_dict(), or load every rank's own state"
            )
            pieces += [(epoch, first, end, rank, num_ranks, *tally) for rank, tally in tallies.items()]
            continue
        count, sums = 0, (0, 0)
        for tally in tallies.values():
            count, sums = count + tally[0], plus(sums, (tally[1], tally[2]))
        if whole and whole[-1][0] == epoch and whole[-1][2] == first:
            before = whole.pop()
            first, count, sums = before[1], count + before[5], plus(sums, (before[6], before[7]))
        whole.append((epoch, first, end, -1, 1, count, *sums))
    return whole + pieces, problems


def certify(
    legs: Iterable[Leg],
    epoch: int,
    num_positions: int,
    expected: Callable[[int, int], tuple[int, Sums]],
) -> tuple[Certificate, list[Leg]]:
    """Return what the legs of all ranks prove of an epoch, and the legs merged.

    Args:
        legs: Of all ranks; those of other epochs are left out.
        epoch: The epoch.
        num_positions: Positions of its order that are served.
        expected: Count and sums of the real samples at positions [first, end).
    """
    merged, problems = merge_legs(leg for leg in legs if leg[0] == epoch)
    whole = [leg for leg in merged if leg[3] == -1]
    at = missed = repeated = 0
    for _, first, end, *_ in whole:
        if first > at:
            missed += expected(at, first)[0]
            problems.append(f"positions [{at}, {first}) were not delivered")
        elif first < at:
            repeated += expected(first, min(at, end))[0]
            problems.append(f"positions [{first}, {min(at, end)}) were delivered again")
        at = max(at, end)
    if at < num_positions:
        missed += expected(at, num_positions)[0]
        problems.append(f"positions [{at}, {num_positions}) were not delivered")
    for _, first, end, _, _, count, *sums in whole:
        wanted, wanted_sums = expected(first, end)
        if count != wanted:
            problems.append(f"positions [{first}, {end}) hold {wanted} samples, but {count} were delivered")
            missed, repeated = missed + max(0, wanted - count), repeated + max(0, count - wanted)
        elif tuple(sums) != wanted_sums:
            problems.append(f"in positions [{first}, {end}) some samples were missed and as many repeated")
    certificate = Certificate(
        epoch=epoch,
        num_samples=expected(0, num_positions)[0],
        delivered=sum(leg[5] for leg in whole),
        missed=missed,
        repeated=repeated,
        problems=tuple(dict.fromkeys(problems)),
    )
    return certificate, merged


def expected_of_plan(plan: ShardPlan, epoch: int) -> Callable[[int, int], tuple[int, Sums]]:
    """Return the count and sums that `certify` compares with, for a plan."""
    from functools import cache

    @cache
    def expected(first: int, end: int) -> tuple[int, Sums]:
        if first == 0 and end == plan.num_positions:  # every sample: their order does not matter
            chunks: Iterable[npt.NDArray[np.int64]] = (
                np.arange(start, min(start + _CHUNK, plan.num_samples)) for start in range(0, plan.num_samples, _CHUNK)
            )
        else:
            chunks = (
                plan.samples(epoch=epoch, first=start, end=min(start + _CHUNK, end))
                for start in range(first, end, _CHUNK)
            )
        count, sums = 0, (0, 0)
        for chunk in chunks:
            count, sums = count + len(chunk), plus(sums, id_sums(chunk))
        return count, sums

    return expected
