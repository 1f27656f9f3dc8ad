"""Samplers that split already, that have a state, an epoch or holes."""

import json
from itertools import chain

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.io import (
    BatchSampler,
    DataLoader,
    DistributedBatchSampler,
    RandomSampler,
)

from paddle_shard import Packed
from paddle_shard.errors import ArgumentError, SplitError, StateError
from paddle_shard.testing.simulated import on_each_rank, simulated_rank
from tests.helpers import ONE, Made, local, locals_of, mesh, sharded

# Samplers that split already


class DuckDistributed(BatchSampler):
    """As PaddleNLP's: no subclass of Paddle's distributed sampler, but with its attributes."""

    def __init__(self, dataset, batch_size, nranks, rank):
        super().__init__(dataset, batch_size=batch_size)
        self.length, self.nranks, self.local_rank = len(dataset), nranks, rank

    def __iter__(self):
        step = self.batch_size * self.nranks
        for first in range(
            self.local_rank * self.batch_size, self.length, step
        ):
            yield list(range(first, first + self.batch_size))

    def __len__(self):
        return self.length // (self.batch_size * self.nranks)


def test_sampler_with_nranks_is_not_split_again():
    got = on_each_rank(
        range(2),
        lambda: locals_of(
            sharded(
                DataLoader(
                    Made(),
                    batch_sampler=DuckDistributed(
                        Made(), 4, 2, dist.get_rank()
                    ),
                )
            )
        ),
    )

    assert got == {
        0: [[0, 1, 2, 3], [8, 9, 10, 11]],
        1: [[4, 5, 6, 7], [12, 13, 14, 15]],
    }


class OfTorch:
    """As torch's `DistributedSampler`, whose indices a batch sampler puts together."""

    def __init__(self, length, num_replicas, rank):
        self.length, self.num_replicas, self.rank = length, num_replicas, rank

    def __iter__(self):
        return iter(range(self.rank, self.length, self.num_replicas))

    def __len__(self):
        return len(range(self.rank, self.length, self.num_replicas))


def test_index_sampler_of_one_rank_is_refused_until_declared():
    def run(num_replicas=2, **options):
        sampler = BatchSampler(
            sampler=OfTorch(16, num_replicas, dist.get_rank() % num_replicas),
            batch_size=4,
        )
        return locals_of(
            sharded(DataLoader(Made(), batch_sampler=sampler), **options)
        )

    with pytest.raises(
        SplitError,
        match=r"OfTorch draws for rank=\d of num_replicas=2.*batch_size=rows of all ranks",
    ):
        on_each_rank(range(2), run)
    got = on_each_rank(range(2), lambda: run(is_dataset_splitted=True))
    assert got == {
        0: [[0, 2, 4, 6], [8, 10, 12, 14]],
        1: [[1, 3, 5, 7], [9, 11, 13, 15]],
    }
    whole = on_each_rank(range(2), lambda: run(1))
    assert [
        row
        for step in zip(*whole.values(), strict=True)
        for rows in step
        for row in rows
    ] == list(range(16))


class Own(BatchSampler):
    """Draws for one data rank, and has a state."""

    def __init__(self):
        self.batch_size, self.rest = 2, list(range(dist.get_rank(), 16, 2))

    def __iter__(self):
        while self.rest:
            batch, self.rest = self.rest[:2], self.rest[2:]
            yield batch

    def __len__(self):
        return 4

    def state_dict(self):
        return {"rest": self.rest}

    def load_state_dict(self, state):
        self.rest = list(state["rest"])


