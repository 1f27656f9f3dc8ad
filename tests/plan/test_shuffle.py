"""The permutation is a bijection for every length, and as random as numpy's.

Quality: every statistic below is a chi-squared over many keys. A shuffle passes if none of its p-values is under
ALPHA; about 120 are computed, so a perfect one would fail in 1 of 80 versions of these (fixed) keys. numpy's
own permutation passes the same tests, and two shuffles that are known to be poor fail them.
"""

import sys
import threading
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_shard.plan import shuffle
from paddle_shard.plan.order import BLOCK
from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import Permutation
from tests.optional import Lazy
from tests.trials import trials

stats = Lazy("scipy.stats")

ALPHA = 1e-4
LENGTHS = [2, 3, 5, 16, 100, 4096, 4097, 10007, 65537]


def is_bijection(n, order):
    return len(order) == n and (np.bincount(order, minlength=n) == 1).all()


def keyed(n, seed, epoch):
    return Permutation(n, derive_key("order", seed, epoch, size=64))


# Bijection and inverse


def test_permutation_of_lengths_up_to_5000_is_a_bijection():
    for n in (*range(1, 700), *range(700, 5001, 7), *range(4090, 4103)):
        assert is_bijection(n, keyed(n, 0, n)(np.arange(n))), n


@pytest.mark.parametrize("e", range(13, 21))
def test_permutation_around_powers_of_two_is_a_bijection(e):
    for n in (2**e - 1, 2**e, 2**e + 1):
        assert is_bijection(n, keyed(n, 1, e)(np.arange(n))), n


@given(
    st.integers(1, 2**62),
    st.lists(st.integers(0, 2**62), min_size=1, max_size=20),
    st.integers(0, 9),
)
def test_permutation_of_any_length_has_an_inverse(n, positions, seed):
    order, x = keyed(n, seed, 0), np.array(positions) % n
    samples = order(x)

    assert ((samples >= 0) & (samples < n)).all()
    assert (order.inverse(samples) == x).all()
    assert (order(order.inverse(x)) == x).all()
    assert (positions == np.array(positions)).all(), (
        "what was given is not changed"
    )


@given(st.integers(1, 30000), st.integers(0, 29999), st.integers(0, 6000))
@settings(max_examples=trials(50))
def test_order_between_is_what_is_computed_directly(n, start, length):
    order, start = keyed(n, 0, 0), start % n
    stop = min(n, start + length)

    for _ in range(2):
        assert (
            order.between(start, stop).tolist()
            == order(np.arange(start, stop)).tolist()
        )


def test_order_may_be_shared_by_threads():
    order = Permutation(1 << 16, derive_key("shared", size=64))
    expected, wrong, interval = (
        order(np.arange(1 << 16)),
        [],
        sys.getswitchinterval(),
    )

    def read(seed):
        for block, within in (
            np.random.RandomState(seed)
            .randint(0, (3, 4000), (1500, 2))
            .tolist()
        ):
            start = block * BLOCK + within  # each block throws the last one out
            if not np.array_equal(
                order.between(start, start + 8), expected[start : start + 8]
            ):
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)

    assert wrong == []


def test_permutation_keeps_shapes_also_of_nothing():
    order = keyed(10**6, 0, 0)

    assert order(np.arange(6).reshape(2, 3)).shape == (2, 3)
    assert order(np.empty(0, np.int64)).shape == (0,)
    assert order.between(5, 5).shape == (0,)


def test_permutation_of_version_1_does_not_change():
    # A run that was saved is resumed in this order: a change here needs another VERSION.
    assert shuffle.VERSION == 1
    assert keyed(10, 0, 0)(np.arange(10)).tolist() == GOLDEN[10]
    assert keyed(10**6, 7, 3)(np.arange(6)).tolist() == GOLDEN[10**6]
    assert keyed(2**62, 7, 3)(np.arange(3)).tolist() == GOLDEN[2**62]


GOLDEN = {
    10: [2, 3, 4, 8, 1, 7, 9, 5, 0, 6],
    10**6: [70584, 798290, 295702, 640693, 192547, 192708],
    2**62: [726644234384199556, 441129344542675183, 904834913861989782],
}


# Quality


def ours(n, seed, epoch):
    return keyed(n, seed, epoch)(np.arange(n))


