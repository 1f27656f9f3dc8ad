"""One of four ranks on two hosts, of which one reads slowly: slow_host_worker.py <directory>."""

import socket
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard


class Rows(paddle.io.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if socket.gethostname() == "slow":
            time.sleep(0.005)
        return np.full(4, index, "float32")


dist.init_parallel_env()
mesh = dist.ProcessMesh([0, 1, 2, 3], dim_names=["dp"])
loader = paddle_shard.shard_dataloader(paddle.io.DataLoader(Rows(), batch_size=32), mesh, shard_dims="dp")
for _, batch in zip(range(40), loader, strict=False):
    time.sleep(0.004)
    dist.all_reduce(batch._local_value().sum())
(Path(sys.argv[1]) / f"said-{dist.get_rank()}").write_text(str(loader.stats))