def test_sampler_state_is_refused_on_another_data_rank():
    def made():
        return sharded(
            DataLoader(Made(), batch_sampler=Own()), is_dataset_splitted=True
        )

    def stopped():
        loader = made()
        return local(next(iter(loader))), loader.state_dict()

    begun = on_each_rank(range(2), stopped)

    def resumed(given):
        loader = made()
        loader.load_state_dict(begun[given(dist.get_rank())][1])
        return locals_of(loader)

    rest = on_each_rank(range(2), lambda: resumed(lambda rank: rank))
    assert sorted(
        [*begun[0][0], *begun[1][0], *chain(*rest[0], *rest[1])]
    ) == list(range(16))
    with pytest.raises(
        StateError, match="data_rank=0, and this loader data_rank=1"
    ):
        on_each_rank(range(2), lambda: resumed(lambda rank: 0))


class Yielded(RandomSampler):
    """As torchdata's: its state is how many samples it has yielded, behind which it begins after it was loaded."""

    def __init__(self):
        self.yielded, self.next_yielded = 0, None

    def __iter__(self):
        rest = list(range(16))[self.next_yielded or 0 :]
        self.yielded, self.next_yielded = 16 - len(rest), None
        for index in rest:
            self.yielded += 1
            yield index

    def __len__(self):
        return 16

    def state_dict(self):
        return {"yielded": self.yielded}

    def load_state_dict(self, state):
        self.next_yielded = state["yielded"]


