"""What a stream promises, on simulated ranks and one process; `multiprocess/test_streams.py` has real ones."""

import copy
import json
import pickle
import random
import re
import sys
from collections import Counter
from types import ModuleType

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.data.stages.stage import Stage
from paddle_shard.errors import (
    ArgumentError,
    ArgumentTypeError,
    DataReadError,
    StateError,
)
from paddle_shard.ranks.reports import error_of_report, report_of
from paddle_shard.testing.simulated import on_each_rank

ONE = dist.ProcessMesh([0], dim_names=["dp"])
TWO = dist.ProcessMesh([0, 1], dim_names=["dp"])


def sharded(
    stream,
    *,
    size=8,
    workers=0,
    mesh=ONE,
    collate_fn=None,
    shard_dims="dp",
    num_parts=None,
    **options,
):
    stream = (
        stream if num_parts is None else Stream.of(stream).in_parts(num_parts)
    )
    given = paddle.io.DataLoader(
        stream, batch_size=size, num_workers=workers, collate_fn=collate_fn
    )
    return paddle_shard.shard_dataloader(
        given, mesh, shard_dims=shard_dims, **options
    )


def real_rows(loader, limit=None):
    """The real rows of each batch of a pass, or of its first batches."""
    batches, found = iter(loader), []
    for batch in batches:
        valid = batches.valid._local_value().numpy()
        found.append(batch._local_value().numpy()[valid].tolist())
        if len(found) == limit:
            break
    return found


def flat(batches):
    return [row for batch in batches for row in batch]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("before", "after"), [(8, 16), (16, 8), (8, 4)])
@pytest.mark.parametrize("tail", ["pad", "drop", "repeat"])
def test_stream_resumes_with_another_batch_size(known, before, after, tail):
    def stream():
        return Stream.of(list(range(64)) if known else lambda: iter(range(64)))

    first = sharded(stream(), size=before, num_parts=4, tail=tail)
    begun = real_rows(first, 2)
    second = sharded(stream(), size=after, num_parts=4, tail=tail)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    gone_on = real_rows(second)

    assert Counter(flat(begun + gone_on)) == Counter(range(64))
    assert len(gone_on) == (64 - 2 * before) // after


@pytest.mark.parametrize("tail", ["pad", "drop"])
@pytest.mark.parametrize("sizes", [(4, 6, 4), (6, 4, 10), (2, 8, 3), (5, 1, 7)])
@pytest.mark.parametrize("known", [True, False])
def test_uncut_stream_resumes_in_other_parts(known, sizes, tail):
    """Where parts do not matter, batches are the next samples of the stream, whatever their number was before."""
    position = 0
    state = None
    for size in sizes:
        source = list(range(61)) if known else lambda: iter(range(61))
        loader = sharded(Stream.of(source), size=size, tail=tail, verify=1)
        if state is not None:
            loader.load_state_dict(state)
        batches = real_rows(loader, 3)
        assert flat(batches) == list(range(position, position + 3 * size))
        position += 3 * size
        state = json.loads(json.dumps(loader.state_dict()))
    loader = sharded(Stream.of(source), size=9, tail=tail, workers=2)
    loader.load_state_dict(state)
    rest = (61 - position) // 9 * 9 if tail == "drop" else 61 - position
    assert sorted(flat(real_rows(loader))) == [
        *range(position, position + rest)
    ]


def test_uncut_stream_resumes_on_another_mesh():
    def run(state, mesh, size):
        loader = sharded(
            Stream.of(lambda: iter(range(40))), size=size, mesh=mesh
        )
        if state is not None:
            loader.load_state_dict(state)
        return real_rows(loader, 2), loader.state_dict()

    begun, state = run(None, ONE, 5)
    assert flat(begun) == list(range(10))
    ranks = on_each_rank([0, 1], lambda: run(state, TWO, 6)[0])
    assert [a + b for a, b in zip(*ranks.values(), strict=True)] == [
        list(range(10, 16)),
        list(range(16, 22)),
    ]


