"""Laws of the mixture's order. The oracle draws one sample after the other from plain lists."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_shard.errors import ArgumentError
from paddle_shard.plan.mixture import Mixing, drawn_of, source_and_index
from paddle_shard.plan.shard_plan import ShardPlan
from paddle_shard.plan.weights import Segment, num_positions_to_read
from tests.orders_and_tails import delivered
from tests.trials import trials

NAMES = ("web", "code", "wiki", "books", "chat")


@st.composite
def segments(draw, most=4):
    """Segments of up to 5 sources that are drawn at times."""
    num = draw(st.integers(1, len(NAMES)))
    lengths = draw(st.lists(st.integers(1, 30), min_size=num, max_size=num))
    found, first = [], 0
    for _ in range(draw(st.integers(1, most))):
        parts = draw(
            st.lists(st.integers(0, 9), min_size=num, max_size=num).filter(any)
        )
        found.append(Segment(first, tuple(parts), tuple(lengths)))
        first += draw(st.integers(1, 60))
    return tuple(found)


def mixing(found, *, shuffled=True):
    return Mixing(NAMES[: len(found[0].parts)], found, shuffled)


def run(found, seed, num, *, shuffled=True, length=None):
    """The first `num` samples of the run as (source, index), from the order of epochs of `length` samples."""
    length = length or num
    order = mixing(found, shuffled=shuffled)
    ids = [
        order.order(length, seed, epoch, 1).between(
            0, min(length, num - epoch * length)
        )
        for epoch in range(-(-num // length))
    ]
    return [source_and_index(sample) for sample in np.concatenate(ids).tolist()]


@settings(max_examples=trials(150))
@given(
    found=segments(),
    seed=st.integers(0, 3),
    num=st.integers(1, 400),
    shuffled=st.booleans(),
)
def test_each_source_is_read_epoch_by_epoch_whatever_happens_to_the_weights(
    found, seed, num, shuffled
):
    drawn = run(found, seed, num, shuffled=shuffled)

    for source in range(len(found[0].parts)):
        at = [
            position
            for position, (from_source, _) in enumerate(drawn)
            if from_source == source
        ]
        indices = [drawn[position][1] for position in at]
        while indices:
            length = found[0].lengths[source]
            epoch, indices, at = indices[:length], indices[length:], at[length:]
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= set(range(length))
            if not shuffled:
                assert epoch == list(range(len(epoch)))


@settings(max_examples=trials(150))
@given(found=segments(), num=st.integers(1, 400))
def test_over_switches_the_bounds_of_the_segments_add_up(found, num):
    drawn = [source for source, _ in run(found, 0, num)]
    share, off = [Fraction(0)] * len(found[0].parts), Fraction(0)
    counts: Counter = Counter()
    bound = Fraction(0)
    for position in range(num):
        begun = [s for s in found if s.first <= position]
        now = begun[-1]
        bound = sum(
            1 - Fraction(1, 2 * n - 2) if n > 1 else 0
            for n in (sum(p > 0 for p in s.parts) for s in begun)
        )
        share = [
            sofar + Fraction(part, sum(now.parts))
            for sofar, part in zip(share, now.parts, strict=True)
        ]
        counts[drawn[position]] += 1
        off = max(abs(sofar - counts[source]) for source, sofar in enumerate(share))
        assert off <= bound


@settings(max_examples=trials(100))
@given(
    found=segments(),
    seed=st.integers(0, 2),
    num=st.integers(1, 300),
    length=st.integers(1, 300),
)
def test_the_run_is_one_sequence_however_long_its_epochs_are(found, seed, num, length):
    assert run(found, seed, num, length=length) == run(found, seed, num)


@settings(max_examples=trials(40))
@given(
    found=segments(),
    seed=st.integers(0, 2),
    epoch=st.integers(0, 3),
    length=st.integers(1, 120),
    data=st.data(),
)
def test_the_inverse_undoes_the_order_and_finds_every_occurrence(
    found, seed, epoch, length, data
):
    order = mixing(found).order(length, seed, epoch, 1)
    positions = np.arange(length)
    ids = order(positions)

    assert len(set(ids.tolist())) == length  # a repeated sample has another id
    assert (order.inverse(ids) == positions).all()
    source = data.draw(st.integers(0, len(found[0].parts) - 1))
    index = data.draw(st.integers(0, found[0].lengths[source] - 1))
    delivered = [
        at
        for at, sample in enumerate(ids.tolist())
        if source_and_index(sample) == (source, index)
    ]
    assert order.occurrences(source, index) == delivered


@settings(max_examples=trials(100))
@given(found=segments(), at=st.integers(0, 300))
def test_what_was_drawn_is_counted(found, at):
    drawn = Counter(source for source, _ in run(found, 0, at)) if at else Counter()
    report = drawn_of(mixing(found), at)

    assert {name: d.drawn for name, d in report.items()} == {
        name: drawn[number] for number, name in enumerate(mixing(found).names)
    }
    if at:
        assert sum(d.share for d in report.values()) == pytest.approx(1)


@settings(max_examples=trials(150))
@given(found=segments(most=3), every=st.booleans())
@example(found=(Segment(0, (7, 3), (70, 30)),), every=False)
def test_by_the_epochs_length_the_first_or_every_source_was_read(found, every):
    steady = found
    num = num_positions_to_read(steady, every=every)
    if num is None:
        assert every or any(part == 0 for part in found[-1].parts)
        return
    drawn = Counter(source for source, _ in run(steady, 0, num))
    ever = [
        source
        for source in range(len(found[0].parts))
        if any(s.parts[source] for s in steady)
    ]
    full = [drawn[source] >= found[0].lengths[source] for source in ever]
    if (
        len(steady) == 1
    ):  # over switches the counts may be behind by the sum of the bounds
        assert all(full) if every else any(full)
    exact = [Fraction(s.parts[0], sum(s.parts)) for s in steady]
    assert exact  # the share is what decides: one position earlier no (not every) share had reached its length
    before = num - 1
    share = [Fraction(0)] * len(found[0].parts)
    ends = [*(s.first for s in steady[1:]), before]
    for s, end in zip(steady, ends, strict=True):
        for source, part in enumerate(s.parts):
            share[source] += Fraction(part, sum(s.parts)) * max(
                0, min(end, before) - s.first
            )
    reached = [share[source] >= found[0].lengths[source] for source in ever]
    assert not (all(reached) if every else any(reached))


@settings(max_examples=trials(60))
@given(
    found=segments(),
    num_samples=st.integers(1, 120),
    ranks=st.sampled_from([1, 2, 4]),
    tail=st.sampled_from(["pad", "fill", "drop"]),
    epoch=st.integers(0, 2),
)
def test_a_plan_over_a_mixture_delivers_each_draw_once(
    found, num_samples, ranks, tail, epoch
):
    plan = ShardPlan(
        num_samples=num_samples,
        batch_size=8,
        num_data_ranks=ranks,
        shuffle=mixing(found),
        tail=tail,
    )

    served = num_samples - num_samples % 8 if tail == "drop" else num_samples
    found_ids = delivered(plan, epoch=epoch)
    assert (len(found_ids), len(set(found_ids))) == (served, served)
    straight = run(found, 0, (epoch + 1) * num_samples)[epoch * num_samples :]
    rows = []
    for step in range(plan.num_steps):
        slices = [
            plan.indices(epoch=epoch, step=step, data_rank=rank).tolist()
            for rank in range(ranks)
        ]
        rows += [source_and_index(sample) for part in slices for sample in part]
    assert rows[:served] == straight[:served]


def test_a_thousand_sources_are_mixed_and_shuffled():
    lengths = tuple(np.random.default_rng(0).integers(1, 10**6, 1000).tolist())
    order = Mixing(
        tuple(map(str, range(1000))), (Segment(0, lengths_to_parts(lengths), lengths),)
    )
    epoch = order.order(10**9, 7, 0, 1)
    found = epoch.between(500_000_000, 500_000_256)

    assert (epoch.inverse(found) == np.arange(500_000_000, 500_000_256)).all()


def lengths_to_parts(lengths):
    return tuple(max(1, length * 1000 // sum(lengths)) for length in lengths)


def test_an_epoch_past_the_limit_is_refused():
    with pytest.raises(ArgumentError, match="epoch must be in range"):
        mixing((Segment(0, (1,), (1,)),)).order(10, 0, 1 << 50, 1)
