"""What users give for a stream does what is meant, or is refused at once with the way that works."""

import logging
from importlib.util import find_spec

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.core import warn_once
from paddle_shard.errors import ArgumentError, ArgumentTypeError

MESH = dist.ProcessMesh([0], dim_names=["dp"])


def sharded(given):
    return paddle_shard.shard_dataloader(given, MESH, shard_dims="dp")


def rows(stream):
    batches, found = (
        iter(sharded(paddle.io.DataLoader(stream, batch_size=4))),
        [],
    )
    for batch in batches:
        found += (
            batch._local_value()
            .numpy()[batches.valid._local_value().numpy()]
            .tolist()
        )
    return found


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(warn_once, "_WARNED", set())
    with caplog.at_level(logging.WARNING, "paddle_shard"):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("cut", ["files", "sharding_filter"])
def test_sharding_filter_leaves_a_stream_that_is_cut_as_it_is(
    cut, said, tmp_path
):
    """The order of torchdata's tutorial: `shuffle().sharding_filter()`."""
    (tmp_path / "a.csv").write_text(
        "n\n" + "".join(f"{n}\n" for n in range(40))
    )
    stream = Stream.csv(tmp_path / "a.csv").map(lambda row: int(row["n"]))
    stream = (
        stream if cut == "files" else Stream.of(range(40)).sharding_filter()
    )

    found = rows(stream.shuffle().sharding_filter())

    assert sorted(found) == list(range(40))
    assert found != sorted(found)
    assert found == rows(stream.shuffle())
    assert said() == []


def test_stream_of_something_that_can_be_iterated_needs_no_of(said):
    for given in (
        [1, 2, 3],
        range(1, 4),
        lambda: iter([1, 2, 3]),
        np.arange(1, 4),
    ):
        assert list(Stream(given)) == list(Stream.of(given)) == [1, 2, 3]
        assert sorted(rows(Stream(given).map(int))) == [1, 2, 3]


def test_stream_is_true_and_of_a_stream_is_itself():
    stream = Stream.of([]).map(int)

    assert stream
    assert Stream.of(stream) is stream
    with pytest.raises(ArgumentTypeError, match="a Stream already"):
        Stream(stream)


@pytest.mark.parametrize("make", [Stream, Stream.of])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (3, "must be iterable, or a function .* got int: 3"),
        (None, "must be iterable, or a function .* got NoneType"),
        ("data.csv", r"'data\.csv'.*Stream\.csv"),
        (b"data.csv", r"b'data\.csv'.*Stream\.csv"),
    ],
)
def test_given_stream_of_another_type_is_refused(make, given, text):
    with pytest.raises(ArgumentTypeError, match=text):
        make(given)


def test_path_is_no_stream(tmp_path):
    with pytest.raises(ArgumentTypeError, match=r"Stream\.csv"):
        Stream.of(tmp_path)


@pytest.mark.parametrize("stage", ["map", "filter"])
@pytest.mark.parametrize("function", [3, None, "int"])
def test_stage_refuses_at_once_what_is_no_function(stage, function):
    with pytest.raises(
        ArgumentTypeError,
        match=f"{stage}: .* a function of a sample, got {function!r}",
    ):
        getattr(Stream.of(range(3)), stage)(function)


NEEDS = {
    Stream.csv: "os",
    Stream.lines: "os",
    Stream.parquet: "pyarrow",
    Stream.webdataset: "webdataset",
}


@pytest.mark.parametrize(
    "source", [source for source, needed in NEEDS.items() if find_spec(needed)]
)
@pytest.mark.parametrize("paths", [3, None])
def test_stream_path_of_another_type_is_refused(source, paths):
    with pytest.raises(
        ArgumentTypeError, match=f"a path, or a list of them, got {paths}"
    ):
        source(paths)


# Other libraries'


def test_stream_that_repeats_without_end_is_refused():
    grain = pytest.importorskip("grain")
    given = grain.MapDataset.range(8).repeat()

    with pytest.raises(
        ArgumentError, match=r"more than 2\^62.*Leave repeat\(\) out"
    ):
        sharded(paddle.io.DataLoader(given, batch_size=4))
    with pytest.raises(
        ArgumentError,
        match=r"source 'a' must have 1 to 2\^40 samples.*Leave repeat\(\) out",
    ):
        paddle_shard.Mixture({"a": given})
