import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from paddle.io import DataLoader

from paddle_shard.testing import run_ranks
from paddle_shard.testing.simulated import on_each_rank
from tests.adapters.claims import check
from tests.helpers import DP2, ONE, local, sharded

sys.path.insert(0, str(Path(__file__).parents[3] / "demos/adapters"))
from mds_recipe import _as_often_as, import_streaming

LocalDataset, MDSWriter = (
    import_streaming().LocalDataset,
    import_streaming().MDSWriter,
)
WORKER = Path(__file__).parent / "mds_worker.py"


def leftovers(folder):
    """Shared memory and lock files of the library."""
    return sorted(
        p
        for place in (Path("/dev/shm"), folder)
        for p in place.glob(f"{'[0-9]' * 6}_*")
    )


def write(folder, length, **options):
    with MDSWriter(
        out=str(folder),
        columns={"id": "int", "image": "ndarray"},
        size_limit=1 << 10,
        **options,
    ) as out:
        for i in range(length):
            out.write({"id": i, "image": np.full((5, 5), i / 7, "float32")})


@pytest.fixture
def data(tmp_path):
    write(tmp_path / "data/plain", 23)
    write(tmp_path / "data/zipped", 23, compression="zstd")
    write(tmp_path / "data/few", 3)
    (tmp_path / "tmp").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_mds_keeps_every_claim(num_ranks, data, tmp_path):
    env = {"TMPDIR": str(tmp_path / "tmp")}
    before = leftovers(tmp_path / "tmp")
    reports = run_ranks(
        WORKER,
        num_ranks,
        tmp_path / "run",
        args=[str(data)],
        env=env,
        timeout=400,
    )

    check(reports, "plain", range(23), shuffled=False)
    check(reports, "shuffled", range(23), shuffled=True)
    check(reports, "zipped", range(23), shuffled=True, resumes=False)
    check(reports, "few", range(3), shuffled=False, resumes=False)
    check(reports, "remote", range(23), shuffled=True)
    caches = {
        path.name: {p.name for p in path.iterdir() if p.is_dir()}
        for path in (data / "cache").iterdir()
    }
    assert set(caches) == {"data-rank-0-of-2", "data-rank-1-of-2"}
    assert all(
        {*"01"[: num_ranks // 2]} <= found and len(found) <= 3 * num_ranks // 2
        for found in caches.values()
    )
    for report in reports:
        refused = report["refused"]
        assert (
            "cannot be split evenly over 2 data ranks" in refused["batch size"]
        )
        assert refused["streams"].startswith(
            "ArgumentError: mds_stream: leave streams out"
        )
        assert refused["begun"] == 1
        assert "StateError: state: samples was None" in refused["state"]
        assert (
            "torch.distributed runs in this process"
            in refused["torch.distributed"]
        )
    assert leftovers(tmp_path / "tmp") == before, (
        "nothing is left behind, by passes that were given up neither"
    )


# the library leaves its index open
@pytest.mark.filterwarnings("ignore:unclosed file")
def test_mds_files_on_the_host_resume_on_another_mesh(data):
    def rows(meshes, state=None, stop=None):
        loader = sharded(
            DataLoader(
                LocalDataset(str(data / "plain")), batch_size=8, shuffle=True
            ),
            meshes,
        )
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        return [
            local(batch["id"]) for batch in islice(batches, stop)
        ], loader.state_dict()

    straight, _ = rows(ONE)
    assert sorted(i for batch in straight for i in batch) == list(range(23))
    begun = on_each_rank((0, 1), lambda: rows(DP2, stop=2))
    assert [
        one + two for one, two in zip(begun[0][0], begun[1][0], strict=True)
    ] == straight[:2]
    assert rows(ONE, begun[0][1])[0] == straight[2:]


def test_mds_samples_that_are_repeated_are_left_out():
    # [data rank, batch, row]
    ids = np.array([[[0, 1], [2, 2]], [[3, 4], [2, -1]]])

    once = _as_often_as(np.ones(5, int), ids)
    assert once.tolist() == [[0, 1, 2, -1], [3, 4, -1, -1]]
    assert _as_often_as(np.array([1, 1, 2, 1, 1]), ids).tolist() == [
        [0, 1, 2, -1],
        [3, 4, 2, -1],
    ]
