import bz2
import errno
import gzip
import io
import json
import lzma
import multiprocessing
import pickle
import random
import subprocess
import sys
import tarfile
import threading

import numpy as np
import paddle
import pytest

from paddle_shard import Stream
from paddle_shard.data.files import files
from paddle_shard.data.files.webdataset import webdataset_source
from paddle_shard.data.stages.stage import Opening
from paddle_shard.data.stages.steps import Map, Shuffle
from paddle_shard.errors import (
    ArgumentError,
    DataReadError,
    MissingDependencyError,
    ShardReadError,
    StateError,
)
from paddle_shard.extras.cli.main import main
from tests.data.http_server import serving
from tests.deadlines import HANG
from tests.descriptors import open_files
from tests.helpers import ONE, sharded
from tests.optional import needs

needs("webdataset")

LENGTHS = [7, 150, 1, 30, 64, 90, 2, 11, 65, 3]
"""Samples of the ten shards: unequal, some with more than one sample whose place the index keeps."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(files, "PAUSES", (0.001,) * 3)
    monkeypatch.setenv("no_proxy", "*")


def tar(members, end=True):
    """A tar of (name, content)."""
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT
    ) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        whole = archive.offset
    return buffer.getvalue() if end else buffer.getvalue()[:whole]


def key_of(number, i):
    return f"{'long-' * 30 if i % 7 == 3 else ''}{number:03d}-{i:04d}"


def shard_of(number, length=None):
    """Samples of several files and sizes: a long name that needs a header of its own, one that is all zeros."""
    random.seed(number)
    members = [("__meta__", b"{}"), ("__notes__/a.txt", b"")]
    for i in range(LENGTHS[number] if length is None else length):
        key = key_of(number, i)
        members.append((f"{key}.cls", str(i % 10).encode()))
        members.append(
            (
                f"{key}.bin",
                b"\0" * 900
                if i % 5 == 2
                else random.randbytes(random.randrange(3000)),
            )
        )
    return tar(members)


SHARDS = {f"{number:03d}.tar": shard_of(number) for number in range(10)}
KEYS = [
    key_of(number, i)
    for number, length in enumerate(LENGTHS)
    for i in range(length)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for name, content in SHARDS.items():
        (folder / name).write_bytes(content)
    assert (
        main(
            [
                "index",
                f"{folder}/{{000..009}}.tar",
                "-o",
                f"{folder}/index.json",
            ]
        )
        == 0
    )
    return folder


def opening(num_parts=1, parts=None, **what):
    return Opening(
        parts=tuple(range(num_parts)) if parts is None else parts,
        num_parts=num_parts,
        **what,
    )


def keys_of(source, num_parts=1, **what):
    return [
        [sample["__key__"] for sample in items]
        for items in source.open(opening(num_parts, **what))
    ]


@pytest.mark.parametrize("index", [None, False, True])
@pytest.mark.parametrize("num_parts", [1, 2, 5, 10])
def test_webdataset_parts_are_every_sample_once(folder, index, num_parts):
    source = webdataset_source(
        f"{folder}/{{000..009}}.tar", index=index and f"{folder}/index.json"
    )

    parts = keys_of(source, num_parts, seed=4)

    assert sorted(key for part in parts for key in part) == sorted(KEYS)
    if index is not False:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert source.lengths(opening(num_parts)) == [
            len(part) for part in parts
        ]


def test_webdataset_index_cuts_more_parts_than_shards(folder):
    parts = keys_of(
        webdataset_source(
            f"{folder}/{{000..009}}.tar", index=f"{folder}/index.json"
        ),
        64,
    )

    assert sorted(key for part in parts for key in part) == sorted(KEYS)
    assert {len(part) for part in parts} == {
        len(KEYS) // 64,
        len(KEYS) // 64 + 1,
    }


@pytest.mark.parametrize("index", [None, False, True])
def test_webdataset_opened_after_s_samples_drops_s(folder, index):
    source = webdataset_source(
        f"{folder}/{{000..004}}.tar", index=index and f"{folder}/index.json"
    )
    straight = [list(items) for items in source.open(opening(3))]

    # Also at the samples whose places the index keeps: every 64th.
    for skip in (0, 1, 2, 7, 11, 58, 62, 63, 64, 65, 67, 120, 138, 156):
        assert [
            list(items) for items in source.open(opening(3, skip=skip))
        ] == [part[skip:] for part in straight]


# it leaves its files open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_samples_are_those_of_the_library(folder):
    import webdataset

    theirs = list(
        webdataset.WebDataset(
            f"{folder}/{{000..003}}.tar", shardshuffle=False, empty_check=False
        )
    )
    ours = list(
        webdataset_source(
            f"{folder}/{{000..003}}.tar", shuffle_shards=False
        ).open(opening())[0]
    )

    assert [
        {k: v for k, v in s.items() if k != "__local_path__"} for s in theirs
    ] == ours


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("where", ["file", "http", "memory", "http cached"])
def test_webdataset_is_the_same_wherever_the_shards_are(
    folder, where, index, tmp_path
):
    import fsspec

    local = webdataset_source(
        f"{folder}/{{000..009}}.tar", index=index and f"{folder}/index.json"
    )
    expected = [
        [{**s, "__url__": None} for s in items]
        for items in local.open(opening(2, skip=100))
    ]
    memory = fsspec.filesystem("memory")
    memory.pipe(
        {f"/w/{path.name}": path.read_bytes() for path in folder.iterdir()}
    )
    with serving(
        {path.name: path.read_bytes() for path in folder.iterdir()}
    ) as server:
        base = {"file": folder.as_uri(), "memory": "memory://w"}.get(
            where, server.url
        )
        cache_dir = tmp_path if "cached" in where else None
        source = webdataset_source(
            base + "/{000..009}.tar",
            index=index and f"{base}/index.json",
            cache_dir=cache_dir,
        )
        found = [
            [{**s, "__url__": None} for s in items]
            for items in source.open(opening(2, skip=100))
        ]

    assert found == expected


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ("d/{000..002}.tar", ["d/000.tar", "d/001.tar", "d/002.tar"]),
        (
            "d/{a,b}-{8..10}.tar",
            [
                "d/a-8.tar",
                "d/a-9.tar",
                "d/a-10.tar",
                "d/b-8.tar",
                "d/b-9.tar",
                "d/b-10.tar",
            ],
        ),
        (["x.tar", "{0..1}.tar"], ["x.tar", "0.tar", "1.tar"]),
        ("a.tar::b.tar", ["a.tar", "b.tar"]),
    ],
)
def test_webdataset_braces_expand(urls, expected):
    assert webdataset_source(urls, index=False)._names == expected


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_webdataset_reads_packed_shards_and_finds_cut_ones(pack, tmp_path):
    packed = pack(SHARDS["001.tar"])
    path = tmp_path / "001.tar.packed"
    path.write_bytes(packed)
    assert main(["index", str(path), "-o", f"{tmp_path}/index.json"]) == 0

    assert keys_of(webdataset_source(str(path)))[0] == KEYS[7:157]
    assert (
        keys_of(
            webdataset_source(str(path), index=f"{tmp_path}/index.json"),
            skip=100,
        )[0]
        == KEYS[107:157]
    )

    path.write_bytes(packed[: len(packed) * 2 // 3])
    with pytest.raises(ShardReadError) as caught:
        keys_of(webdataset_source(str(path), index=False))
    assert 0 <= caught.value.offset < 150


def boundaries(content):
    """Bytes at which members, or the end marker, begin."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return [member.offset for member in archive] + [archive.offset]


