"""A mixture of packed documents on two ranks, trained dynamically and by `dist.to_static`."""

import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F

import paddle_shard
from paddle_shard import Mixture, Packed
from paddle_shard.testing import report

sys.path.insert(0, str(Path(__file__).parents[2] / "demos"))
from cpu_static import cpu_static

LENGTH, TOKENS, STEPS = 16, 50, 6


def documents(seed):
    drawn = np.random.default_rng(seed)
    return [
        drawn.integers(1, TOKENS, n) for n in drawn.integers(1, 30, 40).tolist()
    ]


def loader_of(mesh, workers=0):
    packed = {
        name: Packed(
            documents(seed), LENGTH, labels="labels", max_pieces=LENGTH
        )
        for seed, name in enumerate("ab")
    }
    mixture = Mixture(packed, {"a": 2, "b": 1}, num_samples=4 * STEPS)
    given = paddle.io.DataLoader(
        mixture, batch_size=4, shuffle=True, num_workers=workers
    )
    return paddle_shard.shard_dataloader(
        given, mesh, shard_dims="dp", input_keys=["input_ids", "labels"]
    )


class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.tokens = paddle.nn.Embedding(TOKENS, 8)
        self.head = paddle.nn.Linear(8, TOKENS)

    def forward(self, tokens):
        return self.head(self.tokens(tokens))


def loss_fn(logits, labels):
    """The mean over all places: those without a label count as 0, so every rank divides by the same number."""
    return F.cross_entropy(
        logits, labels, reduction="none", ignore_index=-100
    ).mean()


def model_and_optimizer(mesh):
    paddle.seed(3)
    with paddle.utils.unique_name.guard(f"net{len(made)}_"):
        model = Net()
    made.append(model)
    # it replaces the parameters, so the optimizer comes after it
    dist.shard_layer(model, mesh)
    return model, paddle.optimizer.AdamW(0.05, parameters=model.parameters())


def mean_of_ranks(loss):
    mean = paddle.to_tensor(np.reshape(loss, [1]).astype("float32"))
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def dynamic(mesh):
    model, optimizer = model_and_optimizer(mesh)
    optimizer, losses = dist.shard_optimizer(optimizer), []
    for batch in loader_of(mesh, workers=2):
        loss = loss_fn(model(batch["input_ids"]), batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(dist.reshard(loss, mesh, [dist.Replicate()])))
    return losses


def static(mesh):
    model, optimizer = model_and_optimizer(mesh)
    loader = loader_of(mesh)
    with cpu_static():
        trained = dist.to_static(model, loader, loss_fn, optimizer)
        trained.train()
        return [
            mean_of_ranks(trained(batch["input_ids"], batch["labels"]))
            for batch in loader
        ]


if __name__ == "__main__":
    made = []
    dist.init_parallel_env()
    dp = dist.ProcessMesh([0, 1], dim_names=["dp"])
    report({"dynamic": dynamic(dp), "static": static(dp)})
    dist.barrier()
    sys.stdout.flush()
