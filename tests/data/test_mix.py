"""A mixture of streams: each part draws from the same part of its sources, and each source goes round and round."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_shard import Stream
from paddle_shard.data.iterable import IterableSource
from paddle_shard.data.stages.cut import Stripe
from paddle_shard.data.stages.mix import Mix
from paddle_shard.data.stages.steps import Map, Repeat, Shuffle
from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.weights import WeightedInterleave, schedule_of
from tests.data.test_stages import Parts, contents, opening
from tests.trials import trials

NAMES = ("web", "code", "chat")


def schedule(names, weights):
    return schedule_of("a mixture", tuple(names), weights)


@st.composite
def mixtures(draw):
    """(parts of each source, weights, stop)"""
    num_parts = draw(st.integers(1, 3))
    sources = draw(
        st.lists(
            st.lists(st.integers(1, 9), min_size=num_parts, max_size=num_parts),
            min_size=1,
            max_size=3,
        )
    )
    lists = [
        [
            [1000 * source + 100 * part + i for i in range(length)]
            for part, length in enumerate(lengths)
        ]
        for source, lengths in enumerate(sources)
    ]
    weights = draw(
        st.lists(
            st.integers(0, 4), min_size=len(lists), max_size=len(lists)
        ).filter(any)
    )
    return lists, weights, draw(st.sampled_from(["first", "all"]))


def mix(lists, weights, stop, says=None):
    says = [True] * len(lists) if says is None else says
    stages = {
        name: Parts(parts, say)
        for name, parts, say in zip(NAMES, lists, says, strict=False)
    }
    names = tuple(stages)
    return Mix(
        stages, schedule(names, dict(zip(names, weights, strict=True))), stop
    )


def by_hand(lists, weights, stop, part):
    """One sample after the other, from lists that begin again."""
    drawn = [at for at, weight in enumerate(weights) if weight]
    at, ended, found = dict.fromkeys(drawn, 0), set(), []
    for source in (
        WeightedInterleave(tuple(weights))
        .sources_at(np.arange(500))[0]
        .tolist()
    ):
        own = lists[source][part]
        if at[source] == len(own):
            ended.add(source)
            if stop == "first" or len(ended) == len(drawn):
                return found
        found.append(own[at[source] % len(own)])
        at[source] += 1
    raise AssertionError("no end")


@settings(max_examples=trials(150))
@given(mixture=mixtures(), data=st.data())
def test_part_draws_from_the_same_part_of_each_source(mixture, data):
    lists, weights, _ = mixture
    num_parts = len(lists[0])
    says = data.draw(
        st.lists(st.booleans(), min_size=len(lists), max_size=len(lists))
    )
    stage, wanted = (
        mix(*mixture, says),
        [by_hand(*mixture, part) for part in range(num_parts)],
    )

    assert contents(stage, opening(num_parts)) == wanted
    lengths = stage.lengths(opening(num_parts))
    assert lengths == (
        [len(part) for part in wanted]
        if all(s for s, w in zip(says, weights, strict=True) if w)
        else None
    )
    # a part that has ended is passed over
    skip = data.draw(st.integers(0, max(map(len, wanted)) + 9))
    resumed = [
        list(islice(items, 999))
        for items in stage.open(opening(num_parts, skip=skip))
    ]
    assert resumed == [part[skip:] for part in wanted]
    held = data.draw(st.sets(st.integers(0, num_parts - 1), min_size=1))
    assert contents(stage, opening(num_parts, tuple(sorted(held)))) == [
        wanted[part] for part in sorted(held)
    ]


@settings(max_examples=trials(60))
@given(
    lengths=st.lists(st.integers(6, 30), min_size=2, max_size=3),
    skip=st.integers(0, 40),
    num_parts=st.integers(1, 3),
    stop=st.sampled_from(["first", "all"]),
    seed=st.integers(0, 3),
)
def test_mixed_stages_have_their_own_random_numbers(
    lengths, skip, num_parts, stop, seed
):
    """Striped streams of which no length is known, shuffled before the mixture."""
    stages = {
        name: Map(
            Shuffle(Stripe(IterableSource(lambda n=n: iter(range(n)))), 4),
            lambda i, s=s: (s, i, np.random.rand()),
        )
        for s, (name, n) in enumerate(zip(NAMES, lengths, strict=False))
    }
    names = tuple(stages)
    stage = Shuffle(
        Mix(stages, schedule(names, dict.fromkeys(names, 1)), stop), 3
    )

    straight = contents(stage, opening(num_parts, seed=seed))
    skip = min(skip, *map(len, straight))
    assert contents(stage, opening(num_parts, seed=seed, skip=skip)) == [
        part[skip:] for part in straight
    ]
    if num_parts == 1 and lengths[0] == lengths[1]:
        first, second = (
            [i for s, i, _ in straight[0] if s == source] for source in (0, 1)
        )
        assert first[:4] != second[:4] or sorted(first[:4]) != sorted(range(4))


def test_mixed_sources_are_near_their_share_at_every_prefix():
    stage = mix(
        [
            [list(range(500))] * 2,
            [list(range(500, 1000))] * 2,
            [list(range(1000, 1500))] * 2,
        ],
        [5, 3, 1],
        "first",
    )
    for part in contents(stage, opening(2)):
        counts = np.cumsum(
            [[i // 500 == source for source in range(3)] for i in part], axis=0
        )
        share = np.outer(np.arange(1, len(part) + 1), [5 / 9, 3 / 9, 1 / 9])
        assert np.abs(counts - share).max() <= 3 / 4 + 1e-9


def test_endless_sources_end_nothing():
    endless, short = Repeat(Parts([[1, 2]])), Parts([[10, 20, 30]])
    names = ("a", "b")
    one = Mix(
        {"a": endless, "b": short}, schedule(names, {"a": 1, "b": 1}), "first"
    )
    every = Mix(
        {"a": endless, "b": short}, schedule(names, {"a": 1, "b": 1}), "all"
    )

    assert contents(one, opening())[0] == [1, 10, 2, 20, 1, 30, 2]
    assert not one.endless
    assert every.endless
    assert every.lengths(opening()) is None
    assert list(islice(every.open(opening())[0], 10)) == [
        1,
        10,
        2,
        20,
        1,
        30,
        2,
        10,
        1,
        20,
    ]


def test_sample_is_named_by_its_source():
    assert (
        mix([[[1, 2, 3]], [[4, 5, 6]]], [2, 1], "first").origin(opening(), 0, 1)
        == "source 'code'"
    )


@pytest.mark.parametrize(
    ("sources", "options", "error", "says"),
    [
        ({"a": [1, 2]}, {}, ArgumentTypeError, "source 'a' must be a Stream"),
        ({}, {}, ArgumentError, "got 0"),
        (
            {"a": Stream.of([1])},
            {"stop": "last"},
            ArgumentError,
            "stop must be",
        ),
        (
            {"a": Stream.of([1])},
            {"weights": {"b": 1}},
            ArgumentError,
            "weights: unknown sources ['b']",
        ),
        (
            {"a": Stream.of(iter([1]))},
            {},
            ArgumentError,
            "can be opened only once",
        ),
    ],
)
def test_bad_arguments_are_named(sources, options, error, says):
    with pytest.raises(error) as caught:
        Stream.mixture(sources, **options)
    assert says in str(caught.value)


@pytest.mark.parametrize("stop", ["first", "all"])
@pytest.mark.parametrize("counted", [False, True])
def test_source_without_a_sample_in_a_part_is_named(stop, counted):
    lists = [[[1, 2, 3, 4]] * 3, [[5], [6], []]]
    stage = mix(lists, [3, 1], stop, [counted, counted])

    with pytest.raises(
        ArgumentError,
        match="source 'code', part 2 of 3 has no sample to repeat. .* leave an empty source out",
    ):
        stage.lengths(opening(3)) or contents(stage, opening(3))
    assert (
        contents(mix(lists, [3, 0], stop, [counted, counted]), opening(3))
        == [[1, 2, 3, 4]] * 3
    )


def test_mixed_weights_may_change_and_a_source_may_join():
    streams = {
        "a": Stream.of(list(range(100))),
        "b": Stream.of(list(range(1000, 1100))),
    }
    mixed = list(
        Stream.mixture(
            streams, [(0, {"a": 1}), (6, {"a": 1, "b": 1}), (12, {"b": 1})]
        )
    )

    assert mixed[:6] == list(range(6))
    assert sorted(mixed[6:12]) == [6, 7, 8, 1000, 1001, 1002]
    assert mixed[12:20] == list(range(1003, 1011))
