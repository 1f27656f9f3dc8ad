from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks

pytestmark = pytest.mark.multiprocess


def test_static_and_dynamic_models_train_alike_on_packed_rows(tmp_path):
    reports = run_ranks(
        Path(__file__).with_name("packed_worker.py"),
        2,
        tmp_path,
        timeout=2 * HANG,
    )

    for report in reports:
        assert report["dynamic"][0] > report["dynamic"][5] + 0.05, "it learns"
        assert report["static"] == pytest.approx(report["dynamic"], abs=1e-5)
        assert report["dynamic"] == reports[0]["dynamic"]
