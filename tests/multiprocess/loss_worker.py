"""The loss of a batch with labels that do not count: of the line of docs/lengths.md, of Paddle's mean, and of numpy."""

import re
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F

import paddle_shard
from paddle_shard.testing import report

dist.init_parallel_env()
RANK = dist.get_rank()
mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])
rng = np.random.default_rng(0)
WEIGHT, IDS = (
    rng.normal(size=(16, 16)).astype("float32"),
    rng.integers(0, 16, (8, 6)),
)
LABELS = np.where(
    np.arange(6) < np.array([1, 2, 1, 3, 6, 6, 5, 6])[:, None],
    IDS[:, ::-1],
    -100,
)

page = (Path(__file__).parents[2] / "docs" / "lengths.md").read_text()
snippet = next(
    one
    for one in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    if "language_model" in one
)
rows = [
    {"input_ids": ids, "labels": labels}
    for ids, labels in zip(IDS, LABELS, strict=True)
]
loader = paddle_shard.shard_dataloader(
    paddle.io.DataLoader(rows, batch_size=8), mesh, shard_dims="dp"
)
weight = dist.shard_tensor(
    paddle.to_tensor(WEIGHT, stop_gradient=False), mesh, [dist.Replicate()]
)
logits = []


def language_model(ids):
    logits.append(F.embedding(ids, weight))
    return logits[-1]


class Optimizer:
    """Leaves the gradients as they are."""

    def step(self):
        pass

    def clear_grad(self):
        pass


names = {
    "paddle": paddle,
    "loader": loader,
    "language_model": language_model,
    "optimizer": Optimizer(),
}
exec(compile(snippet, "docs/lengths.md", "exec"), names)
of_page = (names["losses"] * names["mask"]).sum() / names["num_tokens"]
of_paddle = F.cross_entropy(
    logits[-1], names["batch"]["labels"], ignore_index=-100
)


def whole(tensor):
    return dist.reshard(tensor, mesh, [dist.Replicate()])._local_value().numpy()


chances = np.exp(WEIGHT[IDS]) / np.exp(WEIGHT[IDS]).sum(-1, keepdims=True)
counts = LABELS != -100
right = np.where(counts, LABELS, 0)
losses = (
    -np.log(np.take_along_axis(chances, right[..., None], -1)[..., 0]) * counts
)
slopes = (chances - np.eye(16)[right]) * counts[..., None] / counts.sum()
gradient = np.zeros_like(WEIGHT)
np.add.at(gradient, IDS, slopes)
report(
    {
        "page": whole(of_page).item(),
        "paddle": whole(of_paddle).item(),
        "numpy": float(losses.sum() / counts.sum()),
        "numpy, over all": float(losses.mean()),
        "gradients differ by": float(
            np.abs(whole(weight.grad) - gradient).max()
        ),
    }
)
