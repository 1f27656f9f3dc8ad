"""What is missed or repeated by a plan is found."""

from hypothesis import given
from hypothesis import strategies as st

from paddle_shard import ShardPlan
from tests.orders_and_tails import ALL, SERVING_TAILS, UNNAMED


@given(
    length=st.integers(1, 200),
    ranks=st.integers(1, 5),
    multiple=st.integers(1, 3),
    accumulation=st.integers(1, 2),
    tail=st.sampled_from(SERVING_TAILS),
    shuffle=st.sampled_from([*ALL, *UNNAMED]),
)
def test_a_plan_delivers_each_sample_once_but_for_what_it_drops(length, ranks, multiple, accumulation, tail, shuffle):
    plan = ShardPlan(
        num_samples=length,
        batch_size=ranks * multiple * accumulation,
        num_data_ranks=ranks,
        accumulation=accumulation,
        tail=tail,
        shuffle=shuffle,
    )

    found = plan.coverage(epoch=1)

    assert found.counted
    assert found.repeated == 0
    assert found.delivered + found.missed == length
    assert plan.ending.drops or found.missed == 0


def test_a_long_data_set_is_covered_by_arithmetic():
    found = ShardPlan(num_samples=10**12 + 7, batch_size=1000, num_data_ranks=10, shuffle=True).coverage()

    assert not found.counted
    assert (found.delivered, found.missed, found.repeated, found.padding) == (10**12 + 7, 0, 0, 3)
