from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks

pytestmark = pytest.mark.multiprocess


def test_each_real_row_has_its_value_once_on_all_ranks(tmp_path):
    reports = run_ranks(Path(__file__).with_name("metrics_worker.py"), 4, tmp_path, timeout=HANG)

    for found in (rows for report in reports for rows in report.values()):
        assert found["distributed"] == found["local"] == found["view"] == [10 * number for number in range(13)]
        assert found["view stays"]
        assert found["whole"] == [0, 1, 2, 3] * 3 + [0]
        assert "valid must be the iterator's `valid`, a distributed tensor" in found["both local"]
        assert "a row for each of the 2 of the global batch, or for each of the 1 that this rank" in found["other rows"]
