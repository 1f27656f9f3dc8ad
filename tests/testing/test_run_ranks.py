import os
from pathlib import Path

import pytest

from paddle_shard.testing import RanksFailed, run_ranks

pytestmark = pytest.mark.multiprocess


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text("import os, sys, time\nfrom paddle_shard.testing import report\n")
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


def test_reports_come_back_in_rank_order(tmp_path):
    path = script(tmp_path, "import numpy as np\nreport({'rank': rank, 'ids': np.arange(rank)})")

    reports = run_ranks(path, 3, tmp_path / "run")

    assert reports == [{"rank": r, "ids": list(range(r))} for r in range(3)]


def test_a_rank_that_hangs_is_named_with_its_stack_and_killed(tmp_path):
    path = script(tmp_path, "def stuck_here(): time.sleep(600)\nif rank == 1: stuck_here()\nreport(rank)")

    with pytest.raises(RanksFailed, match=r"still running: ranks \[1\]; no report from: \[1\]") as caught:
        run_ranks(path, 2, tmp_path / "run", timeout=15)  # the stacks are written 3 s before

    assert "stuck_here" in str(caught.value)
    assert live_processes_with(str(path)) == []


def test_every_ranks_log_is_shown_when_one_fails(tmp_path):
    body = "print('hello from', rank, flush=True)\nif rank == 1: raise RuntimeError('boom')\ntime.sleep(60)"
    path = script(tmp_path, body)

    with pytest.raises(RanksFailed, match="launcher exited with") as caught:
        run_ranks(path, 2, tmp_path / "run", timeout=60)

    for text in ("hello from 0", "hello from 1", "RuntimeError: boom"):
        assert text in str(caught.value)


def test_a_script_that_does_not_report_is_an_error(tmp_path):
    path = script(tmp_path, "if rank == 0: report(0)")

    with pytest.raises(RanksFailed, match=r"no report from ranks \[1\]"):
        run_ranks(path, 2, tmp_path / "run")
