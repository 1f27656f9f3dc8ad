from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks

WORKER = Path(__file__).parent / "notes_worker.py"


@pytest.mark.multiprocess
def test_step_messages_share_row_shapes_and_skipped_rows(
    tmp_path,
):
    one, two = run_ranks(WORKER, 2, tmp_path, timeout=2 * HANG)

    assert one == two
    told = one.pop("own rows")
    assert "step 1" in told
    assert (
        "[1]: float32, 1 rows of [2] on global rank 0, float32, 2 rows of [2] on global rank 1. "
        in told
    )
    assert "fill it up" in told
    for case, (steps, error, masks) in one.items():
        assert steps == 2, case
        assert "step 2" in error, case
        assert (
            "[0]: float32[3] on global rank 0, float32[5] on global rank 1"
            in error
        ), case
        # 5 for both, 6 for one, 7 for the other
        assert masks[1] == [4.0, None, None, None], case
        assert [masks[0], *masks[2:]] == [
            [4.0 * k + r for r in range(4)] for k in (0, 2, 3)
        ], case
