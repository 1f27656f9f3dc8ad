"""Each rank's state knows the files that any rank was reading, and all ranks are refused together."""

from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks

pytestmark = pytest.mark.multiprocess
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewritten")
    return run_ranks(
        HERE / "rewritten_worker.py",
        2,
        folder / "job",
        args=[folder],
        timeout=2 * HANG,
    )


@pytest.mark.parametrize(
    "case", ["two data ranks", "with workers", "replicas", "a leader"]
)
def test_state_refuses_a_rewritten_file_of_any_rank_on_all(case, reports):
    for report in reports:
        alike, same, other, anyway = report[case]
        assert alike, "the states of all ranks name the same files"
        assert same == anyway == 7
        assert "the data is not what it was" in str(other)
        assert "version of file 6.txt was " in str(other)
