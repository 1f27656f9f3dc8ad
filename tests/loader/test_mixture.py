"""A mixture given to a loader: resumed anywhere, on other meshes, with other weights; errors that name the source."""

import json

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.io import DataLoader

import paddle_shard
from paddle_shard import Mixture, Stream
from paddle_shard.errors import (
    ArgumentError,
    ArgumentTypeError,
    DataReadError,
    StateError,
)
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import ONE, Made, mesh, sharded

LENGTHS = {"web": 23, "code": 7, "chat": 3}


def sources(lengths=LENGTHS):
    """Sample i of the source at place p is 1000 p + i; a source of no length is gone."""
    return {
        name: Made(lambda i, first=1000 * place: np.array(first + i), length)
        if length
        else None
        for place, (name, length) in enumerate(lengths.items())
    }


def make(
    batch_size=4,
    at=ONE,
    *,
    weights=None,
    lengths=LENGTHS,
    num_samples=40,
    shuffle=True,
    workers=0,
    **options,
):
    weights = {"web": 5, "code": 3, "chat": 1} if weights is None else weights
    mixture = Mixture(sources(lengths), weights, num_samples=num_samples)
    return sharded(
        DataLoader(
            mixture, batch_size=batch_size, shuffle=shuffle, num_workers=workers
        ),
        at,
        **options,
    )


def ids(batches, most=None):
    """The real rows of this rank, of up to `most` batches."""
    found = []
    for batch in batches:
        found.append(
            batch._local_value()
            .numpy()[batches.valid._local_value().numpy()]
            .tolist()
        )
        if most is not None and len(found) == most:
            break
    return found


def flat(batches):
    return [row for batch in batches for row in batch]


OLD, NEW = {"web": 5, "code": 3}, {"web": 1, "chat": 1}


@pytest.mark.parametrize(
    ("schedule", "is_refused"),
    [
        ([(0, OLD), (20, NEW)], False),
        ([(0, OLD), (8, NEW)], False),
        ([(0, OLD)], False),
        ([(0, OLD), (7, NEW)], True),
        ([(0, NEW), (20, OLD)], True),
        ([(0, OLD), (4, OLD)], True),
    ],
)
def test_mixture_schedule_changed_before_the_position_is_refused(
    schedule, is_refused
):
    loader = make(weights=[(0, OLD), (20, NEW)])
    with iter(loader) as batches:
        ids(batches, 2)
    state = json.loads(json.dumps(loader.state_dict()))
    other = make(weights=schedule)

    if is_refused:
        with pytest.raises(
            StateError,
            match=r"mixture: saved .*, now .*override=",
        ):
            other.load_state_dict(state)
    else:
        other.load_state_dict(state)


def test_source_may_join_later_as_the_last_one():
    old = make(weights={"web": 5, "code": 3}, lengths={"web": 23, "code": 7})
    with iter(old) as batches:
        begun = flat(ids(batches, 3))
    state = json.loads(json.dumps(old.state_dict()))

    schedule = [(0, {"web": 5, "code": 3}), (16, {"chat": 1})]
    new = make(weights=schedule)
    new.load_state_dict(state)

    assert begun + flat(ids(iter(new))) == flat(
        ids(iter(make(weights=schedule)))
    )


