"""Blocks on disk are read whole by one data rank, and the order is a bijection for every length, size and width."""

import re
import tracemalloc
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_shard import Blocks, ShardPlan
from paddle_shard.data.samplers.plan_batches import PlanBatches
from paddle_shard.errors import ArgumentError
from paddle_shard.plan.blocks import TABLE, BlockOrder
from paddle_shard.plan.shuffle import VERSION
from paddle_shard.plan.state import LoaderState
from tests.optional import Lazy
from tests.orders_and_tails import check_some_steps, delivered
from tests.trials import trials

stats = Lazy("scipy.stats")

blocks = st.builds(Blocks, size=st.integers(1, 50), window=st.integers(1, 9))


def num_parts(n, blocks, width):
    return BlockOrder(n, blocks, width, seed=0, epoch=0).num_parts


# Bijection and inverse


@settings(max_examples=trials(100))
@given(
    n=st.integers(1, 300),
    blocks=blocks,
    width=st.integers(1, 80),
    epoch=st.integers(0, 5),
    data=st.data(),
)
# less than a block
@example(n=7, blocks=Blocks(size=10, window=3), width=4, epoch=0, data=None)
# nothing to keep together
@example(n=40, blocks=Blocks(size=1, window=1), width=8, epoch=0, data=None)
# a block of one, no whole row
@example(n=41, blocks=Blocks(size=40, window=1), width=64, epoch=0, data=None)
@example(
    n=300,
    blocks=Blocks(size=10**18, window=10**18),
    width=1,
    epoch=0,
    data=None,
)
def test_block_order_is_a_bijection_with_its_inverse(
    n, blocks, width, epoch, data
):
    order, positions = BlockOrder(n, blocks, width, 0, epoch), np.arange(n)
    samples = order(positions)

    assert sorted(samples.tolist()) == positions.tolist()
    assert order.inverse(samples).tolist() == positions.tolist()
    assert order(order.inverse(positions)).tolist() == positions.tolist()
    if data is not None:
        start, stop = sorted(
            data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))
        )
        assert (
            order.between(start, stop).tolist() == samples[start:stop].tolist()
        )
        some = np.array(
            data.draw(st.lists(st.integers(0, n - 1), max_size=9)), np.int64
        )
        assert order(some).tolist() == samples[some].tolist()
        assert (
            order.inverse(some).tolist() == np.argsort(samples)[some].tolist()
        )


def test_block_order_is_a_bijection_for_lengths_up_to_300():
    for n in (*range(1, 80), *range(80, 301, 7)):
        order = BlockOrder(
            n, Blocks(size=1 + n % 13, window=1 + n % 4), 1 + n % 29, 0, n
        )
        assert (np.sort(order(np.arange(n))) == np.arange(n)).all(), n


