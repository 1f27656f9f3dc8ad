import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paddle_shard.testing import RanksFailed, run_ranks, start_ranks
from tests.deadlines import HANG
from tests.forks import forks_of_process
from tests.jobs import launch_ranks, processes_left

pytestmark = pytest.mark.multiprocess


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(
        "import os, sys, time\nfrom paddle_shard.testing import report\n"
    )
    with path.open("a") as file:
        file.write("rank = int(os.environ['PADDLE_TRAINER_ID'])\n" + body)
    return path


def live_processes_with(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if text.encode() in (entry / "cmdline").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
    return found


@pytest.fixture(params=["fresh", "forked"])
def processes(request):
    return None if request.param == "fresh" else forks_of_process(os.getpid())


def test_run_ranks_returns_reports_in_rank_order(tmp_path, processes):
    path = script(
        tmp_path,
        "import numpy as np\nreport({'rank': rank, 'args': sys.argv[1:], 'ids': np.arange(rank)})",
    )

    reports = run_ranks(
        path, 3, tmp_path / "run", args=["a", "b c"], processes=processes
    )

    assert reports == [
        {"rank": r, "args": ["a", "b c"], "ids": list(range(r))}
        for r in range(3)
    ]


def test_start_ranks_keeps_its_ports_for_its_ranks(tmp_path):
    body = """
import socket
def can_bind(port, reuse):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
endpoints = [os.environ["PADDLE_MASTER"], os.environ["PADDLE_CURRENT_ENDPOINT"]]
ports = [int(endpoint.rpartition(":")[2]) for endpoint in endpoints]
report([[can_bind(port, reuse) for reuse in (0, 1)] for port in ports])
"""

    [bindings] = run_ranks(script(tmp_path, body), 1, tmp_path / "run")

    # Paddle's store reuses addresses
    assert bindings == [[False, True]] * 2


def test_job_kill_waits_for_ranks_that_end_slowly(
    tmp_path,
):
    # 0.5 GB takes long to free
    body = "import numpy as np\nheld = np.ones(1 << 26)\nreport(rank)\ntime.sleep(600)"

    with start_ranks(
        script(tmp_path, body), 1, tmp_path / "run", timeout=HANG
    ) as job:
        while job.silent([0]):
            time.sleep(0.05)

        job.kill()
        assert job.exit_codes() == {0: -9}


def test_run_ranks_names_and_kills_a_rank_that_hangs(tmp_path, processes):
    child = "[sys.executable, '-c', 'import time; time.sleep(600)', __file__]"
    body = f"import subprocess\ndef stuck_here():\n    subprocess.Popen({child}, start_new_session=True)\n"
    body += "    time.sleep(600)\nif rank == 1: stuck_here()\nreport(rank)"
    path = script(tmp_path, body)

    # on a busy machine it takes longer until the ranks have begun
    for timeout in (
        4 if processes else 8,
        30,
        180,
    ):
        with pytest.raises(RanksFailed) as caught:
            run_ranks(
                path,
                2,
                tmp_path / f"run {timeout}",
                timeout=timeout,
                processes=processes,
            )
        if "stuck_here" in str(caught.value):
            break

    assert "still running: ranks [1]" in str(caught.value)
    assert "no report from ranks [1]" in str(caught.value)
    assert "stuck_here" in str(caught.value)
    assert live_processes_with(str(path)) == [], (
        "what a rank has started is ended, too"
    )


def test_run_ranks_shows_every_log_when_a_rank_fails(tmp_path, processes):
    body = "print('hello from', rank, flush=True)\nif rank == 1: raise RuntimeError('boom')\ntime.sleep(60)"
    path = script(tmp_path, body)

    with pytest.raises(RanksFailed, match=r"exit codes \{1: 1\}") as caught:
        run_ranks(path, 2, tmp_path / "run", timeout=HANG, processes=processes)

    for text in ("hello from 0", "hello from 1", "RuntimeError: boom"):
        assert text in str(caught.value)


def test_run_ranks_needs_a_report_of_each_rank(tmp_path, processes):
    path = script(tmp_path, "if rank == 0: report(0)")

    with pytest.raises(RanksFailed, match=r"no report from ranks \[1\]"):
        run_ranks(path, 2, tmp_path / "run", processes=processes)


def test_run_ranks_sets_what_the_launcher_sets(tmp_path, monkeypatch):
    """Its environment, arguments, folder, import path, signals and standard streams; `__main__` can be pickled."""
    body = """
import json, pickle, signal
class Own: pass
assert type(pickle.loads(pickle.dumps(Own()))) is Own and __name__ == "__main__"
names = sorted(n for n in os.environ if n.startswith(("PADDLE_", "POD_", "MY_", "FLAGS_")) and "SHARD" not in n)
where = ("_MASTER", "_ENDPOINT", "_ENDPOINTS", "_LOG_DIR", "_NAME", "_ENV_PATH")
told = {n: None if n.endswith(where) else os.environ[n] for n in names}
report([told, sys.argv, os.getcwd(), sys.path[0], __file__, sys.stdin.read(), os.isatty(1),
        str(signal.getsignal(signal.SIGINT)), str(signal.getsignal(signal.SIGTERM))])
"""
    path = script(tmp_path, body)
    monkeypatch.chdir(tmp_path)
    launched = launch_ranks(
        path,
        2,
        tmp_path / "launched",
        args=["x"],
        env={"MY_OWN": "1"},
        timeout=HANG,
    )
    for told, *_ in launched:
        # of the launcher's own files
        for name in (
            "PADDLE_LOG_DIR",
            "PADDLE_BACKUP_ENV_PATH",
        ):
            told.pop(name, None)

    # Forked ranks have imported Paddle, which must not show.
    for how, processes in (
        ("forked", forks_of_process(os.getpid())),
        ("fresh", None),
    ):
        found = run_ranks(
            path,
            2,
            tmp_path / how,
            args=["x"],
            env={"MY_OWN": "1"},
            processes=processes,
        )
        assert found == launched, how


def test_forks_draw_different_random_numbers(tmp_path):
    body = "import random\nimport numpy as np, paddle\n"
    body += (
        "report([random.random(), np.random.rand(), paddle.rand([1]).item()])"
    )

    one, two = run_ranks(
        script(tmp_path, body),
        2,
        tmp_path / "run",
        processes=forks_of_process(os.getpid()),
    )

    assert all(a != b for a, b in zip(one, two, strict=True))


def test_forks_reject_variables_that_paddle_reads_at_import(tmp_path):
    forks = forks_of_process(os.getpid())
    with pytest.raises(
        ValueError, match=r"FLAGS_x.*read when Paddle is imported"
    ):
        run_ranks(
            script(tmp_path, ""),
            1,
            tmp_path / "run",
            env={"FLAGS_x": "1"},
            processes=forks,
        )


def test_start_ranks_others_continue_when_one_is_killed(tmp_path, processes):
    body = "import signal\nif rank == 0: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(1)\nreport(rank)"
    with start_ranks(
        script(tmp_path, body), 2, tmp_path / "run", processes=processes
    ) as job:
        assert job.reports([1], HANG) == [1]
        assert job.exit_codes() == {0: -9, 1: 0}
        assert processes_left(job) == set()


def test_start_ranks_end_with_the_process_that_started_them(tmp_path):
    path = script(tmp_path, "time.sleep(600)")
    code = f"""
import os, signal, sys
from paddle_shard.testing import start_ranks
with start_ranks({str(path)!r}, 2, {str(tmp_path / "run")!r}) as job:
    print(*job.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG,
    )

    pids = [int(pid) for pid in done.stdout.split()]
    deadline = time.monotonic() + HANG
    while (
        any(Path(f"/proc/{pid}").exists() for pid in pids)
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
