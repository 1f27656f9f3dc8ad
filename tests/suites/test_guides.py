"""Scripts of Paddle's guides on two data ranks, with the one line changed: the losses are plain Paddle's."""

from pathlib import Path

import numpy as np
import paddle.distributed as dist
import pytest

from tests.deadlines import HANG

pytestmark = pytest.mark.multiprocess
HERE = Path(__file__).parent


@pytest.mark.skipif(
    not hasattr(dist, "to_distributed"),
    reason="this version of Paddle has no such function",
)
@pytest.mark.parametrize(
    ("case", "steps"), [("parallelize", 10), ("to_distributed", 8)]
)
def test_guides_script_has_the_losses_of_paddles_loader(case, steps, run_case):
    cases = ["parallelize", "to_distributed"]
    env = {"PYTHONPATH": str(HERE.parents[1])}
    for report in run_case(
        HERE / "guides_worker.py", 2, case, cases, env=env, timeout=2 * HANG
    ):
        assert len(report["ours"]) == steps
        assert np.allclose(report["ours"], report["plain"], rtol=1e-6)
        assert report["ours"][0] != report["ours"][1]
