"""Train a pipeline: the first layer on one mesh, the second on another, each batch field where it is needed.

    python -m paddle.distributed.launch --nproc_per_node 8 demos/two_meshes.py                  # CPU
    python -m paddle.distributed.launch --gpus 0,1,2,3,4,5,6,7 demos/two_meshes.py              # GPUs
    RUN_STATIC=1 python -m paddle.distributed.launch --gpus 0,1,2,3,4,5,6,7 demos/two_meshes.py

The model and data are those of the docstring of `paddle.distributed.shard_dataloader`. On GPUs the activation
goes to the second mesh by `dist.reshard`. CPU kernels cannot do that, so there each rank runs its own stage.
It ends with an error if a step's loss differs from one process's by more than 1e-4 of it.
"""

import os

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard

RUN_STATIC = os.environ.get("RUN_STATIC", "0") == "1"
ON_GPU = paddle.is_compiled_with_cuda()
REPLICATE, SHARD = dist.Replicate(), dist.Shard
FIRST = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
SECOND = dist.ProcessMesh([[4, 5], [6, 7]], dim_names=["x", "y"])


class Random(paddle.io.Dataset):
    """8 samples of (an input of shape 4x8, the sample's number)."""

    def __init__(self):
        random = np.random.RandomState(1024)
        self.inputs = random.uniform(size=[8, 4, 8]).astype("float32")
        self.labels = np.arange(8, dtype="float32")

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Mlp(paddle.nn.Layer):
    """Two 8x8 matrices; over two meshes, or on one process."""

    def __init__(self, *, sharded):
        super().__init__()
        paddle.seed(1024)
        self.sharded = sharded
        self.w0, self.w1 = (
            self.create_parameter([8, 8]),
            self.create_parameter([8, 8]),
        )
        if sharded:
            self.w0 = dist.shard_tensor(self.w0, FIRST, [REPLICATE, SHARD(1)])
            self.w1 = dist.shard_tensor(self.w1, SECOND, [REPLICATE, SHARD(0)])

    def forward(self, x):
        hidden = paddle.matmul(x, self.w0)
        if self.sharded:
            hidden = dist.reshard(hidden, SECOND, [SHARD(0), SHARD(2)])
        return paddle.matmul(hidden, self.w1)


def loss_fn(logits, label):
    return paddle.nn.MSELoss(reduction="sum")(
        paddle.sum(logits, axis=[1, 2]), label
    )


def adamw(parameters):
    return paddle.optimizer.AdamW(learning_rate=0.001, parameters=parameters)


def train(model, optimizer, batches):
    losses = []
    for x, label in batches:
        loss = loss_fn(model(x), label)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss)
    return losses


def train_static(loader):
    model = Mlp(sharded=True)
    static = dist.to_static(model, loader, loss_fn, adamw(model.parameters()))
    static.train()
    losses = [static(x, label) for x, label in loader]
    return [paddle.to_tensor(loss) for loss in losses if loss is not None]


def train_by_stages(loader):
    """Each rank runs its own stage only, and hands activations and gradients to its peer on the other mesh."""
    from two_stages import Stages

    stages, model, losses = Stages(FIRST, SECOND), Mlp(sharded=False), []
    start = model.w0 if stages.index == 0 else model.w1
    weight = dist.shard_tensor(
        start,
        stages.mesh,
        [REPLICATE, SHARD(1) if stages.index == 0 else SHARD(0)],
    )
    optimizer = dist.shard_optimizer(adamw([weight]))
    for x, label in loader:
        if stages.index == 0:
            hidden = paddle.matmul(x, weight)
            stages.send_forward(hidden)
            hidden.backward(stages.recv_backward(hidden))
        else:
            hidden = stages.recv_forward()
            loss = loss_fn(paddle.matmul(hidden, weight), label)
            loss.backward()
            stages.send_backward(hidden)
            losses.append(dist.reshard(loss, SECOND, [REPLICATE, REPLICATE]))
        optimizer.step()
        optimizer.clear_grad()
    return losses


def main():
    dist.init_parallel_env()
    assert dist.get_world_size() == 8, (
        f"this demo takes 8 processes, got {dist.get_world_size()}"
    )
    if RUN_STATIC and not ON_GPU:
        raise SystemExit(
            "RUN_STATIC=1 needs GPUs here: CPU kernels cannot move a tensor to another mesh."
        )
    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(Random(), batch_size=2),
        meshes=[FIRST, SECOND],
        shard_dims="x",
    )
    if RUN_STATIC:
        losses = train_static(loader)
    elif ON_GPU:
        model = Mlp(sharded=True)
        losses = train(
            model, dist.shard_optimizer(adamw(model.parameters())), loader
        )
    else:
        losses = train_by_stages(loader)

    reached = paddle.zeros([4])
    if dist.get_rank() in SECOND.process_ids:  # where the loss is
        assert len(losses) == 4, (
            f"4 steps were expected, {len(losses)} were made"
        )
        reached = paddle.to_tensor([float(loss.numpy()) for loss in losses])
    dist.broadcast(reached, src=SECOND.process_ids[0])
    alone, data = Mlp(sharded=False), Random()
    batches = [
        tuple(map(paddle.to_tensor, data[np.arange(k, k + 2)]))
        for k in range(0, 8, 2)
    ]
    expected = np.array(
        [
            float(loss)
            for loss in train(alone, adamw(alone.parameters()), batches)
        ]
    )
    difference = np.abs(reached.numpy() / expected - 1).max()
    if dist.get_rank() == 0:
        print(
            "losses on two meshes: "
            + "  ".join(f"{loss:.5f}" for loss in reached.tolist())
        )
        print(
            "one process:          "
            + "  ".join(f"{loss:.5f}" for loss in expected)
        )
        print(
            f"parity: the losses of 4 steps differ from one process's by at most {difference:.1e} of them"
        )
    assert difference <= 1e-4, (
        f"losses differ from one process's by {difference:.1e}"
    )
    dist.barrier()


if __name__ == "__main__":
    main()
