"""Data that Paddle, numpy or a data set would change without a word."""

import io
import time
import zipfile

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.io import DataLoader

import paddle_shard
from paddle_shard import ArrayDataset, Stream
from paddle_shard.errors import BatchStructureError, DataReadError, StateError
from paddle_shard.testing.simulated import simulated_rank
from tests.helpers import Made

MESH = dist.ProcessMesh([0], dim_names=["dp"])
TWO = dist.ProcessMesh([0, 1], dim_names=["dp"])
TOKENS = np.array([[50256, 1], [2, 3], [4, 5], [6, 7]], np.uint16)


class Samples(paddle.io.Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def sharded(data, mesh=MESH, *, is_dataset_splitted=False, **given):
    given = paddle.io.DataLoader(data, batch_size=2, **given)
    return paddle_shard.shard_dataloader(
        given, mesh, shard_dims="dp", is_dataset_splitted=is_dataset_splitted
    )


def local(batch):
    leaves = batch if isinstance(batch, list) else [batch]
    return [leaf._local_value().numpy().tolist() for leaf in leaves]


def stacked(samples):
    return np.stack(samples)


UINT16 = {
    "samples": lambda: sharded(Samples(TOKENS)),
    "scalars": lambda: sharded(Samples(TOKENS[:, 0])),
    "collate_fn": lambda: sharded(Samples(TOKENS), collate_fn=stacked),
    "whole batches": lambda: paddle_shard.shard_dataloader(
        paddle.io.DataLoader(Samples([TOKENS, TOKENS]), batch_size=None),
        MESH,
        shard_dims="dp",
    ),
    "arrays": lambda: sharded(ArrayDataset(TOKENS)),
    "named arrays": lambda: sharded(ArrayDataset(tokens=TOKENS)),
    "stream": lambda: sharded(Stream.of(list(TOKENS))),
    "workers": lambda: sharded(Samples(TOKENS), num_workers=2),
}


@pytest.mark.parametrize("how", UINT16)
def test_uint16_is_refused_with_the_cast_to_use(how):
    with pytest.raises(
        DataReadError,
        match=r"array of uint16, which Paddle takes for bfloat16: .*astype\('int32'\)",
    ):
        next(iter(UINT16[how]()))


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_of_bfloat16_stay_what_they_are(workers):
    ones = paddle.ones([2]).cast("bfloat16")
    for given in ({}, {"collate_fn": paddle.stack}):
        [batch] = sharded(Samples([ones, ones]), num_workers=workers, **given)
        found = batch if isinstance(batch, paddle.Tensor) else batch[0]
        assert found.dtype == paddle.bfloat16
        assert found._local_value().cast("float32").numpy().tolist() == [
            [1, 1],
            [1, 1],
        ]


@pytest.mark.parametrize("collate_fn", [None, lambda samples: samples[0]])
def test_sparse_tensors_are_refused(collate_fn):
    sparse = paddle.ones([2, 2]).to_sparse_coo(2)
    with pytest.raises(DataReadError, match=r"to_dense\(\)"):
        next(iter(sharded(Samples([sparse, sparse]), collate_fn=collate_fn)))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_samples_of_float8_are_refused(dtype):
    sample = paddle.ones([2]).cast(dtype)
    with pytest.raises(DataReadError, match=f"dtype paddle.{dtype} cannot"):
        next(iter(sharded(Samples([sample, sample]))))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("named", [False, True])
def test_collate_fn_of_arrays_gets_what_paddle_gives_it(named, workers):
    tokens, labels = np.arange(16).reshape(8, 2), np.arange(8) + 100
    data = (
        ArrayDataset(tokens=tokens, labels=labels)
        if named
        else ArrayDataset(tokens, labels)
    )
    first = "tokens" if named else 0

    def collate_fn(samples):
        assert type(samples) is list
        return [np.stack([sample[first] for sample in samples])]

    found = [
        local(batch)
        for batch in sharded(data, collate_fn=collate_fn, num_workers=workers)
    ]

    assert found == [[tokens[at : at + 2].tolist()] for at in range(0, 8, 2)]
    alone = sharded(
        ArrayDataset(labels), collate_fn=lambda samples: np.array(samples) + 1
    )
    assert next(local(batch) for batch in alone) == [[101, 102]]


class OneIterator(paddle.io.IterableDataset):
    def __init__(self, make):
        self.items = make(range(16))

    def __iter__(self):
        return self.items


class Restarts(paddle.io.IterableDataset):
    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        self.at += 1
        if self.at > 16:
            raise StopIteration
        return self.at


@pytest.mark.parametrize(
    "make",
    [
        iter,
        lambda items: (item for item in items),
        lambda items: map(int, items),
    ],
)
def test_iterator_of_an_earlier_pass_is_refused(make):
    loader = sharded(OneIterator(make))
    next(iter(loader))
    with pytest.raises(
        DataReadError, match="has returned the iterator of an earlier pass"
    ):
        next(iter(loader))


class Wraps(paddle.io.IterableDataset):
    """Holds an iterator, or an open file."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        for item in self.items:
            yield np.array(int(item))


@pytest.mark.parametrize(
    "make", [iter, lambda items: (item for item in items), io.StringIO]
)
def test_copy_for_reading_names_a_begun_iterator(make, caplog, monkeypatch):
    monkeypatch.setattr("paddle_shard.core.warn_once._WARNED", set())
    items = "\n".join(map(str, range(64))) if make is io.StringIO else range(64)
    loader = sharded(Wraps(make(items)))
    next(iter(loader))
    assert "Wraps.items" not in caplog.text
    next(iter(loader))
    assert "Wraps.items" in caplog.text


def test_data_set_that_begins_anew_in_iter_is_read_in_each_pass():
    loader = sharded(Restarts())
    next(iter(loader))
    for _ in range(2):
        assert [
            number for batch in loader for number in local(batch)[0]
        ] == list(range(1, 17))


@pytest.mark.parametrize("number", [3, 2.5, np.int64(4), np.float32(1)])
def test_collate_fn_number_of_a_ranks_rows_is_refused(number):
    def collate_fn(samples):
        return {
            "x": np.stack(samples),
            "count": number,
            "flag": True,
            "name": "web",
        }

    data = Samples(list(np.ones((8, 2))))
    [batch, *_] = sharded(data, collate_fn=collate_fn)
    assert batch["count"] == number
    with (
        simulated_rank(0, 2),
        pytest.raises(
            BatchStructureError, match=r"field \['count'\] is the number"
        ),
    ):
        next(iter(sharded(data, TWO, collate_fn=collate_fn)))


def test_fields_keep_the_order_of_the_first_batch():
    one, other = np.ones(2), np.zeros(2)
    samples = [{"x": one, "y": other}] * 2 + [{"y": other, "x": one}] * 2
    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(Samples(samples), batch_size=2),
        [MESH, MESH],
        shard_dims=["dp", None],
    )
    for batch in loader:
        assert list(batch) == ["x", "y"]
        assert batch["x"].placements == [dist.Shard(0)]
        assert batch["y"].placements == [dist.Replicate()]


def test_split_state_is_refused_on_another_number_of_data_ranks():
    def loader(size):
        mesh = dist.ProcessMesh(list(range(size)), dim_names=["dp"])
        return sharded(Samples(np.arange(16.0)), mesh, is_dataset_splitted=True)

    with simulated_rank(0, 4):
        batches = loader(4)
        next(iter(batches))
        state = batches.state_dict()
        batches.load_state_dict(state)
    with (
        simulated_rank(0, 2),
        pytest.raises(StateError, match="num_data_ranks"),
    ):
        loader(2).load_state_dict(state)


class Slow(io.FileIO):
    """A file whose readers pause between going to a place and reading there."""

    def seek(self, place, whence=0):
        place = super().seek(place, whence)
        time.sleep(0.001)
        return place


@pytest.mark.parametrize("kind", ["file", "zip"])
def test_worker_has_its_own_place_in_a_file_that_is_open(kind, tmp_path):
    length = 96
    path = tmp_path / "rows"
    np.arange(length).tofile(path)
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for row in range(length):
                archive.writestr(str(row), np.array(row).tobytes())

    def read(index):
        if kind == "zip":
            return np.frombuffer(archive.read(str(index)), int)[0]
        file.seek(8 * index)
        return np.frombuffer(file.read(8), int)[0]

    class Rows(paddle.io.Dataset):
        def __len__(self):
            return length

        def __getitem__(self, index):
            return read(index)

    with Slow(path) as file:
        archive = zipfile.ZipFile(file) if kind == "zip" else None
        batches = list(sharded(Rows(), num_workers=3))
    assert [row for batch in batches for row in local(batch)[0]] == list(
        range(length)
    )


def test_source_of_a_mixture_that_comes_late_is_seeded():
    """Each part begins with the source of the largest weight, so the first batch is of that one alone."""

    def rows():
        streams = {
            "a": Stream.of(range(100)).map(lambda i: np.array([i, 0.0])),
            "b": Stream.of(range(100)).map(
                lambda i: np.array([i, np.random.rand()])
            ),
        }
        loader = paddle_shard.shard_dataloader(
            DataLoader(
                Stream.mixture(streams, weights={"a": 3, "b": 2}), batch_size=4
            ),
            MESH,
            shard_dims="dp",
            num_batches=8,
        )
        return [
            row
            for batch in loader
            for row in batch._local_value().numpy().tolist()
        ]

    np.random.seed(1)
    first = rows()
    np.random.seed(2)
    assert rows() == first


def test_fields_of_a_list_subclass_are_those_of_each_batch():
    class Texts(list):
        pass

    def collated(samples):
        return np.stack(samples), Texts("t" * int(i) for i in samples)

    loader = paddle_shard.shard_dataloader(
        DataLoader(
            Made(np.array, 8),
            batch_sampler=[[0, 1, 2, 3], [4, 5], [6, 7]],
            collate_fn=collated,
        ),
        MESH,
        shard_dims="dp",
    )
    assert [len(texts) for _, texts in loader] == [4, 2, 2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fields_of_texts_are_not_taken_for_rows(num_workers):
    """Two workers have two rows each, as many as there are fields."""
    pairs = [(f"en{i}", f"de{i}") for i in range(8)]
    for given in (pairs, [{"text": pair} for pair in pairs]):
        data = DataLoader(
            Stream.of(given), batch_size=4, num_workers=num_workers
        )
        loader = paddle_shard.shard_dataloader(data, MESH, shard_dims="dp")
        for number, batch in enumerate(loader):
            fields = batch["text"] if isinstance(batch, dict) else batch
            assert fields == [
                list(texts)
                for texts in zip(*pairs[4 * number :][:4], strict=True)
            ]


def test_fields_of_texts_are_cut_by_rows():
    data = Made(
        lambda i: {"x": np.array(i), "y": np.array(i), "m": (f"a{i}", f"b{i}")},
        4,
    )

    def first():
        loader = paddle_shard.shard_dataloader(
            DataLoader(data, batch_size=2),
            [dist.ProcessMesh([0, 1], dim_names=["dp"])] * 3,
            input_keys=["x", "y", "m"],
            shard_dims=["dp", None, "dp"],
        )
        return next(iter(loader))["m"]

    found = {}
    for rank in (0, 1):
        with simulated_rank(rank, 2):
            found[rank] = first()
    assert found == {0: [["a0"], ["b0"]], 1: [["a1"], ["b1"]]}


def test_arrays_of_texts_of_any_length_are_joined():
    stream = Stream.of(range(8)).map(lambda i: np.array(["x" * (i + 1)]))
    loader = paddle_shard.shard_dataloader(
        DataLoader(stream, batch_size=4, num_workers=2), MESH, shard_dims="dp"
    )
    found = [text for batch in loader for text in batch[:, 0].tolist()]
    assert found == ["x" * (i + 1) for i in range(8)]