CUT = tar(
    [
        (f"{i:04d}.{end}", b"\0" * size)
        for i in range(5)
        for end, size in (("a", 512), ("b", 700))
    ]
)


@pytest.mark.parametrize("index", [False, True])
def test_webdataset_tar_cut_off_anywhere_is_an_error(index, tmp_path):
    path = tmp_path / "cut.tar"
    path.write_bytes(CUT)
    main(["index", str(path), "-o", f"{tmp_path}/index.json"])
    source = webdataset_source(
        str(path), index=index and f"{tmp_path}/index.json"
    )
    starts = boundaries(CUT)
    for at in sorted(
        {b + d for b in starts for d in (0, 1, 511, 512, 600)} - {0}
    ):
        path.write_bytes(CUT[:at])
        if at >= starts[-1] + 512 and not index:  # one block of zeros is an end
            assert len(keys_of(source)[0]) == 5
            continue
        with pytest.raises(ShardReadError, match=r"cut\.tar") as caught:
            keys_of(source)
        assert caught.value.shard == str(path)
        if not index:
            whole = sum(b <= at - 512 for b in starts[2::2])
            assert caught.value.offset in {max(0, whole - 1), whole}, at


@pytest.mark.parametrize("index", [False, True])
def test_webdataset_damaged_header_is_an_error(index, tmp_path):
    path = tmp_path / "damaged.tar"
    path.write_bytes(CUT)
    main(["index", str(path), "-o", f"{tmp_path}/index.json"])
    damaged = bytearray(CUT)
    damaged[boundaries(CUT)[4] + 20] ^= 0xFF
    path.write_bytes(damaged)

    with pytest.raises(
        ShardReadError, match="damaged or cut off: bad checksum at byte"
    ):
        keys_of(
            webdataset_source(
                str(path), index=index and f"{path.parent}/index.json"
            )
        )


