"""`paddle-shard simulate`: do the laws hold for a whole epoch of a plan, and how good are its order and its shares?

The epoch is delivered in legs: each but the last one ends with a restart, at a random step, on a random mesh. What is
counted are the ids that the orders of loaders give: of all positions, of all ranks at some steps, and of all steps on
some ranks. What does not fit into the time is sampled, and the answer says so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise, zip_longest
from multiprocessing import get_all_start_methods, get_context
from typing import Any

import numpy as np

from paddle_shard.cli.answer import Answer, Progress, Rows, command, with_hazards
from paddle_shard.cli.plan import PLANNED, Planned, hazards_in, planned
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.balance import Costs, unevenness
from paddle_shard.plan.blocks import Blocks
from paddle_shard.plan.certificate import Total, plus, total_of
from paddle_shard.plan.hazards import Hazard
from paddle_shard.plan.mesh import MeshLayout, replica_groups
from paddle_shard.plan.mixture import Mixing, MixtureOrder, drift_bound, drift_of
from paddle_shard.plan.order import Indices, spread
from paddle_shard.plan.partition import place_of_rows, slice_rows
from paddle_shard.plan.places import Meshes, shapes_of
from paddle_shard.plan.shard_plan import ShardPlan, end_of, step_of_plan, steps_of_plan
from paddle_shard.plan.state import History, LoaderState
from paddle_shard.plan.step import Step
from paddle_shard.samplers import PlanBatches
from paddle_shard.sources.packed import read_lengths

_ONCE = "each sample exactly once, as the tail says"
_EQUAL = "equal steps and equal rows on all ranks"
_ALIKE = "replicas get the same rows"

# Positions whose ids are computed at once: they stay in the cache.
_CHUNK = 1 << 13
# Positions that a process counts before it takes others.
_JOB = 1 << 20
# Fewer jobs are done sooner than processes are begun.
_FEW_JOBS = 16
_MOST_JOBS = 1 << 14
# Steps at which all ranks are looked at, and chunks of the order whose quality is.
_MOST_LOOKS = 1024
# Ranks of a mesh that read: so many, or more as long as they have no more steps together.
_MOST_RANKS, _MOST_OF_RANKS = 8, 20_000
# Samples of an order that is a table, so that it stays below 1 GB.
_MOST_IN_TABLE = 50_000_000
# Ranks of a mesh that are searched, to ask some of them for their data rank.
_MOST_SEARCHED = 1 << 24
_UNEVEN = 1.1
_FEW_BLOCKS = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class _Leg:
    """What a run delivers of the epoch from one start to the next."""

    plan: ShardPlan
    meshes: Meshes
    start: LoaderState
    end: int
    """Step before which it ends."""

    def positions(self) -> tuple[int, int]:
        """Return the first position and the one after the last, with what the tail drops."""
        last = self.end == self.plan.num_steps
        return self.start.samples, self.plan.num_positions if last else self.plan.first_position(step=self.end)

    def steps_of(self, mesh: MeshLayout, axes: Sequence[str], rank: int, steps: Sequence[int]) -> Iterator[Step]:
        """Yield what a global rank reads at some steps, one after the other."""
        of = mesh.num_data_ranks(axes), mesh.data_rank(rank, axes)
        rows_of = lambda num_rows, micro_size: slice_rows(num_rows, *of, micro_size)  # noqa: E731
        return steps_of_plan(self.plan, self.start.epoch, steps, rows_of, self.start.history.skips)


@dataclass
class _Found:
    """What was counted."""

    broken: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Law -> how it is broken."""
    counted: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """(law, what was counted for it) -> how many of how many."""
    blocks: list[int] = field(default_factory=list)
    """Blocks on disk of which each of some batches is."""
    costs: list[tuple[float, float, float, float]] = field(default_factory=list)
    """(imbalance, the same with `balance=`, tokens, tokens with padding to the longest row) of some batches."""
    hazards: list[Hazard] = field(default_factory=list)
    """What is wrong with the order and the shares."""

    def expect(self, law: str, holds: Any, what: str) -> None:
        """Note that a law is broken, unless it holds."""
        if not holds and what not in self.broken[law]:
            self.broken[law].append(what)

    def add(self, law: str, what: str, number: int, of: int) -> None:
        """Note what was counted for a law, of how many."""
        sofar = self.counted[law, what]
        sofar[:] = sofar[0] + number, sofar[1] + of

    def law(self, law: str) -> dict[str, str]:
        """Return what is said of a law."""
        of_law = [(what, *numbers) for (one, what), numbers in self.counted.items() if one == law]
        counted = [f"{f'SAMPLED {done} of' if done != of else 'all'} {of} {what}" for what, done, of in of_law]
        holds = "NO" if self.broken.get(law) else "yes" if any(done for _, done, _ in of_law) else "not counted"
        return {"law": law, "holds": holds, "counted": "; ".join(counted)}


