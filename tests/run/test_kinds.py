"""A record of every kind of data and order: `verify` answers for each, and says what it cannot know."""

import functools

import numpy as np
import paddle
import pytest
from paddle.io import DataLoader, DistributedBatchSampler

import paddle_shard
from paddle_shard import ExternalLoader, Mixture, Packed, Stream
from tests import helpers
from tests.helpers import ONE, Made, local, sharded
from tests.loader.test_settings import CHANGES, DOCUMENTS, FILES, folder  # noqa: F401  (a fixture)
from tests.run.record_runs import asked


def split():
    data = Made(length=46)
    return sharded(
        DataLoader(
            data,
            batch_sampler=DistributedBatchSampler(
                data, 4, num_replicas=1, rank=0
            ),
        ),
        ONE,
    )


class Own(DistributedBatchSampler):
    pass


def split_by_your_own():
    data = Made(length=46)
    return sharded(
        DataLoader(data, batch_sampler=Own(data, 4, num_replicas=1, rank=0)),
        ONE,
    )


def whole_batches():
    return sharded(
        DataLoader(Made(lambda i: np.full(4, i), 6), batch_size=None), ONE
    )


def external():
    build = lambda options: [np.full(4, i) for i in range(6)]  # noqa: E731
    return sharded(ExternalLoader(build, name="mine", repeatable=True), ONE)


def iterable():
    return sharded([paddle.full([4], i) for i in range(6)], ONE)


def packed_mixture():
    data = Mixture(
        {
            "a": Packed(DOCUMENTS, 16, max_pieces=16),
            "b": Packed(DOCUMENTS[:20], 16, max_pieces=16),
        }
    )
    return sharded(DataLoader(data, batch_size=2, shuffle=True), ONE)


KINDS = [
    *CHANGES,
    split,
    split_by_your_own,
    whole_batches,
    external,
    iterable,
    packed_mixture,
]


@pytest.mark.parametrize("made", KINDS, ids=lambda made: made.__name__)
def test_run_of_any_kind_is_recorded_and_verified(made, tmp_path, monkeypatch):
    if (
        made.__name__ in ("webdataset", "parquet")
        and made.__name__ not in FILES
    ):
        pytest.skip("a library is not installed")
    path = tmp_path / "run.jsonl"
    with_record = functools.partial(paddle_shard.shard_dataloader, record=path)
    monkeypatch.setattr(helpers.paddle_shard, "shard_dataloader", with_record)

    def go(loader, most):
        batches = iter(loader)
        return sum(
            next(batches, None) is not None for _ in range(most)
        ), loader.state_dict()

    steps, state = go(made(), 3)
    assert steps == 3
    loader = made()
    loader.load_state_dict(state)
    go(loader, 1000)
    go(loader, 2)

    first, second = asked("verify", path, "--json")["epochs"]
    assert first["problems"] == second["problems"] == []
    assert "so far" not in first["text"]
    assert "so far" in second["text"]
    if first["drawn_by"] in (None, "the mixture"):
        asked("show", path, "--epoch", 0, "--step", 4)
    else:
        assert (
            "which samples these are is not known: the order is that of"
            in first["notes"][0]
        )
        assert "so the record has positions and no samples" in asked(
            "show", path, "--epoch", 0, "--step", 4, code=2
        )


@pytest.mark.parametrize("name", ["seed", "shuffle"])
@pytest.mark.parametrize("stop", [3, 10])
def test_epoch_that_went_on_in_another_order_is_not_proved(
    name, stop, tmp_path
):
    """Unless all of it was delivered by then."""
    record, found = tmp_path / "run.jsonl", []

    def loader(**options):
        given = DataLoader(Made(length=40), batch_size=4)
        return sharded(
            given, ONE, record=record, **{"shuffle": True, "seed": 1, **options}
        )

    first = loader()
    batches = iter(first)
    found += [row for _ in range(stop) for row in local(next(batches))]
    state = first.state_dict()
    batches.close()
    other = loader(**({"seed": 2} if name == "seed" else {"shuffle": False}))
    other.load_state_dict(state, override=[name])
    found += [row for batch in other for row in local(batch)]

    said = asked("verify", record, code=int(stop == 3))

    assert (sorted(found) == list(range(40))) == (stop == 10)
    if stop == 3:
        assert "epoch 0: NOT each of 40 samples exactly once: in" in said
        assert "some samples were missed and as many repeated" in said
        # not of samples
        assert (
            asked("verify", record, "--json", code=1)["epochs"][0][
                "repeated_positions"
            ]
            == 0
        )
    else:
        assert "epoch 0: each of 40 samples exactly once" in said


