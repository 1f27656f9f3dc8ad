"""Ranks that were each given data of their own are told, where what they are given tells it; and equal ones are not."""

from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import preload, run_ranks

pytestmark = pytest.mark.multiprocess


def test_data_that_differ_by_rank_are_told_and_copies_are_not(tmp_path):
    preload("datasets")
    for found in run_ranks(
        Path(__file__).with_name("own_parts_worker.py"),
        2,
        tmp_path / "run",
        args=[tmp_path],
        timeout=HANG,
    ):
        assert "10 steps" in found["gz, the same"]
        assert (
            "own: a list from 0 to 38: 0 bytes on global rank 0, nothing on "
            in found["a list in a mixture"]
        )
        assert "steps" in found["a list in a mixture, alike"]
        assert "6 steps" in found["splits itself"]
        assert "6 steps" in found["splits itself and draws"]
        assert "6 steps" in found["unseeded, resumed"]
        assert "6 steps" in found["shuffled without a seed, resumed"]
        assert "exactly once" in found["sampler"]
        assert "draws of the loader's" in found["sampler"]
        assert (
            "num_samples: 26 on global rank 0, 25 on global rank 1"
            in found["26 and 25"]
        )
        assert "needs is_dataset_splitted=True" in found["26 and 25"]
        if found["taken alike"] is not None:
            assert "The ranks differ" in found["taken and skipped"]
            assert "ArgumentError: The ranks differ" in found["names"]
            assert "file 0.txt: " in found["names"]
            for alike in (
                "cut alike",
                "names in other folders",
                "with an index, alike",
            ):
                assert "steps" in found[alike], found[alike]
            assert "steps" in found["taken alike"]
