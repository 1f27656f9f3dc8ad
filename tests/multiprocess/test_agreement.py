from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks, start_ranks

pytestmark = pytest.mark.multiprocess
WORKER = Path(__file__).parent / "agreement_worker.py"
TIMEOUT = 4.0


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_real_ranks_end_fail_and_leave_together(num_ranks, tmp_path):
    reports = run_ranks(WORKER, num_ranks, tmp_path)

    ends = [20, "ended"]
    sums = [num_ranks * step + sum(range(num_ranks)) for step in range(60)]
    expected = [
        ["ends", ends],
        ["exhausted", [5 + 4 * (num_ranks - 1), "ended"]],
        [
            "fails",
            [13, "failed", f"OSError: global rank {num_ranks - 1}: no disk"],
        ],
        ["breaks", [[4, "left"], [0, "left"], [11, "left"], ends]],
        ["collective", [[60, "ended"], sums]],
        ["ends", ends],
    ]
    assert reports == [expected] * num_ranks


def run_unsound(case, num_ranks, directory, wrong, args=()):
    """Run a case in which rank `wrong` goes wrong; return the others' reports."""
    survivors = [rank for rank in range(num_ranks) if rank != wrong]
    variables = {"AGREEMENT_TIMEOUT": str(TIMEOUT)}
    with start_ranks(
        WORKER,
        num_ranks,
        directory,
        args=[case, *args],
        env=variables,
        timeout=HANG,
    ) as job:
        return job.reports(survivors, HANG)


@pytest.mark.parametrize(("num_ranks", "victim"), [(2, 1), (4, 0), (4, 2)])
def test_survivors_name_the_rank_that_was_killed(num_ranks, victim, tmp_path):
    for report in run_unsound(
        "killed", num_ranks, tmp_path, victim, [str(victim)]
    ):
        assert report[1:3] == ["lost", [victim]]
        assert report[3].startswith(
            f"Global rank {victim} has ended or was killed"
        )


def test_rank_that_sleeps_is_named_at_the_deadline(tmp_path):
    for report in run_unsound("silent", 4, tmp_path, 1):
        assert report[1:3] == ["lost", [1]]
        assert "global rank 1 read up to step" in report[3]
        assert report[4] == TIMEOUT


def test_frozen_process_is_named_at_the_deadline(tmp_path):
    for report in run_unsound("stopped", 4, tmp_path, 1):
        assert report[1:3] == ["lost", [1]]
        assert report[4] == TIMEOUT


def test_rank_that_leaves_alone_is_named(tmp_path):
    for report in run_unsound("leaves", 4, tmp_path, 1):
        assert report[1:3] == ["lost", [1]]
        assert "left by global rank 1 after 7 steps" in report[3]
