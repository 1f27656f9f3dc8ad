"""Two ranks of which one is slow, in another way in each case: what do both say of it?"""

import json
import sys
import time

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.testing import report
from tests.helpers import waited_in

dist.init_parallel_env()
TRACE = sys.argv[1]
ME = dist.get_rank()
DP = dist.ProcessMesh([0, 1], dim_names=["dp"])
MP = dist.ProcessMesh([0, 1], dim_names=["mp"])


class Rows(paddle.io.Dataset):
    def __init__(self, seconds, quick):
        self.seconds, self.quick = seconds, quick

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(self.seconds if index >= self.quick else 0.0)
        return np.full(4, index, "float32")


def said(mesh, *, row=0.0, quick=0, step=0.004, steps=32, workers=0, **options):
    """What the statistics say after some steps, each of which ends with a collective, as that of a model does."""
    given = paddle.io.DataLoader(Rows(row, quick), batch_size=16, num_workers=workers)
    loader = paddle_shard.shard_dataloader(given, mesh, shard_dims="dp" if mesh is DP else None, **options)
    waited = waited_in(loader, step, steps, after=lambda: dist.all_reduce(paddle.ones([1])))
    loader.trace(TRACE)
    shares = {kind: seconds / waited for kind, seconds in loader.stats.epoch.waits.items()}
    dist.barrier()
    with open(TRACE) as file:
        return [str(loader.stats), sum(shares.values()), shares, json.load(file)["traceEvents"], waited / steps]


report(
    {
        "nothing": said(DP, step=0.3, steps=20),
        "slow rows of rank 1": said(DP, row=0.003 * ME),
        "slow rows of rank 1, workers": said(DP, row=0.004 * ME, workers=1),
        "a leader": said(MP, row=0.003, replicas="leader"),
        "each": said(MP, row=0.003),
        "a slow follower": said(MP, step=0.02 + 0.02 * ME, replicas="leader"),
        "a slow rank": said(DP, step=0.02 + 0.02 * ME),
        # 200 steps of less than a millisecond and a collective, and then slow ones for 4 seconds.
        "slow later": said(DP, row=0.01 * ME, quick=3200, step=0.0, steps=249),
    }
)
