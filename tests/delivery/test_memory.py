"""Whose memory it is, and what is left, is what Linux tells; and it is said before it is full."""

import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest
from paddle.io import DataLoader

from paddle_shard.delivery import memory as module
from paddle_shard.delivery.memory import Memory, is_short, left_of_host, memory, shortage
from tests.helpers import ONE, Made, sharded

MB = 1 << 20


def host(folder, *, total=1000, available=600, cgroup="0::/a/b\n", files=None):
    """A `/proc` like this one but for the host's memory, and cgroups; in MB."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    proc.mkdir()
    for name in (str(os.getpid()), "self"):
        (proc / name).mkdir()
    (proc / str(os.getpid()) / "task").mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {total << 10} kB\nMemFree: 1 kB\nMemAvailable: {available << 10} kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    for path, content in (files or {}).items():
        (cgroups / path).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / path).write_text(content)
    return proc, cgroups


def v2(path, limit, used, cached):
    found = {"memory.max": f"{limit}\n", "memory.current": f"{used * MB}\n"}
    found["memory.stat"] = f"anon 5\ninactive_file {cached * MB}\n"
    return {f"{path}/{name}": content for name, content in found.items()}


@pytest.mark.parametrize(
    ("how", "left", "whole"),
    [
        ({}, 600, 1000),
        ({"files": v2("a/b", 300 * MB, 250, 100)}, 150, 300),  # of a container
        ({"files": v2("a/b", "max", 250, 100)}, 600, 1000),
        ({"files": v2("a", 200 * MB, 190, 0) | v2("a/b", 300 * MB, 20, 0)}, 10, 200),  # the limit above is tighter
        ({"files": v2("a/b", 5000 * MB, 20, 0)}, 600, 1000),  # the host is
        (
            {
                "cgroup": "7:cpu,cpuacct:/x\n4:memory:/job\n",
                "files": {
                    "memory/job/memory.limit_in_bytes": str(400 * MB),
                    "memory/job/memory.usage_in_bytes": str(350 * MB),
                    "memory/job/memory.stat": f"cache 1\ntotal_inactive_file {30 * MB}\n",
                },
            },
            80,
            400,
        ),
    ],
)
def test_what_is_left_is_that_of_the_tightest_limit(how, left, whole, tmp_path):
    assert left_of_host(*host(tmp_path, **how)) == (left * MB, whole * MB)


def test_a_process_has_what_it_has_written_and_shares_what_others_have_too():
    before = memory()
    assert 0 < before.left <= before.whole
    mine = np.ones(64 * MB, np.uint8)
    with mmap.mmap(-1, 48 * MB) as mapped:
        for at in range(0, len(mapped), 4096):
            mapped[at] = 1
        asked, answers = os.pipe()
        child = os.fork()
        if not child:  # it has all of it, and writes to none
            os._exit(sum(mapped[at] for at in range(0, len(mapped), 4096)) - 12288 or os.read(asked, 1) != b"x")
        time.sleep(0.3)
        after = memory()
        os.write(answers, b"x")
        assert os.waitpid(child, 0)[1] == 0
        alone = memory()
    assert alone.own - before.own == pytest.approx((64 + 48) * MB, rel=0.2)
    assert after.shared - before.shared > (64 + 48) * MB * 0.8
    assert mine.sum() == 64 * MB


class Copies:
    """A data set of which each worker makes a copy of its own."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if not hasattr(self, "copy"):
            self.copy = np.ones(60 * MB, np.uint8)
        return np.array([index])


def test_workers_are_counted_with_what_each_has_of_its_own():
    loader = sharded(DataLoader(Copies(), batch_size=4, num_workers=2), ONE)
    before = loader.stats.memory
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    found = loader.stats.memory
    assert len(found.workers) - len(before.workers) == 2
    assert sum(size > 60 * MB for size in found.workers) - sum(size > 60 * MB for size in before.workers) == 2
    assert list(found.workers) == sorted(found.workers, reverse=True)
    assert "its 2 child processes" in repr(loader.stats) or before.workers
    batches.close()


def test_what_workers_only_read_is_shared():
    rows = np.ones((64, 1 * MB), np.uint8)
    loader = sharded(DataLoader(Made(lambda index: rows[index, :8], 64), batch_size=4, num_workers=2), ONE)
    before = loader.stats.memory
    batches = iter(loader)
    for _ in range(16):
        next(batches)
    found = loader.stats.memory
    assert sum(found.workers) - sum(before.workers) < 48 * MB
    assert found.shared - before.shared > 48 * MB
    batches.close()


def of(**more):
    known = {"own": 10**9, "workers": (), "shared": 10**8, "left": 10**9, "whole": 10**10}
    return Memory(**{**known, **more})


def test_a_shortage_names_who_has_the_most_and_what_helps():
    assert not is_short(10**9, 10**10)
    assert not is_short(5 * 10**8, 10**10)
    assert is_short(4 * 10**8, 10**10)
    assert "this process's own: the data set itself, or the model" in shortage(of(left=4 * 10**8))
    said = shortage(of(left=4 * 10**8, workers=(3 * 10**9, 10**9, 10**9, 10**9)))
    assert (
        "This rank has 1.0 GB of its own, its 4 child processes 6.0 GB (the largest 3.0 GB), 0.1 GB shared; "
        "0.4 GB of 10.0 GB left." in said
    )
    assert "Fewer workers (num_workers=)" in said
    said = shortage(of(left=4 * 10**8, shared=2 * 10**9))
    assert "a smaller prefetch_factor= holds fewer" in said
    assert "if it is the data set" in said, "which forked workers only read"


def test_a_loop_says_it_once_a_pass_and_goes_on_where_nothing_is_told(monkeypatch, caplog):
    monkeypatch.setattr("paddle_shard.delivery.stats.LOOK_SECONDS", 0.01)
    found = [of(left=10**8)]
    monkeypatch.setattr("paddle_shard.delivery.stats.memory", lambda: found[0])
    monkeypatch.setattr("paddle_shard.delivery.stats.left_of_host", lambda: (10**8, 10**10))
    loader = sharded(DataLoader(Made(lambda i: np.array([i]), 40), batch_size=4), ONE)

    def rows():
        return sum(len(batch._local_value()) for batch in loader if time.sleep(0.012) is None)

    assert rows() == 40
    assert len([record for record in caplog.records if "memory is short" in record.getMessage()]) == 1

    def untold():
        raise KeyError("MemAvailable:")

    monkeypatch.setattr("paddle_shard.delivery.stats.memory", untold)
    monkeypatch.setattr("paddle_shard.delivery.stats.left_of_host", untold)
    assert rows() == 40
    assert "newest pass: 10 batches" in repr(loader.stats)


def test_a_look_is_cheap():
    took = min(_timed() for _ in range(5))
    assert took < module.LOOK_SECONDS / 100


def _timed():
    began = time.perf_counter()
    left_of_host(Path("/proc"))
    return time.perf_counter() - began
