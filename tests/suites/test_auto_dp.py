"""Paddle's auto-DP mode on two ranks: its DataLoader has split the rows, and placements say `Replicate`."""

from pathlib import Path

import pytest

from tests.deadlines import HANG

pytest.importorskip(
    "paddle.distributed.auto_parallel.auto_dp_utils",
    reason="Paddle 3.0 has no such mode",
)
pytestmark = pytest.mark.multiprocess
HERE = Path(__file__).parent
WORKER = HERE / "auto_dp_worker.py"
CASES = [
    "rows",
    "rows, no axis",
    "rows, another name",
    "rows, no data axis",
    "stream",
    "stream, axis",
]
CASES += [
    "stream of this rank",
    "stream of this rank, unsaid",
    "batches",
    "no length",
]
CASES += ["texts", "texts, gathered", "texts, stream"]


@pytest.fixture(scope="module")
def of_ranks(run_case):
    def reports(case):
        return run_case(
            WORKER,
            2,
            case,
            CASES,
            env={"PYTHONPATH": str(HERE.parents[1])},
            timeout=2 * HANG,
        )

    return reports


def firsts(report):
    """The first number of each row, step by step."""
    assert report["error"] == ""
    return [[row[0] for row in step[0]] for step in report["steps"]]


@pytest.mark.parametrize(
    "case", ["rows", "rows, no axis", "rows, another name"]
)
def test_gather_valid_returns_the_real_rows_of_all_ranks(case, of_ranks):
    reports = of_ranks(case)

    assert [firsts(report) for report in reports] == [
        [[0, 1], [4, 5], [8]],
        [[2, 3], [6, 7], [9]],
    ]
    for report in reports:
        assert [step[-1] for step in report["steps"]] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9],
        ]


@pytest.mark.parametrize(
    "case",
    [
        "stream",
        "stream, axis",
        "stream of this rank",
        "batches",
        "texts, stream",
    ],
)
def test_stream_is_split_over_the_data_axis_without_shard_dims(case, of_ranks):
    one, other = map(firsts, of_ranks(case))

    assert len(one) == len(other) == 3
    assert sorted(
        row for rows in (one, other) for step in rows for row in step
    ) == list(range(12))
    if case == "stream of this rank":
        assert one == [[0, 2], [4, 6], [8, 10]]


def test_auto_dp_rows_may_differ_in_length_and_number(
    of_ranks,
):
    one, other = of_ranks("texts")

    assert [firsts(report) for report in (one, other)] == [
        [[0, 1], [4, 5], [8]],
        [[2, 3], [6, 7], [9]],
    ]
    assert [len(step[0][0]) for step in one["steps"]] == [3, 2, 5]
    assert [len(step[0][0]) for step in other["steps"]] == [7, 2, 4]
    assert [len(step[1]) for step in one["steps"]] == [4, 4, 5]
    assert [
        "differ in their shape: [2, 3] on global rank 0, [2, 7] on global rank 1"
        in said
        for said in of_ranks("texts, gathered")
    ] == [
        True,
        True,
    ]


def test_stream_split_by_the_user_is_refused_with_the_argument(of_ranks):
    for report in of_ranks("stream of this rank, unsaid"):
        assert report["steps"] == []
        assert report["error"].startswith("DifferentDataError: ")
        assert "`is_dataset_splitted = True`" in report["error"]


def test_auto_dp_refuses_a_mesh_without_data_axis(
    of_ranks,
):
    for report in of_ranks("rows, no data axis"):
        assert report["error"].startswith(
            "ArgumentError: shard_dims is missing: in auto-DP mode "
        )
    for report in of_ranks("no length"):
        assert "auto-DP mode" in report["error"]
        assert ".batch(" in report["error"]
