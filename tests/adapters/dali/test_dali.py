from pathlib import Path

import numpy as np
import pytest

from paddle_shard.testing import run_ranks
from tests.adapters.claims import check

WORKER = Path(__file__).parent / "dali_worker.py"


@pytest.fixture
def data(tmp_path):
    for folder in ("equal", "ragged"):
        (tmp_path / "data" / folder).mkdir(parents=True)
        for i in range(23):
            rows = 1 + (folder == "ragged") * i
            np.save(
                tmp_path / "data" / folder / f"{i:03}.npy",
                np.full([rows], i, np.int64),
            )
    return tmp_path / "data"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_dali_keeps_every_claim(num_ranks, data, tmp_path):
    reports = run_ranks(
        WORKER, num_ranks, tmp_path / "run", args=[str(data)], timeout=400
    )

    check(reports, "plain", range(23), shuffled=False)
    check(reports, "static executor", range(23), shuffled=False)
    for pad in (False, True):
        for stick in (False, True):
            check(
                reports,
                f"shuffled {pad} {stick}",
                range(23),
                shuffled=True,
                resumes=pad == stick,
            )
    for report in reports:
        assert report["fields"] == ["id", "noise", "x"]
        refused = report["refused"]
        assert (
            "has shard_id=0 and num_shards=1, but this process is data rank"
            in refused["unsplit"]
        )
        assert "num_shards=4, but this process" in refused["world"]
        assert "the pipeline has no reader" in refused["no reader"]
        assert (
            "give the pipeline the enable_checkpointing="
            in refused["no checkpoint"]
        )
        assert (
            "batch_size=4, but this data rank's is 3" in refused["other batch"]
        )
        assert "must return a Pipeline, got NoneType" in refused["no pipeline"]
        assert "samples differ in shape" in refused["ragged"]
        assert "names 1 outputs, but the pipeline has 3" in refused["fields"]
        assert (
            "cannot be split evenly over 2 data ranks" in refused["batch size"]
        )
        assert refused["seed"].startswith(
            "ArgumentError: dali_pipeline: leave seed out"
        )
