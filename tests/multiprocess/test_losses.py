"""The line of docs/lengths.md for labels that do not count gives the mean over the tokens of the global batch."""

from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks


@pytest.mark.multiprocess
def test_masked_loss_of_the_docs_is_the_mean_over_valid_tokens(
    tmp_path,
):
    for found in run_ranks(
        Path(__file__).with_name("loss_worker.py"), 2, tmp_path, timeout=HANG
    ):
        assert found["page"] == pytest.approx(found["numpy"], rel=1e-5)
        assert found["gradients differ by"] < 1e-6
        assert found["paddle"] == pytest.approx(
            found["numpy, over all"], rel=1e-5
        ), "if not, the page is out of date"