def test_webdataset_tars_joined_by_cat_are_an_error(tmp_path):
    path = tmp_path / "joined.tar"
    path.write_bytes(CUT + CUT)

    with pytest.raises(ShardReadError, match="data behind the end"):
        keys_of(webdataset_source(str(path)))


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_webdataset_link_in_a_tar_is_an_error(kind, counted, tmp_path):
    """GNU tar packs a second name of a file as a link: its sample would be missing."""
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(2):
            member = tarfile.TarInfo(f"{number}.txt")
            if number:
                member.type, member.linkname = kind, "0.txt"
            else:
                member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))

    with pytest.raises(
        ShardReadError,
        match=r"'1.txt' is a link to '0.txt'.*--hard-dereference",
    ):
        list(
            Stream.webdataset(
                str(tmp_path / "a.tar"), index=None if counted else False
            )
        )


def test_webdataset_key_that_comes_twice_is_said(tmp_path, caplog):
    names = ["0.txt", "1.txt", "0.cls", "1.cls"]
    (tmp_path / "a.tar").write_bytes(tar([(name, b"x") for name in names]))

    samples = list(Stream.webdataset(str(tmp_path / "a.tar"), index=False))
    assert len(samples) == 4
    assert "the key '0' comes twice in a.tar" in caplog.text


@pytest.mark.parametrize("name", ["{1,2}.tar", "a::b.tar", "[1].tar"])
def test_webdataset_file_with_a_name_like_a_pattern(name, tmp_path):
    (tmp_path / name).write_bytes(tar([("0.txt", b"x")]))

    assert len(list(Stream.webdataset(str(tmp_path / name)))) == 1


@pytest.mark.parametrize("size", [-512, -1024, -1536, -2048])
def test_webdataset_member_of_negative_size_is_an_error(size, tmp_path):
    """Python's tarfile looks for the next member before this one, and may never end (CVE-2025-8194)."""
    header = bytearray(tarfile.TarInfo("1.txt").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" + (size % (1 << 88)).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tar").write_bytes(
        tar([("0.txt", b"x")])[:1024] + header + bytes(1024)
    )

    for index in (None, False):
        with pytest.raises(
            ShardReadError, match="the member '1.txt' has a negative size"
        ):
            list(
                Stream.webdataset(
                    str(tmp_path / "a.tar"),
                    index=index and f"{tmp_path}/index.json",
                )
            )


def test_webdataset_file_name_twice_in_a_sample_is_an_error(tmp_path):
    path = tmp_path / "twice.tar"
    path.write_bytes(tar([("0.a", b""), ("1.a", b""), ("1.a", b"")]))

    with pytest.raises(
        ShardReadError,
        match=r"sample 1 failed: ValueError: 1\.a: duplicate file name",
    ) as caught:
        keys_of(webdataset_source(str(path), index=False))
    assert caught.value.offset == 1
    with pytest.raises(
        ShardReadError,
        match=r"counting its samples failed: ValueError: 1\.a: duplicate file name",
    ):
        webdataset_source(str(path))


