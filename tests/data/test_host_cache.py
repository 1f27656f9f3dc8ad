"""Copies of remote files on a host: each is downloaded once, also if a process is killed meanwhile."""

import signal
import time
from collections import Counter

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.data.files.host_cache import open_cached
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
    "counted lines": lambda urls, **cache: Stream.lines(
        urls, counts=True, **cache
    ),
    "csv": lambda urls, **cache: Stream.csv(urls, **cache),
    "counted csv": lambda urls, **cache: Stream.csv(urls, counts=True, **cache),
    "jsonl": lambda urls, **cache: Stream.jsonl(urls, **cache),
    "counted jsonl": lambda urls, **cache: Stream.jsonl(
        urls, counts=True, **cache
    ),
    "webdataset": lambda urls, **cache: Stream.webdataset(
        urls, index=False, **cache
    ),
    "parquet": lambda urls, **cache: Stream.parquet(
        urls, columns=["id"], **cache
    ),
}


def samples_of(stream, parts=4, skip=0, epoch=0):
    opening = Opening(
        parts=tuple(range(parts)), num_parts=parts, epoch=epoch, skip=skip
    )
    return [
        sample for part in stage_of(stream).open(opening) for sample in part
    ]


@pytest.mark.parametrize(
    "name", [name for name in CACHED if name in FILE_KINDS]
)
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
        whole = [
            asked for asked, span in server.asked if span.startswith("bytes=0-")
        ]
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


READER = """
import os, random, sys, time
from paddle_shard import Stream
from paddle_shard.data.stream import stage_of
from paddle_shard.data.stages.stage import Opening
from paddle_shard.testing import report
url, folder, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = random.Random(4 * seed + int(os.environ["PADDLE_TRAINER_ID"]))
for _ in range(12):
    urls = [f"{url}/{number}.txt" for number in rng.sample(range(6), 3)]
    stream = Stream.lines(urls, cache_dir=folder, shuffle_shards=False)
    for part in stage_of(stream).open(Opening(parts=(0,), num_parts=1, epoch=0)):
        assert [line[0] for line in part] == ["abcdef"[int(name[-5])] for name in urls]
report("right")
if os.environ["PADDLE_TRAINER_ID"] == "0":
    time.sleep(600)  # until it is killed
"""


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(draws(2)))
def test_open_cached_downloads_once_despite_a_killed_process(seed, tmp_path):
    folder = tmp_path / "copies"
    script = tmp_path / "reader.py"
    script.write_text(READER)
    with (
        serving(FILES) as server,
        start_ranks(
            script,
            4,
            tmp_path / "run",
            args=[server.url, folder, seed],
            timeout=HANG,
        ) as job,
    ):
        while len(server.asked) < 5:
            assert job.exit_codes() == {}
            time.sleep(0.005)
        job.send(0, signal.SIGKILL)
        assert job.reports([1, 2, 3], HANG) == ["right"] * 3
        assert job.wait([0], HANG)[0] == -signal.SIGKILL
        whole = [
            asked for asked, span in server.asked if span.startswith("bytes=0-")
        ]
    # The killed process may have begun copies that others made again: of the file that it read, and of the next two.
    assert len(whole) <= len(set(whole)) + 3


def test_open_cached_writes_no_file_that_another_process_reads(tmp_path):
    with serving({"a.txt": b"a\n"}) as server:
        url = f"{server.url}/a.txt"
        first, _ = open_cached(str(tmp_path), url)
        [copy] = tmp_path.iterdir()
        before = copy.stat()
        copy.unlink()  # by a user, who wants it downloaded again
        second, _ = open_cached(str(tmp_path), url)
        assert copy.stat().st_ino != before.st_ino
    with first, second:
        assert (first.read(), second.read()) == (b"a\n", b"a\n")


@pytest.mark.parametrize("link", ["{}.lock", "{}.part", ".{}.x1.part"])
def test_open_cached_follows_no_link_in_the_folder(link, tmp_path):
    target = tmp_path / "another file"
    target.write_bytes(b"kept")
    folder = tmp_path / "copies"
    with serving({"a.txt": b"a\n"}) as server:
        url = f"{server.url}/a.txt"
        open_cached(str(folder), url)[0].close()
        [copy] = folder.iterdir()
        copy.unlink()
        (folder / link.format(copy.name)).symlink_to(target)
        opened, _ = open_cached(str(folder), url)
        with opened:
            assert opened.read() == b"a\n"
    assert target.read_bytes() == b"kept"


def test_host_cache_keeps_a_file_of_unknown_size(tmp_path):
    with serving({"a.txt": b"1\n2\n"}, sized=False) as server:
        stream = Stream.lines(f"{server.url}/a.txt", cache_dir=tmp_path)
        assert samples_of(stream, parts=1) == ["1", "2"]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("first", "then"),
    [(None, "a"), ("a", None), ("a", "a"), ("a", "b"), (None, None)],
)
def test_host_cache_does_not_matter_to_a_resume(first, then, tmp_path):
    with serving(
        {"a.txt": b"".join(b"%d\n" % number for number in range(40))}
    ) as server:

        def loader(folder):
            cache_dir = None if folder is None else tmp_path / folder
            stream = Stream.lines(
                f"{server.url}/a.txt", cache_dir=cache_dir
            ).map(lambda line: np.array([int(line)]))
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
@pytest.mark.parametrize("given", ["s3://bucket/cache", "https://host/cache"])
def test_host_cache_must_be_a_folder_of_this_host(kind, given):
    with pytest.raises(
        ArgumentError, match=f"cache_dir must be .*got {given!r}"
    ):
        CACHED[kind]("https://host/data", cache_dir=given)
