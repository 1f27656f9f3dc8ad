"""Ranks that share a reader: one reads, all get what each would have read, and what is wrong is said on all."""

from pathlib import Path

import numpy as np
import pytest

from tests.deadlines import HANG

pytestmark = pytest.mark.multiprocess
WORKER = Path(__file__).with_name("replicas_worker.py")


def reports(run_once, case):
    return run_once(WORKER, 4, [case], timeout=HANG)


def test_replicas_leader_alone_reads_shared_rows(run_once):
    found = reports(run_once, "reads")

    leaders = {
        "dp1 x mp4": [0],
        "dp2 x mp2": [0, 2],
        "mp2 x dp2": [0, 1],
        "dp4": [0, 1, 2, 3],
    }
    for mesh, of_mesh in leaders.items():
        steps, read, said, in_repr = zip(
            *(report[mesh] for report in found), strict=True
        )
        assert set(steps) == {5}
        looked_at = (
            # two samples twice, by which ranks see that they have the same data
            4
        )
        assert [
            rank for rank, count in enumerate(read) if count > looked_at
        ] == of_mesh
        assert 40 <= sum(read) <= 40 + 4 * looked_at
        assert all(in_repr)
        if mesh == "dp1 x mp4":
            assert said == (
                "reads for global ranks 1, 2, 3 too",
                *["read by global rank 0"] * 3,
            )
        if mesh == "dp4":
            assert said == ("",) * 4
    assert [report["workers"] for report in found] == [2, 0, 2, 0]


@pytest.mark.parametrize(
    "case",
    [
        "workers",
        "random samples",
        "accumulation of steps",
        "prefetch",
        "growing",
        "skips errors",
        "whole items",
        "stream",
        "stream, workers",
        "stream, other workers",
        "bare rank fields",
    ],
)
def test_replicas_leader_gives_what_each_would_have_read(run_once, case):
    for rank, report in enumerate(reports(run_once, "same_as_each")):
        shared, each = report[case]
        assert shared == each, f"rank {rank}"
        assert len(shared[0]) > 2
        assert not any(isinstance(step, str) for step in shared[0]), shared


def test_replicas_that_leave_at_one_step_hear_nothing(
    run_once,
):
    assert reports(run_once, "left") == [[]] * 4


def test_replicas_share_a_long_loop_whose_batches_grow(run_once):
    widths = [(1 + 9 * (step >= 110)) * 2000 for step in range(150)]
    sums = [
        float(width * sum(range(8 * step, 8 * step + 8)))
        for step, width in enumerate(widths)
    ]
    for rank, report in enumerate(reports(run_once, "long")):
        assert report == sums, f"rank {rank}"


def test_replicas_share_batches_of_many_sizes(
    run_once,
):
    widths = np.random.default_rng(7).choice([1, 30, 1000, 20_000, 300_000], 24)
    sums = [
        int(width * sum(n % 100 for n in range(8 * at, 8 * at + 8)))
        for at, width in enumerate(widths)
    ]
    for rank, report in enumerate(reports(run_once, "sizes")):
        assert len(report) == 4
        for how, found in report.items():
            assert found == sums, f"rank {rank}, {how}"


def test_replicas_resume_on_another_mesh(run_once):
    for shared, each, exact in reports(run_once, "resumes"):
        assert shared == each
        assert len(shared) == 3
        assert exact


def test_replicas_share_passes_that_overlap_or_are_left(run_once):
    for rank, (together, first, nested) in enumerate(
        reports(run_once, "passes")
    ):
        sums = [
            [[4], float(sum(range(at, at + 4)))]
            for at in range(4 * (rank // 2), 40, 8)
        ]
        assert together == [[one, one] for one in sums]
        assert first == sums[0]
        inner = [[[8], float(sum(range(at, at + 8)))] for at in range(0, 24, 8)]
        assert nested == [
            sums[0],
            sums[1],
            *inner,
            sums[2],
            sums[3],
            *inner,
            sums[4],
        ]


TOLD = {
    "wrong word": (
        "ArgumentError",
        "replicas must be 'each' or 'leader', got 'one'",
    ),
    "not sent": ("DataReadError", "replicas='each' reads on each"),
    "another choice": ("ArgumentError", "replicas: "),
    "other samples": ("DifferentDataError", "Use the same seed on all ranks"),
    "more samples": ("", ""),
    "fewer samples": ("", ""),
}


@pytest.mark.parametrize("case", TOLD)
def test_replicas_name_what_cannot_be_shared_on_all_ranks(run_once, case):
    kind, text = TOLD[case]
    for report in reports(run_once, "refused"):
        told = report[case][1]
        assert "Error" in told
        assert told.startswith(kind)
        assert text in told, told


def test_replicas_fail_with_their_leader(run_once):
    found = reports(run_once, "refused")

    for report in found:
        steps, told = report["fails on the leader"]
        assert steps == 3, "two steps and the error"
        assert "no disk for 18" in told
        assert report["fails on a follower"] == [5, ""]
