"""A state knows what data it stands on: data that was rewritten in the meantime is refused when a pass begins."""

import datetime
import decimal
import json

import numpy as np
import paddle
import pytest
from paddle.io import BatchSampler, DataLoader

import paddle_shard
from paddle_shard.errors import StateError
from paddle_shard.testing.simulated import on_each_rank, simulated_rank
from tests.helpers import ONE, Made, locals_of, mesh, sharded

LENGTH = 24


def arrays(version):
    return paddle_shard.ArrayDataset(np.arange(LENGTH) + 100 * version)


def texts(version):
    return Made(
        lambda i: {"text": f"{i} of version {version}", "length": np.array(1)},
        LENGTH,
    )


def several(version):
    return paddle_shard.Mixture(
        {"a": numbers(version), "b": numbers(version)}, {"a": 1, "b": 2}
    )


def numbers(version):
    return Made(lambda i: np.array(i + 100 * version), LENGTH)


class Many(paddle.io.Dataset):
    """Reads batches at once."""

    def __init__(self, version):
        self.version = version

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return np.array(index + 100 * self.version)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Own(paddle.io.BatchSampler):
    def __init__(self):
        self.batch_size = 4

    def __iter__(self):
        return iter([list(range(i, i + 4)) for i in range(0, LENGTH, 4)])

    def __len__(self):
        return LENGTH // 4


KINDS = {
    "numbers": numbers,
    "arrays": arrays,
    "texts": texts,
    "mixture": several,
    "at once": Many,
}


def loader_of(dataset, *, workers=0, sampler=False, collate_fn=None, **options):
    how = (
        {"batch_sampler": Own()}
        if sampler
        else {"batch_size": 4, "shuffle": True}
    )
    return sharded(
        DataLoader(dataset, num_workers=workers, collate_fn=collate_fn, **how),
        ONE,
        **options,
    )


def saved_after(loader, steps):
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize(
    ("draw", "workers"),
    [
        (np.random.rand, 0),
        (np.random.rand, 2),
        (lambda: float(paddle.rand([])), 2),
    ],
)
def test_samples_that_draw_are_the_same_after_a_later_resume(draw, workers):
    def made():
        return loader_of(
            Made(lambda i: np.array([i, draw()]), LENGTH), workers=workers
        )

    loader = made()
    straight = [locals_of(loader) for _ in range(2)]
    again = made()
    again.load_state_dict(saved_after_epochs(made(), 1, 2))
    assert locals_of(again) == straight[1][2:]


@pytest.mark.parametrize(
    ("kind", "workers", "steps"),
    [*((kind, 0, 1) for kind in KINDS), ("numbers", 2, 6)],
)
def test_identity_of_a_state_refuses_data_of_another_version(
    kind, workers, steps
):
    state = saved_after(loader_of(KINDS[kind](0), workers=workers), steps)
    same, other, overridden = (
        loader_of(KINDS[kind](version), workers=workers)
        for version in (0, 1, 1)
    )
    same.load_state_dict(state)
    other.load_state_dict(state)
    overridden.load_state_dict(state, override=["data"])

    resumed = [sum(1 for _ in same) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(
            StateError,
            match=r"the data is not what it was .*sample .* override=\['data'\]",
        ):
            iter(other)
    assert [sum(1 for _ in overridden) for _ in range(2)] == resumed


@pytest.mark.parametrize("steps", [1, 3])
def test_identity_is_compared_with_a_sampler_of_the_users(steps):
    state = saved_after(loader_of(numbers(0), sampler=True), steps)
    other = loader_of(numbers(1), sampler=True)
    other.load_state_dict(state)
    with pytest.raises(StateError, match="the data is not what it was"):
        iter(other)


def test_identity_is_compared_at_once_by_a_loader_that_has_read():
    state = saved_after(loader_of(numbers(0)), 2)
    other = loader_of(numbers(1))
    next(iter(other))
    with pytest.raises(StateError, match="the data is not what it was"):
        other.load_state_dict(state)


def test_identity_is_read_once_and_reads_two_samples():
    reads = []
    loader = loader_of(Made(lambda i: reads.append(i) or np.array(i), LENGTH))
    for _ in range(2):
        list(loader)

    assert len(reads) == 2 * LENGTH + 2 * 2
    assert len(set(reads[:4])) <= 2


def test_identity_is_not_known_without_verify():
    state = saved_after(loader_of(numbers(0), verify=None), 2)
    assert state["data"] is None
    other = loader_of(numbers(1), verify=None)
    other.load_state_dict(state)
    assert sum(1 for _ in other) == 4


def saved_after_epochs(loader, epochs, steps):
    for _ in range(epochs):
        for _ in loader:
            pass
    return saved_after(loader, steps)


def test_samples_that_are_never_the_same_are_a_warning(caplog, monkeypatch):
    monkeypatch.setattr("paddle_shard.core.warn_once._WARNED", set())
    noise = np.random.default_rng()
    dataset = Made(lambda i: np.array([i, noise.random()]), LENGTH)
    state = saved_after(loader_of(dataset), 2)
    again = loader_of(dataset)
    again.load_state_dict(state)

    assert sum(1 for _ in again) == 4
    assert caplog.text.count("not the same each time they are read") == 1


@pytest.mark.parametrize(
    "made",
    [
        lambda n: bytearray(b"%d" % n),
        lambda n: decimal.Decimal(n),
        lambda n: datetime.date(2020, 1, 1 + n),
        lambda n: np.array([n, "x"], object),
    ],
)
def test_digests_tell_kinds_of_values_apart(made):
    def data(version):
        return loader_of(
            Made(lambda i: (np.array(i), made(version)), LENGTH),
            collate_fn=lambda rows: np.stack([row[0] for row in rows]),
        )

    state = saved_after(data(0), 2)
    same, other = data(0), data(1)
    same.load_state_dict(state)
    other.load_state_dict(state)
    assert sum(1 for _ in same) == 4
    with pytest.raises(StateError, match="the data is not what it was"):
        next(iter(other))


@pytest.mark.parametrize("workers", [0, 2])
def test_sampler_items_may_be_lists_for_a_collate_fn(
    workers,
):
    """As PaddleScience has them, whose data sets read a whole list of indices at once."""
    data = Made(lambda indices: np.array(indices), 10)
    inner = BatchSampler(data, shuffle=True, batch_size=4)

    def made():
        outer = BatchSampler(sampler=inner, batch_size=1)
        given = DataLoader(
            data,
            batch_sampler=outer,
            collate_fn=lambda one: one[0],
            num_workers=workers,
        )
        return sharded(given, mesh([[0, 1]], "dp", "mp"))

    ranks = on_each_rank(range(2), lambda: locals_of(made()))
    one = ranks[0]
    assert ranks[1] == one
    assert sorted(row for batch in one for row in batch) == list(range(10))
    with simulated_rank(0, 2):
        loader = made()
        next(batches := iter(loader))
        state = loader.state_dict()
        batches.close()
        resumed = made()
        resumed.load_state_dict(state)
        assert locals_of(resumed) == one[1:]
