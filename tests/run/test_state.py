"""A run that is stopped anywhere goes on with the next sample, on any mesh, and proves it."""

import copy
import json
from collections import Counter, defaultdict
from itertools import islice
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paddle.io import BatchSampler, DataLoader, Dataset, DistributedBatchSampler

import paddle_shard
from paddle_shard.core.warn_once import _SAID
from paddle_shard.errors import ArgumentError, ArgumentTypeError, StateError
from paddle_shard.plan.orders import PaddleSequential
from paddle_shard.plan.state import sealed
from paddle_shard.testing.simulated import on_each_rank, simulated_rank
from tests.orders_and_tails import BLOCKS, OF_ANY_MESH
from tests.trials import trials

ONE = dist.ProcessMesh([0], dim_names=["dp"])


class Ids(Dataset):
    def __init__(self, length):
        self.length, self.reads = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads += 1
        return np.array(index), np.random.rand()


def make(
    length=23,
    batch_size=4,
    mesh=ONE,
    *,
    workers=0,
    accumulation=1,
    sampler=None,
    shuffle=True,
    **options,
):
    if isinstance(shuffle, paddle_shard.Blocks):
        options["shuffle"] = shuffle
    batch_sampler = sampler
    if sampler is None:
        batch_sampler = BatchSampler(
            Ids(length), batch_size=batch_size, shuffle=shuffle is True
        )
        batch_sampler._acc_steps = accumulation
    given = DataLoader(Ids(length), batch_sampler=batch_sampler, num_workers=workers)
    return paddle_shard.shard_dataloader(given, mesh, shard_dims="dp", **options)


class OwnWithState(BatchSampler):
    """A sampler of somebody's own that holds its epoch and position."""

    def __init__(self):
        self.batch_size, self.at, self.number = 4, 0, 0

    def __iter__(self):
        order = np.random.RandomState(self.number).permutation(23).tolist()
        while self.at < 23:
            self.at += 4
            yield order[self.at - 4 : self.at]
        self.at, self.number = 0, self.number + 1

    def __len__(self):
        return 6

    def state_dict(self):
        return {"at": self.at, "number": self.number}

    def load_state_dict(self, state):
        self.at, self.number = state["at"], state["number"]


SAMPLERS = {
    "the loader's": lambda: None,
    "sequential": lambda: BatchSampler(sampler=list(range(22, -1, -1)), batch_size=4),
    "weighted": lambda: BatchSampler(
        sampler=paddle.io.WeightedRandomSampler([1.0] * 23, 23), batch_size=4
    ),
    "Paddle's": lambda: DistributedBatchSampler(
        Ids(23), 4, num_replicas=1, rank=0, shuffle=True
    ),
    "buckets": lambda: paddle_shard.BucketBatchSampler(np.arange(1, 24), 4, window=8),
    "buckets of tokens": lambda: paddle_shard.BucketBatchSampler(
        np.arange(1, 24), max_tokens=50, window=8
    ),
    "own with a state": OwnWithState,
}


def content(batch):
    return [leaf._local_value().numpy().tolist() for leaf in batch]


def rest(loader):
    return [content(batch) for batch in loader]


@pytest.mark.parametrize(
    ("tail", "shuffle", "workers"),
    [
        *(
            (tail, True, workers)
            for tail in ("pad", "fill", "drop")
            for workers in (0, 2)
        ),
        ("pad", BLOCKS, 0),
        ("drop", BLOCKS, 2),
    ],
)
def test_a_run_resumed_at_every_step_is_the_straight_run(tail, shuffle, workers):
    straight = make(tail=tail, shuffle=shuffle)
    epochs = [rest(straight) for _ in range(2)]

    for stop in range(len(epochs[0]) + 1):
        first = make(tail=tail, shuffle=shuffle, workers=workers if stop == 2 else 0)
        batches = iter(first)
        got = [content(next(batches)) for _ in range(stop)]
        state = json.loads(json.dumps(first.state_dict()))
        batches.close()

        again = make(tail=tail, shuffle=shuffle, workers=workers if stop == 2 else 0)
        again.load_state_dict(state)
        assert len(json.dumps(state)) < 1024
        assert state["ended"] == (stop == len(epochs[0]))
        assert got + rest(again) == epochs[0]
        assert rest(again) == epochs[1]


@settings(max_examples=trials(25))
@given(
    length=st.integers(1, 60),
    sizes=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 4)),
        min_size=1,
        max_size=4,
    ),
    shuffle=st.sampled_from(OF_ANY_MESH),
    seed=st.integers(0, 3),
)
def test_stops_that_change_the_mesh_and_the_batch_size_miss_and_repeat_nothing(
    length, sizes, shuffle, seed
):
    """Each stretch: (data ranks, multiple of the batch, steps before the next stop)."""
    delivered, states = [], None
    for number, (data_ranks, multiple, steps) in enumerate(sizes):
        mesh = dist.ProcessMesh(list(range(data_ranks)), dim_names=["dp"])
        last = number == len(sizes) - 1

        def run(
            mesh=mesh,
            multiple=multiple,
            steps=steps,
            states=states,
            last=last,
            data_ranks=data_ranks,
        ):
            loader = make(
                length, data_ranks * multiple, mesh, shuffle=shuffle, seed=seed
            )
            if states is not None:
                loader.load_state_dict(states)
            batches, out = iter(loader), []
            for batch in batches:
                valid = batches.valid._local_value().numpy()
                ids = batch[0]._local_value().numpy()
                out.append(
                    (
                        ids[valid].tolist(),
                        loader.where(sample=int(ids[0]), epoch=0),
                        batches.step - 1,
                    )
                )
                if not last and len(out) == steps + 1:
                    break
            return out, loader.state_dict()

        per_rank = on_each_rank(range(data_ranks), run)
        for step in range(len(per_rank[0][0])):
            for rank in range(data_ranks):
                ids, where, at = per_rank[rank][0][step]
                delivered += ids
                if ids:
                    assert (where.step, where.data_rank, where.row) == (at, rank, 0), (
                        "where stays true"
                    )
        states = json.loads(json.dumps(per_rank[0][1]))
        if states["epoch"] == 1:
            break

    first_size = sizes[0][0] * sizes[0][1]  # an order of blocks is made for it
    plan = paddle_shard.ShardPlan(
        num_samples=length,
        batch_size=first_size,
        num_data_ranks=1,
        shuffle=shuffle,
        seed=seed,
    )
    order = plan.samples(epoch=0, first=0, end=length).tolist()
    assert delivered_in_order(delivered, order, states)