def test_weights_may_change_by_schedule_and_the_counts_are_exact():
    weights = [
        (0, {"web": 1, "code": 1, "chat": 0}),
        (20, {"web": 1, "code": 0, "chat": 3}),
    ]
    loader = make(weights=weights)
    with iter(loader) as batches:
        rows = flat(ids(batches))

    counts = [
        [sum(row // 1000 == source for row in part) for source in range(3)]
        for part in (rows[:20], rows[20:])
    ]
    assert counts == [[10, 10, 0], [5, 0, 15]]
    assert {name: drawn.drawn for name, drawn in loader.sources().items()} == {
        "web": 15,
        "code": 10,
        "chat": 15,
    }
    assert loader.sources()["chat"].epochs == 5
    assert loader.sources()["chat"].weight == 0.75


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("epoch", [0, 2])
def test_where_names_every_place_of_a_sample(shuffle, epoch):
    def run():
        loader = make(6, mesh([0, 1], "dp"), shuffle=shuffle)
        loader.set_epoch(epoch)
        with iter(loader) as batches:
            found = ids(batches)
        return (
            found,
            loader.where(sample=("chat", 1), epoch=epoch),
            loader.where(sample=("web", 22), epoch=epoch),
        )

    per_rank = on_each_rank([0, 1], run)
    rows = {rank: per_rank[rank][0] for rank in per_rank}
    for places, wanted in ((per_rank[0][1], 2001), (per_rank[0][2], 22)):
        found = [(place.step, place.data_rank, place.row) for place in places]
        assert found == [
            (step, rank, row)
            for step in range(len(rows[0]))
            for rank in (0, 1)
            for row, value in enumerate(rows[rank][step])
            if value == wanted
        ]
    assert len(per_rank[0][1]) >= 1


def test_mixture_sample_read_again_has_new_random_numbers():
    def noisy(_):
        return np.random.rand(2)

    mixture = Mixture(
        {"one": Made(noisy, 1), "two": Made(noisy, 2)},
        {"one": 1, "two": 1},
        num_samples=24,
    )
    rows = [
        batch._local_value().numpy().tolist()
        for batch in sharded(DataLoader(mixture, batch_size=4), ONE)
    ]
    again = [
        batch._local_value().numpy().tolist()
        for batch in sharded(
            DataLoader(mixture, batch_size=4, num_workers=2), ONE
        )
    ]

    assert rows == again
    assert len({tuple(row) for row in flat(rows)}) == 24


# Errors, and other ways to read it


class Broken(paddle.io.Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index == 3:
            raise OSError("the disk is gone")
        return np.array(index)


@pytest.mark.parametrize("kinds", [("int32", "int64"), ("float32", "float64")])
@pytest.mark.parametrize("streams", [False, True])
def test_field_of_two_dtypes_is_an_error(kinds, streams):
    of = {
        kind: Made(lambda i, kind=kind: {"x": np.array([i], kind)}, 8)
        for kind in kinds
    }
    if streams:
        mixture = Stream.mixture(
            {
                kind: Stream.of([one[i] for i in range(8)])
                for kind, one in of.items()
            }
        )
    else:
        mixture = Mixture(of)
    loader = sharded(
        DataLoader(mixture.in_parts(1) if streams else mixture, batch_size=4),
        ONE,
    )

    with pytest.raises(
        DataReadError,
        match=rf"differ in their dtype at field \['x'\]: {', '.join(kinds)}",
    ):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_error_names_the_source_and_the_index_in_it(workers):
    mixture = Mixture({"good": Made(length=5), "bad": Broken()})

    with pytest.raises(
        DataReadError, match=r"reading sample \('bad', 3\) failed"
    ) as caught:
        list(
            sharded(DataLoader(mixture, batch_size=2, num_workers=workers), ONE)
        )
    assert caught.value.index == ("bad", 3)
    # the positions of the batch in the mixture
    assert len(caught.value.indices) == 2
    loader = sharded(
        DataLoader(mixture, batch_size=2, num_workers=workers),
        ONE,
        on_error="skip",
    )
    assert sum(map(len, ids(iter(loader)))) == 9
    assert loader.stats.total.skipped == 1


def test_mixture_in_a_plain_loader_has_its_first_epoch():
    mixture = Mixture(
        sources(), {"web": 5, "code": 3, "chat": 1}, num_samples=40
    )
    order = flat(ids(iter(make(shuffle=False))))

    assert [int(mixture[at]) for at in range(40)] == order
    assert int(mixture[-1]) == order[-1]
    assert (
        flat(
            batch.numpy().tolist()
            for batch in DataLoader(mixture, batch_size=5)
        )
        == order
    )
    drawn = paddle.io.BatchSampler(sampler=[3, 39, 0], batch_size=3)
    (batch,) = sharded(DataLoader(mixture, batch_sampler=drawn), ONE)
    assert batch._local_value().numpy().tolist() == [
        order[3],
        order[39],
        order[0],
    ]
    with pytest.raises(IndexError):
        mixture[40]


def test_weights_are_by_length_unless_they_are_given():
    mixture = Mixture(sources())

    assert len(mixture) == 33
    assert sorted(int(mixture[at]) for at in range(33)) == sorted(
        1000 * place + at
        for place, length in enumerate(LENGTHS.values())
        for at in range(length)
    )
    assert (
        repr(mixture)
        == "Mixture(web 0.697, code 0.2121, chat 0.09091; 33 samples in an epoch)"
    )


@pytest.mark.parametrize(("stop", "length"), [("first", 14), ("all", 46)])
def test_epoch_ends_with_the_first_or_the_last_source(stop, length):
    assert (
        len(
            Mixture(
                {"a": Made(length=23), "b": Made(length=7)},
                {"a": 1, "b": 1},
                stop=stop,
            )
        )
        == length
    )


@pytest.mark.parametrize(
    ("given", "options", "error", "says"),
    [
        ([1, 2], {}, ArgumentTypeError, "sources must be a dict"),
        ({}, {}, ArgumentError, "1 to 4096 sources"),
        ({1: Made()}, {}, ArgumentTypeError, "name of a source must be a str"),
        (
            {"a": iter([])},
            {},
            ArgumentTypeError,
            "source 'a' must have a length and an index",
        ),
        (
            {"a": Made(length=0)},
            {},
            ArgumentError,
            "source 'a' must have 1 to 2^40 samples",
        ),
        (
            {"a": Made()},
            {"stop": "last"},
            ArgumentError,
            "stop must be 'first' or 'all'",
        ),
        (
            {"a": Made()},
            {"num_samples": 0},
            ArgumentError,
            "num_samples must be an int",
        ),
        (
            {"a": Made()},
            {"num_samples": "9"},
            ArgumentError,
            "num_samples must be an int",
        ),
        (
            {"a": Made()},
            {"weights": [(1, {"a": 1})]},
            ArgumentError,
            "must begin at sample 0",
        ),
        (
            {"a": Made()},
            {"weights": [0.5]},
            ArgumentTypeError,
            "weights must be a dict, or a list",
        ),
        (
            {"a": Made(), "b": None},
            {},
            ArgumentTypeError,
            "source 'b' must have a length and an index",
        ),
        (
            {"a": Made()},
            {"weights": {"b": 1}},
            ArgumentError,
            "weights: unknown sources ['b']",
        ),
        (
            {"a": Made(length=9), "b": Made()},
            {
                "weights": [(0, {"a": 1, "b": 1}), (4, {"a": 0, "b": 1})],
                "stop": "all",
            },
            ArgumentError,
            "weights that change need num_samples",
        ),
    ],
)
def test_bad_arguments_are_named(given, options, error, says):
    with pytest.raises(error) as caught:
        Mixture(given, **options)
    assert says in str(caught.value)


def test_mixture_arguments_are_refused_for_other_data():
    loader = sharded(DataLoader(Made(), batch_size=4), ONE)

    with pytest.raises(
        ArgumentError,
        match=r"sources\(\) is for a loader over a paddle_shard.Mixture",
    ):
        loader.sources()
    with pytest.raises(
        ArgumentError,
        match=r"sample of a mixture must be \(name of a source, index in it\)",
    ):
        make().where(sample=3)
    for shuffle in ("blocks", "paddle"):
        with pytest.raises(
            ArgumentError, match="the sources of a Mixture are shuffled"
        ):
            sharded(
                DataLoader(Mixture(sources()), batch_size=4),
                ONE,
                shuffle=shuffle,
            )


def test_orders_of_one_process_are_public(tmp_path):
    assert "Mixture" in paddle_shard.__all__
    assert dist.get_world_size() == 1


def test_stream_schedule_is_not_extended_before_counting_stages():
    def made(*later):
        names = ("web", "code", "chat")
        streams = {name: Stream.of(range(64)) for name in names}
        weights = [(0, {"web": 2, "code": 1}), *later]
        stream = Stream.mixture(streams, weights).filter(bool).in_parts(4)
        return sharded(DataLoader(stream, batch_size=8), ONE)

    first = made()
    next(iter(first))
    with pytest.raises(StateError, match="stream: saved"):
        made((80, {"chat": 1})).load_state_dict(first.state_dict())


def test_repr_of_a_loader_shows_the_sources_of_a_mixture():
    loader = make(weights={"web": 2, "code": 1, "chat": 1})

    assert "mixture {'sources': ['web', 'code', 'chat']" in repr(loader)
