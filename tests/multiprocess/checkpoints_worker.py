"""Trains a model that is split over mp, and saves or loads it: usage FOLDER MESH STEPS HOW."""

import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F

import paddle_shard
from paddle_shard.errors import PaddleShardError
from paddle_shard.testing import report

folder, axes, steps, how = sys.argv[1:]
if how != "alone":
    dist.init_parallel_env()
ME = dist.get_rank()
shape = [int(size) for size in axes.split("x")]
MESH = dist.ProcessMesh(
    np.arange(np.prod(shape)).reshape(shape), dim_names=["dp", "mp"]
)


class Rows(paddle.io.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return np.array([index / 40, index % 3, 1], "float32")


def split(name, layer, mesh):
    dims = {"0": {"weight": 1, "bias": 0}, "1": {"weight": 0}}.get(name, {})
    for kind, dim in dims.items():
        placements = [dist.Replicate(), dist.Shard(dim)]
        setattr(
            layer,
            kind,
            dist.shard_tensor(getattr(layer, kind), mesh, placements),
        )


paddle.seed(5)
model = paddle.nn.Sequential(paddle.nn.Linear(3, 8), paddle.nn.Linear(8, 1))
dist.shard_layer(model, MESH, split)
optimizer = paddle.optimizer.AdamW(
    learning_rate=0.05, parameters=model.parameters()
)
optimizer = dist.shard_optimizer(optimizer)
loader = paddle_shard.shard_dataloader(
    paddle.io.DataLoader(Rows(), batch_size=4, shuffle=True),
    MESH,
    shard_dims="dp",
    seed=2,
    timeout=60,
)
checkpoints = paddle_shard.Checkpoints(folder)
what = {"model": model, "optimizer": optimizer, "data": loader}
found = {"step": checkpoints.load(**what), "losses": [], "errors": []}
step = found["step"] or 0
for rows in loader:
    loss = F.mse_loss(model(rows), rows[:, :1])
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    whole = dist.reshard(loss, MESH, [dist.Replicate(), dist.Replicate()])
    found["losses"].append(whole.item() if MESH.size > 1 else loss.item())
    step += 1
    if step == int(steps):
        break


def attempt(*args, **kwargs):
    try:
        checkpoints.save(*args, **kwargs)
        found["errors"].append("")
    except PaddleShardError as error:
        found["errors"].append(f"{type(error).__name__}: {error}")


attempt(step, **what)
if how == "errors":
    try:
        checkpoints.load(
            **({"data": loader} if ME else {"model": what["model"]})
        )
    except PaddleShardError as error:
        found["loads"] = f"{type(error).__name__}: {error}"
    attempt(step + ME, **what)  # another step on each rank
    layer = paddle.nn.Linear(2, 2)
    attempt(step, model=layer if ME else {"weight": layer.weight})
    save = paddle.save
    paddle.save = lambda *args: (_ for _ in ()).throw(
        OSError("the disk of this rank is full")
    )
    if ME != 0:
        paddle.save = save
    attempt(step + 1, **what)
    paddle.save = save
    attempt(step + 2, **what)
    if ME == 0:
        (Path(folder) / "generation-000099").write_text(
            "now by process 7 on host other"
        )
    attempt(step + 3, **what)
found["newest"] = checkpoints.newest()
found["exact"] = str(loader.certificate())
report(found)
if dist.is_initialized():
    dist.barrier()