class ByEpoch(Yielded):
    """As torchdata's `StatefulDistributedSampler`: its order depends on the epoch, which its state does not have."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(16).tolist()
        return (order[index] for index in super().__iter__())


@pytest.mark.parametrize("kind", [Yielded, ByEpoch])
@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8])
def test_sampler_that_begins_behind_its_state_serves_all_epochs(kind, stop):
    def made():
        return sharded(
            DataLoader(
                Made(), batch_sampler=BatchSampler(sampler=kind(), batch_size=4)
            ),
            ONE,
        )

    def run(stop):
        loader, rows = made(), []
        while len(rows) < 12:
            for batch in loader:
                rows.append(local(batch))
                if len(rows) == stop:
                    state, loader = loader.state_dict(), made()
                    loader.load_state_dict(state)
                    break
        return rows

    straight = run(None)
    epochs = [list(chain(*straight[first : first + 4])) for first in (0, 4, 8)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(16))] * 3
    assert len({str(epoch) for epoch in epochs}) == (
        1 if kind is Yielded else 3
    )
    assert run(stop) == straight


def distributed(
    length=16, batch_size=2, ranks=2, cls=DistributedBatchSampler, **options
):
    return cls(
        Made(length=length),
        batch_size,
        num_replicas=ranks,
        rank=dist.get_rank(),
        **options,
    )


def test_padding_of_paddles_sampler_is_marked():
    def run():
        batches = iter(
            sharded(DataLoader(Made(length=7), batch_sampler=distributed(7)))
        )
        return [(local(b), local(batches.valid)) for b in batches]

    got = on_each_rank(range(2), run)

    assert got[1][-1] == ([6, 0], [True, False])


def test_split_data_is_refused_by_meshes_of_different_order():
    pairs = Made(lambda i: (np.array(i), np.array(i)))
    with simulated_rank(0, 2):
        sampler = DuckDistributed(pairs, 2, 2, 0)
        with pytest.raises(
            SplitError, match="gives global rank 0 different .data rank, number"
        ):
            sharded(
                DataLoader(pairs, batch_sampler=sampler),
                [mesh([0, 1]), mesh([1, 0])],
            )


def test_rank_on_no_mesh_gets_metadata_of_split_data_too():
    pairs = Made(lambda i: (np.array(i), np.array(i)), 8)

    def run():
        given = DataLoader(pairs, batch_size=2)
        loader = sharded(
            given, [mesh([0, 1]), mesh([4, 5])], is_dataset_splitted=True
        )
        return [[leaf.shape for leaf in batch] for batch in loader]

    got = on_each_rank([0, 2, 4], run)

    assert got[0] == got[2] == got[4] == [[[4], [4]]] * 4


def test_split_items_are_refused_at_construction():
    with pytest.raises(
        ArgumentError,
        match="is_dataset_splitted=True needs a DataLoader with a batch size",
    ):
        sharded(DataLoader(Made(), batch_size=None), is_dataset_splitted=True)


@pytest.mark.parametrize(
    "cls",
    [DistributedBatchSampler, type("Sub", (DistributedBatchSampler,), {})],
)
def test_look_consumes_no_epoch_of_paddles_sampler(cls):
    loader = sharded(
        DataLoader(Made(), batch_sampler=distributed(cls=cls, shuffle=True))
    )
    next(iter(loader))

    pairs = [
        (a, b)
        for a, b in zip(locals_of(loader), locals_of(loader), strict=True)
    ]

    assert loader.epoch == 2
    loader.set_epoch(0)
    assert all(a != b for a, b in pairs)
    assert locals_of(loader) == [a for a, _ in pairs]


def test_epoch_of_paddles_sampler_is_the_loaders():
    sampler = distributed(shuffle=True)
    loader = sharded(DataLoader(Made(), batch_sampler=sampler))
    orders = []
    for epoch in (0, 0, np.int64(2), np.int64(2)):
        sampler.set_epoch(epoch)
        orders.append(locals_of(loader))

    assert orders[0] == orders[1] != orders[2] == orders[3]
    assert (loader.epoch, sampler.epoch) == (3, 3)


def test_packed_rows_in_paddles_order_are_those_of_the_run():
    def loader(window):
        rows = Packed([np.arange(8)] * 6, length=8, window=window)
        return sharded(
            DataLoader(
                rows,
                batch_sampler=DistributedBatchSampler(
                    rows, 2, num_replicas=1, rank=0
                ),
            ),
            ONE,
        )

    first = loader(4)
    next(iter(first))

    with pytest.raises(StateError, match="packed"):
        loader(3).load_state_dict(first.state_dict())


def test_sampler_of_paddle_that_leaves_no_batch_is_refused():
    with pytest.raises(
        ArgumentError, match="leaves no batch: the loader's Made has 3 samples"
    ):
        sharded(
            DataLoader(
                Made(),
                batch_sampler=DistributedBatchSampler(
                    Made(length=3), 4, 1, 0, drop_last=True
                ),
            ),
            ONE,
        )


# Samplers with a state


class OwnRandom(BatchSampler):
    def __init__(self, length, batch_size):
        super().__init__(Made(length=length), batch_size=batch_size)
        self.length, self.random = length, np.random.RandomState(0)

    def __iter__(self):
        order = self.random.permutation(self.length).tolist()
        yield from (
            order[k : k + self.batch_size]
            for k in range(0, self.length, self.batch_size)
        )


def test_neither_len_nor_describing_moves_a_sampler():
    def loader(**options):
        return sharded(
            DataLoader(Made(), batch_sampler=OwnRandom(16, 4)), **options
        )

    with pytest.raises(
        TypeError, match="len.loader.: .* show only at its end.*__len__"
    ):
        len(loader(tail="drop"))
    expected = locals_of(loader(tail="drop"))
    asked = loader()
    assert len(asked) == 4
    pairs = Made(lambda i: (np.array(i), np.array(i)))
    described = sharded(DataLoader(pairs, batch_sampler=OwnRandom(16, 4)))
    from paddle_shard.loader.iteration import describe_inputs

    describe_inputs(described._first_batch)

    assert locals_of(asked) == expected
    assert [local(x) for x, _ in described] == expected


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
    loader = sharded(
        DataLoader(
            Made(), batch_sampler=BatchSampler(sampler=Epochs(), batch_size=4)
        )
    )

    loader.set_epoch(1)

    assert locals_of(loader)[0] == [1, 2]


def test_iterator_keeps_its_epoch():
    class Batches(BatchSampler):
        epoch = 0

        def __iter__(self):
            yield [self.epoch, 1 + self.epoch]

        def set_epoch(self, epoch):
            self.epoch = epoch

    loader = sharded(
        DataLoader(Made(), batch_sampler=Batches(Made(), batch_size=2))
    )
    batches = iter(loader)
    loader.set_epoch(3)

    assert (locals_of(batches), batches.epoch) == ([[0]], 0)


def test_none_in_a_sampler_is_an_error():
    class Holes(BatchSampler):
        def __iter__(self):
            yield from ([0, 1], None, [2, 3])

    with pytest.raises(
        TypeError, match="must yield lists of indices, got NoneType at step 1"
    ):
        locals_of(
            sharded(
                DataLoader(Made(), batch_sampler=Holes(Made(), batch_size=2))
            )
        )


def test_dropping_everything_is_an_error_with_a_sampler_too():
    given = DataLoader(
        Made(),
        batch_sampler=BatchSampler(
            sampler=[1, 2, 3], batch_size=4, drop_last=True
        ),
    )

    with pytest.raises(
        ArgumentError,
        match="tail='drop' leaves no batch: the loader's list has 3 samples",
    ):
        sharded(given)


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("stop", [2, 6, 7, 13])
def test_sampler_set_epoch_is_called_alike_after_a_resume(inner, stop):
    """Only the resumed one told it, so that they drew other samples."""

    class Shuffled(paddle.io.Sampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(
                np.random.RandomState(self.epoch).permutation(24).tolist()
            )

        def __len__(self):
            return 24

    class Batches(paddle.io.BatchSampler):
        epoch = 0

        def __init__(self):
            self.batch_size = 4

        set_epoch = Shuffled.set_epoch

        def __iter__(self):
            return iter(
                np.random.RandomState(self.epoch)
                .permutation(24)
                .reshape(6, 4)
                .tolist()
            )

        def __len__(self):
            return 6

    def made():
        own = (
            paddle.io.BatchSampler(sampler=Shuffled(), batch_size=4)
            if inner
            else Batches()
        )
        return sharded(DataLoader(Made(length=24), batch_sampler=own), ONE)

    loader = made()
    straight = [local(batch) for _ in range(3) for batch in loader]
    assert len({tuple(rows) for rows in straight}) == 18

    loader, found, state = made(), [], None
    while state is None:
        for batch in loader:
            found.append(local(batch))
            if len(found) == stop:
                state = loader.state_dict()
                break
    again = made()
    again.load_state_dict(state)
    while len(found) < 18:
        found += [local(batch) for batch in again]
    assert found == straight


class Heavy(Made):
    def __deepcopy__(self, memo):
        raise AssertionError("copied")


class Stateful(BatchSampler):
    """Has a state, so that each pass has its own copy."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    "given",
    [{"dataset": Heavy(length=8)}, {"sampler": RandomSampler(Heavy(length=8))}],
)
def test_sampler_copy_shares_the_data_set(given):
    loader = sharded(
        DataLoader(
            Made(length=8), batch_sampler=Stateful(**given, batch_size=4)
        ),
        ONE,
    )

    for _ in range(2):  # the second pass needs a copy
        assert sorted(
            row for batch in locals_of(loader) for row in batch
        ) == list(range(8))


