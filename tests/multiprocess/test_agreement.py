import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paddle_shard.testing import run_ranks

pytestmark = pytest.mark.multiprocess
WORKER = Path(__file__).parent / "agreement_worker.py"
TIMEOUT = 4.0


@pytest.mark.parametrize(("num_ranks", "board"), [(2, "yes"), (4, ""), (4, "yes")])
def test_real_ranks_end_fail_and_leave_together(num_ranks, board, tmp_path, monkeypatch):
    monkeypatch.setenv("AGREEMENT_BOARD", board)
    reports = run_ranks(WORKER, num_ranks, tmp_path)

    ends = [20, "ended"]
    sums = [num_ranks * step + sum(range(num_ranks)) for step in range(60)]
    expected = [
        ["ends", ends],
        ["exhausted", [5 + 4 * (num_ranks - 1), "ended"]],
        ["fails", [13, "failed", [[num_ranks - 1, "no disk"]]]],
        ["breaks", [[4, "left"], [0, "left"], [11, "left"], ends]],
        ["collective", [[60, "ended"], sums]],
        ["ends", ends],
    ]
    assert reports == [expected] * num_ranks


class Forks:
    """A process that has imported Paddle, and forks a rank whenever it is asked."""

    def __init__(self, worker):
        ours = ("PADDLE_", "POD_", "FLAGS_selected_")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        command = [sys.executable, "-u", str(worker), "fork"]
        self.process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def rank(self, variables, log, arguments):
        """Start a rank and return its process id, which stays its own as long as this process lives."""
        print(json.dumps([variables, str(log), arguments]), file=self.process.stdin)
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def forks():
    with Forks(WORKER) as forks:
        yield forks


def run_unsound(forks, case, num_ranks, directory, wrong, args=()):
    """Run a case in which rank `wrong` goes wrong; return the others' reports and the seconds of each.

    Without the launcher, which would end the others as soon as one fails.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoints = ",".join(f"127.0.0.1:{port + 1 + r}" for r in range(num_ranks))
    logs = [directory / f"log-{rank}" for rank in range(num_ranks)]
    survivors = [rank for rank in range(num_ranks) if rank != wrong]
    with contextlib.ExitStack() as stack:
        ended = {}
        for rank, log in enumerate(logs):
            variables = {
                "PADDLE_MASTER": f"127.0.0.1:{port}",
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(num_ranks),
                "PADDLE_TRAINER_ENDPOINTS": endpoints,
                "PADDLE_CURRENT_ENDPOINT": endpoints.split(",")[rank],
                "PADDLE_DISTRI_BACKEND": "gloo",
                "PADDLE_SHARD_REPORT_DIR": str(directory),
                "AGREEMENT_TIMEOUT": str(TIMEOUT),
            }
            pid = forks.rank(variables, log, [case, *args])
            stack.callback(os.kill, pid, signal.SIGKILL)
            ended[rank] = os.pidfd_open(pid)  # can be read from as soon as the process has ended
            stack.callback(os.close, ended[rank])
        try:
            deadline = time.monotonic() + 60
            for rank in survivors:
                if not select.select([ended[rank]], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise TimeoutError(f"rank {rank} had not ended after 60 s")
            paths = [directory / f"rank-{rank}.json" for rank in survivors]
            return [json.loads(path.read_text()) for path in paths]
        except (TimeoutError, FileNotFoundError) as error:
            texts = "\n".join(f"--- {log.name} ---\n{log.read_text(errors='replace')[-4000:]}" for log in logs)
            pytest.fail(f"{case}: {error}\n{texts}")


@pytest.mark.parametrize(("num_ranks", "victim"), [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_survivors_name_the_rank_that_was_killed(num_ranks, victim, tmp_path, forks):
    for report in run_unsound(forks, "killed", num_ranks, tmp_path, victim, [str(victim)]):
        assert report[1:3] == ["lost", [victim]]
        assert report[3].startswith(f"Global rank {victim} has ended or was killed")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_sleeps_is_named_at_the_deadline(num_ranks, tmp_path, forks):
    for report in run_unsound(forks, "silent", num_ranks, tmp_path, 1):
        assert report[1:3] == ["lost", [1]]
        assert "global rank 1 has read up to step" in report[3]
        assert report[4] == TIMEOUT


def test_a_frozen_process_is_named_at_the_deadline(tmp_path, forks):
    for report in run_unsound(forks, "stopped", 4, tmp_path, 1):
        assert report[1:3] == ["lost", [1]]
        assert report[4] == TIMEOUT


def test_a_rank_that_leaves_alone_is_named(tmp_path, forks):
    for report in run_unsound(forks, "leaves", 4, tmp_path, 1):
        assert report[1:3] == ["lost", [1]]
        assert "left by global rank 1 after 7 steps" in report[3]
