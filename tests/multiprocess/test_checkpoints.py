import os
import re
from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks

WORKER = Path(__file__).parent / "checkpoints_worker.py"


def run(ranks, tmp_path, name, *args):
    return run_ranks(
        WORKER,
        ranks,
        tmp_path / name,
        args=[tmp_path / "saved", *args],
        timeout=2 * HANG,
    )


@pytest.mark.multiprocess
def test_checkpoints_resume_a_split_model_on_other_meshes(tmp_path):
    [straight] = run_ranks(
        WORKER,
        1,
        tmp_path / "straight",
        args=[tmp_path / "other", "1x1", 10, "alone"],
    )
    first = run(2, tmp_path, "first", "1x2", 3, "group")
    second = run(4, tmp_path, "second", "2x2", 6, "group")
    third = run(2, tmp_path, "third", "2x1", 8, "group")
    [last] = run(1, tmp_path, "last", "1x1", 10, "alone")

    assert [one[0]["step"] for one in (first, second, third, [last])] == [
        None,
        3,
        6,
        8,
    ]
    for ranks in (first, second, third):
        assert all(rank == ranks[0] for rank in ranks)
        assert ranks[0]["errors"] == [""]
    losses = [
        *first[0]["losses"],
        *second[0]["losses"],
        *third[0]["losses"],
        *last["losses"],
    ]
    assert losses == pytest.approx(straight["losses"], abs=1e-5)
    assert last["exact"] == "epoch 0: each of 40 samples exactly once"


@pytest.mark.multiprocess
def test_checkpoints_load_tensors_under_any_other_split(
    tmp_path,
):
    ranks = run_ranks(
        Path(__file__).parent / "parts_worker.py",
        4,
        tmp_path,
        args=[tmp_path / "saved"],
        timeout=HANG,
    )

    for found in ranks:
        assert found["wrong"] == found["whole"] == []
        assert found["sum"] == [6]
        rows, dtype = found["refused"]
        assert re.search(
            r"holds \[\[8, 11\], 'float32'\] for .*, and not \[\[4, 11\], 'float32'\]",
            rows,
        )
        assert re.search(
            r"holds \[\[8, 11\], 'float32'\] for .*, and not \[\[8, 11\], 'float64'\]",
            dtype,
        )


@pytest.mark.multiprocess
def test_loader_on_whose_meshes_the_first_rank_is_not_is_saved(tmp_path):
    ranks = run_ranks(
        Path(__file__).parent / "off_mesh_worker.py",
        3,
        tmp_path,
        args=[tmp_path / "saved"],
        timeout=HANG,
    )

    assert sorted(ranks[1]["seen"] + ranks[2]["seen"]) == list(range(12))
    assert all(rank["extra"] == {"note": "x"} for rank in ranks)


@pytest.mark.multiprocess
def test_checkpoints_fail_on_all_ranks_if_one_fails(tmp_path):
    one, two = run(2, tmp_path, "errors", "2x1", 3, "errors")

    assert (
        one["newest"]
        == two["newest"]
        == str(tmp_path / "saved" / "000001-000002-step5")
    )
    assert sorted(
        name
        for name in os.listdir(tmp_path / "saved")
        if "generation" not in name
    ) == [
        "000001-000001-step3",
        "000001-000002-step5",
    ]
    for rank in (one, two):
        good, steps, tensors, full, again, over = rank["errors"]
        assert good == again == ""
        told = "global rank 0 has ['model'] and rank 1 ['data']."
        assert (
            rank["loads"]
            == f"ArgumentError: load(): all ranks load the same, but {told}"
        )
        assert (
            "ArgumentError: save(): all ranks save the same, but global rank 0 has [3, "
            in steps
        )
        assert "rank 1 [4, " in steps
        assert "only must be distributed tensors" in tensors
        assert "CheckpointError: Checkpoints.save() in " in full
        assert (
            "failed on global rank 0: OSError: the disk of this rank is full"
            in full
        )
        assert over.startswith(
            "TakenOverError: generation 99 of this job has taken over "
        )
        assert (
            "(claimed now by process 7 on host other). Generation 1, of host "
            in over
        )


@pytest.mark.multiprocess
def test_checkpoints_hold_a_state_per_rank_of_split_data(
    tmp_path,
):
    worker = Path(__file__).parent / "split_checkpoints_worker.py"

    def run(name, ranks, steps):
        return run_ranks(
            worker,
            ranks,
            tmp_path / name,
            args=[tmp_path / "saved", steps],
            timeout=HANG,
        )

    first, rest = run("first", 2, 5), run("rest", 2, 100)

    assert [one["error"] for one in (*first, *rest)] == [""] * 4
    assert [one["step"] for one in (*first, *rest)] == [None, None, 5, 5]
    for name in ("sampler", "library"):
        for begun, ended in zip(first, rest, strict=True):
            assert len(begun[name]) == 10
            assert len(ended[name]) == 14
        assert sorted(
            row for one in (*first, *rest) for row in one[name]
        ) == list(range(48))
    for one in run("three", 3, 5):
        assert re.search(
            r"holds a state of each of 2 ranks, and there are 3 now",
            one["error"],
        )
