"""Loops of Paddle's suites under `patch_paddle()`: the rows of Paddle's loader, and one failure on both ranks."""

from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks
from tests.suites.loops_worker import LOOPS, ROWS, UNREADABLE

pytestmark = pytest.mark.multiprocess
WORKER = Path(__file__).with_name("loops_worker.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks has read in each loop."""
    env = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return run_ranks(
        WORKER, 2, tmp_path_factory.mktemp("run"), env=env, timeout=HANG
    )


def flat(steps):
    return [row for rows in steps for row in rows]


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_reads_the_rows_of_paddles_loader(loop, ranks):
    patched = [found["patched"][loop] for found in ranks]
    assert patched == [found["plain"][loop] for found in ranks]
    assert str(patched).count("[") > 2
    for found in ranks:
        is_left_to_paddle = found["loaders"][loop] == 0
        assert is_left_to_paddle == (loop == "mix, files")


def test_loop_reads_each_row_where_paddlenlp_repeats_some(ranks):
    for how, num_missing in (("plain", 1), ("patched", 0)):
        for first, second in zip(
            *(found[how]["nlp"] for found in ranks), strict=True
        ):
            rows = flat(first) + flat(second)
            assert len(first) == len(second) == 3
            assert len(set(range(ROWS)) - set(rows)) == num_missing


def test_loop_that_catches_errors_stays_in_step(ranks):
    runs = [found["patched"]["clas, unreadable"] for found in ranks]
    for first, second in zip(*runs, strict=True):
        places = [
            [step for step, rows in enumerate(flat(epochs)) if rows == "error"]
            for epochs in (first, second)
        ]
        assert places[0] == places[1] != []
        assert str(UNREADABLE) not in str([first, second])


def test_loop_over_data_without_an_end_has_no_length(ranks):
    for found in ranks:
        assert found["patched"]["ernie, length"] == "the sampler has no end"


def test_loop_with_kept_workers_can_be_left(ranks):
    epochs = [found["patched"]["mix, persistent"] for found in ranks]
    for first, second in zip(*epochs, strict=True):
        assert set(flat(first) + flat(second)) == set(range(ROWS))


def test_loop_resumes_with_the_next_row(ranks):
    for found in ranks:
        rest, resumed = found["patched"]["seg, resumed"]
        assert rest == resumed
        assert len(rest) == 2


def test_loop_fails_on_both_ranks_at_the_same_step(ranks):
    for found in ranks:
        steps, text = found["patched"]["failing"]
        assert len(steps) == 1
        assert "sample 6 failed" in text


def test_sampler_loop_that_draws_alike_on_ranks_is_named(ranks):
    for found in ranks:
        assert "read the same first batches" in found["patched"]["clas, pk"]
        assert "draws_for_rank" in found["patched"]["clas, pk"]
