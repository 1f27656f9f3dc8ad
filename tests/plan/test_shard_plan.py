import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paddle_shard import ShardPlan
from paddle_shard.errors import ArgumentError, BatchSizeError
from paddle_shard.extras.cli.plan import facts_of_plan
from paddle_shard.plan.shard_plan import global_batches
from tests.orders_and_tails import SERVING_TAILS

plans = st.builds(
    lambda samples, ranks, micro, multiple, tail, shuffle, seed: {
        "num_samples": samples,
        "batch_size": ranks * micro * multiple,
        "num_data_ranks": ranks,
        "accumulation": micro,
        "tail": tail,
        "shuffle": shuffle,
        "seed": seed,
    },
    st.integers(1, 400),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(SERVING_TAILS),
    st.booleans(),
    st.integers(0, 5),
)


def global_batch(plan, epoch, step):
    """The indices of a step in row order, put together from the data ranks' slices."""
    slices = [
        plan.indices(epoch=epoch, step=step, data_rank=r)
        for r in range(plan.num_data_ranks)
    ]
    parts = [np.array_split(s, plan.accumulation) for s in slices]
    return np.concatenate(
        [part[micro] for micro in range(plan.accumulation) for part in parts]
    )


@given(plans, st.integers(0, 3))
# Paddle repeats sample 0
@example(
    {"num_samples": 7, "batch_size": 4, "num_data_ranks": 2, "tail": "drop"}, 0
)
@example(
    {
        "num_samples": 1,
        "batch_size": 12,
        "num_data_ranks": 4,
        "accumulation": 3,
        "tail": "pad",
    },
    0,
)
def test_shard_plan_delivers_every_sample_once_by_tail(options, epoch):
    plan = ShardPlan(**options)
    batches = [
        global_batch(plan, epoch, step) for step in range(plan.num_steps)
    ]
    real = np.concatenate(
        [b[: len(b) - plan.padding(step=k)] for k, b in enumerate(batches)]
        or [np.empty(0, np.int64)]
    )

    dropped = plan.num_samples - len(real)
    assert dropped in (
        (0, plan.num_samples % plan.batch_size) if plan.ending.drops else (0,)
    )
    assert (
        dropped
        or plan.tail != "drop"
        or plan.num_samples % plan.batch_size == 0
    )
    assert len(set(real.tolist())) == len(real)
    assert all(
        len(batch) % (plan.num_data_ranks * plan.accumulation) == 0
        for batch in batches
    ), "each data rank has as many rows"
    if not plan.shuffle:
        assert real.tolist() == list(range(len(real)))


@given(plans, st.integers(0, 3))
def test_shard_plan_pads_with_the_first_samples(options, epoch):
    plan = ShardPlan(**options)
    batches = [
        global_batch(plan, epoch, step) for step in range(plan.num_steps)
    ]
    order = np.concatenate(batches)[: plan.num_samples] if batches else []

    for step, batch in enumerate(batches):
        padding = plan.padding(step=step)
        assert len(batch) == plan.num_rows(step=step)
        assert padding == 0 or step == plan.num_steps - 1
        assert (
            plan.tail == "fill"
            or padding < plan.num_data_ranks * plan.accumulation
        )
        if plan.tail == "fill":
            assert len(batch) == plan.batch_size
        for number, index in enumerate(batch[len(batch) - padding :]):
            assert index == order[number % plan.num_samples]


@given(plans, st.integers(1, 12))
def test_shard_plan_does_not_depend_on_who_reads_it(options, ranks):
    plan = ShardPlan(**{**options, "tail": "drop"})
    other = ShardPlan(
        **{
            **options,
            "tail": "drop",
            "num_data_ranks": ranks,
            "accumulation": 1,
            "batch_size": ranks * 3,
        }
    )
    total = min(
        plan.num_steps * plan.batch_size, other.num_steps * other.batch_size
    )

    def order(of):
        return np.concatenate(
            [global_batch(of, 2, k) for k in range(of.num_steps)]
            or [np.empty(0)]
        )[:total]

    assert order(plan).tolist() == order(other).tolist()


def test_shard_plan_has_int64_indices_of_any_step():
    plan = ShardPlan(
        num_samples=10**12, batch_size=1024, num_data_ranks=8, shuffle=True
    )

    last = plan.indices(epoch=3, step=plan.num_steps - 1, data_rank=7)

    assert last.dtype == np.int64
    assert last.shape == (plan.num_rows(step=plan.num_steps - 1) // 8,)
    assert ((last >= 0) & (last < 10**12)).all()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch_size": 5}, BatchSizeError, "5 cannot be split evenly over 2 data ranks. Nearest sizes that can: 4 or"),
        ({"batch_size": 4, "accumulation": 4}, BatchSizeError, "2 data ranks times 4 accumulation steps"),
        ({"num_samples": 0}, ArgumentError, "num_samples must be an int in [1, "),
        ({"num_samples": 2**62 + 1}, ArgumentError, "num_samples must be an int in [1, "),
        ({"num_data_ranks": 0}, ArgumentError, "num_data_ranks must be an int >= 1, got 0"),
        ({"batch_size": True}, ArgumentError, "batch_size must be an int >= 1, got True"),
        ({"tail": "wrap"}, ArgumentError, "got 'wrap'"),
        ({"shuffle": "yes"}, ArgumentError, "or a paddle_shard.Blocks, got 'yes'"),
        ({"tail": "error"}, ArgumentError, "10 samples do not fill the last batch of 4 (2 are left over). Nearest "
         "lengths that do: 8 or 12"),
    ],
)  # fmt: skip
def test_shard_plan_rejects_arguments_by_name(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        ShardPlan(
            **{
                "num_samples": 10,
                "batch_size": 4,
                "num_data_ranks": 2,
                **options,
            }
        )


def test_shard_plan_names_what_is_out_of_range():
    plan = ShardPlan(num_samples=10, batch_size=4, num_data_ranks=2)

    with pytest.raises(
        ArgumentError, match=re.escape("step must be in range(3), got 3")
    ):
        plan.indices(epoch=0, step=3, data_rank=0)
    with pytest.raises(
        ValueError, match="Pass the data rank, not the global rank"
    ):
        plan.indices(epoch=0, step=0, data_rank=2)


@pytest.mark.parametrize("tail", ["pad", "fill"])
@pytest.mark.parametrize("shuffle", [False, True, "paddle"])
def test_facts_of_plan_count_rows_that_are_not_valid(shuffle, tail):
    for num_samples, batch_size, ranks in (
        (8, 5, 1),
        (8, 6, 3),
        (7, 4, 2),
        (12, 4, 4),
        (1, 6, 2),
        (25, 6, 3),
    ):
        plan = ShardPlan(
            num_samples=num_samples,
            batch_size=batch_size,
            num_data_ranks=ranks,
            shuffle=shuffle,
            tail=tail,
        )
        for epoch in range(3):
            rows = [
                batch.valid(np.arange(batch.num_rows))
                for batch in global_batches(plan, epoch, range(plan.num_steps))
                if batch.valid is not None
            ]
            assert facts_of_plan(plan)["rows of padding in an epoch"] == sum(
                int((~valid).sum()) for valid in rows
            )
