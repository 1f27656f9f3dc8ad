"""The two-mesh model of Paddle's `shard_dataloader` docstring, as one process and then by stages on named layouts."""

import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

from paddle_shard.testing import report

sys.path.insert(0, str(Path(__file__).parents[2] / "demos"))
from two_stages import Stages

R, S = dist.Replicate(), dist.Shard
LAYOUTS = {  # meshes, and the placements of each stage's weight
    "docstring": ([[0, 1], [2, 3]], [[4, 5], [6, 7]], [R, S(1)], [R, S(0)]),
    # ranks out of order too
    "partial gradient": (
        [[3, 1], [2, 0]],
        [[4, 5], [6, 7]],
        [R, R],
        [R, S(1)],
    ),
    "data parallel": ([[1], [2]], [[3], [0]], [R, R], [R, R]),
}
BATCHES, BATCH = 4, 2


def data():
    paddle.seed(1024)
    np.random.seed(1024)
    inputs = [
        np.random.uniform(size=[4, 8]).astype("float32")
        for _ in range(BATCHES * BATCH)
    ]
    labels = [np.array(i, dtype="float32") for i in range(BATCHES * BATCH)]
    return [
        (np.stack(inputs[k : k + BATCH]), np.stack(labels[k : k + BATCH]))
        for k in range(0, 8, BATCH)
    ]


def weights():
    layer = paddle.nn.Layer()
    return [layer.create_parameter(shape=[8, 8]) for _ in range(2)]


def loss_fn(logits, label):
    return paddle.nn.MSELoss(reduction="sum")(
        paddle.sum(logits, axis=[1, 2]), label
    )


def whole():
    batches, parameters = data(), weights()
    optimizer = paddle.optimizer.AdamW(
        learning_rate=0.001, parameters=parameters
    )
    losses = []
    for x, y in batches:
        loss = loss_fn(
            paddle.to_tensor(x) @ parameters[0] @ parameters[1],
            paddle.to_tensor(y),
        )
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    return losses


def staged(name):
    *meshes, first, second = LAYOUTS[name]
    stages = Stages(*(dist.ProcessMesh(mesh, ["x", "y"]) for mesh in meshes))
    mesh, i = stages.mesh, stages.index
    batches = data()
    weight = dist.shard_tensor(weights()[i], mesh, (first, second)[i])
    optimizer = dist.shard_optimizer(
        paddle.optimizer.AdamW(learning_rate=0.001, parameters=[weight])
    )
    local = BATCH // mesh.shape[0]
    start = mesh.process_ids.index(dist.get_rank()) // mesh.shape[1] * local

    def placed(array):
        return dtensor_from_local(
            paddle.to_tensor(array[start : start + local]), mesh, [S(0), R]
        )

    losses = []
    for x, y in batches:
        if i == 0:
            h = placed(x) @ weight
            stages.send_forward(h)
            h.backward(stages.recv_backward(h))
        else:
            h = stages.recv_forward()
            loss = loss_fn(h @ weight, placed(y))
            loss.backward()
            stages.send_backward(h)
            losses.append(
                dist.reshard(loss, mesh, [R, R])._local_value().item()
            )
        optimizer.step()
        optimizer.clear_grad()
    dist.barrier()
    return {"stage": i, "losses": losses}


expected, found = whole(), {}
dist.init_parallel_env()
for name in sys.argv[1:]:
    print("case:", name, flush=True)
    found[name] = {"whole": expected, **staged(name)}
report(found)