# The run


def _legs(asked: Planned, plan: ShardPlan, restarts: int, draw: random.Random) -> list[_Leg]:
    history, known = History(skips=asked.view["skips"]), plan.fingerprint()
    rows = plan.batch_size // plan.accumulation
    # The loader would refuse to resume an order that depends on the number of data ranks on another number.
    plans = [replace(plan, num_data_ranks=ranks) for ranks in range(1, rows + 1) if rows % ranks == 0]
    plans = [one for one in plans if one.fingerprint() == known]
    found, now, start, meshes = list[_Leg](), plan, LoaderState(epoch=asked.epoch, history=history), asked.meshes
    for stop in sorted(draw.sample(range(1, plan.num_steps), max(0, min(restarts, plan.num_steps - 1)))):
        found.append(_Leg(plan=now, meshes=meshes, start=start, end=stop))
        at, segments = now.first_position(step=stop), ((0, plan.batch_size),)
        state = replace(start, samples=at, steps=stop, segments=segments, fingerprint=known)
        other, replicas = draw.choice(plans), draw.choice([1, 2, 3])
        ranks, batches = other.num_data_ranks, PlanBatches(other)
        start = LoaderState.from_dict(json.loads(json.dumps(state.to_dict())), batches.fingerprint())
        batches.resume(start)
        now = batches.plan_of(start)
        axes = dict(draw.sample([("dp", ranks), ("mp", replicas)], 2))
        ids = draw.sample(range(ranks * replicas), ranks * replicas)
        meshes = [(MeshLayout(shape=tuple(axes.values()), axes=tuple(axes), process_ids=tuple(ids)), ["dp"])]
    return [*found, _Leg(plan=now, meshes=meshes, start=start, end=now.num_steps)]


# Who reads what