def test_block_order_with_several_tables_is_a_bijection():
    n = 5 * TABLE + 17
    order = BlockOrder(n, Blocks(size=TABLE // 3, window=7), 12, 0, 0)
    samples = order.between(0, n)

    assert (np.sort(samples) == np.arange(n)).all()
    assert (order.inverse(samples) == np.arange(n)).all()


@settings(max_examples=trials(30))
@given(
    n=st.one_of(st.integers(2**40 - 3, 2**40 + 3), st.integers(1, 2**62)),
    blocks=st.builds(
        Blocks, size=st.integers(1, 10**13), window=st.integers(1, 100)
    ),
    width=st.integers(1, 5000),
    starts=st.lists(st.integers(0, 2**62), min_size=1, max_size=3),
)
@example(
    n=2**62, blocks=Blocks(size=1, window=1), width=64, starts=[0, 2**62 - 50]
)
@example(
    n=2**62,
    blocks=Blocks(size=2**62 - 1, window=2),
    width=64,
    starts=[0, 2**62 - 50],
)
@example(
    n=2**62,
    blocks=Blocks(size=2**63, window=2**63),
    width=2**61,
    starts=[0, 2**62 - 50],
)
def test_block_order_of_any_length_needs_no_set_up(n, blocks, width, starts):
    order = BlockOrder(n, blocks, width, 3, 1)
    for start in [*(start % n for start in starts), max(0, n - 50)]:
        positions = np.arange(start, min(n, start + 50))
        samples = order.between(start, min(n, start + 50))

        assert len(set(samples.tolist())) == len(samples)
        assert ((samples >= 0) & (samples < n)).all()
        assert (order.inverse(samples) == positions).all()


@pytest.mark.parametrize("window", [1, 8, 10**4, 3 * 10**6])
@pytest.mark.parametrize("size", [1, 1000])
def test_block_order_memory_is_bounded_for_any_window(window, size):
    """2 P tables of 8192 numbers, and less than 4 MB to draw one."""
    order = BlockOrder(10**12, Blocks(size=size, window=window), 2, 0, 0)
    tracemalloc.start()
    try:
        order.inverse(order.between(10**11, 10**11 + 8))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2 * order.num_parts * TABLE * 8 + (4 << 20)


def test_block_order_keeps_shapes_also_of_nothing():
    order = BlockOrder(100, Blocks(size=7), 4, 0, 0)

    assert (
        order(np.arange(6).reshape(2, 3)).shape
        == order.inverse(np.arange(6).reshape(2, 3)).shape
        == (2, 3)
    )
    assert (
        order.between(5, 5).shape
        == order.inverse(np.empty(0, np.int64)).shape
        == (0,)
    )


def test_block_order_of_version_1_does_not_change():
    # A run that was saved is resumed in this order: a change here needs another VERSION.
    assert VERSION == 1
    assert (
        BlockOrder(10, Blocks(size=3, window=2), 2, 0, 0)
        .between(0, 10)
        .tolist()
        == GOLDEN[10]
    )
    assert (
        BlockOrder(2**40, Blocks(), 6, 7, 3).between(2**39, 2**39 + 6).tolist()
        == GOLDEN[2**40]
    )


GOLDEN = {
    10: [0, 5, 1, 8, 2, 9, 3, 7, 4, 6],
    2**40: [
        143168282237,
        260991168713,
        524229452002,
        1048124641689,
        1036802119020,
        447866406453,
    ],
}


# Blocks


def opened(plan, blocks, epoch, steps):
    """[data rank] -> the blocks whose samples it reads in some steps."""
    return [
        {
            block
            for step in steps
            for block in (
                plan.indices(epoch=epoch, step=step, data_rank=rank)
                // blocks.size
            ).tolist()
        }
        for rank in range(plan.num_data_ranks)
    ]


@settings(max_examples=trials(60))
@given(
    n=st.integers(1, 2000),
    blocks=blocks,
    data_ranks=st.integers(1, 8),
    multiple=st.integers(1, 8),
    accumulation=st.integers(1, 3),
    epoch=st.integers(0, 3),
)
@example(
    n=2000,
    blocks=Blocks(size=25, window=2),
    data_ranks=8,
    multiple=1,
    accumulation=2,
    epoch=0,
)
def test_block_order_shares_blocks_at_borders_only(
    n, blocks, data_ranks, multiple, accumulation, epoch
):
    plan = ShardPlan(
        num_samples=n,
        batch_size=data_ranks * multiple * accumulation,
        num_data_ranks=data_ranks,
        shuffle=blocks,
        accumulation=accumulation,
    )
    divides = num_parts(n, blocks, data_ranks * multiple) % data_ranks == 0
    of_rank = opened(plan, blocks, epoch, range(n // plan.batch_size))

    openings = sum(map(len, of_rank))
    shared = {
        block
        for one in of_rank
        for block in one
        if sum(block in other for other in of_rank) > 1
    }
    assert len(shared) <= (data_ranks - 1 if divides else n)
    # A block that several share holds a border between each two of them, so no block costs more than its borders.
    assert (
        not divides or openings <= len(set().union(*of_rank)) + data_ranks - 1
    )


def test_block_order_opens_few_blocks_of_a_part_at_a_time():
    n, size, window = 64_000, 100, 4
    plan = ShardPlan(
        num_samples=n,
        batch_size=64,
        num_data_ranks=8,
        shuffle=Blocks(size=size, window=window),
    )
    parts = num_parts(n, plan.shuffle, 64)
    assert parts == 64
    # [step, row]: each row is a part's next sample
    rows = plan.order(epoch=0).between(0, n // 64 * 64).reshape(-1, 64) // size

    for part in (0, 31, 63):
        steps_of = {
            block: np.flatnonzero(rows[:, part] == block)
            for block in set(rows[:, part].tolist())
        }
        assert (
            max(steps[-1] - steps[0] for steps in steps_of.values())
            < window * size
        )
        open_at = [
            sum(steps[0] <= step <= steps[-1] for steps in steps_of.values())
            for step in range(0, 1000, 10)
        ]
        assert max(open_at) <= window


def test_full_shuffle_opens_every_block_on_every_data_rank():
    n, blocks = 16_000, Blocks(size=100, window=4)
    of = {
        name: opened(
            ShardPlan(
                num_samples=n, batch_size=64, num_data_ranks=8, shuffle=shuffle
            ),
            blocks,
            0,
            range(250),
        )
        for name, shuffle in (("full", True), ("blocks", blocks))
    }

    assert sum(map(len, of["full"])) == 8 * 160
    assert sum(map(len, of["blocks"])) <= 160 + 7


@given(
    n=st.integers(1, 5000),
    blocks=blocks,
    width=st.integers(1, 300).flatmap(
        lambda w: st.sampled_from([w, 2 * w, 64])
    ),
)
def test_num_parts_is_the_most_that_divide_a_micro_batch(n, blocks, width):
    parts, most = num_parts(n, blocks, width), min(64, -(-n // blocks.size))

    assert width % parts == 0
    assert parts <= most
    assert all(width % more for more in range(parts + 1, min(most, width) + 1))


# Quality


@cache
def orders(n, blocks, width, keys):
    return np.array(
        [
            BlockOrder(n, blocks, width, 5, epoch).between(0, n)
            for epoch in range(keys)
        ]
    )


@pytest.mark.parametrize("position", [0, 17, 38, 63])
def test_block_order_places_samples_uniformly(position):
    # 4 parts of two windows each, all whole: a border that cuts a block always cuts it at the same place.
    found = orders(64, Blocks(size=4, window=2), 4, 400)[:, position]

    assert stats.chisquare(np.bincount(found, minlength=64)).pvalue > 1e-4


def test_block_order_is_as_random_as_numpy_within_a_window():
    m = 32
    steps = np.diff(orders(m, Blocks(size=m), 1, 1000), axis=1).ravel() % m

    assert stats.chisquare(np.bincount(steps, minlength=m)[1:]).pvalue > 1e-4


def test_block_order_mixes_many_blocks_in_a_batch():
    order = BlockOrder(100_000, Blocks(size=100, window=8), 64, 0, 0)
    batch = order.between(64 * 500, 64 * 501) // 100

    assert len(set(batch.tolist())) > 50


def test_block_order_differs_by_epoch_and_seed():
    of = [
        BlockOrder(1000, Blocks(size=10), 8, seed, epoch).between(0, 1000)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]

    for one in range(4):
        for other in range(one):
            assert (of[one] == of[other]).mean() < 0.02


# In a plan


@settings(max_examples=trials(40))
@given(
    n=st.integers(1, 250),
    blocks=blocks,
    stretches=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6)),
        min_size=2,
        max_size=4,
    ),
    accumulation=st.integers(1, 3),
)
def test_block_plan_keeps_its_order_with_another_batch_size(
    n, blocks, stretches, accumulation
):
    """Each stretch: (data ranks, multiple of the batch, steps before the next stop)."""
    delivered, state = [], LoaderState()
    for number, (data_ranks, multiple, steps) in enumerate(stretches):
        size = data_ranks * multiple * accumulation
        plan = PlanBatches(
            ShardPlan(
                num_samples=n,
                batch_size=size,
                num_data_ranks=data_ranks,
                shuffle=blocks,
                accumulation=accumulation,
            )
        ).plan_of(state)
        upto = (
            plan.num_steps
            if number == len(stretches) - 1
            else min(plan.num_steps, state.steps + steps)
        )
        for step in range(state.steps, upto):
            first = plan.first_position(step=step)
            order = plan.samples(
                epoch=1,
                first=first,
                end=min(n, first + plan.num_rows(step=step)),
            ).tolist()
            delivered += order
            for rank in range(data_ranks):
                for row, sample in enumerate(
                    plan.indices(epoch=1, step=step, data_rank=rank).tolist()
                ):
                    where = plan.where(epoch=1, sample=sample)
                    found = (
                        where.step == step,
                        where.data_rank == rank,
                        where.row == row,
                    )
                    assert all(found) or (
                        step == plan.num_steps - 1 and plan.padding(step=step)
                    )
        samples = len(delivered)
        state = LoaderState(
            epoch=1, samples=samples, steps=upto, segments=state.continued(size)
        )
        if samples == n:
            break

    assert sorted(delivered) == list(range(n))
    straight = ShardPlan(
        num_samples=n,
        batch_size=stretches[0][0] * stretches[0][1] * accumulation,
        num_data_ranks=1,
        shuffle=blocks,
        accumulation=accumulation,
    )
    assert delivered == straight.samples(epoch=1, first=0, end=n).tolist()


@given(
    n=st.integers(1, 300),
    blocks=blocks,
    data_ranks=st.integers(1, 5),
    multiple=st.integers(1, 4),
)
@settings(max_examples=trials(50))
def test_block_plan_covers_every_sample_once(n, blocks, data_ranks, multiple):
    plan = ShardPlan(
        num_samples=n,
        batch_size=data_ranks * multiple,
        num_data_ranks=data_ranks,
        shuffle=blocks,
        tail="fill",
    )

    assert sorted(delivered(plan, epoch=2)) == list(range(n))


def test_block_plan_of_any_length_is_disjoint_by_samples():
    check_some_steps(
        ShardPlan(
            num_samples=2**40 + 1,
            batch_size=96,
            num_data_ranks=8,
            shuffle="blocks",
        )
    )


def test_block_plan_does_not_depend_on_who_reads_it():
    of = [
        ShardPlan(
            num_samples=5000,
            batch_size=24,
            num_data_ranks=ranks,
            shuffle=Blocks(size=50),
        ).samples(epoch=0, first=0, end=5000)
        for ranks in (1, 2, 12)
    ]

    assert of[0].tolist() == of[1].tolist() == of[2].tolist()


def test_blocks_by_name_are_the_default_blocks():
    named = ShardPlan(
        num_samples=10, batch_size=2, num_data_ranks=1, shuffle="blocks"
    )

    assert named == ShardPlan(
        num_samples=10, batch_size=2, num_data_ranks=1, shuffle=Blocks()
    )
    assert named.fingerprint() == {
        "num_samples": 10,
        "tail": "pad",
        "shuffle": "blocks",
        "block_size": 1024,
        "window": 8,
        "seed": 0,
        "accumulation": 1,
    }


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"size": 0},
            "Blocks: size must be an int >= 1 (samples in a block on disk, or the data set's block_size), got 0",
        ),
        (
            {"size": True},
            "Blocks: size must be an int >= 1 (samples in a block on disk, or the data set's block_size), got True",
        ),
        (
            {"window": 2.0},
            "Blocks: window must be an int >= 1 (blocks that are mixed), got 2.0",
        ),
    ],
)
def test_blocks_reject_what_is_out_of_range(options, text):
    with pytest.raises(ArgumentError, match=re.escape(text)):
        Blocks(**options)


def test_blocks_are_a_value():
    assert Blocks(size=np.int64(4)) == Blocks(size=4)
    assert hash(Blocks(size=np.int64(4))) == hash(Blocks(size=4))
    assert repr(Blocks(size=np.int64(4))) == "Blocks(size=4, window=8)"
