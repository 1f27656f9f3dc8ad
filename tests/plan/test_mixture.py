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
def mixings(draw, most=4, only_shuffled=False):
    """Up to 5 sources, with weights that change up to `most` - 1 times; all are selected at times."""
    num = draw(st.integers(1, len(NAMES)))
    lengths = draw(st.lists(st.integers(1, 30), min_size=num, max_size=num))
    segments, first = [], 0
    for _ in range(draw(st.integers(1, most))):
        weights = draw(
            st.lists(st.integers(0, 9), min_size=num, max_size=num).filter(any)
        )
        segments.append(Segment(first, tuple(weights)))
        first += draw(st.integers(1, 60))
    return Mixing(
        NAMES[:num],
        tuple(lengths),
        tuple(segments),
        only_shuffled or draw(st.booleans()),
    )


def run(mixing, seed, num, *, length=None):
    """The first `num` samples of the run as (source, index), from the order of epochs of `length` samples."""
    length = length or num
    ids = [
        mixing.order(length, seed, epoch, 1).between(
            0, min(length, num - epoch * length)
        )
        for epoch in range(-(-num // length))
    ]
    return [source_and_index(sample) for sample in np.concatenate(ids).tolist()]


@settings(max_examples=trials(150))
@given(mixing=mixings(), seed=st.integers(0, 3), num=st.integers(1, 400))
def test_mixture_reads_each_source_epoch_by_epoch(mixing, seed, num):
    drawn = run(mixing, seed, num)

    for source, length in enumerate(mixing.lengths):
        at = [
            position
            for position, (from_source, _) in enumerate(drawn)
            if from_source == source
        ]
        indices = [drawn[position][1] for position in at]
        while indices:
            epoch, indices, at = indices[:length], indices[length:], at[length:]
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= set(range(length))
            if not mixing.is_shuffled:
                assert epoch == list(range(len(epoch)))


@settings(max_examples=trials(150))
@given(mixing=mixings(), num=st.integers(1, 400))
def test_mixture_bounds_of_the_segments_add_up(mixing, num):
    drawn = [source for source, _ in run(mixing, 0, num)]
    share, off = [Fraction(0)] * len(mixing.names), Fraction(0)
    counts: Counter = Counter()
    bound = Fraction(0)
    for position in range(num):
        begun = [s for s in mixing.segments if s.first <= position]
        now = begun[-1]
        bound = sum(
            1 - Fraction(1, 2 * n - 2) if n > 1 else 0
            for n in (sum(p > 0 for p in s.weights) for s in begun)
        )
        share = [
            sofar + Fraction(weight, sum(now.weights))
            for sofar, weight in zip(share, now.weights, strict=True)
        ]
        counts[drawn[position]] += 1
        off = max(
            abs(sofar - counts[source]) for source, sofar in enumerate(share)
        )
        assert off <= bound


@settings(max_examples=trials(100))
@given(
    mixing=mixings(),
    seed=st.integers(0, 2),
    num=st.integers(1, 300),
    length=st.integers(1, 300),
)
def test_mixture_is_one_sequence_for_any_length_of_epochs(
    mixing, seed, num, length
):
    assert run(mixing, seed, num, length=length) == run(mixing, seed, num)


@settings(max_examples=trials(40))
@given(
    mixing=mixings(),
    seed=st.integers(0, 2),
    epoch=st.integers(0, 3),
    length=st.integers(1, 120),
    data=st.data(),
)
def test_mixture_order_finds_every_occurrence(
    mixing, seed, epoch, length, data
):
    order = mixing.order(length, seed, epoch, 1)
    ids = order(np.arange(length))

    assert len(set(ids.tolist())) == length  # a repeated sample has another id
    source = data.draw(st.integers(0, len(mixing.names) - 1))
    index = data.draw(st.integers(0, mixing.lengths[source] - 1))
    delivered = [
        at
        for at, sample in enumerate(ids.tolist())
        if source_and_index(sample) == (source, index)
    ]
    assert order.occurrences(source, index) == delivered


@settings(max_examples=trials(100))
@given(mixing=mixings(), at=st.integers(0, 300))
def test_drawn_of_counts_what_was_drawn(mixing, at):
    drawn = run(mixing, 0, at) if at else []
    counts = Counter(source for source, _ in drawn)
    rounds = {  # the epochs of a source that hold its draws
        number: -(-counts[number] // length)
        for number, length in enumerate(mixing.lengths)
    }
    report = drawn_of(mixing, at)

    assert {name: d.drawn for name, d in report.items()} == {
        name: counts[number] for number, name in enumerate(mixing.names)
    }
    assert [d.epochs for d in report.values()] == list(rounds.values())
    if at:
        assert sum(d.share for d in report.values()) == pytest.approx(1)


@settings(max_examples=trials(150))
@given(mixing=mixings(most=1), every=st.booleans())
@example(
    mixing=Mixing(("web", "code"), (70, 30), (Segment(0, (7, 3)),)), every=False
)
def test_num_positions_to_read_is_the_first_or_every_length(mixing, every):
    (segment,), lengths = mixing.segments, mixing.lengths
    num = num_positions_to_read(segment.weights, lengths, every=every)
    drawn = Counter(source for source, _ in run(mixing, 0, num))
    selected = [
        source for source, weight in enumerate(segment.weights) if weight
    ]
    full = [drawn[source] >= lengths[source] for source in selected]
    assert all(full) if every else any(full)
    # The share decides: one position earlier no (not every) share had reached its length.
    period = sum(segment.weights)
    reached = [
        Fraction(segment.weights[source], period) * (num - 1) >= lengths[source]
        for source in selected
    ]
    assert not (all(reached) if every else any(reached))


@settings(max_examples=trials(60))
@given(
    mixing=mixings(only_shuffled=True),
    num_samples=st.integers(1, 120),
    ranks=st.sampled_from([1, 2, 4]),
    tail=st.sampled_from(["pad", "fill", "drop"]),
    epoch=st.integers(0, 2),
)
def test_mixture_plan_delivers_each_draw_once(
    mixing, num_samples, ranks, tail, epoch
):
    plan = ShardPlan(
        num_samples=num_samples,
        batch_size=8,
        num_data_ranks=ranks,
        shuffle=mixing,
        tail=tail,
    )

    served = num_samples - num_samples % 8 if tail == "drop" else num_samples
    found_ids = delivered(plan, epoch=epoch)
    assert (len(found_ids), len(set(found_ids))) == (served, served)
    straight = run(mixing, 0, (epoch + 1) * num_samples)[epoch * num_samples :]
    rows = []
    for step in range(plan.num_steps):
        slices = [
            plan.indices(epoch=epoch, step=step, data_rank=rank).tolist()
            for rank in range(ranks)
        ]
        rows += [source_and_index(sample) for part in slices for sample in part]
    assert rows[:served] == straight[:served]


def test_mixture_of_a_thousand_sources_is_shuffled():
    lengths = tuple(np.random.default_rng(0).integers(1, 10**6, 1000).tolist())
    weights = tuple(max(1, length * 1000 // sum(lengths)) for length in lengths)
    mixing = Mixing(
        tuple(map(str, range(1000))), lengths, (Segment(0, weights),)
    )
    order = mixing.order(10**9, 7, 0, 1)
    positions = range(500_000_000, 500_000_256)
    ids = order.between(positions.start, positions.stop).tolist()

    for position, sample in list(zip(positions, ids, strict=True))[::50]:
        assert position in order.occurrences(*source_and_index(sample))


def test_mixture_rejects_an_epoch_past_the_limit():
    mixing = Mixing(("a",), (1,), (Segment(0, (1,)),))
    with pytest.raises(ArgumentError, match="epoch must be an int in"):
        mixing.order(10, 0, 1 << 50, 1)


@pytest.mark.parametrize(
    "sample", ["a", ("b", 0), ("a", 7), ("a", -1), ("a", "0"), 3]
)
def test_mixture_rejects_a_sample_that_it_does_not_have(sample):
    with pytest.raises(ArgumentError, match="sample of a mixture must be"):
        Mixing(("a",), (7,), (Segment(0, (1,)),)).numbers_of(sample)