REPEATED = {
    "repeated": lambda: Stream.of(range(21)).repeat(2),
    "cut, then repeated": lambda: (
        Stream.of(range(21)).sharding_filter().repeat(2)
    ),
    "shuffled, cut, then repeated": lambda: (
        Stream.of(range(21)).shuffle(5).sharding_filter().repeat(2)
    ),
    "repeated, then cut": lambda: (
        Stream.of(range(21)).repeat(2).sharding_filter()
    ),
}


@pytest.mark.parametrize(("with_workers", "kind"), list(enumerate(REPEATED)))
def test_stream_resumes_in_any_round_with_new_readers(with_workers, kind):
    straight = real_rows(sharded(REPEATED[kind](), size=4))
    # In the first round, near its end, and in the second; the kinds take turns in which of them workers resume.
    for number, stop in enumerate(
        (1, len(straight) // 2 - 1, len(straight) - 2)
    ):
        workers = 2 if number == with_workers % 3 else 0
        first, second = (
            sharded(REPEATED[kind](), size=4),
            sharded(REPEATED[kind](), size=4, workers=workers),
        )
        batches = iter(first)
        for _ in range(stop):
            next(batches)
        batches.close()
        second.load_state_dict(first.state_dict())
        assert real_rows(second) == straight[stop:], stop


PASSES_AT_ONCE = {
    "a list": lambda: Stream.of(range(45)),
    "a function": lambda: Stream.of(lambda: iter(range(45))).map(lambda i: i),
    "shuffled": lambda: Stream.of(range(45)).shuffle(7).batch(3).unbatch(),
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [("a list", 0), ("a function", 2), ("shuffled", 0), ("shuffled", 2)],
)
def test_stream_passes_at_once_each_deliver_all_data(name, workers):
    def loader():
        return sharded(PASSES_AT_ONCE[name](), workers=workers)

    alone, shared = real_rows(loader()), loader()
    one, two, found = iter(shared), iter(shared), ([], [])
    peeked = real_rows(shared, 1)
    # the second lags a step behind the first, and a third is left in the middle
    for number in range(len(alone)):
        for batches, rows in zip((one, two), found, strict=True):
            if batches is one or number:
                batch = next(batches)
                rows.append(
                    batch._local_value()
                    .numpy()[batches.valid._local_value().numpy()]
                    .tolist()
                )
    found[1].extend(real_rows(two))

    assert found == (alone, alone)
    assert peeked == alone[:1]


BEHIND_THE_CUT = {
    "filtered": lambda s: s.filter(lambda i: i % 8 > 2),
    "grouped and mixed": lambda s: s.batch(3).shuffle(2).unbatch(),
    "one to several": lambda s: s.map(lambda i: [i] * (1 + i % 3)).unbatch(),
    "repeated": lambda s: s.filter(lambda i: i % 5).repeat(2),
}


@pytest.mark.parametrize(("more", "name"), list(enumerate(BEHIND_THE_CUT)))
def test_stream_readers_that_are_not_equally_far_read_the_same(more, name):
    def rows(workers):
        return real_rows(
            sharded(
                BEHIND_THE_CUT[name](Stream.of(range(96)).sharding_filter()),
                workers=workers,
            )
        )

    assert rows(2 + more % 2) == rows(0)


@pytest.mark.parametrize("workers", [0, 3])
def test_stream_of_whole_batches_repeats_them_in_order(workers):
    stream = Stream.of(lambda: iter([np.arange(4) + 10 * k for k in range(3)]))

    found = real_rows(
        sharded(stream, size=None, workers=workers, num_batches=8)
    )

    assert [batch[0] for batch in found] == [0, 10, 20, 0, 10, 20, 0, 10]


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_function_that_splits_itself_is_called_by_part(workers):
    def own_share():
        info = paddle.io.get_worker_info()
        return iter(range(info.id, 32, info.num_workers))

    found = real_rows(
        sharded(Stream.of(own_share, splits_itself=True), workers=workers)
    )

    assert sorted(flat(found)) == list(range(32))
    with pytest.raises(
        ArgumentTypeError, match="or a function that returns one"
    ):
        Stream.of(iter(range(4)), splits_itself=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_that_splits_itself_must_ask_for_its_part(workers):
    def augmented():
        return (row + random.random() for row in range(32))

    with pytest.raises(
        DataReadError,
        match=r"asks neither paddle\.io\.get_worker_info\(\) nor torch's",
    ):
        list(sharded(Stream.of(augmented, splits_itself=True), workers=workers))

    in_one = Stream.of(augmented, splits_itself=True).in_parts(1)
    assert len(flat(real_rows(sharded(in_one, workers=workers)))) == 32


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_that_splits_itself_may_ask_torch(workers, monkeypatch):
    # tests/adapters/torchdata has the real one
    of_torch = ModuleType("torch.utils.data._utils.worker")
    of_torch._worker_info = None
    monkeypatch.setitem(sys.modules, of_torch.__name__, of_torch)

    def own_share():
        info = of_torch._worker_info
        return (
            row + 0.5 * random.random()
            for row in range(info.id, 32, info.num_workers)
        )

    found = real_rows(
        sharded(Stream.of(own_share, splits_itself=True), workers=workers)
    )

    assert sorted(int(row) for row in flat(found)) == list(range(32))
    assert of_torch._worker_info is None


class Standing(paddle.io.IterableDataset):
    """Holds where it stands, as a data set may of which each worker has a copy; its first sample says what follows."""

    def __iter__(self):
        yield -1.0
        info = paddle.io.get_worker_info()
        self.at, self.step = info.id, info.num_workers
        while self.at < 32:
            yield float(self.at)
            self.at += self.step


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_that_splits_itself_may_ask_after_a_sample(workers):
    rows = flat(
        real_rows(
            sharded(
                Stream.of(Standing(), splits_itself=True).filter(
                    lambda row: row >= 0
                ),
                workers=workers,
            )
        )
    )

    assert sorted(rows) == list(range(32))


class ByEpoch(paddle.io.IterableDataset):
    """Shuffles by the epoch that it is told, as torch's data sets do."""

    def __init__(self, splits):
        self.epoch, self.splits = 0, splits

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(32)
        info = paddle.io.get_worker_info()
        return iter(
            order[info.id :: info.num_workers] if self.splits else order
        )


@pytest.mark.parametrize(
    ("splits", "workers"), [(True, 0), (True, 2), (False, 0)]
)
def test_stream_sets_the_epoch_also_after_a_resume(splits, workers):
    def made():
        stream = (
            Stream.of(ByEpoch(splits), splits_itself=True)
            if splits
            else ByEpoch(splits)
        )
        return sharded(stream, workers=workers)

    loader = made()
    epochs = [flat(real_rows(loader)) for _ in range(3)]
    assert [sorted(rows) for rows in epochs] == [list(range(32))] * 3
    assert len({str(rows) for rows in epochs}) == 3
    if not splits:
        assert epochs[1] == np.random.default_rng(1).permutation(32).tolist()

    loader = made()
    flat(real_rows(loader))
    begun = flat(real_rows(loader, 2))
    other = made()
    other.load_state_dict(loader.state_dict())
    assert begun + flat(real_rows(other)) == epochs[1]


def test_stream_that_splits_itself_fails_at_the_samples_place():
    def broken():
        info = paddle.io.get_worker_info()
        yield info.id
        raise OSError("no disk")

    batches = iter(sharded(Stream.of(broken, splits_itself=True)))
    assert next(batches)._local_value().numpy().tolist() == list(range(8))
    with pytest.raises(DataReadError, match="no disk"):
        next(batches)


def test_stream_joins_chunks_of_workers_for_every_dtype():
    dtypes = ["float16", "float32", "int8", "bool", "complex64"]
    rows = [
        [np.array([i % 2, 1]).astype(dtype) for dtype in dtypes]
        for i in range(32)
    ]

    batches = list(sharded(Stream.of(rows), workers=3))

    for number, dtype in enumerate(dtypes):
        found = [
            row
            for batch in batches
            for row in batch[number]._local_value().numpy()
        ]
        assert [row.dtype for row in found] == [np.dtype(dtype)] * 32
        assert np.array_equal(found, [row[number] for row in rows])


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (
            lambda rows: {"x": np.array(rows), "n": len(rows)},
            "differ in value, without a row for each sample",
        ),
        (lambda rows: np.array(5), "A collate_fn must make one row a sample"),
    ],
)
def test_stream_workers_must_collate_rows(made, text):
    with pytest.raises(DataReadError, match=text):
        next(iter(sharded(Stream.of(range(24)), workers=3, collate_fn=made)))


