import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_shard.plan import weights as module
from paddle_shard.plan.weights import WeightedInterleave
from tests.trials import trials

PARTS = st.lists(
    st.one_of(st.integers(0, 3), st.integers(1, 60), st.integers(1, 5000)),
    min_size=1,
    max_size=40,
).filter(any)


def prefixes(parts, length):
    """How often each source is drawn in every prefix: [length + 1, number of sources]."""
    sources, draws = WeightedInterleave(tuple(parts)).sources_at(
        np.arange(length)
    )
    counts = np.zeros((length + 1, len(parts)), np.int64)
    counts[np.arange(1, length + 1), sources] = 1
    counts = np.cumsum(counts, axis=0)
    assert (counts[np.arange(length), sources] == draws).all()
    return counts


@settings(max_examples=trials(300))
@given(parts=PARTS)
@example(parts=[1, 1])
@example(parts=[1, 10**6 - 1])  # one rare source
@example(parts=[5])
@example(parts=[0, 3, 0])
@example(parts=[1] * 39 + [10_000])
def test_interleave_is_within_tijdemans_bound_at_every_prefix(parts):
    num, length = (
        sum(part > 0 for part in parts),
        min(2 * sum(parts) + 3, 20_000),
    )
    bound = 1 - Fraction(1, 2 * num - 2) if num > 1 else Fraction(0)

    off = np.abs(
        prefixes(parts, length) * sum(parts)
        - np.outer(np.arange(length + 1), parts)
    )

    assert Fraction(int(off.max()), sum(parts)) <= bound


@settings(max_examples=trials(100))
@given(parts=PARTS.filter(lambda parts: sum(parts) <= 10_000))
def test_interleave_is_periodic_and_exact_after_each_period(parts):
    sequence, period = WeightedInterleave(tuple(parts)), sum(parts)
    once, again = (
        sequence.sources_at(np.arange(period))[0],
        sequence.sources_at(np.arange(period, 2 * period))[0],
    )

    assert (once == again).all()
    assert np.bincount(once, minlength=len(parts)).tolist() == parts


@settings(max_examples=trials(100))
@given(
    parts=PARTS,
    start=st.integers(0, 10**12),
    chunk=st.integers(1, 3000),
    data=st.data(),
)
def test_interleave_knows_any_position_without_those_before(
    parts, start, chunk, data
):
    straight = WeightedInterleave(tuple(parts))
    positions = start + np.array(
        data.draw(st.lists(st.integers(0, 50_000), max_size=20)), np.int64
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        asked = WeightedInterleave(tuple(parts))
        found = [
            asked.sources_at(positions[at : at + 1])
            for at in range(len(positions))
        ]

    sources, draws = straight.sources_at(positions)
    assert [int(s[0]) for s, _ in found] == sources.tolist()
    assert [int(d[0]) for _, d in found] == draws.tolist()
    for source in set(sources.tolist()):
        places = straight.inverse(source, draws[sources == source])
        assert (places == positions[sources == source]).all()
    for position, source, draw in zip(
        positions.tolist(), sources.tolist(), draws.tolist(), strict=True
    ):
        assert straight.counts(position)[source] == draw
        assert straight.counts(position).sum() == position


def test_interleave_may_be_shared_by_threads():
    parts = (9000, 7001, 40_000, 3)
    expected = WeightedInterleave(parts).sources_at(np.arange(sum(parts)))[0]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(4):
            shared = WeightedInterleave(parts)
            with ThreadPoolExecutor(4) as pool:
                found = list(
                    pool.map(
                        lambda _, one=shared: one.sources_at(
                            np.arange(sum(parts))
                        )[0],
                        range(4),
                    )
                )
            assert [np.array_equal(one, expected) for one in found] == [
                True
            ] * 4
    finally:
        sys.setswitchinterval(before)
