"""Local files are counted where that is cheap, once, and whoever reads them cuts them at the same places."""

import bz2
import csv
import io
import json
import logging
import multiprocessing
import os
import tarfile
from collections import Counter
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paddle_shard
from paddle_shard import Stream
from paddle_shard.data.files import counts
from paddle_shard.data.files.counts import file_source
from paddle_shard.data.files.text import LINES, csv_format
from paddle_shard.data.files.webdataset import tar_starts, webdataset_source
from paddle_shard.data.stages.stage import Opening
from paddle_shard.data.stream import stage_of
from paddle_shard.errors import ArgumentError, ShardReadError
from paddle_shard.testing.simulated import on_each_rank
from tests.data.http_server import serving
from tests.deadlines import HANG
from tests.trials import trials

UNEVEN = [38, 3, 25, 7, 31, 2, 29, 25]
"""Samples of eight files, 160 in all."""


def tar_bytes(numbers):
    with tarfile.open(fileobj=(buffer := io.BytesIO()), mode="w") as tar:
        for number in numbers:
            member = tarfile.TarInfo(f"{number:04}.txt")
            member.size = len(content := str(number).encode().ljust(900))
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


KINDS = {
    "txt": (
        lambda numbers: "".join(f"{n}\n" for n in numbers).encode(),
        Stream.lines,
        int,
        "counts",
    ),
    "csv": (
        lambda numbers: "".join(
            f'"{n}","a\n\nb"\r\n' for n in ["n", *numbers]
        ).encode(),
        Stream.csv,
        lambda row: int(row["n"]),
        "counts",
    ),
    "tar": (
        tar_bytes,
        Stream.webdataset,
        lambda sample: int(sample["txt"]),
        "index",
    ),
}
"""Ending -> (content of some numbers, stream, number of a sample, name of the option that says no)."""


@pytest.fixture(
    params=[kind for kind in KINDS if kind != "tar" or find_spec("webdataset")]
)
def kind(request):
    return request.param


def write(folder, kind, lengths=UNEVEN, pack=bytes):
    numbers = iter(range(sum(lengths)))
    paths = []
    ending = kind if pack is bytes else f"{kind}.bz2"
    for file, length in enumerate(lengths):
        path = folder / f"{file}.{ending}"
        path.write_bytes(
            pack(KINDS[kind][0]([next(numbers) for _ in range(length)]))
        )
        paths.append(str(path))
    return paths


def loader_of(stream, ranks=1, size=8, **options):
    mesh = dist.ProcessMesh(list(range(ranks)), dim_names=["dp"])
    return paddle_shard.shard_dataloader(
        paddle.io.DataLoader(stream, batch_size=size),
        mesh,
        shard_dims="dp",
        **options,
    )


def real_rows(loader):
    batches, found = iter(loader), []
    for batch in batches:
        found.append(
            batch._local_value()
            .numpy()[batches.valid._local_value().numpy()]
            .tolist()
        )
    return found


@pytest.mark.parametrize(
    ("ranks", "tail"), [(1, "pad"), (2, "drop"), (8, "pad")]
)
def test_counts_make_uneven_files_need_no_padding(kind, ranks, tail, tmp_path):
    _, stream, number, _ = KINDS[kind]
    paths = write(tmp_path, kind)

    def as_rank():
        loader = loader_of(stream(paths).map(number), ranks, tail=tail)
        return real_rows(loader), len(loader), loader.stats.epoch.padding

    found = on_each_rank(range(ranks), as_rank)

    assert [
        (len(steps), length, padding)
        for steps, length, padding in found.values()
    ] == [(20, 20, 0)] * ranks
    assert Counter(
        n for steps, *_ in found.values() for step in steps for n in step
    ) == Counter(range(160))


