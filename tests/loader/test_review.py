"""Uses that a demanding user makes, each of which once went wrong."""

import sys
from itertools import islice

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.io import BatchSampler, DataLoader, Dataset, DistributedBatchSampler

import paddle_shard
from paddle_shard.errors import ArgumentError, BatchStructureError, DataReadError, SplitError
from paddle_shard.loader import say_once
from paddle_shard.testing.simulated import on_each_rank, simulated_rank


class Make(Dataset):
    def __init__(self, function=np.array, length=16):
        self.function, self.length = function, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.function(index)


def mesh(ids, *names):
    return dist.ProcessMesh(ids, dim_names=list(names) or ["dp"])


DP2 = mesh([0, 1])
ONE = mesh([0])


def sharded(given, meshes=DP2, dims="dp", **options):
    return paddle_shard.shard_dataloader(given, meshes, shard_dims=dims, **options)


def ids(loader):
    return [batch._local_value().numpy().tolist() for batch in loader]


# Samplers that split already


class DuckDistributed(BatchSampler):
    """As PaddleNLP's: no subclass of Paddle's distributed sampler, but with its attributes."""

    def __init__(self, dataset, batch_size, nranks, rank):
        super().__init__(dataset, batch_size=batch_size)
        self.length, self.nranks, self.local_rank = len(dataset), nranks, rank

    def __iter__(self):
        step = self.batch_size * self.nranks
        for first in range(self.local_rank * self.batch_size, self.length, step):
            yield list(range(first, first + self.batch_size))

    def __len__(self):
        return self.length // (self.batch_size * self.nranks)


def test_a_sampler_with_nranks_is_not_split_again():
    got = on_each_rank(
        range(2), lambda: ids(sharded(DataLoader(Make(), batch_sampler=DuckDistributed(Make(), 4, 2, dist.get_rank()))))
    )

    assert got == {0: [[0, 1, 2, 3], [8, 9, 10, 11]], 1: [[4, 5, 6, 7], [12, 13, 14, 15]]}


def distributed(length=16, batch_size=2, ranks=2, cls=DistributedBatchSampler, **options):
    return cls(Make(length=length), batch_size, num_replicas=ranks, rank=dist.get_rank(), **options)


def test_the_padding_of_paddles_sampler_is_marked():
    def run():
        batches = iter(sharded(DataLoader(Make(length=7), batch_sampler=distributed(7))))
        return [(b._local_value().numpy().tolist(), batches.valid._local_value().numpy().tolist()) for b in batches]

    got = on_each_rank(range(2), run)

    assert got[1][-1] == ([6, 0], [True, False])


def test_meshes_that_order_the_ranks_otherwise_refuse_data_that_is_split():
    pairs = Make(lambda i: (np.array(i), np.array(i)))
    with simulated_rank(0, 2):
        sampler = DuckDistributed(pairs, 2, 2, 0)
        with pytest.raises(SplitError, match=r"global rank 0 has the data ranks \[0, 1\]"):
            sharded(DataLoader(pairs, batch_sampler=sampler), [mesh([0, 1]), mesh([1, 0])])


def test_a_rank_on_no_mesh_gets_metadata_of_split_data_too():
    pairs = Make(lambda i: (np.array(i), np.array(i)), 8)

    def run():
        given = DataLoader(pairs, batch_size=2)
        loader = sharded(given, [mesh([0, 1]), mesh([4, 5])], is_dataset_splitted=True)
        return [[leaf.shape for leaf in batch] for batch in loader]

    got = on_each_rank([0, 2, 4], run)

    assert got[0] == got[2] == got[4] == [[[4], [4]]] * 4


def test_split_items_are_refused_at_construction():
    with pytest.raises(ArgumentError, match="is_dataset_splitted=True needs a DataLoader with a batch size"):
        sharded(DataLoader(Make(), batch_size=None), is_dataset_splitted=True)