def test_stream_that_went_on_with_other_files_is_not_proved(tmp_path):
    record, paths = (
        tmp_path / "run.jsonl",
        [tmp_path / f"{number}.txt" for number in range(2)],
    )
    for path, rows in zip(paths, (range(14), range(14, 40)), strict=True):
        path.write_text("".join(f"{row}\n" for row in rows))

    def loader(paths):
        stream = Stream.lines(paths, shuffle_shards=False).map(
            lambda line: np.array(int(line))
        )
        return sharded(DataLoader(stream, batch_size=4), ONE, record=record)

    first = loader(paths)
    batches = iter(first)
    found = [row for _ in range(3) for row in local(next(batches))]
    state = first.state_dict()
    batches.close()
    other = loader(paths[::-1])
    other.load_state_dict(state, override=["stream"])
    found += [row for batch in other for row in local(batch)]

    said = asked("verify", record, code=1)

    assert sorted(found) != list(range(40))
    assert "epoch 0: not proved that each of 40 positions of the stream" in said
    assert (
        "from position 12 on are those that were left is not known: the run was resumed there with override="
        in said
    )


def test_record_of_a_stream_counts_positions(tmp_path):
    """It has 21 samples, of which one cannot be read; the last batch has rows of padding."""

    def read(number):
        if number == 5:
            raise ValueError("damaged")
        return np.array(number)

    stream = Stream.of(range(21)).map(read).in_parts(2)
    loader = sharded(
        DataLoader(stream, batch_size=4),
        ONE,
        record=tmp_path / "run.jsonl",
        on_error="skip",
    )
    batches = iter(loader)
    real = sum(int(batches.valid._local_value().numpy().sum()) for _ in batches)

    said = asked("verify", tmp_path / "run.jsonl")
    assert real == 20
    assert "epoch 0: each of 24 positions of the stream exactly once" in said
    assert (
        "rows of padding, and samples that could not be read, have positions, too"
        in said
    )


def test_job_that_has_loaded_and_not_begun_changes_no_answer(tmp_path):
    """As one that died while it built its model, or does so still."""
    record = tmp_path / "run.jsonl"

    def loader():
        return sharded(
            DataLoader(Made(length=40), batch_size=4, shuffle=True),
            ONE,
            record=record,
        )

    def answers():
        return [
            asked("verify", record).splitlines()[-2:],
            [
                one
                for one in asked("show", record, "--sample", 3, "--json")[
                    "delivered"
                ]
                if one["recorded"] == "yes"
            ],
            asked("show", record, "--epoch", 0, "--step", 2, "--json"),
        ]

    first = loader()
    list(first)
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = first.state_dict()
    batches.close()
    before = answers()
    loader()
    assert answers() == before, "made"
    loader().load_state_dict(state)
    assert answers() == before, "loaded"


def test_record_finds_later_samples_and_older_meshes(
    tmp_path,
):
    record, state = tmp_path / "run.jsonl", None
    for length, batch_size, override in ((40, 3, ()), (50, 8, ["num_samples"])):
        given = DataLoader(
            Made(length=length), batch_size=batch_size, shuffle=True
        )
        loader = sharded(
            given,
            ONE if length == 50 else helpers.mesh([[0]], "mp", "dp"),
            record=record,
        )
        if state is not None:
            loader.load_state_dict(state, override=override)
        list(loader)
        state = loader.state_dict()

    (place,) = asked("show", record, "--sample", 45, "--json")["delivered"]
    assert (place["epoch"], place["job"]) == (1, 2)
    assert "must be an int in" in asked("show", record, "--sample", 50, code=2)
    found = asked("show", record, "--epoch", 0, "--step", 0, "--json")[
        "delivered"
    ]
    assert [group["ranks"] for group in found] == [[0]]


def test_record_counts_the_dropped_tail_of_larger_batches(tmp_path):
    record, state = tmp_path / "run.jsonl", None
    for batch_size, steps in ((3, 20), (6, 0)):
        given = DataLoader(Made(length=64), batch_size=batch_size, shuffle=True)
        loader = sharded(given, ONE, record=record, tail="drop")
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        for _ in range(steps):
            next(batches)
        state = loader.state_dict()
    assert list(batches) == []

    assert (
        "epoch 0: each of 60 samples (of 64; tail='drop' leaves out 4) exactly once"
        in asked("verify", record)
    )
