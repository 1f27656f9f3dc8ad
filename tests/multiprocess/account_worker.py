"""Two ranks of which one is slow, in another way in each case: what do both say of it?"""

import json
import sys
import time

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.testing import report

dist.init_parallel_env()
TRACE = sys.argv[1]
ME = dist.get_rank()
DP = dist.ProcessMesh([0, 1], dim_names=["dp"])
MP = dist.ProcessMesh([0, 1], dim_names=["mp"])


class Rows(paddle.io.Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return np.full(4, index, "float32")


def said(mesh, *, row=0.0, step=0.004, steps=32, workers=0, **options):
    """What the statistics say after some steps, each of which ends with a collective, as that of a model does."""
    given = paddle.io.DataLoader(Rows(row), batch_size=16, num_workers=workers)
    loader = paddle_shard.shard_dataloader(given, mesh, shard_dims="dp" if mesh is DP else None, **options)
    batches, waited = iter(loader), 0.0
    for _ in range(steps):
        began = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - began
        time.sleep(step)
        dist.all_reduce(paddle.ones([1]))
    batches.close()
    loader.trace(TRACE)
    shares = {kind: seconds / waited for kind, seconds in loader.stats.epoch.waits.items()}
    dist.barrier()
    with open(TRACE) as file:
        return [str(loader.stats), sum(shares.values()), shares, json.load(file)["traceEvents"]]


report(
    {
        "nothing": said(DP, step=0.3, steps=20),
        "slow rows of rank 1": said(DP, row=0.003 * ME),
        "slow rows of rank 1, workers": said(DP, row=0.004 * ME, workers=1),
        "a leader": said(MP, row=0.003, replicas="leader"),
        "each": said(MP, row=0.003),
        "a slow follower": said(MP, step=0.02 + 0.02 * ME, replicas="leader"),
        "a slow rank": said(DP, step=0.02 + 0.02 * ME),
    }
)