def test_webdataset_names_a_shard_that_is_missing(tmp_path):
    with pytest.raises(
        ShardReadError,
        match=r"none\.tar: reading sample 0 failed: FileNotFoundError",
    ):
        keys_of(webdataset_source(f"{tmp_path}/none.tar", index=False))
    with pytest.raises(
        ShardReadError,
        match=r"none\.tar: counting its samples failed: FileNotFoundError",
    ):
        webdataset_source(f"{tmp_path}/none.tar")


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("skip", [0, 70])
def test_webdataset_dropped_connection_loses_nothing(
    folder, ranges, sized, skip, monkeypatch
):
    content = SHARDS["001.tar"]
    # A server without ranges sends all again; one that does not say the size closes unnoticed, so it does not drop.
    drops = (
        []
        if not sized
        else [10_000, 0, 511]
        if ranges
        else [220_000, 0, 500_000]
    )
    index = (folder / "index.json").read_bytes()
    with serving(
        {"001.tar": content, "index.json": index},
        drops=drops,
        ranges=ranges,
        sized=sized,
    ) as server:
        local = list(
            webdataset_source(f"{folder}/001.tar").open(opening(skip=skip))[0]
        )
        source = webdataset_source(
            f"{server.url}/001.tar", index=f"{folder}/index.json"
        )

        found = list(source.open(opening(skip=skip))[0])

    assert [{**s, "__url__": None} for s in found] == [
        {**s, "__url__": None} for s in local
    ]
    if sized and ranges:
        assert len(server.asked) == 4
        assert all(span for _, span in server.asked)


def test_webdataset_leaves_a_silent_server_after_the_timeout(monkeypatch):
    monkeypatch.setattr(files, "TIMEOUT", 0.2)
    with serving({"a.tar": SHARDS["001.tar"]}, stalls=[20_000]) as server:
        assert (
            keys_of(webdataset_source(f"{server.url}/a.tar"))[0] == KEYS[7:157]
        )
        assert len(server.asked) == 2


def test_webdataset_gives_up_on_a_connection_that_drops():
    with serving(
        {"a.tar": SHARDS["001.tar"]}, drops=[20_000, 0, 0, 0, 0, 0]
    ) as server:
        items = webdataset_source(f"{server.url}/a.tar").open(opening())[0]
        read = []
        with pytest.raises(
            ShardReadError, match="given up after 3 retries at byte 0 of"
        ) as caught:
            read.extend(sample["__key__"] for sample in items)
    assert len(server.asked) == 4
    assert caught.value.shard == f"{server.url}/a.tar"
    assert caught.value.offset == 0


@pytest.mark.parametrize(
    ("statuses", "fails"),
    [([503, 500, 429], False), ([503] * 4, True), ([404], True), ([403], True)],
)
def test_webdataset_asks_again_where_an_answer_may_change(statuses, fails):
    with serving(
        {"a.tar": SHARDS["000.tar"]}, statuses=list(statuses)
    ) as server:
        source = webdataset_source(f"{server.url}/a.tar")
        if fails:
            with pytest.raises(ShardReadError, match=f"{statuses[0]}"):
                keys_of(source)
        else:
            assert keys_of(source)[0] == KEYS[:7]
    assert len(server.asked) == len(statuses) + (not fails)


def test_webdataset_shard_of_another_size_is_an_error(folder, tmp_path):
    (tmp_path / "001.tar").write_bytes(SHARDS["002.tar"])
    source = webdataset_source(
        f"{tmp_path}/001.tar", index=folder / "index.json"
    )

    with pytest.raises(
        ShardReadError,
        match=r"bytes, and had \d+ when it was counted\. .*paddle-shard index",
    ):
        keys_of(source)


