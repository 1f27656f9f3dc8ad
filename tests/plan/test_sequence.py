"""Tokens of a row over the ranks of a sequence axis: as many each, and as much attention."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_shard.plan.sequence import balanced_order
from tests.trials import trials


def num_pairs(order, ends, parts):
    """Return the pairs of a query and a key of causal attention inside documents: int64[ranks, documents]."""
    document = np.searchsorted(ends, order, side="right")
    begins = np.concatenate([[0], ends[:-1]])
    pairs = order - begins[document] + 1
    found = np.zeros((parts, len(ends)), np.int64)
    np.add.at(
        found, (np.repeat(np.arange(parts), len(order) // parts), document), pairs
    )
    return found


@given(parts=st.integers(1, 9), chunk=st.integers(1, 6))
def test_balanced_order_of_a_row_costs_all_ranks_the_same(parts, chunk):
    length = 2 * parts * chunk
    order = balanced_order(np.array([length]), parts)

    assert sorted(order.tolist()) == list(range(length))
    assert len(set(num_pairs(order, np.array([length]), parts)[:, 0].tolist())) == 1
    for rank, own in enumerate(order.reshape(parts, -1)):
        first, second = rank * chunk, (2 * parts - 1 - rank) * chunk
        assert own.tolist() == [
            *range(first, first + chunk),
            *range(second, second + chunk),
        ]


@settings(max_examples=trials(200))
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=9), parts=st.integers(1, 8)
)
def test_balanced_order_of_documents_costs_ranks_the_same(sizes, parts):
    missing = -sum(sizes) % parts
    sizes = sizes + [missing] * (missing > 0)  # as padding
    ends = np.cumsum(sizes)
    order = balanced_order(ends, parts)
    own = order.reshape(parts, -1)

    assert sorted(order.tolist()) == list(range(sum(sizes)))
    assert (np.diff(own, axis=1) > 0).all(), "a rank's tokens ascend"
    pairs = num_pairs(order, ends, parts)
    for number, (size, end) in enumerate(zip(sizes, ends.tolist(), strict=True)):
        inside = [
            [token for token in tokens.tolist() if end - size <= token < end]
            for tokens in own
        ]
        counted = [
            sum(token - (end - size) + 1 for token in tokens) for tokens in inside
        ]
        assert pairs[:, number].tolist() == counted
        assert sum(counted) == size * (size + 1) // 2
        assert max(counted) - min(counted) < 2 * size, (
            "less than two pairs for each token of the document"
        )
        assert max(map(len, inside)) - min(map(len, inside)) <= 1


def test_balanced_order_balances_documents_not_only_rows():
    ends = np.array([1000, 1100, 4000, 4096])
    whole, each = (
        num_pairs(order, ends, 4).sum(axis=1)
        for order in (balanced_order(ends[-1:], 4), balanced_order(ends, 4))
    )

    assert each.max() / each.mean() < 1.001
    assert whole.max() / whole.mean() > 1.2
