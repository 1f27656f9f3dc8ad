"""Rows dealt by cost: equally many for each data rank, never worse than undealt, near the best there is."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_shard.plan.balance import assign_rows, loads
from tests.trials import trials

numbers = st.one_of(
    st.integers(0, 9).map(float),
    st.floats(0, 1e6),
    st.sampled_from([0.0, 1e-300, 1e300]),
)


def heaviest(costs, rows):
    """The largest share of the total that one data rank has; `rows` by data rank."""
    return max(costs[list(own)].sum() for own in rows) / (costs.sum() or 1)


def halves(number):
    """Every way to give each of two data ranks half of the rows."""
    for own in itertools.combinations(range(number), number // 2):
        yield own, tuple(set(range(number)) - set(own))


@given(
    ranks=st.integers(1, 6),
    each=st.integers(1, 6),
    data=st.data(),
    order=st.randoms(),
)
def test_assign_rows_assigns_each_once_and_never_worse(
    ranks, each, data, order
):
    rows = data.draw(
        st.lists(numbers, min_size=ranks * each, max_size=ranks * each)
    )
    costs = np.array(rows, float)
    dealt = assign_rows(costs, ranks)

    assert sorted(dealt.tolist()) == list(range(ranks * each))
    of_ranks = dealt.reshape(ranks, each)
    assert (np.diff(of_ranks, axis=1) > 0).all()
    undealt = heaviest(costs, np.arange(ranks * each).reshape(ranks, each))
    # costs are rounded to 2^-24 of the largest
    assert heaviest(costs, of_ranks) <= undealt + 1e-5
    assert assign_rows(costs * 0.5, ranks).tolist() == dealt.tolist(), (
        "costs have no unit"
    )


@settings(max_examples=trials(200))
@given(rows=st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_assign_rows_to_two_ranks_is_near_the_best(rows):
    costs = np.array(rows + rows[::-1][: len(rows)], float)
    costs[: len(rows)] += 1
    best = min(heaviest(costs, way) for way in halves(len(costs)))

    # Graham's bound for two
    assert (
        heaviest(costs, assign_rows(costs, 2).reshape(2, -1))
        <= 7 / 6 * best + 1e-5
    )


def test_assign_rows_balances_documents_over_8_ranks():
    random = np.random.default_rng(0)
    undealt, dealt = [], []
    for _ in range(50):
        lengths = np.minimum(4096, random.lognormal(np.log(400), 1, 8 * 16))
        for found, rows in (
            (undealt, np.arange(128)),
            (dealt, assign_rows(lengths, 8)),
        ):
            most, mean = loads(lengths[rows], 8)
            found.append(most / mean)

    assert np.mean(undealt) > 1.3
    assert max(dealt) < 1.03
