"""A balanced sequence, by this library and by Paddle's own ring attention; a case of `loader_worker.py`."""

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

import paddle_shard


class Tokens(paddle.io.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return {"ids": 100 * index + np.arange(16)}


def both():
    mesh = dist.ProcessMesh([0, 1], dim_names=["sep"])
    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(Tokens(), batch_size=2),
        mesh,
        placements={"ids": {"sep": paddle_shard.Balanced(dim=1)}},
    )
    ours = next(iter(loader))["ids"]
    result = {
        "ours": ours._local_value().numpy(),
        "placements": str(ours.placements),
    }
    plain = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(Tokens(), batch_size=2),
        mesh,
        placements={"ids": {"sep": 1}},
    )
    whole = dist.reshard(next(iter(plain))["ids"], mesh, [dist.Replicate()])
    result["resharded"] = whole._local_value().numpy()
    try:
        from paddle.distributed.auto_parallel.ring_attention import (
            shard_seq_load_balance,
        )
    except ImportError:  # Paddle 3.0
        result["paddle"] = None
    else:
        whole = paddle.to_tensor(
            np.stack([Tokens()[i]["ids"] for i in range(2)])
        )
        theirs = shard_seq_load_balance(
            dtensor_from_local(whole, mesh, [dist.Replicate()]), 1
        )
        result["paddle"] = theirs._local_value().numpy()
    return result
