"""Copies of remote files on a host: each is downloaded once, and all together keep to their limit."""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.data.files.locks import file_lock
from paddle_shard.data.stages.stage import Opening
from paddle_shard.data.stream import stage_of
from paddle_shard.errors import ArgumentError
from tests.data.http_server import serving
from tests.data.source_laws import FILE_KINDS, TOTAL, files, names
from tests.deadlines import HANG
from tests.jobs import start_ranks
from tests.trials import draws

ONE = dist.ProcessMesh([0], dim_names=["x"])
SIZE = 60_000
FILES = {
    f"{number}.txt": bytes([ord("a") + number]) * (SIZE - 1) + b"\n"
    for number in range(6)
}
"""A line each, all of the same size."""

CACHED = {
    "lines": lambda urls, **cache: Stream.lines(urls, **cache),
    "counted lines": lambda urls, **cache: Stream.lines(urls, counts=True, **cache),
    "csv": lambda urls, **cache: Stream.csv(urls, **cache),
    "counted csv": lambda urls, **cache: Stream.csv(urls, counts=True, **cache),
    "jsonl": lambda urls, **cache: Stream.jsonl(urls, **cache),
    "counted jsonl": lambda urls, **cache: Stream.jsonl(urls, counts=True, **cache),
    "webdataset": lambda urls, **cache: Stream.webdataset(urls, index=False, **cache),
    "parquet": lambda urls, **cache: Stream.parquet(urls, columns=["id"], **cache),
}


def samples_of(stream, parts=4, skip=0, epoch=0):
    opening = Opening(
        parts=tuple(range(parts)), num_parts=parts, epoch=epoch, skip=skip
    )
    return [sample for part in stage_of(stream).open(opening) for sample in part]


def copies(folder):
    return {name for name in os.listdir(folder) if not name.endswith(".lock")}


def bytes_in(folder):
    """Bytes of all files; no copy is begun or removed meanwhile, but one may get its name."""
    sizes = {}
    with open(folder / ".lock", "wb") as lock, file_lock(lock):
        for found in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                status = found.stat()
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


@pytest.mark.parametrize("name", [name for name in CACHED if name in FILE_KINDS])
def test_host_cache_gives_the_samples_and_downloads_once(name, tmp_path):
    kind = FILE_KINDS[name]
    with serving(files()) as server:
        urls = names(server.url, kind.ending)
        found = []
        for _ in range(2):  # as two runs, or ranks
            stream = CACHED[name](urls, cache_dir=tmp_path)
            for epoch, skip in ((0, 0), (1, 3)):
                found.append(
                    [
                        kind.id_of(sample)
                        for sample in samples_of(stream, skip=skip, epoch=epoch)
                    ]
                )
        whole = [asked for asked, span in server.asked if span.startswith("bytes=0-")]
        expected = CACHED[name](urls)
        assert found == 2 * [
            [
                kind.id_of(sample)
                for sample in samples_of(expected, skip=skip, epoch=epoch)
            ]
            for epoch, skip in ((0, 0), (1, 3))
        ]

    assert sorted(found[0]) == list(range(TOTAL))
    opened = 2 if name == "parquet" else 0  # each time for the footers
    assert Counter(whole) == dict.fromkeys(
        [url.rpartition("/")[2] for url in urls], 1 + opened
    )


def test_host_cache_that_is_full_reads_others_from_the_server(tmp_path, caplog):
    with serving(FILES) as server:

        def read(number):
            stream = Stream.lines(
                f"{server.url}/{number}.txt", cache_dir=tmp_path, cache_bytes=2 * SIZE
            )
            [line] = samples_of(stream, parts=1)
            assert line == chr(ord("a") + number) * (SIZE - 1)

        for number in (0, 1, 2, 0, 3, 1, 2):
            read(number)
        names = [name for name, _ in server.asked]
        assert {number: names.count(f"{number}.txt") for number in range(4)} == {
            0: 1,
            1: 1,
            2: 2,
            3: 1,
        }
        kept = {name.rpartition("-")[2]: name for name in copies(tmp_path)}
        assert kept.keys() == {"0.txt", "1.txt"}
        assert f"no room for {server.url}/2.txt of {SIZE} bytes" in caplog.text

        (tmp_path / kept["0.txt"]).unlink()
        read(2)
        assert {name.rpartition("-")[2] for name in copies(tmp_path)} == {
            "1.txt",
            "2.txt",
        }


def test_host_cache_reads_a_file_beyond_its_limit_from_the_server(tmp_path):
    with serving({"a.txt": b"a\n", "b.txt": b"b\n" * 100}) as server:
        for name in ("a.txt", "b.txt", "a.txt", "b.txt"):
            samples_of(
                Stream.lines(
                    f"{server.url}/{name}", cache_dir=tmp_path, cache_bytes=100
                ),
                parts=1,
            )
        names = [name for name, _ in server.asked]
    assert (names.count("a.txt"), names.count("b.txt")) == (1, 2)


