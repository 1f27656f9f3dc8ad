"""Saves a layer that is split over the ranks' devices, and loads it split otherwise, and whole: usage FOLDER."""

import os
import sys

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.testing import report

if os.environ["ON"] == "cpu":
    paddle.set_device("cpu")
dist.init_parallel_env()
RANK = dist.get_rank()
if os.environ["ON"] == "standin":
    import on_standin  # noqa: F401  (of this folder) mends Paddle
if os.environ["ON"] != "cpu":
    paddle.set_device(f"{os.environ['ON']}:{RANK}")
MESH = dist.ProcessMesh([0, 1], dim_names=["mp"])
WEIGHT, BIAS = (
    np.arange(24, dtype="float32").reshape(4, 6),
    np.arange(6, dtype="float32"),
)


def layer_of(dim, weight=WEIGHT, bias=BIAS):
    """Return a layer whose weight is split along a dim; its bias too, or whole for None."""

    def parameter(value, split):
        mine = (
            np.array_split(value, 2, split)[RANK]
            if split is not None
            else value
        )
        kind = dist.Replicate() if split is None else dist.Shard(split)
        made = dist.auto_parallel.api.dtensor_from_local(
            paddle.to_tensor(mine), MESH, [kind]
        )
        return paddle.base.framework.EagerParamBase.from_tensor(
            made, stop_gradient=False
        )

    layer = paddle.nn.Linear(4, 6)
    layer.weight, layer.bias = (
        parameter(weight, dim),
        parameter(bias, 0 if dim == 1 else None),
    )
    return layer


def local(layer):
    return [
        layer.weight._local_value().numpy().tolist(),
        layer.bias._local_value().numpy().tolist(),
    ]


checkpoints = paddle_shard.Checkpoints(sys.argv[1])
checkpoints.save(3, model=layer_of(1))
found = {}
for dim in (1, 0):
    loaded = layer_of(dim, np.zeros_like(WEIGHT), np.zeros_like(BIAS))
    checkpoints.load(model=loaded)
    found[f"split along {dim}"] = local(loaded) == local(layer_of(dim))
whole = {}
checkpoints.load(model=whole)
found["whole"] = whole["weight"].numpy().tolist() == WEIGHT.tolist()
found["place"] = str(whole["weight"].place)
report(found)
dist.barrier()
