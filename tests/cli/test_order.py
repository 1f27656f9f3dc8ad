"""The page computes the same order as the library, in JavaScript."""

import random

import numpy as np
import pytest

from paddle_shard.cli.page import view_of
from paddle_shard.plan.blocks import Blocks
from paddle_shard.plan.mesh import MeshLayout
from paddle_shard.plan.mixture import Mixing, is_sample_id, source_and_index
from paddle_shard.plan.orders import ORDERINGS, PaddleSequential, find_ordering
from paddle_shard.plan.partition import slice_rows
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.skips import Skips
from paddle_shard.plan.weights import Segment
from tests.cli.node import evaluated, needs_node
from tests.orders_and_tails import SERVING_TAILS
from tests.trials import trials

pytestmark = [needs_node, pytest.mark.processes]

AROUND = [1, 2, 3, 255, 256, 257, 4095, 4096, 4097, 2**16 + 1, 2**32 - 1, 2**32 + 1, 10**9, 2**51 + 1, 2**52 - 7]
"""Lengths at which something changes: tables end, halves get longer, numbers of JavaScript end."""
MOST_ROWS = 200
"""Rows of a step that are looked at."""


def view(plan, **more):
    mesh = MeshLayout(shape=(plan.num_data_ranks,), axes=("dp",), process_ids=range(plan.num_data_ranks))
    return view_of(plan, mesh, "dp", **more)


def some_mixture(draw):
    """A mixture whose sources come, grow and change their weights."""
    num = draw.randint(1, 5)
    lengths = [draw.choice([draw.randint(1, 40), draw.randint(4000, 10**6)]) for _ in range(num)]
    found, first = [], 0
    for _ in range(draw.randint(1, 4)):
        weights = [draw.choice([0, draw.randint(1, 9), draw.randint(1, 2000)]) for _ in range(num)]
        weights[draw.randrange(num)] += 1
        away = [draw.random() < 0.3 for _ in range(num)]  # not there yet, or gone
        away[next(at for at, weight in enumerate(weights) if weight)] = False
        here = [0 if one else length for one, length in zip(away, lengths, strict=True)]
        weights = [0 if one else weight for one, weight in zip(away, weights, strict=True)]
        found.append(Segment(first, tuple(weights), tuple(here)))
        first += draw.randint(1, 90)
        lengths = [length + draw.choice([0, 0, 1, 7]) for length in lengths]
    names = ("web", 'it\'s "q"', "größe", "a\\b\n", "\N{GRINNING FACE}\x7f")
    return Mixing(names[:num], tuple(found), draw.random() < 0.7, draw.choice([(), ((0, 30), (2, 50))]))


ORDERS = {
    "sequential": lambda draw: False,
    "shuffled": lambda draw: True,
    "blocks": lambda draw: Blocks(size=draw.choice([1, 3, 16, 1024]), window=draw.choice([1, 2, 8, 50])),
    "paddle": lambda draw: "paddle",
    "paddle unshuffled": lambda draw: PaddleSequential(),
    "mixture": some_mixture,
}


def test_every_order_of_the_library_is_among_those_of_these_tests():
    made = {find_ordering(make(random.Random(0))).name for make in ORDERS.values()}

    assert made >= {ordering.name for ordering in ORDERINGS.values()} | {Mixing.name}


def some_plan(draw, order):
    num_samples = draw.choice([draw.randint(1, 60), draw.randint(60, 6000), draw.choice(AROUND)])
    if order in ("paddle", "mixture"):
        num_samples = min(num_samples, 70_000)
    ranks, accumulation = draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 1, 2, 3])
    unit = ranks * accumulation
    batch_size, segments = draw.randint(1, 8) * unit, ()
    if order != "paddle" and draw.random() < 0.4:  # it was resumed with other batch sizes
        before = [draw.randint(1, 8) * unit for _ in range(draw.randint(1, 3))]
        firsts = [0]
        for size in before:
            firsts.append(firsts[-1] + size * draw.randint(0, 5))
        if firsts[-1] <= num_samples:
            segments = tuple(zip(firsts, [*before, batch_size], strict=True))
    return ShardPlan(
        num_samples=num_samples,
        batch_size=batch_size,
        num_data_ranks=ranks,
        shuffle=ORDERS[order](draw),
        seed=draw.choice([0, 7, -3, 2**70]),
        tail=draw.choice(SERVING_TAILS),
        accumulation=accumulation,
        segments=segments,
        ended=bool(segments) and draw.random() < 0.2,
    )