def _look_at_meshes(leg: _Leg, found: _Found) -> None:
    """Check that the ranks of each mesh are cut into equal groups, each of one data rank."""
    for mesh, axes in leg.meshes:
        groups, ids, count = replica_groups(mesh, axes), mesh.process_ids, mesh.num_data_ranks(axes)
        fine = sorted(chain(*groups)) == sorted(ids) and {*map(len, groups)} == {len(ids) // count}
        found.expect(_EQUAL, fine, f"the ranks of mesh {mesh.shape} are not cut into {count} equal groups")
        whose = {rank: data_rank for data_rank, ranks in enumerate(groups) for rank in ranks}
        asked = spread(ids, max(_MOST_RANKS, _MOST_SEARCHED // len(whose)))
        wrong = [rank for rank in asked if mesh.data_rank(rank, axes) != whose[rank]]
        found.expect(_ALIKE, not wrong, f"ranks {wrong[:8]} of mesh {mesh.shape} read the rows of other data ranks")
        found.add(_ALIKE, "ranks and the data ranks that they take", len(asked), len(whose))


def _look_at_step(leg: _Leg, step: int, found: _Found, most_ranks: int, costs: Costs | None) -> None:
    """Check the rows of all ranks at a step, and what some of the ranks read."""
    plan, epoch, skips = leg.plan, leg.start.epoch, leg.start.history.skips
    num_rows, micro_size, first = plan.num_rows(step=step), plan.micro_size(step=step), plan.first_position(step=step)
    end, rows = min(first + num_rows, plan.num_positions), np.arange(num_rows)
    found.expect(_ONCE, end == end_of(plan, step), f"step {step} does not end where the next one begins")
    if (batch := step_of_plan(plan, epoch, step, skips)) is None:  # all of it is left out
        return
    real, ids = np.ones(num_rows, bool) if batch.real is None else batch.real, np.asarray(batch.ids)
    fine = skips.concerns(epoch) or np.array_equal(ids[real], plan.samples(epoch=epoch, first=first, end=end))
    found.expect(_ONCE, fine, f"step {step} has other samples than its positions")
    for mesh, axes in leg.meshes:
        ranks = mesh.num_data_ranks(axes)
        data_rank, local = place_of_rows(rows, num_rows, ranks, micro_size)
        fine = np.array_equal(np.sort(data_rank * (num_rows // ranks) + local), rows)
        found.expect(_EQUAL, fine, f"the ranks of {mesh.shape} do not share step {step} evenly")
        for rank in spread(mesh.process_ids, most_ranks):
            (read,), mine = leg.steps_of(mesh, axes, rank, [step]), rows[data_rank == mesh.data_rank(rank, axes)]
            kept = np.ones(len(mine), bool) if read.real is None else read.real
            fine = np.array_equal(kept, real[mine]) and np.array_equal(np.asarray(read.ids)[kept], ids[mine[kept]])
            found.expect(_EQUAL, fine, f"rank {rank} of {mesh.shape} reads other rows at step {step} than its own")
    if isinstance(plan.ordering, Blocks):
        found.blocks.append(len(np.unique(ids[real] // plan.ordering.size)))
    if costs is not None:
        of_rows = costs[ids]
        uneven = unevenness(of_rows, micro_size, plan.num_data_ranks)
        found.costs.append((*uneven, of_rows.sum(), len(of_rows) * max(1.0, of_rows.max())))


def _in_lockstep(leg: _Leg, found: _Found, most_ranks: int, deadline: float) -> None:
    """Check that some ranks make the same steps, from the first one to the last."""
    for mesh, axes in leg.meshes:
        ranks, number, steps = spread(mesh.process_ids, most_ranks), leg.start.steps, range(leg.start.steps, leg.end)
        for of_ranks in zip_longest(*(leg.steps_of(mesh, axes, rank, steps) for rank in ranks)):
            if time.monotonic() > deadline:
                break
            same = {one and (one.number, one.num_rows, len(one.ids)) for one in of_ranks}
            number = max(one.number for one in of_ranks if one is not None)
            found.expect(_EQUAL, len(same) == 1, f"the ranks of {mesh.shape} differ in step {number} or in its rows")
        else:
            number = leg.end
        done, of = (number - steps.start) * len(ranks), len(steps) * len(mesh.process_ids)
        found.add(_EQUAL, "steps of ranks, one after the other", done, of)


# All samples


def _counted(ids_of: Callable[..., Indices], first: int, end: int, deadline: float) -> tuple[int, Total]:
    """Count ids, a chunk at a time as far as time allows; return how many places were counted, and their total."""
    num, total = 0, Total()
    for at in range(first, end, _CHUNK):
        if time.monotonic() > deadline:
            break
        stop = min(at + _CHUNK, end)
        num, total = num + stop - at, plus(total, total_of(ids_of(first=at, end=stop)))
    return num, total


def _cover(legs: Sequence[_Leg], found: _Found, deadline: float, draw: random.Random) -> None:
    """Count all samples of the epoch, each leg by its own order, or as many of them as there is time for."""
    plan, epoch, jobs = legs[0].plan, legs[0].start.epoch, list[tuple[str, Any, int, int]]()
    order, what = plan.order(epoch=epoch), "positions of the epoch"
    spans = [(what, partial(leg.plan.samples, epoch=epoch), *leg.positions()) for leg in legs]
    if isinstance(order, MixtureOrder):
        drawn = [order.mixing.draws.counts(order.first + at).tolist() for at in (0, plan.num_positions)]
        for source, span in enumerate(zip(*drawn, strict=True)):
            spans.append(("draws that belong there", partial(order.of_source, source), *span))
    else:
        in_order = partial(replace(plan, shuffle=False).samples, epoch=epoch)
        spans.append(("samples that belong there", in_order, 0, plan.num_samples))
    for what, ids_of, first, end in spans:
        starts = range(first, end, _JOB)
        # Spread over the epoch, also where time is over.
        jobs += [(what, ids_of, at, min(at + _JOB, end)) for at in draw.sample(starts, min(len(starts), _MOST_JOBS))]
        found.add(_ONCE, what, 0, end - first)
    draw.shuffle(jobs)
    totals = dict.fromkeys((what for what, *_ in spans), Total())
    progress = Progress("ids counted", sum(end - at for _, _, at, end in jobs))
    number = min(len(jobs), os.cpu_count() or 1)
    # Of many jobs, threads would wait for each other.
    forks = len(jobs) >= _FEW_JOBS and "fork" in get_all_start_methods()
    with ProcessPoolExecutor(number, get_context("fork")) if forks else ThreadPoolExecutor(number) as pool:
        tasks = {pool.submit(_counted, ids_of, at, end, deadline): what for what, ids_of, at, end in jobs}
        for task in as_completed(tasks):
            (num, total), what = task.result(), tasks[task]
            progress.add(num)
            found.add(_ONCE, what, num, 0)
            totals[what] = plus(totals[what], total)
    if all(number == of for (law, _), (number, of) in found.counted.items() if law == _ONCE):  # there was time for all
        found.expect(_ONCE, len(set(totals.values())) == 1, "samples are missing, or there more than once")


# The answer


def _quality(plan: ShardPlan, epoch: int, found: _Found, draw: random.Random, deadline: float) -> dict[str, float]:
    """Return measures of the order, of some of its chunks, and of the shares."""
    order, looked, pairs, kept, moved, drift = plan.order(epoch=epoch), 0, 0, 0, 0.0, 0.0
    starts = range(0, plan.num_positions, _CHUNK)
    for first in draw.sample(starts, min(len(starts), _MOST_LOOKS)):
        if time.monotonic() > deadline:
            break
        end = min(first + _CHUNK, plan.num_positions)
        ids = plan.samples(epoch=epoch, first=first, end=end)
        looked, pairs, kept = looked + len(ids), pairs + len(ids) - 1, kept + int(np.count_nonzero(np.diff(ids) == 1))
        if isinstance(order, MixtureOrder):
            drift = max(drift, drift_of(order, first, ids[: max(1, _JOB // len(order.mixing.names))]))
        else:
            moved += np.abs(ids - np.linspace(first, end, len(ids), endpoint=False)).sum() / plan.num_samples
            # The inverse of Paddle's order would need another table.
            fine = plan.ordering.pads_first or np.array_equal(order.inverse(ids), np.arange(first, end))
            found.expect(_ONCE, fine, "the order and its inverse do not fit together")
    measures = {"neighbours that stay neighbours, of all": kept / max(1, pairs)}
    if isinstance(plan.ordering, Mixing):
        end = plan.ordering.first_position(epoch, plan.num_samples) + plan.num_samples
        bound = drift_bound(plan.ordering, end)
        measures |= {"drift of a source, in samples": drift, "bound of the drift": bound}
        if drift > bound + 1e-6:
            found.hazards.append((f"a source drifts by {drift:.3f} samples", "Report it: less is proved"))
    else:
        measures["how far a sample moves, of all (mixed: 0.333)"] = moved / max(1, looked)
    if isinstance(plan.ordering, Blocks):
        few, blocks = float(np.mean(found.blocks)), -(-plan.num_samples // plan.ordering.size)
        measures |= {"blocks of which a batch is": few, "blocks of the data": blocks}
        if few < min(_FEW_BLOCKS, blocks, plan.batch_size):
            what = f"a batch is of {few:.1f} blocks on average: samples that lie together are trained together"
            found.hazards.append((what, "Blocks(window=) of more blocks, or a smaller size=, mixes more"))
    if found.costs:
        now, best, tokens, padded = np.mean(found.costs, axis=0).tolist()
        measures |= {"longest data rank, by the mean": now, "the same at the worst step": max(found.costs)[0]}
        measures |= {"the same with balance=": best, "padding to the longest row, of all": 1 - tokens / padded}
        of = "step" if plan.accumulation == 1 else "micro-batch"
        if now > _UNEVEN and now - best > (now - 1) / 2:
            what = f"the data rank with most has {now:.2f} times the mean of its {of}, and the others wait for it"
            found.hazards.append((what, f"balance= deals rows so that it has {best:.2f} times the mean"))
    return {name: round(value, 4) for name, value in measures.items()}


@command(
    *PLANNED,
    ("--restarts", {"type": int, "default": 0, "help": "restarts at random steps, on random meshes (by --seed)"}),
    ("--lengths", {"metavar": "FILE", "help": "the length of each sample: what `paddle-shard lengths` writes"}),
    ("--seconds", {"type": float, "default": 50.0, "help": "what does not fit into this time is sampled"}),
)
def simulate(options: argparse.Namespace) -> Answer:
    """Do the laws hold for the whole epoch, how good is the shuffle, how even are the ranks? Exits with 1 if not.

    example: paddle-shard simulate --samples 1000000000 --batch-size 100000 --mesh dp=50000,mp=2 --shuffle --restarts 5
    """
    began, asked = time.monotonic(), planned(options)
    if asked.plan is None:
        if asked.hazards:
            return with_hazards({}, [], asked.hazards)
        why = " ".join(one for one in asked.said if isinstance(one, str))
        raise ArgumentError(f"{why} There is no order to simulate: give --samples or --source.")
    plan = replace(asked.plan, segments=(), ended=False)  # of a record: from its beginning, as the newest job does it
    if options.restarts < 0 or options.seconds <= 0:
        raise ArgumentError(f"--restarts {options.restarts} --seconds {options.seconds}: neither may be negative.")
    if plan.ordering.pads_first and plan.num_samples > _MOST_IN_TABLE:
        what = f"Paddle's order is a table, of {plan.num_samples} samples here"
        raise ArgumentError(f"{what}; at most {_MOST_IN_TABLE} are simulated. --shuffle True needs no table.")
    costs = None if options.lengths is None else read_lengths(options.lengths)[0].astype(float)[:, None]
    if costs is not None and (len(costs) != plan.num_samples or plan.ordering.own_ids):
        raise ArgumentError(f"--lengths {options.lengths} has {len(costs)} lengths, not one for each sample.")
    if not plan.num_steps:
        return with_hazards({}, [], hazards_in(asked, options.ranks_per_host))
    draw, found = random.Random(options.seed or 0), _Found()
    most_ranks = max(_MOST_RANKS, _MOST_OF_RANKS // plan.num_steps)
    legs = _legs(asked, plan, options.restarts, draw)
    for leg in legs:
        _look_at_meshes(leg, found)
    for number, (before, leg) in enumerate(pairwise(legs), 1):
        fine = (leg.start.steps, leg.start.samples) == (before.end, before.positions()[1])
        found.expect(_ONCE, fine, f"leg {number} does not begin where the one before it has ended")
    seams, looked = [(leg, step) for leg in legs for step in (leg.start.steps, leg.end - 1)], 0
    some = draw.sample(range(plan.num_steps), min(plan.num_steps, _MOST_LOOKS))
    others = [(leg, step) for step in some for leg in legs if leg.start.steps < step < leg.end - 1]
    for leg, step in (*dict.fromkeys(seams), *others):
        if looked >= len(seams) and time.monotonic() > began + 0.1 * options.seconds:
            break
        _look_at_step(leg, step, found, most_ranks, costs)
        looked += 1
    found.add(_EQUAL, "steps, of all ranks", looked, plan.num_steps)
    for number, leg in enumerate(legs, 1):
        _in_lockstep(leg, found, most_ranks, began + options.seconds * (0.1 + 0.1 * number / len(legs)))
    _cover(legs, found, began + 0.95 * options.seconds, draw)
    quality = _quality(plan, asked.epoch, found, draw, began + options.seconds)
    seconds = time.monotonic() - began
    broken = [(what, "This is a fault of the library: report it") for one in found.broken.values() for what in one]
    laws = [found.law(law) for law in (_ONCE, _EQUAL, _ALIKE)]
    spans = [(leg.start.steps, leg.end, shapes_of(leg.meshes)) for leg in legs]
    starts = [{"from_step": first, "steps": end - first, "mesh": mesh} for first, end, mesh in spans]
    head = f"{plan.num_samples} samples in {plan.num_steps} steps of {plan.batch_size}, simulated in {seconds:.1f} s"
    said: list[str | Rows] = [head, "", laws, starts, [{"what": name, "number": one} for name, one in quality.items()]]
    told = {"laws": laws, "starts": starts, "quality": quality, "seconds": seconds}
    if len(legs) <= options.restarts:
        few = f"an epoch of {plan.num_steps} steps has no more"
        said.append(f"{len(legs) - 1} restarts instead of {options.restarts}: {few}")
    return with_hazards(told, said, [*broken, *found.hazards, *hazards_in(asked, options.ranks_per_host)])