@pytest.mark.parametrize("cls", [DistributedBatchSampler, type("Sub", (DistributedBatchSampler,), {})])
def test_a_look_consumes_no_epoch_of_paddles_sampler(cls):
    loader = sharded(DataLoader(Make(), batch_sampler=distributed(cls=cls, shuffle=True)))
    next(iter(loader))

    pairs = [(a, b) for a, b in zip(ids(loader), ids(loader), strict=True)]

    assert loader.epoch == 2
    loader.set_epoch(0)
    assert all(a != b for a, b in pairs)
    assert ids(loader) == [a for a, _ in pairs]


def test_the_epoch_of_paddles_sampler_is_the_loaders():
    sampler = distributed(shuffle=True)
    loader = sharded(DataLoader(Make(), batch_sampler=sampler))
    orders = []
    for epoch in (0, 0, np.int64(2), np.int64(2)):
        sampler.set_epoch(epoch)
        orders.append(ids(loader))

    assert orders[0] == orders[1] != orders[2] == orders[3]
    assert (loader.epoch, sampler.epoch) == (3, 3)


# Samplers with a state


class OwnRandom(BatchSampler):
    def __init__(self, length, batch_size):
        super().__init__(Make(length=length), batch_size=batch_size)
        self.length, self.random = length, np.random.RandomState(0)

    def __iter__(self):
        order = self.random.permutation(self.length).tolist()
        yield from (order[k : k + self.batch_size] for k in range(0, self.length, self.batch_size))


def test_neither_len_nor_describing_moves_a_sampler():
    def loader():
        return sharded(DataLoader(Make(), batch_sampler=OwnRandom(16, 4)), tail="drop")

    expected = ids(loader())
    asked = loader()
    assert len(asked) == 4
    pairs = Make(lambda i: (np.array(i), np.array(i)))
    described = sharded(DataLoader(pairs, batch_sampler=OwnRandom(16, 4)))
    from paddle_shard.loader.iteration import describe

    describe(described._first_batch)

    assert ids(asked) == expected
    assert [x._local_value().numpy().tolist() for x, _ in described] == expected


class Epochs:
    """A sampler of indices that has a set_epoch."""

    epoch = 0

    def __iter__(self):
        return iter([(i + self.epoch) % 8 for i in range(8)])

    def __len__(self):
        return 8

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_set_epoch_reaches_the_sampler_inside_a_batch_sampler():
    loader = sharded(DataLoader(Make(), batch_sampler=BatchSampler(sampler=Epochs(), batch_size=4)))

    loader.set_epoch(1)

    assert ids(loader)[0] == [1, 2]


def test_an_iterator_keeps_its_epoch():
    class Batches(BatchSampler):
        epoch = 0

        def __iter__(self):
            yield [self.epoch, 1 + self.epoch]

        def set_epoch(self, epoch):
            self.epoch = epoch

    loader = sharded(DataLoader(Make(), batch_sampler=Batches(Make(), batch_size=2)))
    batches = iter(loader)
    loader.set_epoch(3)

    assert (ids(batches), batches.epoch) == ([[0]], 0)


def test_none_in_a_sampler_is_an_error():
    class Holes(BatchSampler):
        def __iter__(self):
            yield from ([0, 1], None, [2, 3])

    with pytest.raises(TypeError, match="must yield lists of indices, got NoneType at step 1"):
        ids(sharded(DataLoader(Make(), batch_sampler=Holes(Make(), batch_size=2))))


def test_dropping_everything_is_an_error_with_a_sampler_too():
    given = DataLoader(Make(), batch_sampler=BatchSampler(sampler=[1, 2, 3], batch_size=4, drop_last=True))

    with pytest.raises(ArgumentError, match="tail='drop' leaves no batch: the loader's list has 3 samples"):
        sharded(given)


# Fields


