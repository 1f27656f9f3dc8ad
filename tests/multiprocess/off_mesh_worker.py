"""The first rank is on none of the loader's meshes, and an epoch is resumed in its middle: usage FOLDER."""

import sys

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.testing import report

dist.init_parallel_env()
ME = dist.get_rank()
MESH = dist.ProcessMesh([1, 2], dim_names=["dp"])


class Rows(paddle.io.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return np.array([index])


def loader_of():
    return paddle_shard.shard_dataloader(
        paddle.io.DataLoader(Rows(), batch_size=4, shuffle=True),
        MESH,
        shard_dims="dp",
    )


first, seen = loader_of(), []
for batch in first:
    seen += batch._local_value().numpy()[:, 0].tolist() if ME else []
    break
checkpoints = paddle_shard.Checkpoints(sys.argv[1])
checkpoints.save(1, data=first, extra={"note": "x"})
second, extra = loader_of(), {}
checkpoints.load(data=second, extra=extra)
for batch in second:
    seen += batch._local_value().numpy()[:, 0].tolist() if ME else []
report({"seen": seen, "extra": extra})
dist.barrier()