class Counts(BatchSampler):
    """Batches of three, and a state that JSON changes: its keys are ints."""

    def __init__(self, extra=None):
        self.at, self.batch_size, self.extra = (
            0,
            3,
            {10: 1, 9: (2,)} if extra is None else extra,
        )

    def __len__(self):
        return 10

    def __iter__(self):
        for at in range(self.at, 30, 3):
            self.at = at + 3
            yield [at, at + 1, at + 2]
        self.at = 0

    def state_dict(self):
        return {"at": self.at, **self.extra}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize(
    "way",
    [lambda state: state, lambda state: json.loads(json.dumps(state))],
    ids=["as it is", "JSON"],
)
def test_sampler_state_is_covered_by_the_checksum(way):
    def loader(extra=None):
        return sharded(
            DataLoader(Made(np.int64, 30), batch_sampler=Counts(extra)), ONE
        )

    begun = loader()
    batches = iter(begun)
    for _ in range(4):
        next(batches)
    resumed = loader()
    resumed.load_state_dict(way(begun.state_dict()))
    assert local(next(iter(resumed))) == [12, 13, 14]
    changed = way(begun.state_dict())
    changed["sampler"] = {
        **changed["sampler"],
        "now": {**changed["sampler"]["now"], "at": 15},
    }
    with pytest.raises(
        StateError, match="its content is not that of its checksum"
    ):
        loader().load_state_dict(changed)
    other = loader({"set": {1, 2}})  # which no JSON holds
    batches = iter(other)
    next(batches)
    resumed = loader({"set": set()})
    resumed.load_state_dict(other.state_dict())
    assert local(next(iter(resumed))) == [3, 4, 5]