def delivered_in_order(delivered, order, state):
    upto = len(order) if state["epoch"] == 1 else state["samples"]
    return sorted(delivered) == sorted(order[:upto]) and len(set(delivered)) == len(
        delivered
    )


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_the_epochs_after_a_resume_are_those_of_the_straight_run(name):
    straight = make(sampler=SAMPLERS[name]())
    epochs = [rest(straight) for _ in range(3)]
    for epoch in (0, 1):
        for step in range(0, len(epochs[epoch]) + 1, 1 + epoch):
            first = make(sampler=SAMPLERS[name]())
            for _ in range(epoch):
                rest(first)
            batches = iter(first)
            for _ in range(step):  # all of the batches, but not the end after them
                next(batches)
            again = make(sampler=SAMPLERS[name]())
            again.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert [rest(again) for _ in range(epoch, 3)] == [
                epochs[epoch][step:],
                *epochs[epoch + 1 :],
            ], (epoch, step)


def test_next_of_a_loader_begins_at_a_loaded_position():
    state = make()
    for _ in zip(range(3), state, strict=False):
        pass
    state = state.state_dict()
    wanted = rest(make())[3:5]
    for view in (lambda loader: loader, lambda loader: loader()):
        loader = make()
        taken = view(loader)
        next(taken)
        loader.load_state_dict(state)
        assert [content(next(taken)) for _ in range(2)] == wanted
        assert loader.state_dict()["steps"] == 5


def test_resuming_reads_nothing_of_what_was_delivered():
    loader = make(10_000, 10)
    batches = iter(loader)
    for _ in range(500):
        next(batches)
    again = make(10_000, 10)
    again.load_state_dict(loader.state_dict())

    expected, got = content(next(batches)), content(next(iter(again)))

    assert got == expected
    assert (
        again.dataset.reads == 10 + 4
    )  # two samples, read twice, by which it sees that the data is that of the state


def test_what_is_read_ahead_does_not_count():
    loader = make(40, 4, workers=2)
    batches = iter(loader)
    next(batches)
    next(batches)

    assert (loader.state_dict()["samples"], loader.state_dict()["steps"]) == (8, 2)
    batches.close()


def test_ended_and_the_next_epoch_are_different_states():
    loader = make(8, 4)
    batches = iter(loader)
    states = [loader.state_dict()]
    for _ in range(2):
        next(batches)
        states.append(loader.state_dict())
    with pytest.raises(StopIteration):
        next(batches)
    states.append(loader.state_dict())

    assert [(s["epoch"], s["samples"], s["ended"]) for s in states] == [
        (0, 0, False),
        (0, 4, False),
        (0, 8, True),
        (1, 0, False),
    ]
    again = make(8, 4)
    again.load_state_dict(states[2])
    assert rest(again) == []
    assert again.epoch == 1


def test_breaking_off_repeats_the_epoch_and_after_a_load_its_rest():
    loader = make(24, 4)
    for _ in loader:
        break
    whole = rest(loader)
    assert len(whole) == 6

    again = make(24, 4)
    first = iter(again)
    next(first)
    next(first)
    other = make(24, 4)
    other.load_state_dict(again.state_dict())
    for _ in range(2):
        for batch in other:
            assert content(batch) == whole[2]
            break
    other.set_epoch(0)
    assert [content(batch) for batch in other] == whole[2:]
    other.set_epoch(0)
    assert other.state_dict()["samples"] == 0
    assert rest(other) == whole, "the position serves one pass"
    other.set_epoch(0)
    assert rest(other) == whole


def test_another_epoch_than_the_loaded_one_that_no_loop_has_continued_is_a_line_in_the_log(
    caplog, monkeypatch
):
    monkeypatch.setattr("paddle_shard.core.warn_once._SAID", set())
    straight = make(24, 4)
    rest(straight)
    next(iter(straight))
    state = straight.state_dict()
    rest(straight)
    ended = straight.state_dict()
    for at, epochs, lines in (
        (state, [0], 1),
        (state, [1, 2], 0),
        (ended, [2], 0),
        (ended, [0], 0),
    ):
        caplog.clear()
        loader = make(24, 4)
        loader.load_state_dict(at)
        for epoch in epochs:
            loader.set_epoch(epoch)
            rest(loader)
        found = [line for line in caplog.messages if "set_epoch" in line]
        assert len(found) == lines
        assert all(
            "set_epoch(0)" in line and "epoch 1, after 4 samples" in line
            for line in found
        )


def test_the_position_serves_the_first_pass_over_its_epoch_that_comes_to_its_end():
    straight = make(24, 4)
    epochs = [rest(straight), rest(straight)]
    first = make(24, 4)
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    loader = make(24, 4)
    before = iter(loader)  # of the run that the load puts an end to
    next(before)
    loader.load_state_dict(state)

    assert [content(batch) for batch in before] == epochs[0][1:]
    assert (loader.epoch, loader.state_dict()["samples"]) == (0, 4), (
        "passes of before the load do not move the run"
    )
    loader.set_epoch(1)
    assert rest(loader) == epochs[1]
    loader.set_epoch(0)
    for _ in range(2):
        assert content(next(iter(loader))) == epochs[0][1], (
            "a pass over another epoch, or a look, has not used it up"
        )
    one, other = iter(loader), iter(loader)
    assert [content(batch) for batch in other] == epochs[0][1:]
    assert [content(batch) for batch in one] == epochs[0][1:]
    assert loader.epoch == 1
    loader.set_epoch(0)
    assert rest(loader) == epochs[0]


def test_a_pass_that_ends_behind_another_does_not_hold_the_state_back():
    loader = make(24, 4)
    old, new = iter(loader), iter(loader)
    next(new)
    assert len([*old]) == 6
    assert len([*new]) == 5

    assert (
        loader.epoch,
        loader.state_dict()["epoch"],
        loader.state_dict()["samples"],
    ) == (1, 1, 0)


