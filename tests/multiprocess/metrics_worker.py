"""What `gather_valid` returns on each of four ranks, for distributed tensors and for local ones."""

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.errors import ArgumentError
from paddle_shard.testing import report

dist.init_parallel_env()
found = {}
for names in (["dp", "mp"], ["mp", "dp"]):
    mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=names)
    data = paddle_shard.ArrayDataset(np.arange(13))
    loader = paddle_shard.shard_dataloader(paddle.io.DataLoader(data, batch_size=4), mesh, shard_dims="dp")
    rows = {"distributed": [], "local": [], "view": [], "whole": []}
    batches = iter(loader)
    for batch in batches:
        batch = batch[0] if isinstance(batch, list) else batch
        values = 10 * batch.reshape([-1, 1])
        rows["distributed"] += paddle_shard.gather_valid(values, batches.valid).flatten().tolist()
        rows["local"] += paddle_shard.gather_valid(values._local_value(), batches.valid).flatten().tolist()
        view = paddle.tile(values._local_value(), [1, 2])[:, :1]
        rows["view"] += paddle_shard.gather_valid(view, batches.valid).flatten().tolist()
        rows["view stays"] = not view.is_contiguous()
        whole = paddle.arange(batch.shape[0])
        rows["whole"] += paddle_shard.gather_valid(whole, batches.valid).tolist()
    try:
        paddle_shard.gather_valid(values._local_value(), batches.valid._local_value())
    except ArgumentError as error:
        rows["both local"] = str(error)
    try:
        paddle_shard.gather_valid(paddle.zeros([3]), batches.valid)
    except ArgumentError as error:
        rows["other rows"] = str(error)
    found[names[0]] = rows
report(found)
dist.barrier()
