"""A plan delivers each sample once."""

from hypothesis import given
from hypothesis import strategies as st

from paddle_shard import ShardPlan
from tests.orders_and_tails import (
    ALL,
    SERVING_TAILS,
    UNNAMED,
    check_some_steps,
    delivered,
)


@given(
    length=st.integers(1, 200),
    ranks=st.integers(1, 5),
    multiple=st.integers(1, 3),
    accumulation=st.integers(1, 2),
    tail=st.sampled_from(SERVING_TAILS),
    shuffle=st.sampled_from([*ALL, *UNNAMED]),
)
def test_shard_plan_delivers_each_sample_it_does_not_drop_once(
    length, ranks, multiple, accumulation, tail, shuffle
):
    plan = ShardPlan(
        num_samples=length,
        batch_size=ranks * multiple * accumulation,
        num_data_ranks=ranks,
        accumulation=accumulation,
        tail=tail,
        shuffle=shuffle,
    )

    found = delivered(plan, epoch=1)

    assert len(set(found)) == len(found)
    assert set(found) <= set(range(length))
    assert plan.ending.drops or len(found) == length


def test_shard_plan_of_any_length_has_disjoint_steps():
    plan = ShardPlan(
        num_samples=10**12 + 7, batch_size=1000, num_data_ranks=10, shuffle=True
    )

    check_some_steps(plan)
    assert plan.padding(step=plan.num_steps - 1) == 3
