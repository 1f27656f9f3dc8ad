import re
from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks

WORKER = Path(__file__).parent / "account_worker.py"


@pytest.mark.multiprocess
def test_all_ranks_name_the_one_that_is_late_and_why(tmp_path):
    one, two = run_ranks(WORKER, 2, tmp_path, timeout=2 * HANG)

    for case in one:
        assert one[case][0] == two[case][0], case
        for _, closes, _ in (one[case], two[case]):
            assert 0.95 <= closes <= 1.001, case
    told = {case: found[0] for case, found in one.items()}
    assert "Data is ready when it is asked for" in told["nothing"]
    for case in ("slow rows of rank 1", "slow rows of rank 1, workers"):
        assert re.search(r"on global rank 1, reading `Rows`, [\d.]+ ms a sample", told[case]), told[case]
    assert "workers instead of 1 (num_workers=) would hide it" in told["slow rows of rank 1, workers"]
    assert one["slow rows of rank 1"][2]["other ranks"] > 0.5, "rank 0 waits for rank 1"
    assert "on global rank 0, reading `Rows`" in told["a leader"]
    assert two["a leader"][2]["leader"] > 0.5
    assert "replicas='leader', which reads once for 2 ranks" in told["each"]
