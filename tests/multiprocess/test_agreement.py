import contextlib
import json
import os
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
TIMEOUT = 8.0


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_real_ranks_end_fail_and_leave_together(num_ranks, tmp_path):
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


def run_unsound(case, num_ranks, directory, wrong, args=()):
    """Run a case in which rank `wrong` goes wrong; return the others' reports and the seconds of each.

    Without the launcher, which would end the others as soon as one fails.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "POD_", "FLAGS_selected_"))}
    endpoints = ",".join(f"127.0.0.1:{port + 1 + r}" for r in range(num_ranks))
    processes, logs = [], []
    for rank in range(num_ranks):
        env = variables | {
            "PADDLE_MASTER": f"127.0.0.1:{port}",
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(num_ranks),
            "PADDLE_TRAINER_ENDPOINTS": endpoints,
            "PADDLE_CURRENT_ENDPOINT": endpoints.split(",")[rank],
            "PADDLE_DISTRI_BACKEND": "gloo",
            "PADDLE_SHARD_REPORT_DIR": str(directory),
            "AGREEMENT_TIMEOUT": str(TIMEOUT),
        }
        logs.append(directory / f"log-{rank}")
        command = [sys.executable, "-u", str(WORKER), case, *args]
        with open(logs[-1], "w") as log:
            processes.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
    survivors = [rank for rank in range(num_ranks) if rank != wrong]
    try:
        deadline = time.monotonic() + 60
        for rank in survivors:
            processes[rank].wait(max(0.0, deadline - time.monotonic()))
        paths = [directory / f"rank-{rank}.json" for rank in survivors]
        return [json.loads(path.read_text()) for path in paths]
    except (subprocess.TimeoutExpired, FileNotFoundError) as error:
        texts = "\n".join(f"--- {log.name} ---\n{log.read_text(errors='replace')[-4000:]}" for log in logs)
        pytest.fail(f"{case}: {error}\n{texts}")
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(10)


@pytest.mark.parametrize(("num_ranks", "victim"), [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_survivors_name_the_rank_that_was_killed(num_ranks, victim, tmp_path):
    for report in run_unsound("killed", num_ranks, tmp_path, victim, [str(victim)]):
        assert report[1:3] == ["lost", [victim]]
        assert report[3].startswith(f"Global rank {victim} has ended or was killed")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_sleeps_is_named_at_the_deadline(num_ranks, tmp_path):
    for report in run_unsound("silent", num_ranks, tmp_path, 1):
        assert report[1:3] == ["lost", [1]]
        assert "global rank 1 has read up to step" in report[3]
        assert report[4] == TIMEOUT


def test_a_frozen_process_is_named_at_the_deadline(tmp_path):
    for report in run_unsound("stopped", 4, tmp_path, 1):
        assert report[1:3] == ["lost", [1]]
        assert report[4] == TIMEOUT


def test_a_rank_that_leaves_alone_is_named(tmp_path):
    for report in run_unsound("leaves", 4, tmp_path, 1):
        assert report[1:3] == ["lost", [1]]
        assert "left by global rank 1 after 7 steps" in report[3]
