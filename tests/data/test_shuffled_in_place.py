"""Data sets that change themselves as they are read, as by `random.shuffle(self.files)` in `__iter__`."""

import random

import numpy as np
import paddle
import pytest
from paddle.io import ChainDataset, DataLoader, IterableDataset

import paddle_shard
from paddle_shard.data.iterable import copy_for_reading
from tests.helpers import ONE, locals_of, sharded

FILES = 6


class Listed(IterableDataset):
    """Two samples of each file, in an order that it makes anew each time from the one before."""

    def __init__(self, files=range(FILES), kind=list):
        self.files = kind(files)

    def __iter__(self):
        self.shuffle()
        for file in list(self.files):
            yield from (np.array(2 * file), np.array(2 * file + 1))

    def shuffle(self):
        random.shuffle(self.files)


class OfArray(Listed):
    def __init__(self):
        super().__init__(kind=lambda files: np.array(files))

    def shuffle(self):
        np.random.shuffle(self.files)


class OfDict(Listed):
    def __init__(self):
        super().__init__()
        self.seen = {"epochs": 0}

    def shuffle(self):
        self.seen["epochs"] += 1
        random.shuffle(self.files)
        self.files = (
            self.files[self.seen["epochs"] :]
            + self.files[: self.seen["epochs"]]
        )


class Counting(Listed):
    """It counts its epochs by itself."""

    def __init__(self):
        super().__init__()
        self.epoch = 0

    def shuffle(self):
        random.Random(self.epoch).shuffle(self.files)
        self.epoch += 1


class Around(IterableDataset):
    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)


class Refuses(Listed):
    """It cannot be copied, so that it is read as it is."""

    def __copy__(self):
        raise TypeError("never")


class Closes(Listed):
    """A copy that goes would close what both have."""

    closed = 0

    def __del__(self):
        type(self).closed += 1


KINDS = {
    "a list": Listed,
    "an array": OfArray,
    "a dict": OfDict,
    "in another": lambda: Around(Listed()),
    "in a list": lambda: ChainDataset(
        [Listed(range(3)), Listed(range(3, FILES))]
    ),
}


def loader(data, workers=0, batch_size=4):
    return sharded(
        DataLoader(data, batch_size=batch_size, num_workers=workers), ONE
    )


@pytest.mark.parametrize("kind", KINDS)
def test_shuffled_list_order_depends_on_seed_and_epoch_only(
    kind,
):
    straight, beside = loader(KINDS[kind]()), loader(KINDS[kind](), workers=2)
    epochs = [locals_of(straight) for _ in range(3)]
    assert [locals_of(beside) for _ in range(3)] == epochs
    assert all(
        sorted(row for batch in epoch for row in batch)
        == list(range(2 * FILES))
        for epoch in epochs
    )
    before = loader(KINDS[kind]())
    for epoch in range(2):
        for step, _ in enumerate(before):
            if (epoch, step) == (1, 0):
                state = before.state_dict()
    resumed = loader(KINDS[kind]())
    resumed.load_state_dict(state)
    assert locals_of(resumed) == epochs[1][1:]
    assert locals_of(resumed) == epochs[2]


def test_shuffled_in_place_leaves_the_users_list():
    data = Around(Listed())
    for _ in range(2):
        locals_of(loader(data))
    assert data.inner.files == list(range(FILES))


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffled_copy_begins_with_the_users_number(workers):
    data = Around(Counting())
    batches = loader(data, workers)
    epochs = [locals_of(batches) for _ in range(2)]
    assert epochs[0] == epochs[1]
    assert data.inner.epoch == 0
    data.inner.epoch = 1
    assert locals_of(loader(data, workers)) != epochs[0]


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_shuffled_parts_have_lists_of_their_own(workers):
    class Split(Listed):
        """Shuffled alike in each part, as by an epoch that all know; then each takes every P-th file."""

        def shuffle(self):
            info = paddle.io.get_worker_info()
            random.Random(3).shuffle(self.files)
            self.files = self.files[info.id :: info.num_workers]

    stream = paddle_shard.Stream.of(Split(), splits_itself=True).in_parts(3)
    read = locals_of(loader(stream, workers, batch_size=3))
    assert sorted(row for batch in read for row in batch) == list(
        range(2 * FILES)
    )


@pytest.mark.parametrize("kind", [Refuses, Closes])
def test_shuffled_data_that_cannot_be_copied_is_read_as_it_is(kind):
    data = kind()
    assert sorted(
        row for batch in locals_of(loader(data)) for row in batch
    ) == list(range(2 * FILES))
    assert Closes.closed == 0
    del data


@pytest.mark.parametrize(
    ("length", "is_copied"), [(10, True), ((1 << 20) + 1, False)]
)
def test_long_list_is_the_data_itself_and_not_copied(length, is_copied):
    class Holds(IterableDataset):
        def __init__(self):
            self.rows = [0] * length

        def __iter__(self):
            return iter(self.rows)

    given = Holds()

    assert (copy_for_reading(given).rows is not given.rows) == is_copied
