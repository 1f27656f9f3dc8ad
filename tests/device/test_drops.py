"""Loaders that are dropped, with batches in flight and the collector running, neither hang nor crash."""

import os
import subprocess
import sys

import pytest

CODE = """
import faulthandler, gc, os, random, sys, threading
import numpy as np, paddle, paddle.distributed as dist
faulthandler.enable()
if os.environ.get("CUSTOM_DEVICE_ROOT"):
    paddle.set_device("standin:0")  # a GPU is the current place without being asked
import paddle_shard
times, kind = int(sys.argv[1]), sys.argv[2]
ROWS = np.zeros((64, 300), "float32")
class Data(paddle.io.Dataset):
    def __getitem__(self, index):
        return ROWS[index], index
    def __len__(self):
        return 64
OPTIONS = {"default": {}, "prefetch": {"prefetch": 2}, "inline": {"prefetch": 0}}
mesh = dist.ProcessMesh([0], dim_names=["dp"])
over = []
def collect():
    while not over:
        gc.collect(0)
collector = threading.Thread(target=collect, daemon=True)
collector.start()
held = []
for number in range(times):
    faulthandler.dump_traceback_later(30, exit=True)
    given = paddle.io.DataLoader(Data(), batch_size=8)
    loader = paddle_shard.shard_dataloader(given, mesh, shard_dims="dp", **OPTIONS[kind])
    batches = iter(loader)
    for _ in range(number % 5):
        held.append(next(batches))
    del held[:-3]
    if number % 3 == 0:
        batches.close()
    del loader, batches
faulthandler.cancel_dump_traceback_later()
over.append(1)
collector.join()
print("dropped", times)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["default", "prefetch", "inline"])
def test_dropped_loaders_neither_hang_nor_crash(kind):
    times = os.environ.get("DROPS", "300")
    command = [sys.executable, "-c", CODE, times, kind]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert f"dropped {times}" in done.stdout