def shown(sample):
    """A sample as the page shows it."""
    return list(map(int, source_and_index(sample))) if is_sample_id(sample) else sample


def of_python(plan, epoch, step):
    """What each data rank reads at a step, and [row, position, sample, real] of the first rows."""
    first, num_rows = plan.first_position(step=step), plan.num_rows(step=step)
    rows = np.arange(min(num_rows, MOST_ROWS))
    samples = plan.take(epoch=epoch, step=step, rows=rows).tolist()
    real = plan.valid(epoch=epoch, step=step, rows=rows).tolist()
    for data_rank in range(plan.num_data_ranks):  # what each reads
        mine = plan.indices(epoch=epoch, step=step, data_rank=data_rank).tolist()
        yield data_rank, list(map(shown, mine))
    yield None, [[row, first + row, shown(samples[row]), real[row]] for row in rows.tolist()]


def of_page(rows):
    """The same from what the page computes."""
    by_rank = {}
    for one in rows:
        by_rank.setdefault(one["dataRank"], {})[one["local"]] = one["sample"]
    for data_rank in sorted(by_rank):
        mine = by_rank[data_rank]
        yield data_rank, [mine[local] for local in range(len(mine))]
    yield None, [[one["row"], one["position"], one["sample"], one["state"] == "real"] for one in rows][:MOST_ROWS]


ROWS = "Array.from({length: plan.extent(%d, %d).rows}, (_, row) => plan.rowAt(%d, %d, row))"


@pytest.mark.parametrize("order", ORDERS)
def test_each_row_of_a_step_holds_the_sample_that_python_says_on_the_data_rank_that_it_says(order):
    draw, asked, expected = random.Random(order), [], []
    for _ in range(trials(120)):
        plan = some_plan(draw, order)
        epoch = draw.choice([0, 1, 2, 17])
        if not plan.num_steps:
            continue
        steps = {0, plan.num_steps - 1, draw.randrange(plan.num_steps), draw.randrange(min(12, plan.num_steps))}
        for step in sorted(steps):
            asked.append((view(plan), ROWS % (epoch, step, epoch, step)))
            expected.append((plan, epoch, step))

    found = evaluated(asked)

    for rows, (plan, epoch, step) in zip(found, expected, strict=True):
        assert list(of_page(rows)) == list(of_python(plan, epoch, step)), (plan, epoch, step)


