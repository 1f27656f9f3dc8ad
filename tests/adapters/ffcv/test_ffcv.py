from pathlib import Path

import numpy as np
import pytest
from ffcv.fields import IntField, NDArrayField
from ffcv.writer import DatasetWriter

from paddle_shard.testing import run_ranks
from tests.adapters.claims import check

WORKER = Path(__file__).parent / "ffcv_worker.py"


class Samples:
    def __len__(self):
        return 23

    def __getitem__(self, i):
        return np.full((5, 5), i / 7, np.float32), i


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("data") / "samples.beton")
    fields = {
        "image": NDArrayField(np.dtype("float32"), (5, 5)),
        "id": IntField(),
    }
    DatasetWriter(path, fields, num_workers=1).from_indexed_dataset(Samples())
    return path


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ffcv_keeps_every_claim(num_ranks, data, tmp_path):
    reports = run_ranks(WORKER, num_ranks, tmp_path, args=[data], timeout=200)

    check(reports, "plain", range(23), shuffled=False)
    check(reports, "shuffled", range(23), shuffled=True)
    check(reports, "quasi", range(23), shuffled=True)
    check(reports, "chosen", range(0, 23, 2), shuffled=True, resumes=False)
    for report in reports:
        assert report["fields"] == ["id", "image"]
        assert report["held"] == [True] * 4
        refused = report["refused"]
        for name in ("distributed", "order", "seed", "drop_last"):
            assert refused[name].startswith(
                f"ArgumentError: ffcv_loader: leave {name} out"
            )
        assert (
            "cannot be split evenly over 2 data ranks" in refused["batch size"]
        )
        assert "shuffle must be False, True or 'quasi'" in refused["shuffle"]
        assert "ValueError: on purpose" in refused["dead thread"]