@pytest.mark.parametrize("tail", ["pad", "fill", "drop"])
@pytest.mark.parametrize("shuffle", [False, True, BLOCKS])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 11])
def test_what_an_epoch_that_has_ended_delivered_is_the_same_on_both_sides_of_a_load(
    tail, shuffle, size
):
    """A smaller batch size would have served what "drop" has dropped; it comes too late."""
    one = make(11, 4, tail=tail, shuffle=shuffle)
    for batch in (batches := iter(one)):
        last = batches.step - 1, int(content(batch)[0][0])
        if one.state_dict()["ended"]:
            break
    state, told = one.state_dict(), one.certificate()
    places = [one.where(sample=sample, epoch=0) for sample in range(11)]

    other = make(11, size, tail=tail, shuffle=shuffle)
    other.load_state_dict(state)
    assert rest(other) == []
    assert str(other.certificate()) == str(told)
    assert told.exact
    assert told.num_samples == (8 if tail == "drop" else 11)
    assert [other.where(sample=sample, epoch=0) for sample in range(11)] == places
    assert other.where(sample=last[1], epoch=0).step == last[0]


def test_a_look_at_the_first_batch_delivers_nothing():
    loader = make(24, 4)
    loader._first_batch()

    state, fresh = loader.state_dict(), make(24, 4).state_dict()
    assert sealed({**state, "data": None}) == sealed(fresh)
    assert loader.stats.total.batches == 0
    assert run_epoch(loader).exact


def test_the_state_follows_the_newest_iterator_that_has_delivered():
    loader = make(24, 4)
    old, new = iter(loader), iter(loader)
    next(old)
    assert loader.state_dict()["steps"] == 1
    next(old)
    next(new)
    next(old)

    assert loader.state_dict()["steps"] == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"length": 24}, "num_samples"),
        ({"seed": 1}, "seed"),
        ({"tail": "drop"}, "tail"),
        ({"shuffle": False}, "shuffle"),
        ({"shuffle": BLOCKS}, "block_size"),
    ],
)
def test_another_run_is_refused_by_the_name_of_what_differs(change, field):
    state = make().state_dict()

    with pytest.raises(
        StateError,
        match=f"state is of another run .*{field}: saved .*, now .*override=",
    ):
        make(**change).load_state_dict(state)


def test_an_order_of_blocks_is_bound_to_its_blocks_and_to_the_accumulation_not_to_the_batch_size():
    state = make(shuffle=BLOCKS).state_dict()

    make(shuffle=BLOCKS, batch_size=6).load_state_dict(state)
    with pytest.raises(StateError, match="window: saved 2, now 3"):
        make(shuffle=paddle_shard.Blocks(size=3, window=3)).load_state_dict(state)
    with pytest.raises(StateError, match="accumulation: saved 1, now 2"):
        make(shuffle=BLOCKS, accumulation=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "override", "told"),
    [
        ({"seed": 1}, ["seed"], True),
        ({"shuffle": False}, ["shuffle"], True),
        ({"seed": 1}, ["seed", "tail"], True),
        ({}, ["seed"], False),
        ({"tail": "drop"}, ["tail"], False),
        ({"length": 26}, ["num_samples"], True),
    ],
)
@pytest.mark.parametrize("steps", [0, 2, 6])
def test_an_epoch_that_goes_on_in_another_order_is_told_to_lose_samples(
    change, override, told, steps, caplog
):
    loader = make()
    batches = iter(loader)
    begun = [sample for _ in range(steps) for sample in content(next(batches))]
    state = loader.state_dict()
    _SAID.clear()
    caplog.clear()

    other = make(**change)
    other.load_state_dict(state, override=override)

    assert len(rest(other)) + len(begun) > 0
    assert ("are lost, and others are delivered twice" in caplog.text) == (
        told and steps == 2
    ), caplog.text


def test_a_field_may_be_overridden_by_name():
    state = make().state_dict()
    loader = make(tail="drop")

    loader.load_state_dict(state, override=["tail"])

    assert len(rest(loader)) == 5


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda s: s.pop("segments"), "state is damaged"),
        (
            lambda s: s.update(version=2),
            "state has version 2, but this paddle_shard reads version 7 only",
        ),
        (
            lambda s: s["fingerprint"].update(order_version=0),
            "order_version: saved 0, now 1",
        ),
    ],
)
def test_a_damaged_state_is_refused(damage, text):
    state = make().state_dict()
    damage(state)

    with pytest.raises(StateError, match=text):
        make().load_state_dict(sealed(state))
    with pytest.raises(StateError, match="must be what the loader's state_dict"):
        make().load_state_dict(b"cut sho")


def test_it_is_saved_beside_the_model_with_paddle_save(tmp_path):
    loader = make()
    next(iter(loader))
    paddle.save(
        {"model": paddle.nn.Linear(2, 2).state_dict(), "data": loader.state_dict()},
        str(tmp_path / "c.pd"),
    )
    again = make()

    again.load_state_dict(paddle.load(str(tmp_path / "c.pd"))["data"])

    assert again.state_dict() == loader.state_dict()


# Beside a distributed checkpoint


def state_in_mid_epoch():
    loader = make()
    batches = iter(loader)
    next(batches)
    next(batches)
    loader.certificate()
    return loader.state_dict()


def test_a_state_travels_in_a_tensor_of_one_size():
    state, fresh = state_in_mid_epoch(), make(length=10**6).state_dict()
    tensors = [paddle_shard.state_to_tensor(one) for one in (state, fresh)]

    assert [(list(tensor.shape), tensor.dtype) for tensor in tensors] == [
        ([4096], paddle.uint8)
    ] * 2
    assert [paddle_shard.state_from_tensor(tensor) for tensor in tensors] == [
        state,
        fresh,
    ]
    again = make()
    again.load_state_dict(paddle_shard.state_from_tensor(tensors[0]))
    assert again.state_dict() == state


def test_a_distributed_checkpoint_holds_the_state_and_the_run_goes_on(
    tmp_path, monkeypatch
):
    straight, layer = rest(make()), paddle.nn.Linear(2, 2)
    first = make()
    batches = iter(first)
    got = [content(next(batches)) for _ in range(2)]
    saved = {
        **layer.state_dict(),
        "data": paddle_shard.state_to_tensor(first.state_dict()),
    }
    dist.save_state_dict(saved, str(tmp_path))

    # Paddle 3.0 moves what it loads to a GPU even on one process; on the CPU wheel that ends the process.
    monkeypatch.setattr(paddle.Tensor, "cuda", lambda self: self)
    again = make()
    found = {
        **paddle.nn.Linear(2, 2).state_dict(),
        "data": paddle_shard.state_to_tensor(again.state_dict()),
    }
    dist.load_state_dict(found, str(tmp_path))
    again.load_state_dict(paddle_shard.state_from_tensor(found["data"]))

    np.testing.assert_array_equal(found["weight"].numpy(), layer.weight.numpy())
    assert got + rest(again) == straight


