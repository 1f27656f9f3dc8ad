"""Ranks that share a cluster, clusters that grow, two hosts, and what is left of a rank that is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paddle_shard.testing import run_ranks
from tests.adapters.ray.conftest import ROOT
from tests.deadlines import HANG
from tests.launch.conftest import two_hosts  # noqa: F401  (a fixture)

WORKER = Path(__file__).with_name("ray_worker.py")
ENV = {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token"}


def test_ray_ranks_with_the_same_rows_share_actors(cluster, tmp_path):
    reports = run_ranks(
        WORKER,
        2,
        tmp_path,
        args=["leader"],
        env={**ENV, "RAY_ADDRESS": cluster},
        timeout=2 * HANG,
    )

    for report in reports:
        assert report["actors"] == report["workers"] == reports[0]["workers"]
        assert 1 <= report["actors seen"] <= 2
    assert [("reads for" in one["who"]) for one in reports].count(True) == 1, (
        reports
    )


def test_ranks_share_a_data_set_of_ray_data_and_make_equal_steps(
    cluster, tmp_path
):
    reports = run_ranks(
        WORKER,
        2,
        tmp_path,
        args=["data"],
        env={**ENV, "RAY_ADDRESS": cluster},
        timeout=2 * HANG,
    )

    for epoch in range(2):
        steps = [report["epochs"][epoch] for report in reports]
        assert sorted(
            one for rank in steps for step in rank for one in step
        ) == list(range(103))
        assert len(steps[0]) == len(steps[1])
    assert sorted(one for step in reports[0]["leader"] for one in step) == list(
        range(103)
    )
    for report in reports:
        assert report["leader"] == reports[0]["leader"]
        within, twice = report["refused"]
        assert (
            "StateError: state is within an epoch, but the Ray Data loader has no save="
            in within
        )
        assert "another process reads the share of data rank 0" in twice


def test_relative_paths_are_meant_from_the_folder_of_the_rank(
    cluster, tmp_path
):
    (report,) = run_ranks(
        WORKER,
        1,
        tmp_path,
        args=["relative"],
        env={**ENV, "RAY_ADDRESS": cluster},
        timeout=2 * HANG,
    )

    assert [sorted(one) for one in report["found"]] == [list(range(40))] * 2


def test_actors_of_a_rank_that_is_killed_are_gone(cluster):
    env = {**os.environ, **ENV, "RAY_ADDRESS": cluster}
    with subprocess.Popen(
        [sys.executable, WORKER, "killed"],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    ) as rank:
        try:
            line = next(
                line for line in rank.stdout if line.startswith("begun")
            )
        finally:
            rank.kill()
    pids = list(map(int, line.split()[1:]))
    assert pids
    deadline = time.monotonic() + HANG
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def cluster_of_two_hosts(two_hosts):  # noqa: F811
    """A cluster whose first host has no CPU for actors; each node in the foreground of its own host."""
    if not two_hosts[0].enter:
        pytest.skip("network namespaces are not permitted here")
    ray = [
        Path(sys.executable).with_name("ray"),
        "start",
        "--block",
        "--disable-usage-stats",
    ]
    ray += ["--object-store-memory=100000000"]
    env, nodes = {**os.environ, **ENV}, []
    for number, host in enumerate(two_hosts):
        at = ["--head", "--port=6399", "--include-dashboard=false"]
        if number:
            at = [f"--address={two_hosts[0].ip}:6399"]
        command = [
            *host.enter,
            *ray,
            *at,
            f"--node-ip-address={host.ip}",
            f"--num-cpus={2 * number}",
        ]
        nodes.append(
            subprocess.Popen(
                command,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        for line in nodes[-1].stdout:
            if "Ray runtime started" in line:
                break
        else:
            pytest.fail(f"node {number} has not started")
    yield two_hosts
    for node in reversed(nodes):
        node.terminate()
        node.communicate(timeout=HANG)


def test_readers_on_another_host_read_the_same(cluster_of_two_hosts, tmp_path):
    first, second = cluster_of_two_hosts
    script = tmp_path / "enter.sh"
    script.write_text(f'#!/bin/sh\nexec {" ".join(first.enter)} "$@"\n')
    script.chmod(0o755)
    out = tmp_path / "report.json"
    env = {
        **os.environ,
        **ENV,
        "RAY_ADDRESS": f"{first.ip}:6399",
        "PADDLE_SHARD_REPORT": str(out),
    }
    code = "import runpy, sys; sys.argv[1:] = ['host']; import paddle_shard.testing as t; "
    code += (
        f"t.report = lambda found: open({str(out)!r}, 'w').write(repr(found)); "
    )
    code += f"runpy.run_path({str(WORKER)!r}, run_name='__main__')"

    done = subprocess.run(
        [script, sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=2 * HANG,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = out.read_text()
    assert "'same': True" in found
    assert (
        f"reading sample 7 failed in worker 0 on node {second.ip} "
        in found.replace("worker 1", "worker 0")
    )
