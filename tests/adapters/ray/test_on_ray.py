"""`launch/on_ray.py` runs ranks on a Ray cluster as Paddle's launcher runs them on hosts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.adapters.ray.conftest import ROOT
from tests.deadlines import HANG

SCRIPT = """
import os, sys, time
import paddle
import paddle.distributed as dist

dist.init_parallel_env()
rank, total = dist.get_rank(), paddle.to_tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(f"rank {rank} of {dist.get_world_size()}: sum {total.item()}, {sys.argv[1:]}", flush=True)
open(f"{sys.argv[1]}/{rank}", "w").write(str(os.getpid()))
dist.barrier()
print(f"in {os.getcwd()}", flush=True)
if "follows" in sys.argv:
    if rank == 1:
        os._exit(7)
    while os.path.exists(f"/proc/{open(sys.argv[1] + '/1').read() or 0}/fd/0"):
        pass
    time.sleep(0.05)  # it has noticed that it has lost another, and ends
    os._exit(1)
if "fails" in sys.argv and rank == 1:
    print("it failed here", flush=True)
    os._exit(7)
if "fails" in sys.argv or "waits" in sys.argv:
    time.sleep(1000)
os._exit(0)
"""


@pytest.fixture
def launch(cluster, tmp_path):
    """Starts the script with some arguments; and where its ranks leave their process ids."""
    script, env = (
        tmp_path / "train.py",
        {**os.environ, "RAY_ADDRESS": cluster, "RAY_AUTH_MODE": "token"},
    )
    script.write_text(SCRIPT)
    (tmp_path / "ranks").mkdir()

    def start(*arguments, **more):
        command = [
            sys.executable,
            ROOT / "launch/on_ray.py",
            "--processes",
            "2",
            script,
            tmp_path / "ranks",
            *arguments,
        ]
        pipes = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        return subprocess.Popen(command, env=env | more, cwd=tmp_path, **pipes)

    yield start, tmp_path / "ranks"
    until(lambda: not alive(tmp_path / "ranks"))


def alive(folder):
    return [
        path
        for path in folder.iterdir()
        if Path(f"/proc/{path.read_text() or 0}").exists()
    ]


def until(true):
    deadline = time.monotonic() + HANG
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_ranks_meet_and_the_first_ones_output_is_shown(launch):
    start, ranks = launch
    out, err = (process := start("--lr", "3")).communicate(timeout=HANG)

    assert process.returncode == 0, err
    assert f"rank 0 of 2: sum 3.0, ['{ranks}', '--lr', '3']" in out
    assert "rank 1" not in out
    assert f"in {ranks.parent}\n" in out, (
        "relative paths are those that the user sees"
    )
    assert sorted(path.name for path in ranks.iterdir()) == ["0", "1"]


def test_on_ray_exits_with_the_code_of_the_failed_rank(launch):
    start, _ = launch
    _, err = (process := start("fails")).communicate(timeout=HANG)

    assert process.returncode == 7
    assert "rank 1 of 2 failed with exit code 7" in err.splitlines()[-1]
    assert "it failed here" in err


def test_on_ray_names_the_rank_that_failed_first(launch):
    start, _ = launch
    _, err = (process := start("follows")).communicate(timeout=HANG)

    assert process.returncode == 7, err
    assert "rank 1 of 2 failed with exit code 7" in err.splitlines()[-1]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
)
def test_on_ray_ranks_end_with_the_command(launch, number):
    start, ranks = launch
    process = start("waits")
    until(
        lambda: len([path for path in ranks.iterdir() if path.read_text()]) == 2
    )
    process.send_signal(number)
    process.communicate(timeout=HANG)

    assert process.returncode == (
        -number if number == signal.SIGKILL else 128 + number
    )
    until(lambda: not alive(ranks))


def test_script_that_is_not_there_is_told(tmp_path):
    command = [
        sys.executable,
        ROOT / "launch/on_ray.py",
        "--processes",
        "2",
        "nothing.py",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=HANG
    )

    assert done.returncode == 2
    assert "script 'nothing.py' is not a file, seen from" in done.stderr


def test_address_that_is_none_is_named_without_a_traceback(launch):
    start, _ = launch

    run = start(RAY_ADDRESS="nonsense")
    _, err = run.communicate(timeout=HANG)

    assert run.returncode == 2
    assert (
        "on_ray.py: no Ray cluster: Invalid address format: nonsense. Start one with: ray start --head"
        in err
    )
    assert "Traceback" not in err


def test_loader_names_an_address_that_is_none(launch):
    code = "from paddle_shard.extras.ray_readers import connect_to_ray; connect_to_ray()"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RAY_ADDRESS": "nonsense"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )

    assert "ValueError: Invalid address format: nonsense" in run.stderr
