"""Anything that can be iterated is a source, and every reader of it sees the same stream."""

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_shard.data.iterable import IterableSource
from paddle_shard.data.stages.stage import Opening
from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.seeding import mix
from tests.helpers import SeededBy


def seed_generators(key, number=None):
    seed = key if number is None else mix(key, number)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def opening(**options):
    return Opening(
        parts=(0,), num_parts=1, rng=SeededBy(seed_generators), **options
    )


def read(source, **options):
    (items,) = source.open(opening(**options))
    return list(items)


class Iterable:
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class Endless:
    """An iterable that is an error to read beyond what is asked for."""

    def __init__(self, limit):
        self.limit = limit

    def __iter__(self):
        yield from range(self.limit)
        raise AssertionError("read too far")


KINDS = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "deque": deque,
    "iterable": Iterable,
    "function of a generator": lambda samples: lambda: (x for x in samples),
    "function of a list": lambda samples: lambda: samples,
    "generator": lambda samples: (x for x in samples),
    "map": lambda samples: map(int, samples),
}
ONE_SHOT = {"generator", "map"}
kinds = st.sampled_from(sorted(KINDS))


@given(
    kind=kinds,
    samples=st.lists(st.integers(-9, 9), max_size=9),
    skip=st.integers(0, 12),
)
def test_iterable_is_iterated_from_a_position(kind, samples, skip):
    assert (
        read(IterableSource(KINDS[kind](samples)), skip=skip) == samples[skip:]
    )


@given(
    kind=kinds,
    samples=st.lists(st.integers(), max_size=9),
    skip=st.integers(0, 12),
)
def test_stream_length_is_known_and_independent_of_the_position(
    kind, samples, skip
):
    known = kind in ("list", "tuple", "array", "deque")

    assert IterableSource(KINDS[kind](samples)).lengths(opening(skip=skip)) == (
        [len(samples)] if known else None
    )


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - ONE_SHOT))
def test_iterable_begins_anew_each_epoch(kind):
    source = IterableSource(KINDS[kind]([1, 2, 3]))

    assert [read(source, epoch=epoch) for epoch in (0, 1, 1)] == [[1, 2, 3]] * 3


@pytest.mark.parametrize("kind", sorted(ONE_SHOT))
def test_iterable_that_is_read_once_is_refused_a_second_time(kind):
    source = IterableSource(KINDS[kind]([1, 2, 3]))
    source.open(opening())  # opening alone reads nothing
    assert source.lengths(opening()) is None
    assert read(source) == [1, 2, 3]

    with pytest.raises(
        ArgumentError,
        match=f"{kind} has been read already.*function that makes it, without calling",
    ):
        read(source, epoch=1)


@pytest.mark.parametrize("given_", [3, None, object()])
def test_iterable_of_another_type_is_refused(given_):
    with pytest.raises(
        ArgumentTypeError,
        match=f"must be iterable, or a function .* got {type(given_).__name__}",
    ):
        IterableSource(given_)


def test_iterable_is_not_read_ahead():
    (items,) = IterableSource(Endless(4)).open(opening(skip=1))

    assert [next(items) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(AssertionError, match="read too far"):
        next(items)


def test_stream_of_a_list_is_read_from_its_position():
    class Indexed(list):
        def __getitem__(self, number):
            got.append(number)
            return super().__getitem__(number)

    got = []
    read(IterableSource(Indexed("abcdef")), skip=4)

    assert got == [4, 5]


class Draws(list):
    def __getitem__(self, number):
        return number, np.random.randint(1 << 30), random.randrange(1 << 30)


def draws():
    for number in range(8):
        yield number, np.random.randint(1 << 30), random.randrange(1 << 30)


@pytest.mark.parametrize(
    "make", [lambda: Draws(range(8)), lambda: draws], ids=["list", "function"]
)
def test_random_stream_is_alike_for_readers_and_anew_by_epoch(
    make,
):
    straight = read(IterableSource(make()))
    for skip in range(9):
        seed_generators(skip)
        (items,) = IterableSource(make()).open(opening(skip=skip))
        found = []
        for item in items:
            found.append(item)
            random.random(), np.random.rand()  # another's draws in between
        assert found == straight[skip:]

    others = [
        read(IterableSource(make()), **how)
        for how in ({"epoch": 1}, {"seed": 1}, {"round": 1})
    ]
    assert all(
        a[1:] != b[1:]
        for other in others
        for a, b in zip(straight, other, strict=True)
    )


@pytest.mark.parametrize(
    "make",
    [lambda fail: fail, lambda fail: Failing()],
    ids=["function", "list"],
)
def test_exception_comes_out_where_it_was_raised(make):
    def fail():
        yield 0
        yield 1
        raise KeyError("third")

    (items,) = IterableSource(make(fail)).open(opening())

    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(KeyError, match="third"):
        next(items)


class Failing(list):
    def __len__(self):
        return 5

    def __getitem__(self, number):
        if number == 2:
            raise KeyError("third")
        return number


def test_stop_iteration_of_a_lists_item_is_no_end():
    class Stops(Failing):
        def __getitem__(self, number):
            raise StopIteration

    with pytest.raises(RuntimeError):
        read(IterableSource(Stops()))


def test_dict_is_iterated_like_anything_else():
    assert read(IterableSource({"a": 1, "b": 2})) == ["a", "b"]


def test_iterable_that_can_be_called_too_is_iterated():
    class Both(Iterable):
        def __call__(self, model_input):
            raise AssertionError("not to be called")

    assert read(IterableSource(Both([1, 2]))) == [1, 2]


def test_stream_order_may_be_drawn_at_iter_or_at_first_item():
    class AtOnce:
        def __iter__(self):
            return iter(np.random.permutation(20).tolist())

    class WithTheFirst:
        def __iter__(self):
            yield from np.random.permutation(20).tolist()

    # A reader with a thread of its own, as Paddle's DataLoader has one, draws it at any time between the two.
    for options in ({}, {"skip": 3}, {"epoch": 1}):
        assert read(IterableSource(AtOnce()), **options) == read(
            IterableSource(WithTheFirst()), **options
        )