# Samplers with a state of their own


class Right(BatchSampler):
    """Shuffled by its own epoch, which its state holds; it counts a batch before it yields it."""

    def __init__(self):
        self.position, self.ended, self.batch_size, self.drop_last = (
            0,
            0,
            4,
            False,
        )

    def order(self):
        return (
            np.random.RandomState(self.ended)
            .permutation(40)
            .reshape(10, 4)
            .tolist()
        )

    def __iter__(self):
        batches = self.order()
        while self.position < 10:
            self.position += 1
            yield batches[self.position - 1]
        self.position, self.ended = 0, self.ended + 1

    def __len__(self):
        return 10

    def state_dict(self):
        return {"position": self.position, "ended": self.ended}

    def load_state_dict(self, state):
        self.position, self.ended = state["position"], state["ended"]


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("stops", [(2,), (7,), (12,), (2, 3, 4), (10, 5)])
def test_sampler_with_a_state_draws_each_sample_once(stops, inner):
    def made():
        sampler = (
            Right()
            if not inner
            else BatchSampler(sampler=OfBatches(Right()), batch_size=4)
        )
        return sharded(DataLoader(Made(length=40), batch_sampler=sampler), ONE)

    def steps(loader, most):
        found = []
        while len(found) < most and loader.epoch < 2:
            batches = iter(loader)
            for batch in batches:
                found.append(local(batch))
                if len(found) == most:
                    break
            state = json.loads(json.dumps(loader.state_dict()))
            batches.close()
        return found, state

    found, state = steps(made(), stops[0])
    for stop in (*stops[1:], 100):
        loader = made()
        loader.load_state_dict(state)
        more, state = steps(loader, stop)
        found += more

    assert (
        found
        == locals_of(made())
        + np.random.RandomState(1).permutation(40).reshape(10, 4).tolist()
    )


class OfBatches:
    """The indices of a batch sampler, one by one, with its state: right between two batches only."""

    def __init__(self, of):
        self.of = of

    def __iter__(self):
        for batch in self.of:
            yield from batch

    def __len__(self):
        return 40

    def state_dict(self):
        return self.of.state_dict()

    def load_state_dict(self, state):
        self.of.load_state_dict(state)


def test_paddles_sampler_keeps_its_own_seed():
    """In versions after 3.3, `DistributedBatchSampler(seed=)` shuffles by `RandomState(seed + epoch)`."""

    def made(seed):
        data = Made(length=12)
        sampler = DistributedBatchSampler(
            data, 4, num_replicas=1, rank=0, shuffle=True
        )
        sampler.seed = seed
        return sharded(DataLoader(data, batch_sampler=sampler), ONE)

    loader = made(seed=5)
    for epoch in range(2):
        rows = np.arange(12)
        np.random.RandomState(5 + epoch).shuffle(rows)
        assert locals_of(loader) == rows.reshape(3, 4).tolist()
    state = json.loads(json.dumps(loader.state_dict()))
    made(seed=5).load_state_dict(state)
    with pytest.raises(StateError, match="sampler_seed: saved 5, now 6"):
        made(seed=6).load_state_dict(state)