def test_every_byte_that_is_not_what_was_saved_is_refused():
    whole = paddle_shard.state_to_tensor(state_in_mid_epoch()).numpy()

    for at in range(len(whole)):
        damaged = whole.copy()
        damaged[at] ^= 1 << at % 8
        with pytest.raises(StateError, match="damaged|no loader's state|version"):
            paddle_shard.state_from_tensor(paddle.to_tensor(damaged))
    for upto in range(0, len(whole), 61):
        with pytest.raises(
            StateError, match=rf"must be uint8\[4096\], .* got uint8\[{upto}\]"
        ):
            paddle_shard.state_from_tensor(paddle.to_tensor(whole[:upto]))
        cut = np.concatenate([whole[:upto], np.zeros(len(whole) - upto, "uint8")])
        with pytest.raises(StateError, match="damaged|no loader's state"):
            paddle_shard.state_from_tensor(paddle.to_tensor(cut))
    with pytest.raises(StateError, match=r"got float32\[4096\]"):
        paddle_shard.state_from_tensor(paddle.to_tensor(whole.astype("float32")))
    with pytest.raises(
        ArgumentTypeError, match="must be what state_to_tensor returned, got ndarray"
    ):
        paddle_shard.state_from_tensor(whole)


@pytest.mark.parametrize(
    ("sampler_state", "text"),
    [
        (
            {"order": list(range(2000))},
            r"state is 9\d\d\d bytes long as JSON, but a tensor holds 4096",
        ),
        (
            {"at": (1, 2)},
            r"state: \['sampler'\] do not come back from JSON as they were \(tuples become lists",
        ),
        ({1: 2}, r"state: \['sampler'\] do not come back"),
        ({"at": np.int64(3)}, r"state cannot be written as JSON \(.*int64"),
        ({"at": float("nan")}, r"state cannot be written as JSON"),
    ],
)
def test_a_samplers_state_that_no_tensor_can_hold_is_refused_with_the_way_out(
    sampler_state, text
):
    state = {**make().state_dict(), "sampler": sampler_state}

    with pytest.raises(
        StateError, match=text + r"(?s:.*)paddle.save\(loader.state_dict\(\), path\)"
    ):
        paddle_shard.state_to_tensor(state)


# Samplers of the user's own


class Draws(BatchSampler):
    """Draws each batch from numpy's global generator when asked."""

    def __init__(self, length, batch_size):
        super().__init__(Ids(length), batch_size=batch_size)
        self.length = length

    def __iter__(self):
        left = list(range(self.length))
        while left:
            yield [
                left.pop(np.random.randint(len(left)))
                for _ in range(min(self.batch_size, len(left)))
            ]


class Counts(Draws):
    """Has a state of its own, and counts how many batches all of them have drawn."""

    drawn = 0

    def __init__(self, length, batch_size):
        super().__init__(length, batch_size)
        self.at = 0

    def __iter__(self):
        while self.at < self.length:
            first, self.at = self.at, self.at + self.batch_size
            Counts.drawn += 1
            yield list(range(first, min(self.at, self.length)))
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Buckets(Draws):
    """Its batches are of several sizes, up to the one that it names, and it drops what it does not want itself."""

    def __init__(self, length, batch_size):
        super().__init__(length, batch_size)
        self.drop_last = True

    def __iter__(self):
        left = list(range(self.length))
        for size in (2, 4, 2, 2, 4, 1, 4, 3):
            yield [left.pop(np.random.randint(len(left))) for _ in range(size)]

    def __len__(self):
        return 8


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Draws, Counts, Buckets])
def test_a_sampler_of_the_users_own_is_resumed_at_every_step(kind, workers):
    straight = rest(make(sampler=kind(22, 4), length=22))
    assert sum(len(ids) for ids, _ in straight) == 22

    for stop in range(len(straight) + 1):
        own = workers if stop == 2 else 0
        first = make(sampler=kind(22, 4), length=22, workers=own)
        batches = iter(first)
        got = [content(next(batches)) for _ in range(stop)]
        state = json.loads(json.dumps(first.state_dict()))
        batches.close()
        again = make(sampler=kind(22, 4), length=22, workers=own)
        again.load_state_dict(state)

        assert got + rest(again) == straight
        assert again.certificate().exact, str(again.certificate())


def test_a_sampler_with_a_state_is_not_replayed():
    first = make(sampler=Counts(400, 4), length=400)
    batches = iter(first)
    for _ in range(50):
        next(batches)
    sampler = Counts(400, 4)
    again = make(sampler=sampler, length=400)
    again.load_state_dict(first.state_dict())
    before = Counts.drawn

    assert content(next(iter(again)))[0] == [200, 201, 202, 203]
    assert Counts.drawn == before + 1


class Walk(Counts):
    """Goes on through the data from epoch to epoch, as its state says."""

    def __init__(self, length, batch_size):
        super().__init__(length, batch_size)
        self.round = 0

    def __iter__(self):
        while self.at < self.length:
            first, self.at = self.at, self.at + self.batch_size
            yield [
                (i + 5 * self.round) % self.length
                for i in range(first, min(self.at, self.length))
            ]
        self.at, self.round = 0, self.round + 1

    def state_dict(self):
        self.state = {
            "at": self.at,
            "round": self.round,
        }  # the object that it goes on to change
        return self.state

    def load_state_dict(self, state):
        self.at, self.round = state["at"], state["round"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Draws, {}),
        (Draws, {"workers": 2}),
        (Counts, {"prefetch": 0}),
        (Counts, {"prefetch": 3}),
        (Walk, {}),
        (Walk, {"prefetch": 0}),
        (Walk, {"workers": 2}),
    ],
)
def test_passes_over_a_sampler_of_the_users_own_are_independent(kind, options):
    """However far each has read ahead."""
    whole = make(sampler=kind(22, 4), length=22)
    epochs = [rest(whole), rest(whole), rest(whole)]
    loader = make(sampler=kind(22, 4), length=22, **options)

    assert [(content(a), content(b)) for a, b in zip(loader, loader, strict=False)] == [
        (b, b) for b in epochs[0]
    ]
    for steps in (1, 3, 5):  # a look; loops that are left
        batches = iter(loader)
        assert [content(next(batches)) for _ in range(steps)] == epochs[1][:steps]
    assert rest(loader) == epochs[1]
    state = json.loads(json.dumps(loader.state_dict()))
    other = make(sampler=kind(22, 4), length=22)
    other.load_state_dict(state)
    assert rest(loader) == rest(other) == epochs[2], (
        "a state between two epochs holds the sampler's, too"
    )