def test_a_replicated_field_of_another_mesh_has_its_global_shape_everywhere():
    pairs = Make(lambda i: (np.array(i), np.array([i, i])))

    def run():
        return [leaf.shape for leaf in next(iter(sharded(DataLoader(pairs, batch_size=4), METHES, ["dp", None])))]

    METHES = [mesh([0, 1]), mesh([2, 3])]
    got = on_each_rank(range(5), run)

    assert all(shapes == [[4], [4, 2]] for shapes in got.values())


def test_valid_is_placed_as_the_last_field():
    fields = Make(lambda i: {"x": np.arange(4), "y": np.array(i)})
    four = mesh([[0, 1], [2, 3]], "dp", "sep")

    def run():
        batches = iter(sharded(DataLoader(fields, batch_size=4), four, placements={"x": {"sep": 1}}))
        batch = next(batches)
        return batches.valid._local_value().shape, batch["y"]._local_value().shape

    got = on_each_rank(range(4), run)

    assert all(valid == y == [2] for valid, y in got.values())


def test_what_has_an_item_for_each_row_is_cut_like_the_rows():
    def collate(samples):
        names = [f"s{i}" for i in samples]
        return [np.array(samples), np.array(names), names, [{"id": n} for n in names], [None, *names[1:]], np.ones(3)]

    def run():
        loader = sharded(DataLoader(Make(int), batch_size=4, collate_fn=collate), [DP2] * 6, ["dp"] * 5 + [None])
        return next(iter(loader))

    got = on_each_rank(range(2), run)[1]

    assert got[1].tolist() == got[2] == ["s2", "s3"]
    assert got[3] == [{"id": "s2"}, {"id": "s3"}]
    assert got[4] == ["s2", "s3"]


def test_a_dict_cannot_have_a_list_of_meshes():
    fields = Make(lambda i: ({"a": np.array(i)}, np.array(i)))

    with pytest.raises(BatchStructureError, match="is a dict, but its entry in meshes is a list of 2"):
        next(iter(sharded(DataLoader(fields, batch_size=4), [[DP2, DP2], DP2])))


def test_items_that_are_batches_are_counted_by_a_field_that_is_split():
    item = Make(lambda i: [np.arange(3), np.arange(4)], 2)

    batch = next(iter(sharded(DataLoader(item, batch_size=None), [DP2, DP2], [None, "dp"])))

    assert [leaf._local_value().shape for leaf in batch] == [[3], [2]]


def test_a_collate_that_pads_texts_to_the_longest_is_refused():
    def pad(samples):
        longest = max(map(len, samples))
        return np.array([[ord(c) for c in s.ljust(longest)] for s in samples])

    loader = sharded(DataLoader(Make(lambda i: "a" * (i + 1)), batch_size=4, collate_fn=pad))
    with pytest.raises(DataReadError, match="pads to the longest row"):
        next(iter(loader))
    alone = sharded(DataLoader(Make(lambda i: "a" * (i + 1)), batch_size=4, collate_fn=pad), mesh([0]))
    assert next(iter(alone)).shape == [4, 4], "with one data rank there are no others"


# The user's DataLoader


@pytest.mark.parametrize("workers", [0, 2])
def test_arrays_without_elements_arrive(workers):
    empty = Make(lambda i: (np.array(i), np.zeros((0, 3), "float32")))

    _, got = next(iter(sharded(DataLoader(empty, batch_size=4, num_workers=workers))))

    assert (got.shape, got.dtype) == ([4, 0, 3], paddle.float32)


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_stop_gradients_as_paddles_do(workers):
    def sample(i):
        return paddle.to_tensor([float(i)], stop_gradient=False)

    assert next(iter(sharded(DataLoader(Make(sample), batch_size=4, num_workers=workers)))).stop_gradient


class Delegates(DataLoader):
    def __getattr__(self, name):
        return getattr(self.dataset, name)


