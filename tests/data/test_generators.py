"""What samples draw from Paddle's generator is the same whoever reads them."""

import pickle
import random
import sys

import numpy as np
import paddle
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.data.generators import PaddleGenerator
from tests.helpers import ONE, Made


def noise():
    return paddle.rand([2]).numpy()


class Noisy(paddle.io.Dataset):
    """Samples of noise, from some number on; before it, of zeros."""

    uses_rng = True

    def __init__(self, first=0):
        self.first = first

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return noise() if index >= self.first else np.zeros(2, "float32")


def rows(data, workers=0, passed=0, **options):
    paddle.seed(workers + 17)  # whatever the user has drawn before
    given = paddle.io.DataLoader(data, batch_size=4, num_workers=workers)
    loader = paddle_shard.shard_dataloader(
        given, ONE, shard_dims="dp", **options
    )
    before = paddle.get_rng_state()
    found = []
    for step, batch in enumerate(loader):
        if passed and step + 1 == passed:
            state = loader.state_dict()
            found, loader = (
                [],
                paddle_shard.shard_dataloader(
                    given, ONE, shard_dims="dp", **options
                ),
            )
            loader.load_state_dict(state)
            return [
                row
                for batch in loader
                for row in batch._local_value().numpy().tolist()
            ]
        found += batch._local_value().numpy().tolist()
    paddle.set_rng_state(before)
    return found


@pytest.mark.parametrize("first", [0, 3, 4, 21])
def test_data_set_that_draws_is_the_same_for_all_readers(first):
    straight = rows(Noisy(first), prefetch=0)

    assert straight[:first] == [[0.0, 0.0]] * first
    assert len({tuple(row) for row in straight[first:]}) == 24 - first
    for workers in (0, 1, 2):
        assert rows(Noisy(first), workers) == straight
    assert rows(Noisy(first), passed=2) == straight[8:]
    assert rows(Noisy(first), seed=1, prefetch=0)[first:] != straight[first:]


@pytest.mark.parametrize("first", [0, 9])
def test_stream_that_draws_is_the_same_for_all_readers(first):
    def noisy():
        return (
            Stream.of(range(24))
            .map(lambda i: noise() if i >= first else np.zeros(2, "float32"))
            .shuffle(4)
        )

    straight = rows(noisy())
    assert len({tuple(row) for row in straight}) == 24 - first + (first > 0)
    assert rows(noisy(), 2) == straight
    assert rows(noisy(), passed=2) == straight[8:]
    assert rows(noisy(), seed=1) != straight


class StandInTorch:
    """What is used of torch, which is not installed here; `tests/adapters/torchdata` has the real one."""

    uint8 = "uint8"

    class Generator(random.Random):
        manual_seed = random.Random.seed

        def get_state(self):
            return np.frombuffer(pickle.dumps(self.getstate()), np.uint8).view(
                Bytes
            )

        def set_state(self, state):
            self.setstate(pickle.loads(bytes(state)))

    def __init__(self):
        self.default_generator = self.Generator(4)

    @staticmethod
    def frombuffer(data, dtype):
        return data


class Bytes(np.ndarray):
    def numpy(self):
        return self


@pytest.mark.parametrize("stream", [False, True])
def test_torch_draws_differ_by_sample_and_are_alike_for_readers(
    stream, monkeypatch
):
    """In workers, its draws were the same in each of them and in each epoch."""
    monkeypatch.setitem(sys.modules, "torch", StandInTorch())
    own = sys.modules["torch"].default_generator

    def sample(index):
        return np.array([index, own.random()])

    def made(workers):
        data = Stream.of(range(24)).map(sample) if stream else Made(sample, 24)
        given = paddle.io.DataLoader(data, batch_size=4, num_workers=workers)
        return paddle_shard.shard_dataloader(given, ONE, shard_dims="dp")

    def epochs(workers):
        loader = made(workers)
        return [
            [
                row
                for batch in loader
                for row in batch._local_value().numpy().tolist()
            ]
            for _ in range(2)
        ]

    before = own.getstate()
    straight = epochs(0)
    assert own.getstate() == before
    assert len({number for epoch in straight for _, number in epoch}) == 48
    assert epochs(2) == straight


def test_users_state_is_left_alone():
    paddle.seed(3)
    expected = noise().tolist()
    paddle.seed(3)
    given = paddle.io.DataLoader(Noisy(), batch_size=4)
    list(paddle_shard.shard_dataloader(given, ONE, shard_dims="dp"))
    assert noise().tolist() == expected


def test_marks_are_equal_only_if_nothing_was_drawn_between():
    one = PaddleGenerator()
    paddle.seed(5)
    first = one.get_state()
    mark = one.mark()
    assert one.mark() == mark
    drawn = noise().tolist()
    assert one.mark() != mark
    one.set_state(first)
    assert one.mark() == mark
    assert noise().tolist() == drawn


def masked(samples):
    return np.stack([sample * (np.random.rand() > 0.5) for sample in samples])