@pytest.mark.parametrize("kind", [Draws, Counts, Walk])
@pytest.mark.parametrize("tail", ["pad", "fill"])
def test_padding_after_a_resume_is_that_of_the_straight_run(kind, tail):
    mesh = dist.ProcessMesh(list(range(4)), dim_names=["dp"])

    def loader():
        return make(sampler=kind(21, 8), length=21, mesh=mesh, tail=tail)

    def of_rank():
        run = loader()
        rest(run)
        epoch, states = [], []
        for batch in run:
            epoch.append(content(batch)[0])
            states.append(json.loads(json.dumps(run.state_dict())))
        for step, state in enumerate(states):
            again = loader()
            if kind is not Walk:
                again.set_epoch(1)
            again.load_state_dict(state)
            assert [content(batch)[0] for batch in again] == epoch[step + 1 :]
        return epoch

    per_rank = on_each_rank(range(4), of_rank)
    assert sum(len(ids) for epoch in per_rank.values() for ids in epoch) == 24


class OwnGenerator(Draws):
    """Its generator starts anew in every process."""

    def __init__(self, length, batch_size):
        super().__init__(length, batch_size)
        self.generator = np.random.default_rng(7)

    def __iter__(self):
        order = self.generator.permutation(self.length).tolist()
        yield from (
            order[i : i + self.batch_size]
            for i in range(0, self.length, self.batch_size)
        )


def test_a_replay_that_draws_other_samples_is_refused():
    first = make(sampler=OwnGenerator(22, 4), length=22)
    straight = [rest(first)]
    batches = iter(first)
    got = [content(next(batches)) for _ in range(3)]
    states = [first.state_dict()]

    with pytest.raises(
        StateError,
        match="first 12 samples .* OwnGenerator draws now are not .* set_epoch",
    ):
        other = make(sampler=OwnGenerator(22, 4), length=22)
        other.load_state_dict(states[0])
        rest(other)
    again = make(sampler=OwnGenerator(22, 4), length=22)
    rest(again)
    again.load_state_dict(states[0])
    assert got + rest(again) == [*got, *(content(batch) for batch in batches)]
    assert straight[0] != got


@pytest.mark.parametrize(
    ("sampler", "length", "field"),
    [
        (Draws(24, 4), 24, "num_samples: saved 22, now 24"),
        (Buckets(22, 4), 22, "batch_sampler: saved 'Draws', now 'Buckets'"),
        (
            BatchSampler(sampler=list(range(22)), batch_size=4),
            22,
            "sampler: saved 'SequenceSampler', now 'list'",
        ),
        (Draws(20, 4), 22, "sampler_length: saved 22, now 20"),
    ],
)
def test_a_state_of_other_data_or_of_another_sampler_is_refused(sampler, length, field):
    state = make(sampler=Draws(22, 4), length=22).state_dict()

    with pytest.raises(StateError, match=field):
        make(sampler=sampler, length=length).load_state_dict(state)


@pytest.mark.parametrize(
    "once",
    [
        lambda: iter([[0, 1], [2, 3]]),
        lambda: ([i, i + 1] for i in (0, 2)),
        lambda: BatchSampler(sampler=(i for i in range(4)), batch_size=2),
    ],
)
def test_a_sampler_that_can_be_iterated_once_is_refused(once):
    with pytest.raises(ArgumentError, match="can be iterated only once"):
        iter(make(4, sampler=once()))


def test_a_sampler_that_yields_nothing_any_more_says_so():
    class Emptied(Draws):
        def __iter__(self):
            self.left = getattr(self, "left", None) or iter([[0, 1], [2, 3]])
            yield from self.left

    loader = make(4, sampler=Emptied(4, 2))
    assert len(rest(loader)) == 2

    with pytest.raises(ArgumentError, match="Emptied has yielded no batch in epoch 1"):
        rest(loader)


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_index_sampler_may_change_its_batch_size(drop_last):
    indices = list(range(100, 0, -1))

    def loader(size):
        return make(
            101,
            sampler=BatchSampler(sampler=indices, batch_size=size, drop_last=drop_last),
        )

    first = loader(6)
    batches = iter(first)
    got = [i for _ in range(3) for i in content(next(batches))[0]]
    again = loader(4)
    again.load_state_dict(first.state_dict())
    whole = (
        3 * 6 + 82 // 4 * 4 if drop_last else 100
    )  # what is left is cut anew, not what the other size left of it

    assert got + [i for batch in rest(again) for i in batch[0]] == indices[:whole]
    assert again.certificate().exact


@pytest.mark.parametrize(
    ("length", "drop_last", "accumulation"),
    [(23, False, 1), (23, True, 1), (21, False, 2), (3, False, 1)],
)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_data_ranks", [1, 2, 3])
def test_paddles_own_sampler_is_reproduced_bit_for_bit(
    length, drop_last, accumulation, shuffle, num_data_ranks
):
    mesh = dist.ProcessMesh(list(range(num_data_ranks)), dim_names=["dp"])

    def three_epochs(batch_sampler, **options):
        batch_sampler._acc_steps = accumulation
        given = DataLoader(Ids(length), batch_sampler=batch_sampler)
        loader = paddle_shard.shard_dataloader(given, mesh, shard_dims="dp", **options)
        return [[content(batch)[0] for batch in loader] for _ in range(3)]

    def theirs():
        return DistributedBatchSampler(
            Ids(length),
            2,
            num_replicas=num_data_ranks,
            rank=dist.get_rank(),
            shuffle=shuffle,
            drop_last=drop_last,
        )

    for rank in range(num_data_ranks):
        with simulated_rank(rank, num_data_ranks):
            alone = theirs()
            alone._acc_steps = accumulation
            expected = [[list(batch) for batch in alone] for _ in range(3)]
            # A plain loader that is told to use Paddle's order, for runs that migrate.
            plain = BatchSampler(
                Ids(length), batch_size=2 * num_data_ranks, drop_last=drop_last
            )

            assert three_epochs(theirs()) == expected
            assert (
                three_epochs(plain, shuffle="paddle" if shuffle else PaddleSequential())
                == expected
            )