def test_a_subclass_that_delegates_attributes_is_read():
    assert ids(sharded(Delegates(Make(length=4), batch_size=4))) == [[0, 1]]


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
        ids(sharded(cls(Make(length=4), batch_size=4)))


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

    return sharded(OfTheirOwn(Make(length=24), batch_size=4, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_a_subclass_that_drops_or_reorders_batches_is_refused_where_it_does(name, workers):
    way, come = REFUSED[name]
    loader = with_own_iter(way, workers)
    batches, found = iter(loader), []
    with pytest.raises(BatchStructureError, match=r"__iter__ .*(super|each batch|drops)"):
        for batch in batches:
            found.append(batch._local_value().numpy().tolist())

    assert found == ids(sharded(DataLoader(Make(length=24), batch_size=4)))[:come]
    assert loader.state_dict()["steps"] == come
    assert loader.epoch == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_subclass_that_keeps_its_batches_and_their_order_is_followed(name, workers):
    expected = ids(sharded(DataLoader(Make(length=24), batch_size=4)))
    loader = with_own_iter(FOLLOWED[name], workers)

    assert [ids(loader) for _ in range(2)] == [expected, expected]


class ReadsForItself(DataLoader):
    """Has a DataLoader inside, and hands on what that yields, as PaddleNLP's DistDataLoader; a pass at a time."""

    def __init__(self, rank, workers):
        super().__init__(Make(length=10), batch_size=2)  # of which nothing is read
        rows = list(range(4 * rank, 4 * rank + 4)) + list(range(10 + 4 * rank, 14 + 4 * rank))
        self._inner = DataLoader(Make(lambda i: rows[i], length=8), batch_size=2, num_workers=workers)
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
        return [[batch._local_value().numpy().tolist() for batch in loader] for _ in range(2)]

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
        next(iter(sharded(DataLoader(Make(), batch_size=4, num_workers=workers, collate_fn=collate))))


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_without_a_text_is_reported(workers):
    def sample(i):
        raise Mute

    with pytest.raises(DataReadError, match="Mute: .its text cannot be had"):
        next(iter(sharded(DataLoader(Make(sample), batch_size=4, num_workers=workers))))


def test_a_closed_iterator_consumes_no_epoch():
    loader = sharded(DataLoader(Make(), batch_size=4))
    batches = iter(loader)
    next(batches)
    batches.close()

    assert list(batches) == []
    assert loader.epoch == 0


# Arguments


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dims": []}, "shard_dims is an empty list"),
        ({"dense_tensor_idx": [None, []]}, "dense_tensor_idx must be a list with a list"),
        ({"dense_tensor_idx": 1}, "dense_tensor_idx must be a list with a list"),
    ],
)
def test_arguments_are_checked_at_construction(options, text):
    with pytest.raises(ArgumentError, match=text):
        sharded(DataLoader(Make(), batch_size=4), **options)


def test_patching_survives_odd_modules_and_refuses_unknown_options(monkeypatch):
    monkeypatch.setitem(sys.modules, "blocked", None)
    original = dist.shard_dataloader
    with pytest.raises(ArgumentError, match=r"unknown options \['tale'\]"):
        paddle_shard.patch_paddle(tale="fill")
    assert dist.shard_dataloader is original
    with paddle_shard.patch_paddle():
        assert dist.shard_dataloader is not original
    assert dist.shard_dataloader is original


def test_a_loop_that_was_left_is_said_to_begin_again_once(caplog, monkeypatch):
    monkeypatch.setattr(say_once, "_SAID", set())
    loader = sharded(DataLoader(Make(length=8), batch_size=4), ONE)

    def said():
        return [text for record in caplog.records if "begins the same epoch again" in (text := record.getMessage())]

    list(loader), list(zip(loader, loader, strict=True))
    loader.set_epoch(3)
    for _ in loader:
        break
    loader.set_epoch(4)
    iterator = iter(loader)
    next(iterator)
    list(iterator)
    assert said() == []
    for _ in range(2):
        next(iter(loader))
    list(loader)
    assert len(said()) == 1
