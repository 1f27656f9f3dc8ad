import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.weights import MAX_PERIOD, integer_weights
from tests.trials import trials


def parts(**weights):
    return integer_weights(tuple(weights), weights)


@pytest.mark.parametrize(
    "kind", [np.float16, np.float32, np.float64, np.longdouble]
)
def test_integer_weights_take_numpy_numbers_by_their_digits(kind):
    assert parts(web=kind("0.7"), code=kind("0.3")) == (7, 3)


def test_integer_weights_suggest_the_nearest_name():
    with pytest.raises(
        ArgumentError,
        match=r"unknown sources \['wbe'\]; the sources are \['web'",
    ):
        integer_weights(("web", "code"), {"wbe": 0.7, "code": 0.3})


def test_integer_weights_of_short_numbers_are_exact():
    assert parts(web=0.7, code=0.3) == (7, 3)
    assert parts(web=70, code=30) == (7, 3)
    assert parts(a=1 / 3, b=2 / 3) == (1, 2)
    assert parts(a=0.1, b=0.2, c=0.7) == (1, 2, 7)
    assert parts(a=Fraction(1, 7), b=np.float64(0.5), c=0) == (2, 7, 0)
    assert parts(a=1e-300, b=1e-300) == (1, 1)
    assert parts(a=5) == (1,)


@given(
    weights=st.lists(
        st.integers(0, MAX_PERIOD // 60), min_size=1, max_size=60
    ).filter(any)
)
def test_integer_weights_are_exact_within_the_longest_period(weights):
    names = tuple(map(str, range(len(weights))))
    divisor = math.gcd(*weights)

    for said in (
        weights,
        [weight / divisor for weight in weights],
        [Fraction(weight, 7) for weight in weights],
    ):
        found = integer_weights(names, dict(zip(names, said, strict=True)))
        assert found == tuple(weight // divisor for weight in weights)


@settings(max_examples=trials(300))
@given(weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=60).filter(any))
def test_integer_weights_are_rounded_by_less_than_a_part(weights):
    names = tuple(map(str, range(len(weights))))
    found = integer_weights(names, dict(zip(names, weights, strict=True)))

    exact = [
        Fraction(weight) / sum(map(Fraction, weights)) for weight in weights
    ]
    off = max(
        abs(Fraction(part, sum(found)) - share)
        for part, share in zip(found, exact, strict=True)
    )
    assert sum(found) <= MAX_PERIOD
    # they are drawn once in a period
    raised = sum(0 < share < Fraction(1, MAX_PERIOD) for share in exact)
    assert off < Fraction(1 + raised, MAX_PERIOD)
    assert all(
        (part > 0) == (weight > 0)
        for part, weight in zip(found, weights, strict=True)
    )


@pytest.mark.parametrize(
    ("weights", "error", "says"),
    [
        ([1, 2], ArgumentTypeError, "weights must be a dict"),
        ({"a": 1, "b": 1, "c": 1}, ArgumentError, "unknown sources ['c']"),
        ({"a": 0, "b": 0}, ArgumentError, "at least one"),
        ({"a": -1, "b": 1}, ArgumentError, "the weight of 'a'"),
        ({"a": float("nan"), "b": 1}, ArgumentError, "the weight of 'a'"),
        ({"a": float("inf"), "b": 1}, ArgumentError, "the weight of 'a'"),
        ({"a": "1", "b": 1}, ArgumentTypeError, "the weight of 'a'"),
        ({"a": True, "b": 1}, ArgumentTypeError, "the weight of 'a'"),
        (
            {"a": 10**5000, "b": 1},
            ArgumentError,
            "the weight of 'a' must be a finite number >= 0, got inf",
        ),
        (
            {"a": -(10**400), "b": 1},
            ArgumentError,
            "the weight of 'a' must be a finite number >= 0, got inf",
        ),
        ({"a": np.float32("nan"), "b": 1}, ArgumentError, "the weight of 'a'"),
        ({"a": np.array(0.5), "b": 1}, ArgumentTypeError, "the weight of 'a'"),
    ],
)
def test_integer_weights_reject_bad_weights(weights, error, says):
    with pytest.raises(error) as caught:
        integer_weights(("a", "b"), weights)
    assert says in str(caught.value)