@pytest.mark.parametrize("length", [24, 29, 35])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 1), (1, 4)])
def test_paddles_own_sampler_that_does_not_shuffle_resumes_on_any_number_of_ranks(
    before, after, length
):
    def stretch(num_ranks, state, steps):
        """(rows of the steps in the order of the ranks, state): all steps if `steps` is None."""
        mesh = dist.ProcessMesh(list(range(num_ranks)), dim_names=["dp"])

        def run():
            own = DistributedBatchSampler(
                Ids(length),
                12 // num_ranks,
                num_replicas=num_ranks,
                rank=dist.get_rank(),
            )
            loader = make(length, mesh=mesh, sampler=own)
            if state is not None:
                loader.load_state_dict(state)
                loader.set_epoch(state["epoch"] + state["ended"])
            batches, found = iter(loader), []
            for batch in batches:
                found.append(
                    batch[0]
                    ._local_value()
                    .numpy()[batches.valid._local_value().numpy()]
                    .tolist()
                )
                if len(found) == steps:
                    break
            return found, json.loads(json.dumps(loader.state_dict()))

        reports = on_each_rank(range(num_ranks), run)
        return [
            row
            for step in zip(*(found for found, _ in reports.values()), strict=True)
            for rows in step
            for row in rows
        ], reports[0][1]

    num_steps = -(-length // 12)
    for stop in range(1, num_steps + 1):
        begun, state = stretch(before, None, stop)
        rest, _ = stretch(after, state, None)

        assert begun + rest == [
            *range(length),
            *(range(length) if stop == num_steps else []),
        ]


# The certificate


def run_epoch(loader):
    for _ in loader:
        pass
    return loader.certificate()


def test_a_full_epoch_is_certified():
    assert str(run_epoch(make(100, 8))) == "epoch 0: each of 100 samples exactly once"
    assert run_epoch(make(100, 8, tail="drop")).num_samples == 96
    loader = make(100, 8)
    run_epoch(loader)
    assert str(run_epoch(loader)) == "epoch 1: each of 100 samples exactly once"


def test_what_the_tail_drops_is_told():
    for size in (8, 12):
        left_out = 100 % size
        told = run_epoch(make(100, size, tail="drop"))
        assert (told.exact, told.num_samples, told.dropped) == (
            True,
            100 - left_out,
            left_out,
        )
        assert str(told) == (
            f"epoch 0: each of {100 - left_out} samples (of 100; tail='drop' leaves out {left_out}) exactly once"
        )
    assert (
        run_epoch(make(100, 10, tail="drop")).dropped
        == run_epoch(make(100, 8)).dropped
        == 0
    )


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_a_loop_without_a_batch_says_so_and_is_not_certified(kind, caplog):
    class OneBatch(paddle.io.BatchSampler):
        batch_size, drop_last = 16, False

        def __init__(self):
            pass

        def __len__(self):
            return 1

        def __iter__(self):
            yield list(range(14))

    if kind == "sampler":
        given = paddle.io.DataLoader(Ids(14), batch_sampler=OneBatch())
    else:
        given = paddle.io.DataLoader(
            paddle_shard.Stream.of(lambda: iter(range(14))), batch_size=16
        )
    _SAID.clear()
    loader = paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", tail="drop")
    assert [*loader] == [*loader] == []

    assert caplog.text.count("ended without a batch") == 1
    if kind == "sampler":
        told = loader.certificate()
        assert not told.exact
        assert "no sample was delivered" in str(told)


def test_a_sample_that_is_missed_in_two_deliveries_is_two_deliveries_that_are_missing():
    class OneBad(Ids):
        def __getitem__(self, index):
            if index == 1:
                raise ValueError
            return super().__getitem__(index)

    given = paddle.io.DataLoader(OneBad(10), batch_size=5)
    loader = paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", on_error="skip")
    next(iter(loader))
    told = run_epoch(loader)

    assert (told.missed, told.repeated) == (2, 5)
    assert told.delivered == 4 + 9 == told.num_samples - told.missed + told.repeated


def test_an_older_iterator_that_ends_does_not_take_the_certificate_back():
    loader = make(8, 4)
    older = iter(loader)
    assert len([*islice(older, 2)]) == 2
    run_epoch(loader)
    next(iter(loader))
    assert next(older, None) is None

    assert loader.certificate().epoch == 1


@pytest.mark.parametrize("steps", [0, 3, 13])
def test_setting_the_epoch_moves_the_certificate_behind_a_load_no_more_than_without_one(
    steps,
):
    loader = make(100, 8)
    for _ in zip(range(steps), iter(loader), strict=False):
        pass
    before, state = loader.certificate().epoch, loader.state_dict()
    other = make(100, 8)
    other.load_state_dict(state)
    for one in (loader, other) if steps else (other,):
        one.set_epoch(5)
        assert one.certificate().epoch == before
        next(iter(one))
        assert one.certificate().epoch == 5


@pytest.mark.parametrize("shuffle", [True, BLOCKS])
def test_a_stopped_run_is_certified_over_its_stops(shuffle):
    state = None
    for size, steps in ((8, 3), (4, 5), (12, 99)):
        loader = make(100, size, shuffle=shuffle)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        for _ in range(steps):
            if next(batches, None) is None:
                break
        state = json.loads(json.dumps(loader.state_dict()))

    assert str(loader.certificate()) == "epoch 0: each of 100 samples exactly once"


def test_a_run_that_is_not_at_its_end_says_what_is_missing():
    loader = make(100, 8)
    next(iter(loader))

    certificate = loader.certificate()

    assert not certificate.exact
    assert (certificate.delivered, certificate.missed, certificate.repeated) == (
        8,
        92,
        0,
    )
    assert "positions [8, 100) were not delivered" in str(certificate)


@pytest.mark.parametrize("begun_again", [0, 1, 40])
def test_an_epoch_that_was_left_and_begun_again_was_delivered_twice_in_part(
    begun_again,
):
    loader = make(100, 8)
    for _ in range(begun_again):
        next(iter(loader))
    told = run_epoch(loader)

    assert (told.exact, told.delivered, told.repeated) == (
        not begun_again,
        100 + 8 * begun_again,
        8 * begun_again,
    )
    assert len(json.dumps(loader.state_dict())) < 1024
    loader.set_epoch(0)
    assert run_epoch(loader).repeated == 100 + 8 * begun_again, (
        "a second pass over all of it is a repetition, too"
    )


def test_after_a_load_the_loaded_epoch_is_certified_and_the_account_goes_on():
    loader = make(100, 8)
    run_epoch(loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()

    for other in (make(100, 8), loader):
        other.load_state_dict(state)
        assert (other.certificate().epoch, other.certificate().delivered) == (1, 24)
        assert other.state_dict()["certificate"][0][:4] == [-1, 1, 0, [[0, 24]]], (
            "of all ranks together"
        )
        assert str(run_epoch(other)) == "epoch 1: each of 100 samples exactly once"


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("indices", (4, 20, 4, 20)), ("indices", (20, 2, 12)), ("estimate", (6, 6, 6))],
)
@pytest.mark.parametrize("length", [60, 100])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_a_samplers_end_is_what_was_seen_not_what_a_length_says(
    kind, sizes, length, tail
):
    got, state = [], None
    for number, size in enumerate(sizes):
        loader = make(length, size, tail=tail, **KINDS[kind](length, size))
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        for _, batch in zip(
            range(2 if number < len(sizes) - 1 else length), batches, strict=False
        ):
            valid = batches.valid._local_value().numpy()
            got += [i for i, real in zip(content(batch)[0], valid, strict=True) if real]
        state = json.loads(json.dumps(loader.state_dict()))
        if state["ended"]:
            break

    assert len(set(got)) == len(got)
    assert len(got) == length or (tail == "drop" and length - len(got) < size)
    told = loader.certificate()
    assert (told.exact, told.num_samples) == (True, len(got)), str(told)
    assert "that the loader's" in str(told)