def numpys(n, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(n)


def affine(n, seed, epoch):
    """Poor: differences of neighbours are constant."""
    random = np.random.default_rng([seed, epoch])
    a = next(
        a for a in random.integers(1, max(n, 2), 1000) if np.gcd(a, n) == 1
    )
    return (a * np.arange(n) + random.integers(n)) % n


def p_value(counts, expected=None):
    counts = np.asarray(counts, float).ravel()
    expected = (
        np.full(len(counts), counts.sum() / len(counts))
        if expected is None
        else np.asarray(expected).ravel()
    )
    chosen = expected > 0
    return stats.chisquare(
        counts[chosen], expected[chosen] * counts.sum() / expected.sum()
    ).pvalue


def joint(n, pairs, bins):
    """Chi-squared of (x, y) pairs against independence, on a grid; edges fall between whole numbers."""
    edges = np.linspace(0, n, min(n, bins) + 1).round()
    xs, ys = (
        np.searchsorted(edges, np.concatenate(side), side="right") - 1
        for side in zip(*pairs, strict=True)
    )
    width = np.diff(edges)
    return p_value(
        np.bincount(len(width) * xs + ys, minlength=len(width) ** 2),
        np.outer(width, width),
    )


def p_values(shuffle_of, n):
    """Every statistic of a shuffle at one length."""
    keys = max(40, min(1000, 100_000 // n))
    shuffle_of = cache(shuffle_of)
    orders = [shuffle_of(n, 5, epoch) for epoch in range(keys)]
    x = np.arange(n)
    found = {
        "position of each sample": joint(
            n, [(x, order) for order in orders], 16
        )
    }
    if n > 2:
        steps = np.concatenate([np.diff(order) % n for order in orders])
        edges = np.linspace(1, n, min(n - 1, 64) + 1).round()
        found["successive differences"] = p_value(
            np.histogram(steps, edges)[0], np.diff(edges)
        )
    found["fixed points"] = few([(order == x).sum() for order in orders], n)
    others = {
        "epochs": [shuffle_of(n, 5, epoch + 1) for epoch in range(keys)],
        "seeds": [shuffle_of(n, 6, epoch) for epoch in range(keys)],
    }
    for name, other in others.items():
        found[f"neighbouring {name}"] = joint(
            n, zip(orders, other, strict=True), 16
        )
        same = [(a == b).sum() for a, b in zip(orders, other, strict=True)]
        found[f"meetings of neighbouring {name}"] = few(same, n)
    swapped = [
        (shuffle_of(n, k, 100 + k), shuffle_of(n, 100 + k, k))
        for k in range(keys)
    ]
    found["(seed, epoch) and (epoch, seed)"] = joint(n, swapped, 16)
    found["their meetings"] = few([(a == b).sum() for a, b in swapped], n)
    return found


def few(counts, n):
    """Chi-squared of how many points of a random permutation are fixed (rencontres numbers)."""
    top = min(n, 4)
    derangements = [1, 0]
    for k in range(2, n + 1 if n < 30 else 30):
        derangements.append((k - 1) * (derangements[-1] + derangements[-2]))
    if n < 30:
        import math

        exact = [
            math.comb(n, k) * derangements[n - k] / math.factorial(n)
            for k in range(n + 1)
        ]
    else:
        exact = list(stats.poisson.pmf(range(40), 1))
    expected = np.array([*exact[:top], sum(exact[top:])])
    seen = np.bincount(np.minimum(counts, top), minlength=top + 1)
    return p_value(seen, expected)


@pytest.mark.parametrize(
    ("shuffle_of", "n"),
    [*((ours, n) for n in LENGTHS), (numpys, 5), (numpys, 4097)],
)
def test_permutation_is_as_random_as_numpys(shuffle_of, n):
    found = p_values(shuffle_of, n)

    assert min(found.values()) > ALPHA, found


def test_permutation_tests_find_poor_shuffles(monkeypatch):
    assert min(p_values(affine, 4097).values()) < ALPHA
    monkeypatch.setattr(shuffle, "ROUNDS", 3)
    assert min(p_values(ours, 4097).values()) < ALPHA


def test_permutation_of_small_lengths_needs_the_table(monkeypatch):
    monkeypatch.setattr(shuffle, "TABLE_MAX", 0)
    assert min(p_values(ours, 16).values()) < ALPHA