def test_webdataset_threads_download_each_shard_once(tmp_path):
    with serving(SHARDS) as server:
        source = webdataset_source(
            server.url + "/{000..009}.tar", cache_dir=tmp_path
        )
        found, threads = [], []
        for _ in range(12):
            threads.append(
                threading.Thread(
                    target=lambda: found.append(keys_of(source, 5))
                )
            )
            threads[-1].start()
        for thread in threads:
            thread.join()

    assert len(found) == 12
    assert all(parts == found[0] for parts in found)
    assert sorted(name for name, _ in server.asked) == sorted(SHARDS)
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.processes
def test_webdataset_processes_download_each_shard_once(tmp_path):
    with serving(SHARDS) as server:
        script = (
            "import sys\n"
            "from paddle_shard.data.stages.stage import Opening\n"
            "from paddle_shard.data.files.webdataset import webdataset_source\n"
            "source = webdataset_source(sys.argv[1] + '/{000..009}.tar', cache_dir=sys.argv[2])\n"
            "print(sum(1 for _ in source.open(Opening(parts=(0,), num_parts=1, epoch=int(sys.argv[3])))[0]))\n"
        )
        command = [sys.executable, "-c", script, server.url, str(tmp_path)]
        ranks = [
            subprocess.Popen(
                [*command, str(i)], stdout=subprocess.PIPE, text=True
            )
            for i in range(2)
        ]
        counts = [int(rank.communicate(timeout=HANG)[0]) for rank in ranks]

    assert counts == [len(KEYS)] * 2
    assert sorted(name for name, _ in server.asked) == sorted(SHARDS)


def test_webdataset_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    def full(source, target, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(
        "paddle_shard.data.files.host_cache.shutil.copyfileobj", full
    )
    with (
        serving({"001.tar": SHARDS["001.tar"]}) as server,
        pytest.raises(
            ShardReadError, match=r"001\.tar.*No space left on device"
        ),
    ):
        keys_of(webdataset_source(f"{server.url}/001.tar", cache_dir=tmp_path))


def test_webdataset_download_that_drops_is_finished(tmp_path):
    with serving(
        {"001.tar": SHARDS["001.tar"]}, drops=[5_000, 0, 5_000]
    ) as server:
        source = webdataset_source(f"{server.url}/001.tar", cache_dir=tmp_path)
        assert keys_of(source)[0] == KEYS[7:157]
    [copy] = tmp_path.iterdir()
    assert copy.read_bytes() == SHARDS["001.tar"]


def test_webdataset_source_reads_in_a_forked_child(folder):
    import fsspec

    fsspec.filesystem("memory").pipe(
        {f"/f/{name}": content for name, content in SHARDS.items()}
    )
    source = webdataset_source("memory://f/{000..009}.tar")
    here = keys_of(source, 2)
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    child = context.Process(target=lambda: writer.send(keys_of(source, 2)))
    child.start()

    assert reader.poll(HANG)
    assert reader.recv() == here
    child.join()


def test_webdataset_samples_are_decoded_by_a_stage(tmp_path):
    from PIL import Image
    from webdataset.autodecode import Decoder, imagehandler

    picture = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), 7, np.uint8)).save(picture, "PNG")
    array = io.BytesIO()
    np.save(array, np.arange(3))
    members = []
    for i in range(20):
        contents = {
            "png": picture.getvalue(),
            "cls": str(i).encode(),
            "npy": array.getvalue(),
            "up": b"a",
        }
        members += [
            (f"{i:03d}.{end}", content) for end, content in contents.items()
        ]
    (tmp_path / "a.tar").write_bytes(tar(members))

    def upper(key, data):
        return data.decode().upper() if key == ".up" else None

    stage = Map(
        Shuffle(webdataset_source(f"{tmp_path}/a.tar"), 8),
        Decoder([imagehandler("rgb8"), upper]),
    )
    samples = list(stage.open(opening())[0])

    assert sorted(sample["cls"] for sample in samples) == list(range(20))
    assert [sample["cls"] for sample in samples] != list(range(20))
    assert samples[0]["png"].tolist() == np.full((4, 5, 3), 7).tolist()
    assert samples[0]["npy"].tolist() == [0, 1, 2]
    assert samples[0]["up"] == "A"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stage", ["map", "filter"])
