"""Batches of like lengths: each sample once an epoch, little padding, resumed anywhere and on any mesh."""

import copy
import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.io import DataLoader

from paddle_shard import BucketBatchSampler
from paddle_shard.errors import ArgumentError, ArgumentTypeError, StateError
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import ONE, Made, locals_of, mesh, sharded
from tests.trials import trials

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=80)


@settings(max_examples=trials(150))
@given(
    lengths=LENGTHS,
    size=st.integers(1, 6),
    windows=st.integers(1, 4),
    seed=st.integers(0, 3),
    drop=st.booleans(),
)
def test_buckets_select_each_sample_once_with_its_like(
    lengths, size, windows, seed, drop
):
    sampler = BucketBatchSampler(
        lengths, size, window=size * windows, seed=seed, drop_last=drop
    )
    for epoch in range(2):
        assert sampler.epoch == epoch
        expected = len(sampler)
        batches = list(sampler)
        drawn = [index for batch in batches for index in batch]

        assert len(batches) == expected
        assert len(set(drawn)) == len(drawn)
        rest = len(lengths) % size if drop else 0
        assert len(drawn) == len(lengths) - rest
        assert all(len(batch) == size for batch in batches) or not drop
        for batch in batches:
            assert [lengths[i] for i in batch] == sorted(
                lengths[i] for i in batch
            )


@settings(max_examples=trials(150))
@given(
    lengths=LENGTHS,
    tokens=st.integers(1, 100),
    multiple=st.integers(1, 4),
    window=st.integers(1, 60),
)
def test_buckets_have_at_most_so_many_tokens_a_batch(
    lengths, tokens, multiple, window
):
    sampler = BucketBatchSampler(
        lengths, max_tokens=tokens, multiple_of=multiple, window=window
    )
    expected = len(sampler)
    batches = list(sampler)

    assert len(batches) == expected
    assert sorted(index for batch in batches for index in batch) == list(
        range(len(lengths))
    )
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        assert len(batch) * longest <= tokens or len(batch) <= multiple
    windows = -(-len(lengths) // window)
    assert sum(len(batch) % multiple > 0 for batch in batches) <= windows


def test_buckets_need_little_padding():
    lengths = np.random.default_rng(0).integers(1, 1000, 20_000)
    batches = list(BucketBatchSampler(lengths, 32, window=4096))
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    means = [float(lengths[batch].mean()) for batch in batches]

    assert lengths.sum() / padded > 0.98
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.1


@settings(max_examples=trials(80))
@given(lengths=LENGTHS, stop=st.integers(0, 30), by_tokens=st.booleans())
def test_buckets_continue_at_any_batch_and_in_the_next_epoch(
    lengths, stop, by_tokens
):
    def made():
        sizes = {"max_tokens": 60} if by_tokens else {"batch_size": 3}
        return BucketBatchSampler(lengths, **sizes, window=12)

    straight = list(made()), None
    one = made()
    before = list(islice(iter(one), stop))
    state, other = json.loads(json.dumps(one.state_dict())), made()
    other.load_state_dict(state)

    assert (
        before
        + (
            list(other)
            if len(before) < len(straight[0]) or stop == len(before)
            else []
        )
        == straight[0]
    )


def test_buckets_copy_shares_lengths_and_not_the_position():
    sampler = BucketBatchSampler(np.arange(100), 4, window=20)
    other = copy.deepcopy(sampler)
    next(iter(other))

    assert other._lengths is sampler._lengths
    assert (
        sampler.state_dict()
        == BucketBatchSampler(np.arange(100), 4, window=20).state_dict()
    )


def test_buckets_resume_on_another_mesh():
    lengths = np.random.default_rng(1).integers(1, 50, 64)

    def loader(at):
        sampler = BucketBatchSampler(lengths, 8, window=32, seed=3)
        return sharded(DataLoader(Made(length=64), batch_sampler=sampler), at)

    straight = [locals_of(loader(ONE)), None]
    epochs = loader(ONE)
    straight = [locals_of(epochs), locals_of(epochs)]

    def first():
        one = loader(mesh([0, 1], "dp"))
        with iter(one) as batches:
            found = [
                next(batches)._local_value().numpy().tolist() for _ in range(3)
            ]
        return found, one.state_dict()

    per_rank = on_each_rank([0, 1], first)
    before = [
        a + b for a, b in zip(per_rank[0][0], per_rank[1][0], strict=True)
    ]
    again = loader(ONE)
    again.load_state_dict(json.loads(json.dumps(per_rank[0][1])))

    assert before + locals_of(again) == straight[0]
    assert locals_of(again) == straight[1]
    assert straight[0] != straight[1]
    assert again.certificate().exact


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 2, "max_tokens": 3}, "either batch_size or max_tokens"),
        ({}, "either batch_size or max_tokens"),
        ({"batch_size": 0}, "batch_size must be an int >= 1"),
        ({"max_tokens": 2.5}, "max_tokens must be an int >= 1"),
        (
            {"batch_size": 3, "multiple_of": 2},
            "batch_size=3 must be a multiple of multiple_of=2",
        ),
        ({"batch_size": 1, "lengths": []}, "lengths must be an array of ints"),
        (
            {"batch_size": 1, "lengths": [1.5]},
            "lengths must be an array of ints",
        ),
        (
            {"batch_size": 1, "lengths": [-1, 2]},
            "lengths must be an array of ints >= 0 .* shape \\[2\\]: \\[-1, 2\\]",
        ),
    ],
)
def test_bad_arguments_are_named(options, says):
    with pytest.raises(ArgumentError, match=says):
        BucketBatchSampler(options.pop("lengths", [1, 2]), **options)


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"version": 2, "epoch": 0, "window": 0, "batch": 0},
        {"epoch": 1},
    ],
)
def test_buckets_reject_a_state_of_something_else(state):
    with pytest.raises(
        StateError, match="state must be of a BucketBatchSampler"
    ):
        BucketBatchSampler([1], 1).load_state_dict(state)


