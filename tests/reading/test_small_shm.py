"""With the little shared memory that a container has, workers hand over batches that are larger."""

import shutil
import subprocess
import sys

import pytest

from tests.deadlines import HANG

SCRIPT = """
import os
import numpy as np
import paddle
import paddle_shard

class Images(paddle.io.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return np.full((1 << 18, 5), index, "float32")

theirs = paddle.io.DataLoader(Images(), batch_size=4, num_workers=2)
mesh = paddle.distributed.ProcessMesh([0], dim_names=["dp"])
most, found = 0, []
for batch in paddle_shard.shard_dataloader(theirs, mesh, shard_dims="dp"):
    found += batch._local_value()[:, 0, 0].tolist()
    room = os.statvfs("/dev/shm")
    most = max(most, (room.f_blocks - room.f_bfree) * room.f_frsize)
print(found == list(range(8)), most, flush=True)
for batch in theirs:
    pass
print("no bus error")
"""


def run_with_small_shm():
    small = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$0" "$@"'
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", small, sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=HANG,
    )


@pytest.fixture(autouse=True)
def _mounts():
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    if (
        shutil.which("unshare") is None
        or subprocess.run(probe, capture_output=True).returncode
    ):
        pytest.skip(
            "needs a mount namespace: root, or a user that may make one"
        )


@pytest.mark.processes
def test_batches_larger_than_dev_shm_need_none_of_it():
    done = run_with_small_shm()

    assert done.stdout == "True 0\n", done.stderr[-2000:]
    assert done.returncode != 0
    assert "bus error" in done.stderr.lower(), done.stderr[-2000:]
