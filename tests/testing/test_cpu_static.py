import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess
WORKER = Path(__file__).with_name("cpu_static_worker.py")
# The cases of each number of ranks are run by one job.
CASES = {
    2: ["parity", "replicas", "second_model", "one_rank", "undo"],
    4: ["other_groups", "two_groups"],
}


@pytest.fixture
def of_ranks(run_case):
    """What each of so many ranks reports of a case."""
    return lambda num_ranks, case: run_case(
        WORKER, num_ranks, case, CASES[num_ranks]
    )


def test_static_losses_are_the_dynamic_ones(of_ranks):
    for report in of_ranks(2, "parity"):
        assert report["static"] == pytest.approx(report["dynamic"], abs=1e-5)
        assert len(set(report["static"])) == 5


def test_ranks_that_are_replicas_alone_train(of_ranks):
    for report in of_ranks(2, "replicas"):
        assert report["static"] == pytest.approx(report["dynamic"], abs=1e-5)


def test_second_model_of_the_process_trains_and_evaluates(of_ranks):
    for report in of_ranks(2, "second_model"):
        first, second = report["runs"]
        assert first["train"] == pytest.approx(second["train"], abs=1e-6)
        for run in (first, second):
            assert run["eval"] == pytest.approx(run["numpy"], abs=1e-5)
        assert report["eval_after_undo"] == pytest.approx(
            second["eval"], abs=1e-6
        )


def test_groups_used_between_steps_do_not_leak_into_a_step(of_ranks):
    for report in of_ranks(4, "other_groups"):
        assert report["static"] == pytest.approx(report["dynamic"], abs=1e-5)
        assert report["replicas"] == pytest.approx(report["dynamic"], abs=1e-5)
        assert report["again"] < report["static"]  # it went on training


def test_program_of_two_groups_is_refused_on_every_rank(of_ranks):
    groups = {
        0: [[0, 1], [0, 2]],
        1: [[0, 1], [1, 3]],
        2: [[0, 2], [2, 3]],
        3: [[1, 3], [2, 3]],
    }

    for report in of_ranks(4, "two_groups"):
        kind, text, dynamic_mode = report["refused"]
        assert kind == "StaticGroupsError"
        assert dynamic_mode
        for rank, used in groups.items():
            assert f"rank {rank}: train uses {used}\n" in text
        assert report["static"] == pytest.approx(report["dynamic"], abs=1e-5)


def test_refusal_on_one_rank_is_raised_on_all(of_ranks):
    for kind, text, _ in of_ranks(2, "one_rank"):
        assert kind == "StaticGroupsError"
        assert (
            "Groups by rank:\n  rank 1: train uses [[0, 1], [0, 1, 2]]\nTest training"
            in text
        )


def test_undo_puts_back_what_it_found(of_ranks):
    for report in of_ranks(2, "undo"):
        assert report["pod_name"] == [True, False, True, True]
        assert report["changed"] == [False, True, False, False]
        assert report["refused"][1] == "No CUDA device found"


def test_cpu_static_changes_nothing_on_an_accelerator(monkeypatch):
    from paddle.distributed.auto_parallel.static.engine import Engine
    from paddle.framework import core

    from demos.cpu_static import cpu_static

    monkeypatch.setattr(core, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setenv("POD_NAME", "pod")
    before = Engine._init_comm

    with cpu_static():
        assert Engine._init_comm is before


def test_importing_the_tools_does_not_import_paddle():
    code = (
        "import sys, paddle_shard.testing; assert 'paddle' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