READER = """
import os, random, sys
from paddle_shard import Stream
from paddle_shard.data.stream import stage_of
from paddle_shard.data.stages.stage import Opening
from paddle_shard.testing import report
url, folder, limit, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rng = random.Random(4 * seed + int(os.environ["PADDLE_TRAINER_ID"]))
for _ in range(12):
    urls = [f"{url}/{number}.txt" for number in rng.sample(range(6), 3)]
    stream = Stream.lines(urls, cache_dir=folder, cache_bytes=limit, shuffle_shards=False)
    for part in stage_of(stream).open(Opening(parts=(0,), num_parts=1, epoch=0)):
        assert [line[0] for line in part] == ["abcdef"[int(name[-5])] for name in urls]
report("right")
"""


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(draws(2)))
def test_host_cache_is_shared_by_processes_within_its_limit(seed, tmp_path):
    rng = random.Random(seed)
    limit, most, stop = rng.randrange(2 * SIZE, 5 * SIZE), [], threading.Event()
    folder, script = tmp_path / "copies", tmp_path / "reader.py"
    folder.mkdir()
    script.write_text(READER)

    def watch():
        while not stop.is_set():
            most.append(bytes_in(folder))
            time.sleep(0.002)

    with serving(FILES) as server:
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with start_ranks(
                script,
                4,
                tmp_path / "run",
                args=[server.url, folder, limit, seed],
                timeout=HANG,
            ) as job:
                while len(server.asked) < 5:
                    assert job.exit_codes() == {}
                    time.sleep(0.005)
                job.send(0, signal.SIGKILL)
                said = job.reports([1, 2, 3], HANG)
                assert job.wait([0], HANG)[0] == -signal.SIGKILL
        finally:
            stop.set()
            watcher.join()

    assert said == ["right"] * 3
    assert max(most) <= limit
    assert max(most) > SIZE


def test_host_cache_removes_what_a_killed_process_left(tmp_path):
    (tmp_path / "precious.txt").write_bytes(b"x" * SIZE)
    (tmp_path / "0123456789abcdef").write_bytes(b"x" * SIZE)
    half = tmp_path / ".0123456789abcdef-9.txt.xyz.part"
    half.write_bytes(b"x" * SIZE)
    os.utime(half, (0, 0))
    with serving(FILES) as server:
        for number in range(6):
            samples_of(
                Stream.lines(
                    f"{server.url}/{number}.txt", cache_dir=tmp_path, cache_bytes=SIZE
                ),
                parts=1,
            )

    assert not half.exists()
    assert {"precious.txt", "0123456789abcdef"} <= copies(tmp_path)
    assert len(copies(tmp_path)) == 3


def test_host_cache_keeps_a_file_of_unknown_size(tmp_path):
    with serving({"a.txt": b"1\n2\n"}, sized=False) as server:
        stream = Stream.lines(
            f"{server.url}/a.txt", cache_dir=tmp_path, cache_bytes=SIZE
        )
        assert samples_of(stream, parts=1) == ["1", "2"]
    assert len(copies(tmp_path)) == 1


def test_host_cache_rejects_a_limit_by_name():
    with pytest.raises(ArgumentError, match="cache_bytes"):
        Stream.lines("memory://a.txt", cache_dir="x", cache_bytes=0)
    with pytest.raises(ArgumentError, match="limits cache_dir, which is not given"):
        Stream.lines("memory://a.txt", cache_bytes=5)


@pytest.mark.parametrize(
    ("first", "then"), [(None, "a"), ("a", None), ("a", "a"), ("a", "b"), (None, None)]
)
def test_host_cache_does_not_matter_to_a_resume(first, then, tmp_path):
    with serving(
        {"a.txt": b"".join(b"%d\n" % number for number in range(40))}
    ) as server:

        def loader(folder):
            cache_dir = None if folder is None else tmp_path / folder
            stream = Stream.lines(f"{server.url}/a.txt", cache_dir=cache_dir).map(
                lambda line: np.array([int(line)])
            )
            given = paddle.io.DataLoader(stream, batch_size=4)
            return paddle_shard.shard_dataloader(given, ONE, shard_dims="x")

        batches = iter(before := loader(first))
        next(batches)
        resumed = loader(then)
        resumed.load_state_dict(before.state_dict())
        batch = next(iter(resumed))
        batch = batch[0] if isinstance(batch, list) else batch
        assert batch._local_value().numpy()[:, 0].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("kind", CACHED)
@pytest.mark.parametrize(
    "given", [5, b"cache", "", "s3://bucket/cache", "https://host/cache"]
)
def test_host_cache_must_be_a_folder_of_this_host(kind, given):
    with pytest.raises(ArgumentError, match=f"cache_dir must be .*got {given!r}"):
        CACHED[kind]("https://host/data", cache_dir=given)