class Gathering(Exception):
    """Has what a rank would send to the others."""


class Job:
    """Loaders of simulated ranks, and all that each data rank was really given: the oracle of the certificate."""

    def __init__(self, kind, length, tail, data_ranks, replicas, size):
        self.kind, self.length, self.tail, self.size = kind, length, tail, size
        self.data_ranks, self.replicas = data_ranks, replicas
        mesh = dist.ProcessMesh(
            np.arange(data_ranks * replicas).reshape(data_ranks, replicas),
            dim_names=["dp", "mp"],
        )
        self.loaders = self.each(
            lambda rank: make(
                length, size, mesh, tail=tail, **KINDS[kind](length, size)
            )
        )
        self.given, self.ended, self.last = defaultdict(Counter), set(), None
        self.unknown, self.untold = set(), set()
        """Epochs of which some rank's account is lost; and those of which a rank may have its own account only."""

    def each(self, do):
        ranks = range(self.data_ranks * self.replicas)
        results = on_each_rank(ranks, lambda: do(dist.get_rank()))
        return [results[rank] for rank in ranks]

    def deliver(self, steps, at_once=1):
        """Let each rank take steps of as many iterators in turn; None: to their end."""

        def of_rank(rank):
            passes, got, ended = (
                [iter(self.loaders[rank]) for _ in range(at_once)],
                [],
                False,
            )
            for batches in passes * (len(passes) * (steps or 10**3)):
                batch = next(batches, None)
                if batch is None:
                    ended = True
                    break
                got.append(
                    (
                        batches.epoch,
                        content(batch)[0],
                        batches.valid._local_value().numpy().tolist(),
                    )
                )
            return got, ended, passes[0].epoch

        if self.data_ranks == 1:
            self.untold.clear()
        for rank, (got, ended, epoch) in enumerate(self.each(of_rank)):
            for of_epoch, ids, valid in got if rank % self.replicas == 0 else ():
                self.given[of_epoch].update(
                    i for i, real in zip(ids, valid, strict=True) if real
                )
            if ended:
                self.ended.add(epoch)
            if got or ended:
                self.last = epoch
            if self.data_ranks > 1:
                self.untold |= {epoch, *(of_epoch for of_epoch, _, _ in got)}

    def set_epoch(self, epoch):
        self.each(lambda rank: self.loaders[rank].set_epoch(epoch))

    def certificate(self):
        def gathering(legs, *others):
            raise Gathering(legs)

        def sent(rank):
            with (
                mock.patch("paddle_shard.run.run.gathered", gathering),
                pytest.raises(Gathering) as it,
            ):
                self.loaders[rank].certificate()
            return it.value.args[0]

        accounts = json.loads(json.dumps(self.each(sent)))
        with mock.patch(
            "paddle_shard.run.run.gathered", lambda legs, *others: accounts
        ):
            found = self.each(lambda rank: self.loaders[rank].certificate())
        self.untold -= {found[0].epoch, self.loaders[0].state_dict()["epoch"]}
        assert len(set(map(str, found))) == 1, "all ranks say the same"
        return found[0]

    def check(self):
        told = self.certificate()
        assert told.epoch == (self.loaders[0].epoch if self.last is None else self.last)
        got, left = self.given[told.epoch], self.length - len(self.given[told.epoch])
        once = all(times == 1 for times in got.values())
        ended = told.epoch in self.ended
        if told.epoch in self.unknown:
            assert not told.exact
            return
        own = self.kind in OWN
        complete = left == 0 or (self.tail == "drop" and (ended or left < self.size))
        assert (
            told.delivered
            == sum(got.values())
            == told.num_samples - told.missed + told.repeated
        )
        if told.exact:
            assert once, (told, got)
            assert complete, (told, got)
            assert told.num_samples == len(got)
        elif (
            not own or ended
        ):  # a plan's end is known ahead; a sampler's has to be seen
            assert not (once and complete), (str(told), got)
        if (
            self.kind != "blocks" and not own and self.tail != "drop"
        ):  # whose order is that of the first batch size
            assert (told.missed, told.repeated) == (left, sum(got.values()) - len(got))

    def resumed(self, how, data_ranks, replicas, size):
        """A job that goes on from this one's saved states."""
        if how == "merged":
            self.certificate()
        states = json.loads(
            json.dumps(self.each(lambda rank: self.loaders[rank].state_dict()))
        )
        epoch = states[0]["epoch"]
        assert (
            len(
                {(state["epoch"], state["samples"], state["ended"]) for state in states}
            )
            == 1
        )
        assert len(json.dumps(states[0])) < 4096
        new = self.kind, self.length, self.tail, data_ranks, replicas, size
        other = self if how == "same loaders" else Job(*new)
        world = other.data_ranks * other.replicas
        held = (
            {0}
            if how == "one"
            else {rank % len(states) // self.replicas for rank in range(world)}
        )
        other.given = defaultdict(Counter, {epoch: copy.copy(self.given[epoch])})
        known = (
            epoch not in self.untold
            or how == "same loaders"
            or len(held) == self.data_ranks
        )
        other.unknown = (
            {epoch}
            if self.given[epoch] and (epoch in self.unknown or not known)
            else set()
        )
        other.untold = self.untold & {epoch}
        other.ended, other.last = ({epoch} if states[0]["ended"] else set()), epoch
        own = how != "one"
        other.each(
            lambda rank: other.loaders[rank].load_state_dict(
                states[rank % len(states) if own else 0]
            )
        )
        return other


KINDS = {
    "plain": lambda length, size: {"shuffle": True},
    "blocks": lambda length, size: {"shuffle": BLOCKS},
    "indices": lambda length, size: {
        "sampler": BatchSampler(sampler=list(range(length))[::-1], batch_size=size)
    },
    "draws": lambda length, size: {"sampler": Draws(length, 6)},
    "estimate": lambda length, size: {"sampler": Estimates(length, 6)},
    "counts": lambda length, size: {"sampler": Counts(length, 6)},
}
OWN = ("indices", "draws", "estimate", "counts")


class Estimates(Draws):
    """Has a length that is too small at first, too large later, as those that are made of sizes."""

    def __len__(self):
        return 2


MESHES = st.tuples(
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([6, 6, 12, 18]),
)
ACTIONS = st.one_of(
    st.tuples(st.just("deliver"), st.sampled_from([1, 2, 3, None])),
    st.tuples(st.just("deliver"), st.sampled_from([1, 2, None]), st.just(2)),
    st.tuples(st.just("set_epoch"), st.integers(0, 1)),
    st.tuples(st.just("check")),
    st.tuples(
        st.just("resumed"),
        st.sampled_from(["merged", "own", "one", "same loaders"]),
        MESHES,
    ),
)


@settings(max_examples=trials(60))
@given(
    kind=st.sampled_from(sorted(KINDS)),
    length=st.sampled_from([6, 17, 30, 36]),
    tail=st.sampled_from(["pad", "fill", "drop"]),
    mesh=MESHES,
    actions=st.lists(ACTIONS, max_size=7),
)
@example(
    "blocks",
    6,
    "pad",
    (1, 1, 6),
    [("deliver", 1), ("check",), ("deliver", 1), ("resumed", "own", (1, 1, 6))],
)
@example(
    "blocks", 17, "pad", (3, 1, 6), [("deliver", 1), ("resumed", "own", (3, 2, 6))] * 2
)
def test_the_certificate_says_exactly_once_if_and_only_if_it_was(
    kind, length, tail, mesh, actions
):
    if tail == "drop" and length < 18:
        length += 18
    job = Job(kind, length, tail, *mesh)
    for name, *how in actions:
        if name == "resumed":
            job = job.resumed(how[0], *how[1])
        else:
            getattr(job, name)(*how)
    job.deliver(None)
    job.check()


def test_a_pass_draws_a_sampler_once_though_its_length_is_not_told():
    drawn = []  # also of copies

    class NotTold(BatchSampler):
        def __init__(self):
            self.batch_size = 4

        def __iter__(self):
            drawn.append(1)
            return iter([[0, 1, 2, 3], [4, 5]])

        def __len__(self):
            raise TypeError("as that of Paddle's WeightedRandomSampler, given a list")

    assert len(rest(make(sampler=NotTold()))) == 2
    assert len(drawn) <= 2, (
        "once for the pass, and once if somebody asks for the length"
    )


@pytest.mark.parametrize("steps", [0, 3])
def test_plan_and_length_are_those_of_the_epoch_that_is_served_with_another_batch_size(
    steps,
):
    loader = make(50, 4)
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    again = make(50, 10)
    again.load_state_dict(loader.state_dict())
    told = len(again), again.plan.num_steps
    batches = iter(again)
    delivered = steps + sum(1 for _ in batches)

    assert told == (delivered, delivered)
    assert len(again) == again.plan.num_steps == 5  # of the next epoch


@pytest.mark.parametrize("schedule", [None, [(0, 4), (16, 5)]])
def test_an_epoch_that_has_ended_keeps_its_steps_under_another_tail(schedule):
    def loader_of(rows, tail):
        given = DataLoader(Ids(20), batch_size=rows)
        return paddle_shard.shard_dataloader(
            given, ONE, shard_dims="dp", tail=tail, batch_size=schedule
        )

    batches = iter(loader := loader_of(4, "pad"))
    for _ in range(4):
        next(batches)
    again = loader_of(5, "pad")
    again.load_state_dict(loader.state_dict())
    next(iter(again))
    state = again.state_dict()
    assert (state["steps"], state["samples"], state["ended"]) == (5, 20, True)

    other = loader_of(5, "drop")
    other.load_state_dict(state, override=["tail"])
    assert len(other) == 5
    assert list(other) == []


@pytest.mark.parametrize("weights", [list, np.array])
def test_a_sampler_that_draws_another_number_is_refused_also_where_paddle_does_not_tell_its_length(
    weights,
):
    def made(number):
        sampler = paddle.io.WeightedRandomSampler(
            weights([1.0 + at for at in range(23)]), number
        )
        given = DataLoader(
            [np.array([at]) for at in range(23)],
            batch_sampler=BatchSampler(sampler=sampler, batch_size=4),
        )
        return paddle_shard.shard_dataloader(
            given, dist.ProcessMesh([0], dim_names=["dp"]), shard_dims="dp"
        )

    loader = made(23)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    with pytest.raises(StateError, match="sampler_length: saved 23, now 21"):
        made(21).load_state_dict(state)
