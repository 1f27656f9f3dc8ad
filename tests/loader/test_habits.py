"""Habits of those who write data sets, samplers and collate functions: what cannot be kept is said."""

import itertools
import random

import numpy as np
import pytest
from paddle.io import BatchSampler, DataLoader, Dataset, Sampler

import paddle_shard
from paddle_shard.core import warn_once
from paddle_shard.errors import DataReadError, PaddleShardError
from tests.helpers import ONE, Made, local, locals_of, sharded


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(warn_once, "_WARNED", set())


class Rows(Dataset):
    def __init__(self, length=8):
        self.rows, self.epoch = list(range(length)), 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return np.array([self.rows[index], self.epoch])


class OwnGenerator(Rows):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)


class Collator:
    def __init__(self):
        self.rng, self.strength = random.Random(3), 0

    def __call__(self, samples):
        return np.stack(samples) + self.strength

    def method(self, samples):
        return self(samples)


# The length of the data


def test_data_that_has_become_shorter_is_an_error():
    data = Rows()
    loader = sharded(DataLoader(data, batch_size=2), ONE)
    assert len(list(loader)) == 4
    data.rows = list(range(4))
    with pytest.raises(DataReadError, match="IndexError"):
        list(loader)


def test_data_that_has_grown_is_served_by_a_new_loader():
    data = Rows()
    loader = sharded(DataLoader(data, batch_size=2), ONE)
    assert len(list(loader)) == 4
    data.rows = list(range(12))
    assert len(list(loader)) == 4
    state = loader.state_dict()
    again = sharded(DataLoader(data, batch_size=2), ONE)
    again.load_state_dict(state, override=["num_samples"])
    assert len(list(again)) == 6


# Persistent workers


def test_persistent_workers_stay_where_nothing_was_set(caplog):
    loader = sharded(
        DataLoader(
            Rows(), batch_size=4, num_workers=2, persistent_workers=True
        ),
        ONE,
    )
    for _ in range(3):
        list(loader)
    assert "started anew" not in caplog.text
    loader.close()


# Generators of one's own


# Memory that is used again


def test_samples_that_are_one_object_are_read():
    row = np.arange(3)
    assert (
        locals_of(
            sharded(DataLoader(Made(lambda index: row, 4), batch_size=2), ONE)
        )
        == [[[0, 1, 2]] * 2] * 2
    )
    stream = paddle_shard.Stream.of(itertools.repeat(row, 4))
    assert (
        locals_of(sharded(DataLoader(stream, batch_size=2), ONE))
        == [[[0, 1, 2]] * 2] * 2
    )


# A step that is tried again


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError, DataReadError), (KeyboardInterrupt, KeyboardInterrupt)],
)
def test_iterator_that_has_failed_says_how_to_resume(error, raised):
    """Ctrl-C in a notebook, too: the cell is run again."""
    broken = [True]

    def read(index):
        if index == 5 and broken:
            broken.clear()
            raise error("the network is away")
        return np.array(index)

    loader = sharded(DataLoader(Made(read, 12), batch_size=2), ONE, prefetch=0)
    batches, rows = iter(loader), []
    with pytest.raises(raised):
        for batch in batches:
            rows += local(batch)
    with pytest.raises(
        PaddleShardError,
        match=rf"has failed before \({raised.__name__}: .*loader.load_state_dict",
    ):
        next(batches)
    loader.load_state_dict(loader.state_dict())
    assert rows + [row for batch in loader for row in local(batch)] == list(
        range(12)
    )


# A sampler's set_epoch


class Wants(Sampler):
    def __init__(self):
        super().__init__(Rows())

    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        return 8


class WantsMore(Wants):
    def set_epoch(self, epoch, seed):
        self.told = epoch, seed


def test_set_epoch_passes_further_arguments_to_the_sampler():
    sampler = WantsMore()
    loader = sharded(
        DataLoader(
            Rows(), batch_sampler=BatchSampler(sampler=sampler, batch_size=4)
        ),
        ONE,
    )
    loader.set_epoch(5, seed=7)
    assert sampler.told == (5, 7)
    with pytest.raises(TypeError, match="missing 1 required .* 'seed'"):
        list(loader)  # the next epoch begins at its end
