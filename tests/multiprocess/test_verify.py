"""Replicas that have read other data are told so on every rank, by step, rank and field."""

from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks

pytestmark = pytest.mark.multiprocess
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    environment = {"PYTHONPATH": str(HERE.parents[1])}
    return run_ranks(
        HERE / "verify_worker.py", 4, folder, env=environment, timeout=2 * HANG
    )


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        ("same", 4),
        ("same, workers, each step", 4),
        ("stream, same", 4),
        ("later", 4),  # only the first batch is compared
        ("never", 4),
        ("own part, not compared", 1),
        ("own part, split", 4),
        ("seeded", 4),
        ("seeded, workers", 4),
        ("own noise", 4),  # a warning
        ("own noise, padded", 4),
        ("names", 3),
        ("mixed, nothing", 4),
        ("mixed, order", 4),
        ("damaged, nothing", 4),
    ],
)
def test_verify_is_silent_if_nothing_differs_or_is_compared(
    case, steps, reports
):
    assert [report[case] for report in reports] == [[steps, ""]] * 4


@pytest.mark.parametrize(
    ("case", "steps", "says"),
    [
        (
            "first",
            0,
            "step 0: global ranks 2 and 3 have read the same samples, but their data differ in these digests: ['image",
        ),
        ("first, workers", 0, "step 0: global ranks 2 and 3 "),
        ("later, every second", 2, "step 2: global ranks 2 and 3 "),
        # one of the two that identify it
        (
            "later, every step",
            0,
            "the ranks hold different data. sample ",
        ),
        ("noise", 0, "step 0: global ranks 0 and 1 "),
        ("stream", 0, "step 0: global ranks 2 and 3 "),
        # the comparison of streams that all read may come first
        (
            "whole",
            0,
            "have read",
        ),
        ("mixture", 0, "the ranks hold different data. sample ('web', "),
        ("mixed, text", 0, "digests: ['text']: "),
        ("mixed, number", 0, "digests: ['number']: "),
        ("mixed, pair", 0, "digests: ['pair']: "),
        ("mixed, objects", 0, "digests: ['objects']: "),
        ("mixed, more", 0, "the ranks hold different data. sample "),
        ("items", 0, "the ranks hold different data. sample "),
        ("damaged, text", 0, "digests: ['text']: "),
    ],
)
def test_verify_raises_on_all_ranks_if_replicas_differ(
    case, steps, says, reports
):
    for report in reports:
        found, text = report[case]
        assert found == steps
        assert text.startswith("DifferentDataError: ")
        assert says in text


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("own part", "pass the whole data set, or is_dataset_splitted=True"),
        (
            "own part, leader",
            "pass the whole data set, or is_dataset_splitted=True",
        ),
        (
            "own part, workers",
            "pass the whole data set, or is_dataset_splitted=True",
        ),
        (
            "other version",
            "Each rank must hold the whole data set, and the same one",
        ),
    ],
)
def test_verify_names_both_data_ranks_that_differ(case, says, reports):
    """Data that the user has split, and data of another version, have the lengths that they should have."""
    for report in reports:
        found, text = report[case]
        assert found == 0
        assert text.startswith(
            "DifferentDataError: the ranks hold different data. sample "
        )
        assert says in text


def test_ranks_that_compare_otherwise_are_told(reports):
    for report in reports:
        assert (
            "verify: first on global ranks 0, 1, 2, None on global rank 3"
            in report["other option"][1]
        )
