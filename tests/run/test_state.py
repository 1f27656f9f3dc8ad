"""A run that is stopped anywhere goes on with the next sample, on any mesh."""

import itertools
import json

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.io import BatchSampler, DataLoader, DistributedBatchSampler

import paddle_shard
from paddle_shard.core.warn_once import _WARNED
from paddle_shard.errors import StateError
from paddle_shard.plan.state import sealed
from paddle_shard.testing.simulated import on_each_rank
from tests.orders_and_tails import BLOCKS, OF_ANY_MESH
from tests.run.runs import (
    ONE,
    Ids,
    content,
    make,
    rest,
    run_epoch,
)
from tests.trials import trials


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
    "sequential": lambda: BatchSampler(
        sampler=list(range(22, -1, -1)), batch_size=4
    ),
    "weighted": lambda: BatchSampler(
        sampler=paddle.io.WeightedRandomSampler([1.0] * 23, 23), batch_size=4
    ),
    "Paddle's": lambda: DistributedBatchSampler(
        Ids(23), 4, num_replicas=1, rank=0, shuffle=True
    ),
    "buckets": lambda: paddle_shard.BucketBatchSampler(
        np.arange(1, 24), 4, window=8
    ),
    "buckets of tokens": lambda: paddle_shard.BucketBatchSampler(
        np.arange(1, 24), max_tokens=50, window=8
    ),
    "own with a state": OwnWithState,
}


