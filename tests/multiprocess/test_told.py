"""A call that fails on one rank only is told to the others, by rank and reason, whatever they do meanwhile."""

import json
from pathlib import Path

import pytest

from paddle_shard.testing import RanksFailed
from tests.deadlines import HANG
from tests.jobs import run_ranks, start_ranks

WORKER = Path(__file__).with_name("told_worker.py")
ENVIRONMENT = {"PYTHONPATH": str(WORKER.parents[2])}
CALLS = {
    "not made": "its shard_dataloader() failed: tail must be",
    "a state of another run": "its load_state_dict() failed: state is of another run (seed: saved 5, now 0)",
    "no state": "its load_state_dict() failed: state must be what the loader's state_dict() returned",
    "a misspelt option": "its load_state_dict() failed: ",
    "an epoch": "its set_epoch() failed: epoch must be",
    "the sampler's epoch": "its set_epoch() failed: epoch must be",
    "a loop": "its iter(loader) failed: no more processes",
    "a loop that was agreed on": "its iter(loader) failed: no more processes",
    "the end of a loop": "the end of its loop failed: no more processes",
    "gather_valid: rows": "its gather_valid() failed: values must have a row for each",
    "gather_valid: type": "its gather_valid() failed: gather_valid: values must be a paddle.Tensor",
    "gather_valid: valid": "its gather_valid() failed: valid must be the iterator's `valid`",
    "gather_valid: shape": "gather_valid",
    "gather_valid: nothing for valid": "its gather_valid() failed: gather_valid() missing 1 required positional",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder, names = tmp_path_factory.mktemp("told"), json.dumps(list(CALLS))
    return run_ranks(
        WORKER,
        3,
        folder,
        args=["cases", names, 3],
        env=ENVIRONMENT,
        timeout=HANG,
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize("call", CALLS)
def test_call_that_fails_on_one_rank_is_named_on_all(call, reports):
    *others, (kind, text, seconds) = (report[call] for report in reports)

    assert text in CALLS[call] or CALLS[call].partition("failed: ")[2] in text
    for other_kind, told, waited in others:
        assert (
            f"global rank {len(others)}: {CALLS[call]}" in told
            or call == "gather_valid: shape"
        )
        assert other_kind == (
            kind if kind not in ("OSError", "TypeError") else "DataReadError"
        )
        assert max(seconds, waited) < HANG / 12, (
            "not only when the timeout is over"
        )


@pytest.mark.multiprocess
def test_random_sequences_of_calls_name_the_wrong_rank_on_all(
    reports,
):
    for of_ranks in zip(
        *(report["at random"] for report in reports), strict=True
    ):
        for rank, (victim, found) in enumerate(of_ranks):
            assert found is not None
            _, text, seconds = found
            assert seconds < HANG / 12
            assert rank == victim or f"global rank {victim}: its " in text, text


@pytest.mark.multiprocess
def test_gather_valid_takes_each_dtype_and_values_of_no_size(reports):
    for found in reports:
        *dtypes, no_boxes = found["dtypes"].values()
        assert dtypes == [[True], *[[6]] * 5]
        assert no_boxes == [1, 0, 5]


@pytest.mark.multiprocess
def test_ranks_of_which_one_could_not_make_a_call_go_on_together(reports):
    steps = zip(*(report["later"] for report in reports), strict=True)

    assert [
        row for of_ranks in steps for part in of_ranks for row in part
    ] == list(range(24))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("how", "victim", "cause"),
    [
        ("ends", 1, "its set_epoch() failed: epoch must be"),
        ("ends", 0, "its set_epoch() failed: epoch must be"),
        ("leaves", 1, "its set_epoch() failed: epoch must be"),
        ("not_made", 1, "its shard_dataloader() failed: tail must be"),
    ],
)
def test_ranks_in_a_loop_are_told_why_another_has_left_it(
    how, victim, cause, tmp_path
):
    with start_ranks(
        WORKER,
        2,
        tmp_path,
        args=[how, str(victim)],
        env=ENVIRONMENT,
        timeout=HANG,
    ) as job:
        [(kind, text, seconds)] = job.reports([1 - victim], HANG)

    assert kind == "ArgumentError"
    assert f"global rank {victim}: {cause}" in text
    assert seconds < HANG / 12


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("how", "victim", "num_ranks"),
    [("import", 1, 2), ("stream", 1, 3), ("exit", 2, 3), ("import", 0, 3)],
)
def test_rank_that_exits_before_its_loader_is_named_at_once(
    how, victim, num_ranks, tmp_path
):
    with start_ranks(
        WORKER,
        num_ranks,
        tmp_path,
        args=[how, str(victim)],
        env=ENVIRONMENT,
        timeout=HANG,
    ) as job:
        for kind, text, seconds in job.reports(
            [rank for rank in range(num_ranks) if rank != victim], HANG
        ):
            assert kind == "PeerLostError"
            assert f"lobal rank {victim}" in text
            assert seconds < HANG / 12


@pytest.mark.multiprocess
def test_rank_exits_at_once_though_its_peer_is_stopped(
    tmp_path,
):
    with start_ranks(
        WORKER, 2, tmp_path, args=["stop", "1"], env=ENVIRONMENT, timeout=HANG
    ) as job:
        assert job.wait([1], HANG / 4) == {1: 1}


REFUSED = """
import paddle, paddle.distributed as dist, paddle_shard
dist.init_parallel_env()
mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])
paddle_shard.shard_dataloader(paddle.io.DataLoader(list(range(100)), batch_size=25), mesh, shard_dims="dp")
"""


@pytest.mark.multiprocess
def test_loader_refused_by_all_ranks_logs_nothing_at_exit(tmp_path):
    """They end before they have met, which nobody else need know."""
    (tmp_path / "refused.py").write_text(REFUSED)
    with pytest.raises(RanksFailed) as failed:
        run_ranks(
            tmp_path / "refused.py",
            2,
            tmp_path / "job",
            env=ENVIRONMENT,
            timeout=HANG,
        )
    assert (
        "a global batch of 25 cannot be split evenly over 2 data ranks. Nearest sizes that can: 24 or 26"
        in str(failed.value)
    )
    assert "ERROR" not in str(failed.value)
    assert "Agreement" not in str(failed.value)