@pytest.mark.parametrize("pack", [bytes, bz2.compress])
@pytest.mark.parametrize("where", ["disk", "http", "both"])
def test_counts_depend_on_arguments_and_files_alone(
    kind, where, pack, tmp_path, monkeypatch
):
    monkeypatch.setenv("no_proxy", "*")
    _, stream, _, option = KINDS[kind]
    paths = write(tmp_path, kind, [3, 2], pack)

    def knows_length(names, **options):
        return (
            stage_of(stream(names, **options)).lengths(
                Opening(parts=(0,), num_parts=1)
            )
            is not None
        )

    with serving(
        {path.name: path.read_bytes() for path in map(Path, paths)}
    ) as server:
        urls = [f"{server.url}/{os.path.basename(path)}" for path in paths]
        names = {"disk": paths, "http": urls, "both": [paths[0], urls[1]]}[
            where
        ]

        assert knows_length(names) is (where == "disk" and pack is bytes)
        assert not knows_length(names, **{option: False})
        if kind != "tar":
            assert knows_length(names, counts=True)


def test_counts_name_a_file_that_cannot_be_counted(kind, tmp_path):
    with pytest.raises(
        ShardReadError,
        match=rf"none\.{kind}: counting its samples failed: FileNotFoundError",
    ):
        KINDS[kind][1](f"{tmp_path}/none.{kind}")


# What is kept


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """The names that were counted, where counts are kept of files however new they are."""
    seen = []

    def noted(count):
        return lambda name, *how: (
            seen.append(os.path.basename(name)) or count(name, *how)
        )

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(counts, "count_file", noted(counts.count_file))
    return seen


def test_counts_are_kept_until_a_file_changes(kind, counted, tmp_path):
    stream, paths = KINDS[kind][1], write(tmp_path, kind)
    first = stage_of(stream(paths)).fingerprint()
    assert len(counted) == 8
    assert stage_of(stream(paths)).fingerprint() == first
    assert len(counted) == 8

    (tmp_path / f"3.{kind}").write_bytes(KINDS[kind][0](range(999)))

    assert stage_of(stream(paths)).lengths(
        Opening(parts=(0,), num_parts=1)
    ) == [160 - 7 + 999]
    assert len(counted) == 16


def test_counts_see_a_change_of_the_same_size_and_time(counted, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"1\n2\n")
    before = path.stat()
    assert file_source(path, LINES).lengths(
        Opening(parts=(0,), num_parts=1)
    ) == [2]
    path.write_bytes(b"123\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert file_source(path, LINES).lengths(
        Opening(parts=(0,), num_parts=1)
    ) == [1]


@pytest.mark.parametrize("damage", [b"", b"[]", b"{", b'{"x": 1}', None])
def test_counts_ignore_a_damaged_cache(kind, damage, counted, tmp_path):
    stream, paths = KINDS[kind][1], write(tmp_path, kind, [3, 2])
    first = stage_of(stream(paths)).fingerprint()
    [kept] = (tmp_path / "cache" / "paddle_shard" / "counts").iterdir()
    other = json.dumps([[1] for _ in json.loads(kept.read_bytes())]).encode()
    kept.write_bytes(other if damage is None else damage)

    assert stage_of(stream(paths)).fingerprint() == first
    assert len(counted) == 4