@pytest.mark.parametrize(
    ("tail", "shuffle", "workers"),
    [
        ("pad", True, 2),
        ("fill", True, 2),
        ("drop", True, 0),
        ("pad", BLOCKS, 0),
        ("drop", BLOCKS, 2),
    ],
)
def test_run_resumed_at_every_step_is_the_straight_run(tail, shuffle, workers):
    straight = make(tail=tail, shuffle=shuffle)
    epochs = [rest(straight) for _ in range(2)]

    for stop in range(len(epochs[0]) + 1):
        first = make(
            tail=tail, shuffle=shuffle, workers=workers if stop == 2 else 0
        )
        batches = iter(first)
        got = [content(next(batches)) for _ in range(stop)]
        state = json.loads(json.dumps(first.state_dict()))
        batches.close()

        again = make(
            tail=tail, shuffle=shuffle, workers=workers if stop == 2 else 0
        )
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
def test_state_resumes_exactly_on_other_meshes_and_batch_sizes(
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
                    assert (where.step, where.data_rank, where.row) == (
                        at,
                        rank,
                        0,
                    ), "where stays true"
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
    return sorted(delivered) == sorted(order[:upto]) and len(
        set(delivered)
    ) == len(delivered)


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_state_resumes_the_epochs_of_the_straight_run(name):
    straight = make(sampler=SAMPLERS[name]())
    epochs = [rest(straight) for _ in range(3)]
    for epoch in (0, 1):
        num_steps = len(epochs[epoch])
        for step in (
            (0, num_steps // 2, num_steps) if epoch else range(num_steps + 1)
        ):
            first = make(sampler=SAMPLERS[name]())
            for _ in range(epoch):
                rest(first)
            batches = iter(first)
            # all of the batches, but not the end after them
            for _ in range(step):
                next(batches)
            again = make(sampler=SAMPLERS[name]())
            again.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert [rest(again) for _ in range(2)] == [
                epochs[epoch][step:],
                epochs[epoch + 1],
            ], (epoch, step)


def test_state_moves_next_of_a_loader():
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


def test_resume_reads_nothing_of_what_was_delivered():
    loader = make(10_000, 10)
    batches = iter(loader)
    for _ in range(500):
        next(batches)
    again = make(10_000, 10)
    again.load_state_dict(loader.state_dict())

    expected, got = content(next(batches)), content(next(iter(again)))

    assert got == expected
    # two samples, read twice, by which it sees that the data is that of the state
    assert again.dataset.reads == 10 + 4


def test_state_does_not_count_what_is_read_ahead():
    loader = make(40, 4, workers=2)
    batches = iter(loader)
    next(batches)
    next(batches)

    assert (loader.state_dict()["samples"], loader.state_dict()["steps"]) == (
        8,
        2,
    )
    batches.close()


def test_state_of_an_ended_epoch_is_not_the_next_epoch():
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


def test_break_repeats_the_epoch_or_after_a_load_its_rest():
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


def test_set_epoch_warns_of_a_loaded_epoch_that_is_not_continued(
    caplog, monkeypatch
):
    monkeypatch.setattr("paddle_shard.core.warn_once._WARNED", set())
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


def test_resume_serves_the_first_iterator_that_finishes_it():
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


def test_state_is_not_held_back_by_an_older_iterator():
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


@pytest.mark.parametrize(
    ("size", "shuffle", "tail"),
    [
        (size, shuffle, tail)
        for number, (shuffle, tail) in enumerate(
            itertools.product([False, True, BLOCKS], ["pad", "fill", "drop"])
        )
        for size in ((1, 3, 5), (2, 4, 11))[number % 2]
    ],
)
def test_state_of_an_ended_epoch_is_the_same_after_a_load(tail, shuffle, size):
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
    assert [
        other.where(sample=sample, epoch=0) for sample in range(11)
    ] == places
    assert other.where(sample=last[1], epoch=0).step == last[0]


def test_state_does_not_count_a_look_at_the_first_batch():
    loader = make(24, 4)
    loader._first_batch()

    state, fresh = loader.state_dict(), make(24, 4).state_dict()
    assert sealed({**state, "data": None}) == sealed(fresh)
    assert loader.stats.total.batches == 0
    assert run_epoch(loader).exact


def test_state_follows_the_newest_iterator_that_has_delivered():
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
def test_state_of_another_run_names_what_differs(change, field):
    state = make().state_dict()

    with pytest.raises(
        StateError,
        match=f"state is of another run .*{field}: saved .*, now .*override=",
    ):
        make(**change).load_state_dict(state)


def test_state_of_blocks_is_bound_to_blocks_and_accumulation():
    state = make(shuffle=BLOCKS).state_dict()

    make(shuffle=BLOCKS, batch_size=6).load_state_dict(state)
    with pytest.raises(StateError, match="window: saved 2, now 3"):
        make(shuffle=paddle_shard.Blocks(size=3, window=3)).load_state_dict(
            state
        )
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
def test_override_of_the_order_warns_of_lost_samples(
    change, override, told, steps, caplog
):
    loader = make()
    batches = iter(loader)
    begun = [sample for _ in range(steps) for sample in content(next(batches))]
    state = loader.state_dict()
    _WARNED.clear()
    caplog.clear()

    other = make(**change)
    other.load_state_dict(state, override=override)

    assert len(rest(other)) + len(begun) > 0
    assert ("are lost, and others are delivered twice" in caplog.text) == (
        told and steps == 2
    ), caplog.text


def test_override_accepts_a_field_by_name():
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
def test_state_that_is_damaged_is_rejected(damage, text):
    state = make().state_dict()
    damage(state)

    with pytest.raises(StateError, match=text):
        make().load_state_dict(sealed(state))
    with pytest.raises(
        StateError, match="must be what the loader's state_dict"
    ):
        make().load_state_dict(b"cut sho")


def test_state_is_saved_with_paddle_save(tmp_path):
    loader = make()
    next(iter(loader))
    paddle.save(
        {
            "model": paddle.nn.Linear(2, 2).state_dict(),
            "data": loader.state_dict(),
        },
        str(tmp_path / "c.pd"),
    )
    again = make()

    again.load_state_dict(paddle.load(str(tmp_path / "c.pd"))["data"])

    assert again.state_dict() == loader.state_dict()


@pytest.mark.parametrize("steps", [0, 3])
def test_plan_and_length_follow_another_batch_size(
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
def test_state_of_an_ended_epoch_keeps_its_steps_under_a_tail(schedule):
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