def test_webdataset_failing_sample_is_named_by_key_and_tar(
    stage, workers, tmp_path, caplog
):
    members = [
        (f"{i:03d}.{'cls' if i != 5 else 'txt'}", b"1") for i in range(12)
    ]
    (tmp_path / "a.tar").write_bytes(tar(members))
    stream = getattr(Stream.webdataset(f"{tmp_path}/a.tar").shuffle(8), stage)(
        lambda sample: int(sample["cls"]) > 0
    )
    stream = (
        stream
        if stage == "map"
        else stream.map(lambda sample: int(sample["cls"]))
    )

    with pytest.raises(
        DataReadError, match=r"KeyError: 'cls' \(sample '005' of a\.tar\)"
    ):
        list(
            sharded(
                paddle.io.DataLoader(stream, batch_size=4, num_workers=workers),
                ONE,
            )
        )

    list(
        sharded(
            paddle.io.DataLoader(stream, batch_size=4, num_workers=workers),
            ONE,
            on_error="skip",
        )
    )
    assert "KeyError: 'cls' (sample '005' of a.tar)" in caplog.text


def test_webdataset_names_the_extra_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "webdataset", None)

    with pytest.raises(
        MissingDependencyError,
        match=r"pip install 'paddle_shard\[webdataset\]'",
    ):
        webdataset_source("a.tar")


def test_webdataset_without_fsspec_reads_local_files(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)

    assert keys_of(webdataset_source(f"{folder}/000.tar"))[0] == KEYS[:7]
    with pytest.raises(
        MissingDependencyError,
        match=r"reading s3://b/a\.tar: .*fsspec.*\[sources\]",
    ):
        keys_of(webdataset_source("s3://b/a.tar"))


def test_index_command_counts_and_shows_its_progress(folder, tmp_path, capsys):
    output = tmp_path / "index.json"

    assert main(["index", f"{folder}/{{000..009}}.tar", "-o", str(output)]) == 0

    index = json.loads(output.read_text())
    assert index["version"] == 1
    assert [index["shards"][name]["samples"] for name in SHARDS] == LENGTHS
    assert [index["shards"][name]["bytes"] for name in SHARDS] == [
        len(content) for content in SHARDS.values()
    ]
    shown = capsys.readouterr()
    assert "[2/10]" in shown.err
    assert f"{sum(LENGTHS)} samples in 10 shards" in shown.out
    assert len(list(tmp_path.iterdir())) == 1


def test_index_command_writes_nothing_of_a_damaged_shard(tmp_path, capsys):
    (tmp_path / "a.tar").write_bytes(CUT)
    (tmp_path / "b.tar").write_bytes(CUT[:3000])

    assert (
        main(
            ["index", f"{tmp_path}/{{a,b}}.tar", "-o", f"{tmp_path}/index.json"]
        )
        == 2
    )

    assert "b.tar: ReadError" in capsys.readouterr().err
    assert not (tmp_path / "index.json").exists()


def test_index_says_where_samples_begin_over_http_too(folder):
    with serving(
        {**SHARDS, "index.json": (folder / "index.json").read_bytes()}
    ) as server:
        source = webdataset_source(
            f"{server.url}/001.tar", index=f"{server.url}/index.json"
        )
        first = next(source.open(opening(skip=130))[0])

    assert first["__key__"] == KEYS[137]
    start = json.loads((folder / "index.json").read_text())["shards"][
        "001.tar"
    ]["starts"][2]
    assert [name for name, _ in server.asked] == ["index.json", "001.tar"]
    assert server.asked[1][1].startswith(f"bytes={start}-")


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("not json", StateError, "is not an index of shards"),
        ("[]", StateError, "is not an index of shards"),
        (
            '{"version": 2, "shards": {}}',
            StateError,
            "version 2, this library reads 1",
        ),
        (
            '{"version": 1, "shards": {"000.tar": {"samples": "many"}}}',
            StateError,
            "is damaged",
        ),
        *[
            (
                f'{{"version": 1, "shards": {{"000.tar": {{"samples": {samples}, "bytes": {size}}}}}}}',
                StateError,
                "is damaged",
            )
            for samples, size in [
                ("true", 1),
                (1.5, 1),
                (-1, 1),
                (1, "null"),
            ]
        ],
        (
            '{"version": 1, "shards": {}}',
            ArgumentError,
            r"does not know 1 of the shards: 000\.tar",
        ),
        (None, ArgumentError, "cannot be read"),
    ],
)
def test_index_that_does_not_serve_is_rejected_with_the_fix(
    folder, text, error, match, tmp_path
):
    if text is not None:
        (tmp_path / "i.json").write_text(text)

    with pytest.raises(error, match=match) as caught:
        webdataset_source(f"{folder}/000.tar", index=tmp_path / "i.json")
    assert "paddle-shard index" in str(caught.value)