@pytest.mark.parametrize(
    "size",
    [
        {"batch_size": 8},
        {"max_tokens": 60, "multiple_of": 4},
        {"max_tokens": 9, "multiple_of": 2},
    ],
)
@pytest.mark.parametrize("tail", ["pad", "fill", "drop"])
def test_buckets_serve_any_number_of_samples_on_two_ranks(size, tail):
    """Only the last batch of an epoch may need padding."""
    if tail == "fill" and "batch_size" not in size:
        return
    for number in (1, 39, 40, 41, 64, 101)[tail == "drop" :]:
        check_all_are_served(number, size, tail)


def check_all_are_served(number, size, tail):
    lengths = np.random.default_rng(number).integers(1, 20, number)

    def run():
        sampler = BucketBatchSampler(lengths, window=32, **size)
        batches = iter(
            sharded(
                DataLoader(Made(length=number), batch_sampler=sampler),
                mesh([0, 1]),
                tail=tail,
            )
        )
        found = []
        for batch in batches:
            rows, real = (
                batch._local_value().numpy(),
                batches.valid._local_value().numpy(),
            )
            found += rows[real].tolist()
        return found

    per_rank = on_each_rank([0, 1], run)
    found = sorted(per_rank[0] + per_rank[1])
    assert len(set(found)) == len(found)
    assert len(found) == number or tail == "drop"


@pytest.mark.parametrize(
    ("change", "of_now"),
    [
        ({"batch_size": 6}, "'batch_size': 6"),
        ({"window": 32}, "'window': 32"),
        ({"seed": 1}, "'seed': 1"),
        ({"multiple_of": 2}, "'multiple_of': 2"),
        ({"drop_last": True}, "'drop_last': True"),
        ({"lengths": range(46, 0, -1)}, "'lengths': '46, CRC "),
        ({"lengths": range(1, 46)}, "'lengths': '45, CRC "),
        ({"batch_size": None, "max_tokens": 90}, "'max_tokens': 90"),
    ],
)
def test_buckets_reject_a_state_of_another_order(change, of_now):
    def made(lengths=range(1, 47), batch_size=4, **settings):
        return BucketBatchSampler(
            list(lengths), batch_size, **{"window": 16, **settings}
        )

    sampler = made()
    next(iter(sampler))
    with pytest.raises(StateError) as caught:
        made(**change).load_state_dict(sampler.state_dict())
    now, _, saved = str(caught.value).partition(", got ")
    assert of_now in now
    assert of_now not in saved or "CRC" in of_now


@pytest.mark.parametrize("wrong", [Made(), iter([1, 2]), {1: 2}, "12"])
def test_buckets_reject_what_are_no_lengths(wrong):
    """A data set without an end was read for ever."""
    with pytest.raises(
        (ArgumentError, ArgumentTypeError), match="lengths must be an array"
    ):
        BucketBatchSampler(wrong, 2)
