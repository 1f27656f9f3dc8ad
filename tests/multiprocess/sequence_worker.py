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
    result = {"ours": ours._local_value().numpy(), "placements": str(ours.placements)}
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
        whole = paddle.to_tensor(np.stack([Tokens()[i]["ids"] for i in range(2)]))
        theirs = shard_seq_load_balance(
            dtensor_from_local(whole, mesh, [dist.Replicate()]), 1
        )
        result["paddle"] = theirs._local_value().numpy()
    return result


def logits_in_order():
    """What `unsplit` makes of outputs of dp x sep, by layout; each token's output is made of its id and position."""
    documents = [
        100 * (number + 1) + np.arange(size)
        for number, size in enumerate((9, 4, 7, 2, 11, 5))
    ]
    rows, found = paddle_shard.Packed(documents, 16), {}
    ranks = dist.get_world_size()
    shape = (1, 2) if ranks == 2 else (2, 2)
    mesh = dist.ProcessMesh(np.arange(ranks).reshape(shape), dim_names=["dp", "sep"])
    for layout in ("plain", "balanced", "documents"):
        split = paddle_shard.SequenceSplit("sep", 2, layout=layout)
        names = ("input_ids", "position_ids", "token_index")
        loader = paddle_shard.shard_dataloader(
            paddle.io.DataLoader(rows, batch_size=2, collate_fn=split.collate()),
            mesh,
            shard_dims="dp",
            input_keys=names,
            placements=split.placements(*names, dp=0),
        )
        batch = next(iter(loader))
        ids, positions = (batch[name]._local_value() for name in names[:2])
        logits = paddle.stack(
            [ids.astype("float32"), positions.astype("float32")], axis=-1
        )
        outputs = dtensor_from_local(logits, mesh, batch["input_ids"].placements)
        whole = split.unsplit(outputs, batch["token_index"])
        found[layout] = [
            list(whole.shape),
            str(whole.placements),
            whole._local_value().numpy().tolist(),
        ]
    return found
