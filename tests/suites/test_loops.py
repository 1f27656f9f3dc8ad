"""Loops of Paddle's suites under `patch_paddle()`: the rows of Paddle's loader, and one failure on both ranks."""

from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks
from tests.suites.loops_worker import LOOPS

pytestmark = pytest.mark.multiprocess
WORKER = Path(__file__).with_name("loops_worker.py")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return {
        how: run_ranks(
            WORKER, 2, tmp_path_factory.mktemp(how), args=[how], env=env, timeout=HANG
        )
        for how in ("plain", "patched")
    }


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_reads_the_rows_of_paddles_loader(loop, reports):
    patched = [found[loop] for found in reports["patched"]]
    assert patched == [found[loop] for found in reports["plain"]]
    assert str(patched).count("[") > 2


def test_loop_fails_on_both_ranks_at_the_same_step(reports):
    for found in reports["patched"]:
        steps, text = found["failing"]
        assert len(steps) == 1
        assert "sample 6 failed" in text


def test_loop_of_a_sampler_that_draws_alike_on_both_ranks_is_named(reports):
    for found in reports["patched"]:
        assert "read the same first batches" in found["clas, pk"]
        assert "draws_for_rank" in found["clas, pk"]
