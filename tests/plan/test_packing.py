"""Packed rows: each token once, no row too long, nearly as few rows as best fit decreasing needs."""

import time
from bisect import bisect_left, insort

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.packing import Packing, fitted
from tests.trials import trials


def rows_of_best_fit(lengths, length):
    """How many rows the textbook's best fit decreasing needs."""
    spaces, rows = [], 0
    for size in sorted(lengths.tolist(), reverse=True):
        at = bisect_left(spaces, size)
        if at == len(spaces):
            rows, left = rows + 1, length - size
        else:
            left = spaces.pop(at) - size
        if left:
            insort(spaces, left)
    return rows


def log_normal(drawn, num, length):
    return np.clip(
        np.exp(drawn.normal(np.log(400), 1, num)).astype(np.int64), 1, length
    )


KINDS = {
    "log-normal": log_normal,
    "uniform": lambda drawn, num, length: drawn.integers(1, length + 1, num),
    "just over half": lambda drawn, num, length: np.full(num, length // 2 + 1),
    "a third": lambda drawn, num, length: np.full(num, length // 3),
    "tiny": lambda drawn, num, length: drawn.integers(1, 11, num),
    "short": lambda drawn, num, length: drawn.integers(1, length // 3, num),
    "two kinds": lambda drawn, num, length: np.where(
        drawn.random(num) < 0.5,
        drawn.integers(3000, 3500, num),
        drawn.integers(100, 700, num),
    ),
    "heavy tail": lambda drawn, num, length: np.minimum(
        drawn.zipf(1.5, num), length
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", [1, 40, 4096])
def test_fitted_needs_nearly_as_few_rows_as_best_fit(kind, num):
    for seed in range(2):
        lengths = KINDS[kind](np.random.default_rng(seed), num, 4096)
        rows, num_rows = fitted(lengths, 4096)

        assert len(np.unique(rows)) == num_rows == rows.max() + 1
        assert np.bincount(rows, weights=lengths).max() <= 4096
        assert num_rows <= 1.02 * rows_of_best_fit(lengths, 4096) + 1


def test_packing_pads_log_normal_lengths_by_at_most_0_3_percent():
    lengths = log_normal(np.random.default_rng(7), 20 * 4096, 4096)

    assert Packing(lengths, 4096).padding <= 0.003


@settings(max_examples=trials(200))
@given(
    lengths=st.lists(
        st.one_of(st.integers(0, 12), st.integers(0, 100)),
        min_size=1,
        max_size=120,
    ).filter(any),
    length=st.integers(1, 20),
    window=st.sampled_from([1, 3, 16, 4096]),
)
@example(lengths=[0, 0, 5], length=5, window=1)
@example(lengths=[41], length=20, window=2)
def test_packing_puts_every_token_in_one_row_once(lengths, length, window):
    packing = Packing(np.array(lengths), length, window)
    seen = [[0] * n for n in lengths]
    for row in range(packing.num_rows):
        pieces = packing.pieces(row)
        assert 1 <= sum(piece.end - piece.first for piece in pieces) <= length
        assert len(pieces) <= packing.most_pieces
        assert pieces == sorted(
            pieces, key=lambda piece: (piece.document, piece.first)
        )
        for piece in pieces:
            assert piece.first % length == 0, (
                "a long document is cut at whole rows"
            )
            for token in range(piece.first, piece.end):
                seen[piece.document][token] += 1

    assert all(count == 1 for document in seen for count in document)
    assert (
        max(len(packing.pieces(row)) for row in range(packing.num_rows))
        == packing.most_pieces
    )
    assert packing.padding == pytest.approx(
        1 - sum(lengths) / (packing.num_rows * length)
    )


def test_packing_is_a_function_of_the_lengths_alone():
    lengths = log_normal(np.random.default_rng(0), 9000, 4096)
    one, other = (
        Packing(lengths, 4096),
        Packing(lengths.astype(np.int32).copy(), 4096),
    )

    assert [one.pieces(row) for row in range(one.num_rows)] == [
        other.pieces(row) for row in range(other.num_rows)
    ]


def test_packing_window_has_consecutive_documents():
    lengths = log_normal(np.random.default_rng(0), 5000, 4096)
    packing = Packing(lengths, 4096, window=100)

    for row in range(packing.num_rows):
        assert (
            len({piece.document // 100 for piece in packing.pieces(row)}) == 1
        )


def test_packing_time_grows_with_the_documents():
    lengths = log_normal(np.random.default_rng(0), 160_000, 4096)

    def seconds(num):
        return min(
            _timed(lambda: Packing(lengths[:num], 4096)) for _ in range(3)
        )

    assert any(seconds(160_000) < 3 * 16 * seconds(10_000) for _ in range(5))


def _timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@pytest.mark.parametrize(
    ("lengths", "options", "says"),
    [
        ([1.5], {}, "lengths must be an array of ints >= 0"),
        ([[1]], {}, "lengths must be an array of ints >= 0"),
        ([-1], {}, "lengths must be an array of ints >= 0"),
        ([0, 0], {}, "no token"),
        ([1], {"length": 0}, "length must be an int in"),
        ([1], {"length": True}, "length must be an int in"),
        ([1], {"window": 0}, "window must be an int in"),
        ([1], {"window": 65537}, "window must be an int in"),
        (
            [2**40, 1],
            {},
            r"the longest document has 1099511627776 tokens, .* 274877906945 pieces of up to 4, more than",
        ),
    ],
)
def test_packing_rejects_bad_arguments(lengths, options, says):
    with pytest.raises(ArgumentError, match=says):
        Packing(np.array(lengths), **{"length": 4, **options})