def test_stream_of_changed_data_is_not_resumed(tmp_path):
    (tmp_path / "lines").write_text("1\n2\n3\n4\n")
    streams = [
        (lambda: Stream.of(range(32)), lambda: Stream.of(range(40))),
        (
            lambda: Stream.lines(tmp_path / "lines").map(int),
            lambda: Stream.lines(tmp_path / "lines").map(int),
        ),
    ]
    for number, (one, other) in enumerate(streams):
        first = sharded(one(), size=2)
        real_rows(first, 1)
        state = first.state_dict()
        if number:
            (tmp_path / "lines").write_text("1\n2\n3\n4\n5\n")
        with pytest.raises(StateError, match="of another run"):
            sharded(other(), size=2).load_state_dict(state)


def test_stream_parts_cannot_be_overridden():
    first = sharded(Stream.of(range(32)).shuffle(4), num_parts=4)
    real_rows(first, 1)

    with pytest.raises(
        StateError,
        match=r"num_parts=4, and this loader num_parts=8.*in_parts\(\)",
    ):
        sharded(Stream.of(range(32)).shuffle(4), num_parts=8).load_state_dict(
            first.state_dict(), override=["num_parts"]
        )


def test_stream_must_not_be_empty():
    with pytest.raises(
        ArgumentError, match="the stream has no batch: it is empty"
    ):
        sharded(Stream.of([]))
    with pytest.raises(DataReadError, match="every part is empty"):
        next(iter(sharded(Stream.of(lambda: iter([])))))