@pytest.mark.parametrize("folder", ["/proc/nowhere", "a file"])
def test_counts_without_a_cache_are_made_each_time(
    kind, folder, counted, monkeypatch, tmp_path
):
    (tmp_path / "a file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))
    stream, paths = KINDS[kind][1], write(tmp_path, kind, [3, 2])

    assert (
        stage_of(stream(paths)).fingerprint()
        == stage_of(stream(paths)).fingerprint()
    )
    assert len(counted) == 4


def _count_and_tell(path, seen):
    count = counts.count_file
    counts.count_file = lambda name, *how: seen.put(1) or count(name, *how)
    file_source(path, LINES)


def test_ranks_that_start_together_count_once(counted, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a line\n" * 100_000)
    context = multiprocessing.get_context("fork")
    seen = context.Queue()
    ranks = [
        context.Process(target=_count_and_tell, args=(path, seen))
        for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(HANG)

    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert seen.get(timeout=HANG) == 1
    assert seen.empty()


# How it is counted


@contextmanager
def few_places():
    """Every second sample's place is kept, and not more than four of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "EVERY", 2)
        patch.setattr(counts, "MOST", 4)
        yield


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@settings(max_examples=trials(60))
@given(
    rows=st.lists(
        st.lists(
            st.text("ab\"',\n\r\u2028é", max_size=4), min_size=2, max_size=2
        ),
        min_size=1,
        max_size=40,
    ),
    bom=st.booleans(),
    header=st.booleans(),
)
def test_csv_that_is_begun_in_mid_file_is_what_python_reads(
    tmp_path_factory, ending, rows, bom, header
):
    """The oracle is Python's csv over the whole file."""
    rows = [["n", "m"], *rows]
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator=ending, quoting=csv.QUOTE_ALL).writerows(
        rows
    )
    path.write_bytes(b"\xef\xbb\xbf" * bom + buffer.getvalue().encode())
    expected = list(csv.reader(io.StringIO(buffer.getvalue(), newline="")))
    if header:
        expected = [
            dict(zip(expected[0], row, strict=True)) for row in expected[1:]
        ]
    with few_places():
        source = file_source(path, csv_format(header=header, delimiter=","))

    [length] = source.lengths(Opening(parts=(0,), num_parts=1))
    assert length == len(expected)
    for skip in range(length + 1):
        assert (
            list(source.open(Opening(parts=(0,), num_parts=1, skip=skip))[0])
            == expected[skip:]
        )


@pytest.mark.parametrize("num_parts", [1, 5, 40])
def test_counts_let_parts_begin_in_mid_file(kind, num_parts, tmp_path):
    _, stream, number, _ = KINDS[kind]
    with few_places():
        source = stage_of(
            stream(write(tmp_path, kind, [70, 0, 30])).map(number)
        )
    opening = Opening(parts=tuple(range(num_parts)), num_parts=num_parts)

    parts = [list(items) for items in source.open(opening)]

    assert sorted(n for part in parts for n in part) == list(range(100))
    assert source.lengths(opening) == [len(part) for part in parts]


def test_counts_let_a_part_begin_near_its_first_sample(kind, tmp_path):
    [path] = write(tmp_path, kind, [5_000])
    entry = stage_of(KINDS[kind][1](path))._read.entries[path]

    assert len(entry.starts) <= 128
    assert max(entry.before(skip)[1] for skip in range(5_000)) < 5_000 / 64


@pytest.mark.skipif(not find_spec("webdataset"), reason="needs webdataset")
def test_counts_of_a_tar_read_only_headers(tmp_path, monkeypatch):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(5):
            member = tarfile.TarInfo(f"{number}.bin")
            member.size = 10 << 20
            tar.addfile(member, io.BytesIO(bytes(10 << 20)))
    # what would read contents
    monkeypatch.setattr(tarfile.TarFile, "extractfile", None)
    before = _bytes_read()

    entry = counts.count_file(str(path), tar_starts)

    assert (entry.samples, entry.bytes) == (5, path.stat().st_size)
    assert _bytes_read() - before < 5 << 20


def _bytes_read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


@pytest.mark.skipif(not find_spec("webdataset"), reason="needs webdataset")
@pytest.mark.parametrize("cut", [-10_240, -10_241, -12_000, 700, 1300, 5000])
def test_counts_fail_where_reading_a_cut_tar_does(cut, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(range(30))[:cut])

    for make in (
        webdataset_source,
        lambda path: list(Stream.webdataset(path, index=False)),
    ):
        with pytest.raises(
            ShardReadError,
            match=r"a\.tar: (counting|reading) .* failed: ReadError",
        ):
            make(str(path))


@pytest.mark.parametrize("kind", ["txt", "csv"])
def test_counts_of_a_file_that_changed_are_an_error(kind, tmp_path):
    paths = write(tmp_path, kind, [30])
    stream = KINDS[kind][1](paths)
    with open(paths[0], "ab") as file:
        file.write(KINDS[kind][0]([1]))

    with pytest.raises(
        ShardReadError,
        match=r"bytes, and had \d+ when it was counted.*: count again",
    ):
        list(stream)


# What is not counted


def _sizes(*lengths):
    return [b"%05d\n" % 0 * length for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([100] * 8, 8),
        ([90, 110, 100, 95, 105, 100, 100, 100], 8),
        ([101, 58], 2),
        ([10, 20, 30], 2),
    ],
)
def test_chosen_num_parts_is_at_most_the_uncounted_files(
    lengths, parts, tmp_path
):
    paths = []
    for number, content in enumerate(_sizes(*lengths)):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_bytes(content)

    loader = loader_of(Stream.lines(paths, counts=False).map(int))

    assert f"num_parts {parts}," in repr(loader)


def test_chosen_num_parts_rejects_ranks_that_do_not_divide_them(tmp_path):
    paths = write(tmp_path, "txt", [1, 2, 3])
    with pytest.raises(
        ArgumentError,
        match=r"in_parts\(2\): .* 4 data ranks\. .*counts=True.* Values that work: 4, 8\.",
    ):
        loader_of(Stream.lines(paths, counts=False).map(int), ranks=4)


def test_rows_of_padding_are_counted_and_said_once(tmp_path, caplog):
    loader = loader_of(
        Stream.lines(write(tmp_path, "txt", UNEVEN), counts=False)
        .map(int)
        .in_parts(8)
    )

    with caplog.at_level(logging.WARNING, "paddle_shard"):
        steps = [len(real_rows(loader)) for _ in range(2)]

    padding = max(UNEVEN) * 8 - 160  # a sample of each file a step
    assert steps == [max(UNEVEN)] * 2
    assert (loader.stats.epoch.padding, loader.stats.total.padding) == (
        padding,
        2 * padding,
    )
    [said] = [record.getMessage() for record in caplog.records]
    assert (
        f"tail='pad': {padding / (padding + 160):.0%} of this rank's rows were padding"
        in said
    )
    assert "counts=True" in said


def test_padding_is_said_again_in_an_epoch_with_more(tmp_path, caplog):
    paths = []
    for number, content in enumerate(_sizes(40, 23, 31, 9)):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_bytes(content)
    loader = loader_of(Stream.lines(paths, counts=False).map(int).in_parts(2))

    shares = []
    warned = []
    for _ in range(12):
        caplog.clear()
        served = sum(len(row) for row in real_rows(loader))
        padding = loader.stats.epoch.padding
        shares.append(padding / (served + padding))
        warned.append(len(caplog.records))

    more = [n for n in range(12) if shares[n] > max([0.1, *shares[:n]])]
    assert more
    assert [n for n in range(12) if warned[n]] == more
    assert max(warned) == 1


@pytest.mark.parametrize("tail", ["pad", "drop", "repeat"])
def test_counts_warn_of_no_parts_that_are_equal(kind, tail, tmp_path, caplog):
    _, stream, number, _ = KINDS[kind]
    with caplog.at_level(logging.WARNING, "paddle_shard"):
        real_rows(
            loader_of(
                stream(write(tmp_path, kind, [20, 3, 18])).map(number),
                tail=tail,
            )
        )
        real_rows(loader_of(Stream.of(lambda: iter(range(45))), tail=tail))

    assert not caplog.records


def test_statistics_count_padding_of_data_with_an_index_too():
    dataset = paddle.io.TensorDataset(
        [paddle.to_tensor(np.arange(10, dtype="float32"))]
    )
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(dataset, batch_size=8),
        mesh,
        shard_dims="dp",
        tail="fill",
    )
    list(loader)

    assert (loader.stats.epoch.samples, loader.stats.epoch.padding) == (10, 6)
    assert loader.stats.scalars()["data/padding"] == 6
    assert "padding=6" in repr(loader.stats)
