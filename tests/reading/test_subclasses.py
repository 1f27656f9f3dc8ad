"""Subclasses of DataLoader, and what a collate_fn may return."""

from itertools import islice

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.io import DataLoader

from paddle_shard.errors import BatchStructureError, DataReadError
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import Made, local, locals_of, sharded


@pytest.mark.parametrize("workers", [0, 2])
def test_arrays_without_elements_arrive(workers):
    empty = Made(lambda i: (np.array(i), np.zeros((0, 3), "float32")))

    _, got = next(iter(sharded(DataLoader(empty, batch_size=4, num_workers=workers))))

    assert (got.shape, got.dtype) == ([4, 0, 3], paddle.float32)


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_stop_gradients_as_paddles_do(workers):
    def sample(i):
        return paddle.to_tensor([float(i)], stop_gradient=False)

    assert next(iter(sharded(DataLoader(Made(sample), batch_size=4, num_workers=workers)))).stop_gradient


class Delegates(DataLoader):
    def __getattr__(self, name):
        return getattr(self.dataset, name)


def test_a_subclass_that_delegates_attributes_is_read():
    assert locals_of(sharded(Delegates(Made(length=4), batch_size=4))) == [[0, 1]]


class Twice(DataLoader):
    def __iter__(self):
        yield from super().__iter__()
        yield from super().__iter__()


class Own(DataLoader):
    def __iter__(self):
        return DataLoader.__iter__(self)


@pytest.mark.parametrize(("cls", "text"), [(Twice, "more than once"), (Own, "yields more batches .*super")])
def test_a_subclass_that_cannot_be_followed_says_so(cls, text):
    with pytest.raises(BatchStructureError, match=text):
        locals_of(sharded(cls(Made(length=4), batch_size=4)))


def every_other(batches):
    return (batch for number, batch in enumerate(batches) if number % 2 == 0)


def in_pairs(batches):
    for one in batches:
        two = next(batches, None)
        if two is not None:
            yield two
        yield one


def joined(batches):
    return (paddle.concat([one, next(batches)]) for one in batches)


def twice_each(batches):
    return (again for batch in batches for again in (batch, batch))


def read_ahead(batches):
    ahead = next(batches)
    for batch in batches:
        yield ahead
        ahead = batch
    yield ahead


def changed(batches):
    return (batch * 1 for batch in batches)


def but_the_last(batches):
    last = next(batches)
    for batch in batches:
        yield last
        last = batch


# What the subclass does to its batches, and how many come before it is refused.
REFUSED = {
    "drops each second": (every_other, 1),
    "drops the first": (lambda batches: islice(batches, 1, None), 0),
    "drops the last": (but_the_last, 5),
    "stops early": (lambda batches: islice(batches, 3), 3),
    "asks for nothing": (lambda batches: iter(()), 0),
    "reorders": (in_pairs, 0),
    "joins": (joined, 0),
    "repeats each": (twice_each, 1),
    "drops and changes": (lambda batches: changed(every_other(batches)), 1),
    "reorders and changes": (lambda batches: changed(in_pairs(batches)), 0),
    "reads ahead and changes": (lambda batches: changed(read_ahead(batches)), 0),
}
FOLLOWED = {
    "hands them on": lambda batches: batches,
    "changes": changed,
    "reads ahead": read_ahead,
    "takes as many as there are": lambda batches: (next(batches) for _ in range(6)),
}


def with_own_iter(way, workers):
    class OfTheirOwn(DataLoader):
        def __iter__(self):
            return way(super().__iter__())

    return sharded(OfTheirOwn(Made(length=24), batch_size=4, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_a_subclass_that_drops_or_reorders_batches_is_refused_where_it_does(name, workers):
    way, come = REFUSED[name]
    loader = with_own_iter(way, workers)
    batches, found = iter(loader), []
    with pytest.raises(BatchStructureError, match=r"__iter__ .*(super|each batch|drops)"):
        for batch in batches:
            found.append(local(batch))

    assert found == locals_of(sharded(DataLoader(Made(length=24), batch_size=4)))[:come]
    assert loader.state_dict()["steps"] == come
    assert loader.epoch == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_subclass_that_keeps_its_batches_and_their_order_is_followed(name, workers):
    expected = locals_of(sharded(DataLoader(Made(length=24), batch_size=4)))
    loader = with_own_iter(FOLLOWED[name], workers)

    assert [locals_of(loader) for _ in range(2)] == [expected, expected]


class ReadsForItself(DataLoader):
    """Has a DataLoader inside, and hands on what that yields, as PaddleNLP's DistDataLoader; a pass at a time."""

    def __init__(self, rank, workers):
        super().__init__(Made(length=10), batch_size=2)  # of which nothing is read
        rows = list(range(4 * rank, 4 * rank + 4)) + list(range(10 + 4 * rank, 14 + 4 * rank))
        self._inner = DataLoader(Made(lambda i: rows[i], length=8), batch_size=2, num_workers=workers)
        self._batches = None

    def __iter__(self):
        return self

    def __next__(self):
        if self._batches is None:
            self._batches = iter(self._inner)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise


@pytest.mark.parametrize("workers", [0, 2])
def test_a_subclass_that_reads_for_itself_is_taken_as_it_comes_where_the_data_is_split(workers):
    def run():
        loader = sharded(ReadsForItself(dist.get_rank(), workers), is_dataset_splitted=True)
        return [[local(batch) for batch in loader] for _ in range(2)]

    got = on_each_rank(range(2), run)

    assert got[0] == [[[0, 1], [2, 3], [10, 11], [12, 13]]] * 2
    assert got[1] == [[[4, 5], [6, 7], [14, 15], [16, 17]]] * 2
    with pytest.raises(BatchStructureError, match="yields more batches than it was asked for"):
        next(iter(sharded(ReadsForItself(0, 0))))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("dtype", "text"), [(">f4", "in another byte order"), (np.longdouble, "no tensors of dtype float128")]
)
def test_arrays_that_no_tensor_can_hold_are_named(dtype, text, workers):
    def collate(samples):
        return np.zeros((len(samples), 2), dtype)

    with pytest.raises(DataReadError, match=text):
        next(iter(sharded(DataLoader(Made(), batch_size=4, num_workers=workers, collate_fn=collate))))


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_without_a_text_is_reported(workers):
    def sample(i):
        raise Mute

    with pytest.raises(DataReadError, match="Mute: .its text cannot be had"):
        next(iter(sharded(DataLoader(Made(sample), batch_size=4, num_workers=workers))))


def into_one_array(batches):
    array = np.zeros(2, "int64")  # the rows of this rank
    for batch in batches:
        array[:] = batch.numpy()
        yield array


@pytest.mark.parametrize("workers", [0, 2])
def test_arrays_that_a_subclass_yields_are_placed_and_may_be_used_again(workers):
    expected = locals_of(sharded(DataLoader(Made(length=24), batch_size=4)))
    held = list(with_own_iter(into_one_array, workers))

    assert all(batch.is_dist() for batch in held)
    assert [local(batch) for batch in held] == expected