def test_report_of_a_long_failure_keeps_its_place():
    error = DataReadError("x" * 100_000)
    error.index, error.step = (3, 4), 7

    other = error_of_report(5, report_of(error))

    assert isinstance(other, DataReadError)
    assert (other.index, other.step) == ((3, 4), 7)
    assert str(other).startswith("global rank 5: xxx")
    assert len(str(other)) < 11_000


def test_generator_loses_no_batch_to_its_description():
    from paddle_shard.loader.iteration import describe_inputs

    def pairs():
        for k in range(3):
            yield [np.full((4, 2), k, "float32"), np.full(4, k)]

    loader = paddle_shard.shard_dataloader(pairs(), ONE, shard_dims="dp")
    described = describe_inputs(loader._first_batch)

    assert described[1]._local_value().numpy().tolist() == [0] * 4
    assert [labels._local_value().numpy()[0] for _, labels in loader] == [
        0,
        1,
        2,
    ]


def test_stream_statistics_count_what_was_delivered():
    loader = sharded(Stream.of(np.arange(20, dtype="float32")))
    real_rows(loader)

    assert (loader.stats.total.batches, loader.stats.total.samples) == (3, 20)
    scalars = loader.stats.scalars()
    assert scalars["data/batches"] == 3
    assert 0 <= scalars["data/starved"] <= 1
    assert "batches=3, samples=20" in repr(loader.stats)


def test_stream_parts_belong_to_the_run_not_to_the_mesh():
    def as_rank():
        return real_rows(
            sharded(Stream.of(range(64)).shuffle(8), mesh=TWO, num_parts=4)
        )

    slices = on_each_rank([0, 1], as_rank)
    alone = real_rows(sharded(Stream.of(range(64)).shuffle(8), num_parts=4))

    assert [
        one + two for one, two in zip(slices[0], slices[1], strict=True)
    ] == alone


