"""Tars that are cut off or damaged, disks that are full, servers that stall, drop or are gone."""

import contextlib
import gzip
import io
import json
import multiprocessing
import os
import subprocess
import tarfile
import threading
import time

import paddle.distributed as dist
import pytest
from paddle.io import DataLoader

import paddle_shard
from paddle_shard import Stream
from paddle_shard.data.files import files
from paddle_shard.data.files.host_cache import open_cached
from paddle_shard.data.files.webdataset import read_index
from paddle_shard.errors import ArgumentError, DataReadError, StateError
from paddle_shard.extras.cli.main import main
from tests.data.http_server import serving
from tests.deadlines import HANG
from tests.faults.feeds import drawn_options
from tests.faults.traces import children, kill
from tests.optional import needs

Decoder = needs("webdataset.autodecode").Decoder

LENGTHS = [40, 24, 31, 33]
BATCH = 8


def number_of(sample):
    """What a sample says it is; its bytes are checked."""
    found = json.loads(sample["json"])
    assert sample["bin"] == bytes([found % 251]) * (found % 7 * 100)
    return found


class Numbered:
    def __call__(self, sample):
        return number_of(sample)


def tar_of(first, length):
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT
    ) as archive:
        for number in range(first, first + length):
            for ending, content in (
                ("json", str(number).encode()),
                ("bin", bytes([number % 251]) * (number % 7 * 100)),
            ):
                info = tarfile.TarInfo(f"{number:04d}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


TARS = {
    f"{i:03d}.tar": tar_of(sum(LENGTHS[:i]), length)
    for i, length in enumerate(LENGTHS)
}
TOTAL = sum(LENGTHS)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, content in TARS.items():
        (folder / name).write_bytes(content)
    main(["index", f"{folder}/{{000..003}}.tar", "-o", f"{folder}/index.json"])
    return folder


def loader_over(base, *, workers=0, index=False, cache_dir=None, **own):
    stream = (
        Stream.webdataset(
            f"{base}/{{000..003}}.tar", index=index, cache_dir=cache_dir
        )
        .map(Numbered())
        .in_parts(4)
    )
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    own = {"tail": "pad", **own}
    dataloader = DataLoader(stream, batch_size=BATCH, num_workers=workers)
    return paddle_shard.shard_dataloader(
        dataloader, mesh, shard_dims="dp", **own
    )


def read(loader, steps=None):
    """(the real numbers, the failure)."""
    found, batches = [], iter(loader)
    try:
        while steps is None or steps > 0:
            batch = next(batches)
            found += (
                batch._local_value()
                .numpy()[batches.valid._local_value().numpy()]
                .tolist()
            )
            steps = None if steps is None else steps - 1
    except StopIteration:
        return found, None
    except DataReadError as error:
        return found, error
    batches.close()
    return found, None


def assert_whole(before, state, base, **how):
    """Going on from a state delivers what is missing, each sample exactly once."""
    loader = loader_over(base, **how)
    # files without counts are known by their sizes
    loader.load_state_dict(state, override=["stream"])
    after, failure = read(loader)
    assert failure is None, failure
    assert sorted(before + after) == list(range(TOTAL))


# Tars


@pytest.mark.parametrize("workers", [0, 2])
def test_tar_cut_anywhere_is_named_and_resumed_once_mended(
    workers, rng, folder
):
    for _ in range(4):
        name, index = (
            rng.choice(sorted(TARS)),
            rng.choice([False, f"{folder}/index.json"]),
        )
        straight, _ = read(loader_over(folder, index=index))
        assert sorted(straight) == list(range(TOTAL))
        whole = TARS[name]
        last = whole.rstrip(b"\0")
        at = rng.randrange(len(last))
        loader = loader_over(
            folder, workers=workers, index=index, **drawn_options(rng)
        )
        (folder / name).write_bytes(whole[:at])
        found, failure = read(loader)
        (folder / name).write_bytes(whole)

        assert failure is not None, (
            f"{len(found)} numbers and no failure: {name} cut at {at} of {len(last)}"
        )
        assert name in str(failure)
        assert straight[: len(found)] == found
        assert_whole(found, loader.state_dict(), folder, index=index)


@pytest.mark.parametrize("packed", [False, True])
def test_damaged_byte_is_an_error_or_in_one_files_content(
    packed, rng, tmp_path
):
    """A tar has a sum over each header, and none over what is in a file; packed, it has one over all."""
    path = tmp_path / ("one.tar.gz" if packed else "one.tar")
    whole = (
        gzip.compress(TARS["000.tar"], mtime=0) if packed else TARS["000.tar"]
    )
    keys = [f"{number:04d}" for number in range(LENGTHS[0])]
    named = 0
    for _ in range(25):
        # of gzip's own header nothing is checked
        at = rng.randrange(10 if packed else 0, len(whole))
        content = bytearray(whole)
        content[at] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        stream = Stream.webdataset(str(path), index=False)
        try:
            found = [sample["__key__"] for sample in stream]
        except Exception as error:
            found = str(error)
        if isinstance(found, str):
            assert path.name in found
            named += 1
        else:
            assert found == keys, at
            assert not packed or gzip.decompress(content) == TARS["000.tar"]
    assert named


def test_undecodable_sample_is_named_by_shard_and_key(rng, folder):
    bad = rng.randrange(TOTAL)
    shard = next(i for i in range(4) if bad < sum(LENGTHS[: i + 1]))
    name = f"{shard:03d}.tar"
    content = TARS[name].replace(
        str(bad).encode().ljust(512, b"\0"), b"}".ljust(512, b"\0"), 1
    )
    assert content != TARS[name]
    stream = Stream.webdataset(f"{folder}/{{000..003}}.tar").map(Decoder([]))
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    stream = stream.map(lambda sample: sample["json"]).in_parts(4)
    together = DataLoader(
        stream, batch_size=BATCH, num_workers=rng.choice([0, 2])
    )
    loader = paddle_shard.shard_dataloader(together, mesh, shard_dims="dp")
    (folder / name).write_bytes(content)
    _, failure = read(loader)

    assert failure is not None
    assert name in str(failure)
    assert f"'{bad:04d}'" in str(failure)


def test_index_cut_short_anywhere_is_refused(rng, folder):
    path = folder / "index.json"
    text = path.read_bytes()
    for at in [0, *rng.sample(range(len(text) - 2), 60)]:
        path.write_bytes(text[:at])
        with pytest.raises((StateError, ArgumentError)):
            read_index(str(path), [str(folder / name) for name in TARS])


# Servers


@pytest.mark.parametrize("workers", [0, 2])
def test_server_that_drops_and_stalls_costs_no_sample(
    workers, rng, folder, monkeypatch
):
    monkeypatch.setattr(files, "TIMEOUT", 0.3)
    index = rng.choice([False, f"{folder}/index.json"])
    straight, _ = read(loader_over(folder, index=index))
    drops = [
        rng.choice([0, 1, 511, rng.randrange(40_000), 10**6]) for _ in range(10)
    ]
    with serving(TARS, ranges=rng.random() < 0.8) as server:
        server.statuses += [rng.choice([200, 200, 503, 429]) for _ in range(3)]
        if rng.random() < 0.5:
            server.drops += [drops[0]]
            server.stalls += [rng.randrange(20_000)]
        else:
            server.drops += [drop for i, drop in enumerate(drops) if i % 3]
        loader = loader_over(
            server.url, workers=workers, index=index, **drawn_options(rng)
        )
        # what befalls one file is drawn
        monkeypatch.setattr(files, "PAUSES", (0.01,) * 12)
        found, failure = read(loader)
    assert failure is None, failure
    assert found == straight


@pytest.mark.parametrize("ill", ["gone", "stalls", "refuses"])
def test_server_that_is_gone_is_named_and_resumed_once_back(
    ill, rng, monkeypatch
):
    monkeypatch.setattr(files, "TIMEOUT", 0.2)
    workers = rng.choice([0, 2])
    with serving(TARS) as server:
        loader = loader_over(server.url, workers=workers, **drawn_options(rng))
        if ill == "stalls":
            server.stalls += [rng.randrange(15_000)] + [0] * 40
        elif ill == "refuses":
            server.drops += [rng.randrange(15_000)]
            server.statuses += [200] * 4 + [500] * 40
        else:
            server.drops += [rng.randrange(10_000) for _ in range(2)] + [0] * 60
        start = time.monotonic()
        found, failure = read(loader)
        seconds = time.monotonic() - start
        server.released.set()
        server.drops.clear(), server.stalls.clear(), server.statuses.clear()
        assert failure is not None
        assert f"given up after {len(files.PAUSES)} retries" in str(
            failure
        ) or "HTTP Error 500" in str(failure)
        assert server.url in str(failure)
        # Each try its time, and the pauses between them; parts are opened one after the other.
        assert (
            seconds
            < 4 * (len(files.PAUSES) + 1) * (files.TIMEOUT + max(files.PAUSES))
            + HANG
        )
        assert_whole(found, loader.state_dict(), server.url)


def test_pauses_between_retries_double(monkeypatch):
    pauses = []
    monkeypatch.setattr(files.time, "sleep", pauses.append)
    with (
        serving(TARS, statuses=[503] * 9) as server,
        pytest.raises(OSError, match="given up after 3 retries"),
    ):
        files.open_file(f"{server.url}/000.tar")[0].read(1)
    first, second, third = [pause for pause in pauses if pause > 0]
    assert (second, third) == (2 * first, 4 * first)


# Caches


def kept(cache_dir):
    return sorted(
        name
        for name in os.listdir(cache_dir)
        if not name.endswith((".part", ".lock"))
    )


def halves(cache_dir):
    """Bytes of incomplete copies; what a buffer held may be there."""
    return sum(
        os.path.getsize(entry)
        for entry in os.scandir(cache_dir)
        if entry.name.endswith(".part")
    )


@contextlib.contextmanager
def small_disk(path, options):
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_full_disk_is_named_and_leaves_no_half_file(rng, tmp_path):
    sizes = sorted(len(content) for content in TARS.values())
    room = rng.randrange(4096, sum(sizes) - 4096) // 4096 * 4096
    with (
        small_disk(tmp_path / "disk", f"size={room}") as disk,
        serving(TARS) as server,
    ):
        loader = loader_over(
            server.url,
            workers=rng.choice([0, 2]),
            cache_dir=str(disk),
            **drawn_options(rng),
        )
        found, failure = read(loader)
        assert failure is not None
        assert "No space left on device" in str(failure)
        assert halves(disk) <= 1 << 14
        assert {os.path.getsize(disk / name) for name in kept(disk)} <= set(
            sizes
        )
        subprocess.run(
            ["mount", "-o", "remount,size=10m", str(disk)], check=True
        )
        assert_whole(
            found, loader.state_dict(), server.url, cache_dir=str(disk)
        )
        assert len(kept(disk)) == len(TARS)


def test_disk_without_room_for_another_file_is_said_too(tmp_path):
    with (
        small_disk(tmp_path / "disk", "size=10m,nr_inodes=3") as disk,
        serving(TARS) as server,
    ):
        _, failure = read(loader_over(server.url, cache_dir=str(disk)))
        assert failure is not None
        assert "No space left on device" in str(failure)
        assert str(disk) in str(failure)


def test_file_size_limit_is_named_and_leaves_no_half_file(rng, tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    disk = tmp_path / "disk"
    with serving(TARS) as server:
        loader = loader_over(server.url, cache_dir=str(disk))
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (rng.randrange(1, 20_000), before[1])
        )
        try:
            found, failure = read(loader)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert failure is not None
        assert "File too large" in str(failure)
        assert halves(disk) <= 1 << 14
        assert_whole(
            found, loader.state_dict(), server.url, cache_dir=str(disk)
        )


def test_worker_killed_in_a_download_leaves_no_partial_file(rng, tmp_path):
    disk = tmp_path / "disk"
    with serving(TARS, stalls=[rng.randrange(1, 30_000)]) as server:
        before = children()
        loader = loader_over(
            server.url, workers=2, cache_dir=str(disk), **drawn_options(rng)
        )
        batches = iter(loader)
        deadline = time.monotonic() + HANG
        while not (
            parts := [
                name for name in os.listdir(disk) if name.endswith(".part")
            ]
            if disk.exists()
            else []
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert parts
        for victim in sorted(children() - before):
            kill(victim)
        with pytest.raises(DataReadError, match="exit code -9"):
            next(batches)
        server.released.set()
        assert_whole([], loader.state_dict(), server.url, cache_dir=str(disk))
        whole = [name for name in kept(disk) if not name.endswith(".part")]
        assert sorted(os.path.getsize(disk / name) for name in whole) == sorted(
            map(len, TARS.values())
        )


def test_child_forked_in_a_failing_download_frees_the_lock(tmp_path):
    disk = str(tmp_path / "disk")
    with serving(TARS, stalls=[5000], statuses=[200, 404]) as server:
        url = f"{server.url}/000.tar"
        first = threading.Thread(
            target=lambda: (
                contextlib.suppress(OSError).__enter__() or failing(url, disk)
            )
        )
        first.start()
        deadline = time.monotonic() + HANG
        while not os.path.isdir(disk) or not any(
            name.endswith(".part") for name in os.listdir(disk)
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child = multiprocessing.get_context("fork").Process(
            target=time.sleep, args=(100,)
        )
        child.start()  # such as a worker of another loader
        server.released.set()
        first.join()
        found = []
        second = threading.Thread(
            target=lambda: found.append(open_cached(disk, url)[0].close())
        )
        second.start()
        second.join(HANG)
        in_time = list(found)
        child.kill()
        child.join()
        second.join()
    assert in_time


def failing(url, disk):
    try:
        open_cached(disk, url)
    except Exception:
        return
    raise AssertionError("the download was to fail")