@pytest.mark.parametrize("length", AROUND)
def test_a_shuffled_epoch_of_any_length_is_python_s(length):
    plan = ShardPlan(num_samples=length, batch_size=1, num_data_ranks=1, shuffle=True, seed=5)
    at = sorted({0, length - 1, length // 2, *(length * k // 50 for k in range(50))})

    found = evaluated([(view(plan), f"{at}.map((step) => plan.rowAt(3, step, 0).sample)")])[0]

    assert found == plan.order(epoch=3)(np.array(at)).tolist()


@pytest.mark.parametrize("weights", [(1,), (5, 0, 3), (2**19, 1, 7), tuple(range(1, 1000)), (2**20 - 2, 1, 1)])
def test_the_sources_of_a_mixture_are_drawn_in_python_s_sequence_however_long_its_period(weights):
    num, period = len(weights), sum(weights)
    mixing = Mixing(tuple(map(str, range(num))), (Segment(0, weights, (10**6,) * num),))
    plan = ShardPlan(num_samples=10**7, batch_size=1, num_data_ranks=1, shuffle=mixing)
    at = sorted({*range(40), *(k * period // 20 + 1 for k in range(60)), 3 * period - 1, 3 * period})

    counts, drawn = evaluated([(view(plan), f"[{at}.map(plan.draws.counts), {at}.map(plan.draws.at)]")])[0]

    assert counts == [mixing.draws.counts(position).tolist() for position in at]
    sources, draws = mixing.draws.at(np.array(at))
    assert drawn == [list(pair) for pair in zip(sources.tolist(), draws.tolist(), strict=True)]


def test_what_is_left_out_and_what_is_padding_are_told_apart():
    draw, asked, expected = random.Random(1), [], []
    for _ in range(trials(100)):
        plan = some_plan(draw, draw.choice(list(ORDERS)))
        if not plan.num_steps:
            continue
        epoch, step = draw.choice([0, 1]), draw.choice([0, plan.num_steps - 1])
        first, num_rows = plan.first_position(step=step), plan.num_rows(step=step)
        samples = plan.take(epoch=epoch, step=step, rows=np.arange(num_rows)).tolist()
        skips = Skips().joined(
            [(epoch, first + draw.randint(0, 3), first + draw.randint(3, 6)), (epoch + 1, first, first + 9)],
            [(draw.choice(samples), draw.choice([0, epoch]), draw.choice([0, first + 2])) for _ in range(2)],
        )
        skips = Skips(
            skips.stretches,
            tuple((s & ~(511 << 52) if is_sample_id(s) else s, *since) for s, *since in skips.samples),
        )
        asked.append((view(plan, skips=skips), ROWS % (epoch, step, epoch, step)))
        valid = plan.valid(epoch=epoch, step=step, rows=np.arange(num_rows))
        out = skips.rows(epoch, first, np.array(samples))
        expected.append(["padding" if not v else "left out" if o else "real" for v, o in zip(valid, out, strict=True)])

    assert [[row["state"] for row in rows] for rows in evaluated(asked)] == expected
    assert {state for states in expected for state in states} == {"padding", "left out", "real"}


def test_the_step_of_a_position_is_python_s():
    draw, asked, expected = random.Random(2), [], []
    for _ in range(trials(100)):
        plan = some_plan(draw, "shuffled")
        if not plan.num_steps:
            continue
        positions = [draw.randrange(min(plan.num_positions, plan.num_served or 1)) for _ in range(5)]
        asked.append((view(plan), f"{positions}.map((position) => plan.stepOf(0, position))"))
        expected.append([min(plan.num_steps - 1, plan.step_of(position=position)) for position in positions])

    assert evaluated(asked) == expected


def test_a_mesh_with_fewer_data_ranks_than_another_reads_the_same_batches_in_larger_slices():
    plan = ShardPlan(num_samples=50, batch_size=24, num_data_ranks=6, shuffle=True, accumulation=2)
    asked = []
    for ranks in (1, 2, 3, 6):
        mesh = MeshLayout(shape=(ranks,), axes=("dp",), process_ids=tuple(range(ranks)))
        asked += [(view_of(plan, mesh, "dp"), ROWS % (0, step, 0, step)) for step in range(3)]

    for (shows, _), rows, step in zip(asked, evaluated(asked), [0, 1, 2] * 4, strict=True):
        num_rows, micro_size = plan.num_rows(step=step), plan.micro_size(step=step)
        for rank in range(shows["dataRanks"]):
            mine = slice_rows(num_rows, shows["dataRanks"], rank, micro_size)
            assert [row["row"] for row in rows if row["dataRank"] == rank] == mine.tolist()
        assert [row["sample"] for row in rows] == plan.take(epoch=0, step=step, rows=range(num_rows)).tolist()


def test_rows_that_these_data_ranks_cannot_share_evenly_are_on_none_of_them():
    plan = ShardPlan(num_samples=48, batch_size=8, num_data_ranks=4, segments=((0, 6), (24, 8)))
    asked = [(view(plan), ROWS % (0, step, 0, step)) for step in range(plan.num_steps)]

    for step, rows in enumerate(evaluated(asked)):
        for row in rows:
            place = plan.where(epoch=0, sample=row["sample"])
            assert (place.step, place.data_rank, place.row) == (step, row["dataRank"], row["local"])


def test_epochs_with_a_length_or_batches_of_their_own_are_shown_so():
    mixing = Mixing(("a", "b"), (Segment(0, (2, 1), (9, 9)),), lengths=((0, 30), (2, 50)))
    plans = [ShardPlan(num_samples=n, batch_size=b, num_data_ranks=2, shuffle=mixing) for n, b in ((30, 4), (50, 6))]
    shows = view(plans[0], plans={2: plans[1]})

    found = evaluated([(shows, ROWS % (epoch, 7, epoch, 7)) for epoch in (0, 1, 2)])

    for epoch, rows in enumerate(found):
        assert list(of_page(rows)) == list(of_python(plans[epoch == 2], epoch, 7))


def test_an_epoch_is_a_bijection_on_the_page_too():
    plan = ShardPlan(num_samples=5003, batch_size=1, num_data_ranks=1, shuffle=True)
    found = evaluated([(view(plan), "Array.from({length: 5003}, (_, step) => plan.rowAt(0, step, 0).sample)")])[0]

    assert sorted(found) == list(range(5003))