class _Uneven(Stage):
    """Parts of given lengths, which it knows."""

    cuts = True

    def __init__(self, lengths):
        self.given = lengths

    def open(self, opening):
        return [
            iter(
                range(100 * part + opening.skip, 100 * part + self.given[part])
            )
            for part in opening.parts
        ]

    def lengths(self, opening):
        return [self.given[part] for part in opening.parts]

    def fingerprint(self):
        return ["uneven", self.given]


def rolled(i):
    return np.array([i, np.random.randint(1 << 30)])


FOUR = dist.ProcessMesh([0, 1, 2, 3], dim_names=["dp"])
PADDED = {
    "uneven parts": lambda: Stream(_Uneven([9, 2, 5, 4])).map(rolled),
    "shuffled": lambda: Stream(_Uneven([1, 7, 3, 12])).map(rolled).shuffle(4),
    "empty parts": lambda: Stream(_Uneven([0, 0, 5, 0])).map(rolled),
    "striped": lambda: Stream.of(list(range(21))).map(rolled),
    "fewer samples than parts": lambda: Stream.of(list(range(3))).map(rolled),
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        (name, workers)
        for at, name in enumerate(PADDED)
        for workers in (0, 2 + at % 2)
    ],
)
def test_stream_rows_and_padding_are_those_of_one_process(name, workers):
    def rows(mesh, workers, state=None):
        def as_rank():
            loader = sharded(
                PADDED[name](), mesh=mesh, workers=workers, num_parts=4
            )
            if state is not None:
                loader.load_state_dict(state)
            batches, found, states = iter(loader), [], [loader.state_dict()]
            for batch in batches:
                found.append(
                    (
                        batch._local_value().numpy(),
                        batches.valid._local_value().numpy(),
                    )
                )
                states.append(loader.state_dict())
            return found, states

        per_rank = on_each_rank(mesh.process_ids, as_rank)
        steps = zip(*(found for found, _ in per_rank.values()), strict=True)
        joined = [
            [
                np.concatenate(field).tolist()
                for field in zip(*ranks, strict=True)
            ]
            for ranks in steps
        ]
        return joined, per_rank[0][1]

    alone, states = rows(ONE, 0)
    assert any(not all(valid) for _, valid in alone)
    for mesh in (TWO,) if workers else (ONE, TWO, FOUR):
        assert rows(mesh, workers)[0] == alone, mesh
    meshes = (ONE, TWO) if workers else (ONE, TWO, FOUR)
    stops = [len(alone) // 2] if workers else range(len(alone))
    for step in stops:
        resumed = rows(meshes[step % len(meshes)], workers, states[step])[0]
        assert resumed == alone[step:], step


@pytest.mark.parametrize(
    ("workers", "sizes"),
    [((1, 3), [4, 4, 4, 2]), ((0,), [4, 2]), ((), [4]), ((2,), [4, 4, 1])],
)
def test_stream_fills_a_ranks_own_short_batch(workers, sizes):
    def items():
        return (
            np.arange(size) + 10 * number for number, size in enumerate(sizes)
        )

    def rows(workers, state=None):
        loader = sharded(
            Stream.of(items),
            size=None,
            workers=workers,
            mesh=ONE,
            is_dataset_splitted=True,
            tail="pad",
        )
        if state is not None:
            loader.load_state_dict(state)
        batches, found, states = iter(loader), [], [loader.state_dict()]
        for batch in batches:
            valid = batches.valid._local_value().numpy().tolist()
            found.append((batch._local_value().numpy().tolist(), valid))
            states.append(loader.state_dict())
        return found, states

    alone, states = rows(0)
    assert [sum(valid) for _, valid in alone] == sizes
    assert all(len(valid) == 4 for _, valid in alone)
    for number in workers:
        assert rows(number)[0] == alone
    for step, state in enumerate(states[:-1]):
        with_workers = 2 if step == 1 and workers else 0
        assert rows(with_workers, state)[0] == alone[step:]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_stream_of_batches_that_is_read_once_has_an_end(workers):
    items = iter([np.arange(4)] * 3)
    loader = sharded(Stream.of(items), size=None, workers=workers, tail="pad")

    assert len(list(loader)) == 3


class _Shrunk(Stage):
    """Says that its parts are longer than they are, as a stale index does."""

    cuts = True

    def open(self, opening):
        return [
            iter(range(part, 29, opening.num_parts)) for part in opening.parts
        ]

    def lengths(self, opening):
        return [8 for _ in opening.parts]

    def fingerprint(self):
        return ["shrunk"]


def test_stream_that_is_shorter_than_its_index_is_an_error():
    loader = sharded(Stream(_Shrunk()), num_parts=4, tail="drop")
    delivered = []

    with pytest.raises(
        DataReadError, match="fewer samples than its source said"
    ):
        for batch in loader:
            delivered.append(batch)
    assert len(delivered) == 3


def test_batch_sampler_of_a_loader_cannot_be_iterated():
    with pytest.raises(
        ArgumentTypeError, match="Iterate over the loader itself"
    ):
        list(sharded(Stream.of(range(8))).batch_sampler)


@pytest.mark.parametrize("change", [{"size": 2}, {"tail": "pad"}])
def test_stream_epoch_that_has_ended_stays_as_delivered(change):
    """A smaller batch, or another tail, would have served what "drop" has dropped; it comes too late."""
    stream = Stream.of(range(23))
    one = sharded(stream, size=4, tail="drop", num_parts=2)
    found = iter(one)
    for _ in range(len(one)):
        next(found)
    state = one.state_dict()
    assert state["ended"]
    again = sharded(
        stream, num_parts=2, **{"size": 4, "tail": "drop", **change}
    )
    again.load_state_dict(state, override=["tail"] if "tail" in change else [])

    assert len(again) == 5
    assert list(again) == []
    assert again.epoch == 1
    assert len(list(again)) == len(again)


def test_stream_can_be_copied_and_pickled():
    stream = Stream.of(range(4))

    assert list(copy.deepcopy(pickle.loads(pickle.dumps(stream)))) == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize(
    "after",
    [
        lambda s: s,
        lambda s: s.filter(bool),
        lambda s: s.shuffle(4).filter(bool).map(int),
    ],
)
def test_stream_part_needs_a_file_whatever_stage_follows(after, tmp_path):
    (tmp_path / "0.txt").write_text("1\n2\n3\n4\n")
    stream = after(
        Stream.lines(str(tmp_path / "*.txt"), counts=False).map(int)
    ).in_parts(2)

    with pytest.raises(
        ArgumentError,
        match=r"in_parts\(2\): 1 shards cannot be assigned to 2 parts",
    ):
        sharded(stream, size=4)


def test_stream_that_repeats_files_needs_one_a_part(tmp_path):
    (tmp_path / "0.txt").write_text("1\n2\n3\n4\n")
    stream = (
        Stream.lines(str(tmp_path / "*.txt"), counts=False).repeat().map(int)
    )
    two = dist.ProcessMesh([0, 1], dim_names=["dp"])

    with pytest.raises(
        ArgumentError,
        match=r"in_parts\(1\): .* multiple of the 2 data ranks\. .*counts=True",
    ):
        sharded(stream, size=4, mesh=two, num_batches=2)


def test_stream_warns_of_padding_of_uneven_parts(tmp_path, caplog):
    for number, lines in enumerate((40, 10, 10)):
        (tmp_path / f"{number}.txt").write_text(
            "".join(f"{line}\n" for line in range(lines))
        )
    stream = Stream.lines(
        str(tmp_path / "*.txt"), counts=False, shuffle_shards=False
    ).map(int)

    list(sharded(stream.in_parts(2), size=4))

    assert re.search(
        r"tail='pad': \d+% of this rank's rows [^\n]*counts=True", caplog.text
    ), caplog.text