def test_index_without_places_serves_as_well(folder, tmp_path):
    index = json.loads((folder / "index.json").read_text())
    for entry in index["shards"].values():
        del entry["starts"]
    (tmp_path / "i.json").write_text(json.dumps(index))

    source = webdataset_source(
        f"{folder}/{{000..009}}.tar", index=tmp_path / "i.json"
    )

    assert sorted(key for part in keys_of(source, 7) for key in part) == sorted(
        KEYS
    )


def test_index_replaces_no_file_of_another_kind(folder, tmp_path, capsys):
    copy = tmp_path / "000.tar"
    copy.write_bytes((folder / "000.tar").read_bytes())

    assert main(["index", str(copy), "-o", str(copy)]) == 2
    rule = "--output must be a .json file in a folder that exists, got"
    assert f"{rule} {copy}" in capsys.readouterr().err
    assert copy.read_bytes() == (folder / "000.tar").read_bytes()
    for _ in range(2):
        assert main(["index", str(copy), "-o", f"{tmp_path}/index.json"]) == 0
    nowhere = tmp_path / "none" / "index.json"
    assert main(["index", str(copy), "-o", str(nowhere)]) == 2
    assert f"{rule} {nowhere}" in capsys.readouterr().err


def test_index_rejects_shards_that_it_could_not_tell_apart(
    folder, tmp_path, capsys
):
    (tmp_path / "000.tar").write_bytes(CUT)

    with pytest.raises(ArgumentError, match="last piece of their names"):
        webdataset_source(
            [f"{folder}/000.tar", f"{tmp_path}/000.tar"],
            index=f"{folder}/index.json",
        )
    assert (
        main(
            [
                "index",
                f"{folder}/000.tar",
                f"{tmp_path}/000.tar",
                "-o",
                f"{tmp_path}/i.json",
            ]
        )
        == 2
    )
    assert (
        main(["index", f"{folder}/none-*.tar", "-o", f"{tmp_path}/i.json"]) == 2
    )
    assert "last piece of their names" in capsys.readouterr().err


def test_webdataset_closes_files_when_a_part_is_left(folder):
    def open_tars():
        return sum(one.target.endswith(".tar") for one in open_files())

    items = webdataset_source(
        f"{folder}/{{000..009}}.tar", index=f"{folder}/index.json"
    ).open(opening(skip=10))[0]
    next(items)
    assert open_tars() == 1
    items.close()
    assert open_tars() == 0


def test_decode_raises_what_a_decoder_raises():
    sample = {"__key__": "7", "__url__": "s3://b/a.tar", "png": b"no picture"}

    with pytest.raises(OSError, match="cannot identify image"):
        next(iter(Stream.of([sample]).decode("pil")))
    [decoded] = Stream.of([sample]).decode("pil", only="cls")
    assert decoded["png"] == b"no picture"
    with pytest.raises(ValueError, match="rgb9"):
        Stream.of([sample]).decode("rgb9")


@pytest.mark.parametrize(
    "ending", ["pkl", "pickle", "pyd", "pth", "a.pkl", "pkl.gz"]
)
def test_decode_unpickles_only_by_a_handler_of_the_user(ending):
    content = pickle.dumps(7)
    if ending.endswith("gz"):
        content = gzip.compress(content)
    stream = Stream.of([{"__key__": "7", ending: content}])

    [left] = stream.decode()
    assert left[ending] == pickle.dumps(7)
    [unpickled] = stream.decode(lambda ending, content: pickle.loads(content))
    assert unpickled[ending] == 7
