"""Ranks for tests: forked from a process that has imported Paddle, in a second a job; or under Paddle's launcher."""

import contextlib
import json
import os
import time
from pathlib import Path

from paddle_shard import testing
from paddle_shard.testing import RanksFailed
from paddle_shard.testing.job import Job, Processes, job_variables
from tests.deadlines import HANG
from tests.forks import forks_of_process


def start_ranks(*args, **options):
    """`paddle_shard.testing.start_ranks`, of forked ranks."""
    return testing.start_ranks(
        *args, processes=forks_of_process(os.getpid()), **options
    )


def run_ranks(*args, **options):
    """`paddle_shard.testing.run_ranks`, of forked ranks."""
    return testing.run_ranks(
        *args, processes=forks_of_process(os.getpid()), **options
    )


def preload(*modules):
    """Import modules once for all ranks that this process forks from now on; those that are not there are left out."""
    forks_of_process(os.getpid()).preload(*modules)


def processes_left(job, seconds=10.0):
    """Return the processes, started by ranks of a job, that still run after this time."""
    deadline = time.monotonic() + seconds
    while (left := job._processes.alive() - set(job.pids)) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.01)
    return left


def run_script(script, directory, timeout=HANG):
    """Run a Python file in a forked process; return its exit code, its output, and which processes it has left.

    A script whose last line is `raise SystemExit` ends as a fresh interpreter does, freeing what it has.
    """
    with start_ranks(script, 1, directory, timeout=timeout) as job:
        codes = job.wait([0], timeout)
        left = processes_left(job)
    return codes.get(0), (Path(directory) / "workerlog.0").read_text(), left


def launch_ranks(
    script, num_ranks, directory, *, args=(), env=None, timeout=120.0
):
    """Return the reports of ranks that `python -m paddle.distributed.launch` has started."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        "-m",
        "paddle.distributed.launch",
        "--nproc_per_node",
        str(num_ranks),
        "--log_dir",
        str(folder),
    ]
    job = Job("the launcher", folder, Processes(folder))
    with contextlib.ExitStack() as stack:
        stack.callback(job.kill)
        job.start(
            [*command, str(script), *map(str, args)],
            job_variables(folder, env, timeout),
            "launcher.log",
        )
        codes = job.wait([0], timeout)
    if codes != {0: 0} or job.silent(range(num_ranks)):
        raise RanksFailed(f"the launcher exited with {codes}\n{job.logs()}")
    return [
        json.loads((folder / f"rank-{rank}.json").read_text())
        for rank in range(num_ranks)
    ]
