"""Runs over samplers of the user's own are resumed at every step."""

import json

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.io import BatchSampler, DataLoader, DistributedBatchSampler

import paddle_shard
from paddle_shard.errors import ArgumentError, StateError
from paddle_shard.plan.orders import PaddleSequential
from paddle_shard.testing.simulated import on_each_rank, simulated_rank
from tests.run.runs import (
    Counts,
    Draws,
    Ids,
    content,
    make,
    rest,
)


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


@pytest.mark.parametrize("kind", [Draws, Counts, Buckets])
def test_user_sampler_is_resumed_at_every_step(kind):
    straight = rest(make(sampler=kind(22, 4), length=22))
    assert sum(len(ids) for ids, _ in straight) == 22

    for stop in range(len(straight) + 1):
        own = 2 if stop == 2 else 0
        first = make(sampler=kind(22, 4), length=22, workers=own)
        batches = iter(first)
        got = [content(next(batches)) for _ in range(stop)]
        state = json.loads(json.dumps(first.state_dict()))
        batches.close()
        again = make(sampler=kind(22, 4), length=22, workers=own)
        again.load_state_dict(state)

        assert got + rest(again) == straight
        assert again.certificate().exact, str(again.certificate())


def test_user_sampler_with_a_state_is_not_replayed():
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
        # the object that it goes on to change
        self.state = {
            "at": self.at,
            "round": self.round,
        }
        return self.state

    def load_state_dict(self, state):
        self.at, self.round = state["at"], state["round"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Draws, {"workers": 2}),
        (Counts, {"prefetch": 3}),
        (Walk, {}),
        (Walk, {"prefetch": 0}),
    ],
)
def test_user_sampler_has_independent_iterators(kind, options):
    """However far each has read ahead."""
    whole = make(sampler=kind(22, 4), length=22)
    epochs = [rest(whole), rest(whole), rest(whole)]
    loader = make(sampler=kind(22, 4), length=22, **options)

    assert [
        (content(a), content(b)) for a, b in zip(loader, loader, strict=False)
    ] == [(b, b) for b in epochs[0]]
    for steps in (1, 3, 5):  # a look; loops that are left
        batches = iter(loader)
        assert [content(next(batches)) for _ in range(steps)] == epochs[1][
            :steps
        ]
    assert rest(loader) == epochs[1]
    state = json.loads(json.dumps(loader.state_dict()))
    other = make(sampler=kind(22, 4), length=22)
    other.load_state_dict(state)
    assert rest(loader) == rest(other) == epochs[2], (
        "a state between two epochs holds the sampler's, too"
    )


@pytest.mark.parametrize("kind", [Draws, Counts, Walk])
@pytest.mark.parametrize("tail", ["pad", "fill"])
def test_user_sampler_pads_alike_after_a_resume(kind, tail):
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


def test_user_sampler_that_replays_other_samples_is_rejected():
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
def test_state_of_another_user_sampler_is_rejected(sampler, length, field):
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
def test_user_sampler_that_can_be_iterated_once_is_rejected(once):
    with pytest.raises(ArgumentError, match="can be iterated only once"):
        iter(make(4, sampler=once()))


def test_user_sampler_that_yields_no_more_is_an_error():
    class Emptied(Draws):
        def __iter__(self):
            self.left = getattr(self, "left", None) or iter([[0, 1], [2, 3]])
            yield from self.left

    loader = make(4, sampler=Emptied(4, 2))
    assert len(rest(loader)) == 2

    with pytest.raises(
        ArgumentError, match="Emptied has yielded no batch in epoch 1"
    ):
        rest(loader)


@pytest.mark.parametrize("drop_last", [False, True])
def test_index_sampler_may_change_its_batch_size(drop_last):
    indices = list(range(100, 0, -1))

    def loader(size):
        return make(
            101,
            sampler=BatchSampler(
                sampler=indices, batch_size=size, drop_last=drop_last
            ),
        )

    first = loader(6)
    batches = iter(first)
    got = [i for _ in range(3) for i in content(next(batches))[0]]
    again = loader(4)
    again.load_state_dict(first.state_dict())
    # what is left is cut anew, not what the other size left of it
    whole = 3 * 6 + 82 // 4 * 4 if drop_last else 100

    assert (
        got + [i for batch in rest(again) for i in batch[0]] == indices[:whole]
    )
    assert again.certificate().exact


@pytest.mark.parametrize(
    ("length", "drop_last", "accumulation"),
    [(23, False, 1), (23, True, 1), (21, False, 2), (3, False, 1)],
)
@pytest.mark.parametrize(
    ("num_data_ranks", "shuffle"), [(1, True), (2, False), (3, True)]
)
def test_paddle_sampler_is_reproduced_bit_for_bit(
    length, drop_last, accumulation, shuffle, num_data_ranks
):
    mesh = dist.ProcessMesh(list(range(num_data_ranks)), dim_names=["dp"])

    def three_epochs(batch_sampler, **options):
        batch_sampler._acc_steps = accumulation
        given = DataLoader(Ids(length), batch_sampler=batch_sampler)
        loader = paddle_shard.shard_dataloader(
            given, mesh, shard_dims="dp", **options
        )
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
                three_epochs(
                    plain, shuffle="paddle" if shuffle else PaddleSequential()
                )
                == expected
            )


@pytest.mark.parametrize(
    ("before", "after", "length"),
    [(2, 4, 24), (2, 4, 29), (4, 2, 35), (4, 2, 24), (3, 1, 29), (1, 4, 35)],
)
def test_paddle_sampler_without_shuffle_resumes_on_any_ranks(
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
            for step in zip(
                *(found for found, _ in reports.values()), strict=True
            )
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


def test_user_sampler_without_a_length_is_drawn_once():
    drawn = []  # also of copies

    class NotTold(BatchSampler):
        def __init__(self):
            self.batch_size = 4

        def __iter__(self):
            drawn.append(1)
            return iter([[0, 1, 2, 3], [4, 5]])

        def __len__(self):
            raise TypeError(
                "as that of Paddle's WeightedRandomSampler, given a list"
            )

    assert len(rest(make(sampler=NotTold()))) == 2
    assert len(drawn) <= 2, (
        "once for the pass, and once if somebody asks for the length"
    )


@pytest.mark.parametrize("weights", [list, np.array])
def test_weighted_sampler_with_another_number_is_rejected(
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
