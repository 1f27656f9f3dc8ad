"""Two data ranks train as Paddle's guides show it, with Paddle's loader and with this one: `guides_worker.py CASE...`.

Each rank reports {case: {"plain": losses, "ours": losses}}.
"""

import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.high_level_api import ToDistributedConfig
from paddle.io import BatchSampler, DataLoader, Dataset

import paddle_shard
from paddle_shard.loader.compat import mend_process_mesh
from paddle_shard.testing import report


class RandomDataset(Dataset):
    def __init__(self, make, num_samples=18):
        self.rows = [
            make(np.random.RandomState(row)) for row in range(num_samples)
        ]

    def __getitem__(self, index):
        return self.rows[index]

    def __len__(self):
        return len(self.rows)


class MlpModel(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.w0 = paddle.nn.Linear(16, 32, bias_attr=False)
        self.w1 = paddle.nn.Linear(32, 16, bias_attr=False)

    def forward(self, x):
        return self.w1(self.w0(x))


class TextModel(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.embed, self.head = (
            paddle.nn.Embedding(32, 8),
            paddle.nn.Linear(8, 32),
        )

    def forward(self, ids, labels=None):
        logits = self.head(self.embed(ids))
        return None if labels is None else paddle.nn.functional.cross_entropy(
            logits, labels
        ), logits


def trained(loader, loss_of, optimizer):
    losses = []
    for _ in range(2):
        for batch in loader():
            loss = loss_of(*batch)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            replicated = [dist.Replicate()] * len(loss.process_mesh.shape)
            losses.append(
                dist.reshard(loss, loss.process_mesh, replicated)
                ._local_value()
                .item()
            )
    return losses


def parallelized():
    """Follows section 2.3 of `auto_parallel_cn.md` of Paddle's guides, on a mesh for two ranks."""
    paddle.seed(7)
    mesh = dist.ProcessMesh([[0], [1]], dim_names=["dp", "mp"])
    dist.auto_parallel.set_mesh(mesh)
    model = MlpModel()
    optimizer = paddle.optimizer.AdamW(
        learning_rate=0.001, parameters=model.parameters()
    )
    plan = {"w0": dist.ColWiseParallel(), "w1": dist.RowWiseParallel()}
    config = {
        "dp_config": {"sharding_level": 0},
        "mp_config": {"parallelize_plan": plan},
    }
    model, optimizer = dist.parallelize(model, optimizer, config=config)
    data = RandomDataset(
        lambda draw: tuple(draw.uniform(size=[2, 4, 16]).astype("float32"))
    )
    given = DataLoader(data, batch_sampler=BatchSampler(data, batch_size=4))
    loader = dist.shard_dataloader(given, meshes=[mesh], shard_dims="dp")
    loss_fn = paddle.nn.MSELoss()
    return trained(
        loader, lambda inputs, labels: loss_fn(model(inputs), labels), optimizer
    )


def to_distributed():
    """Follows `to_distributed_api_for_llama.py` of Paddle's tests: Paddle calls `shard_dataloader` itself."""
    paddle.seed(7)
    model = TextModel()
    optimizer = paddle.optimizer.SGD(
        learning_rate=0.1, parameters=model.parameters()
    )
    data = RandomDataset(lambda draw: tuple(draw.randint(0, 32, (2, 6))))
    given = DataLoader(
        data,
        batch_sampler=BatchSampler(
            data, batch_size=4, shuffle=False, drop_last=True
        ),
    )
    config = ToDistributedConfig()
    config.input_spec = [paddle.static.InputSpec([4, 6], "int64", "ids", True)]
    model, optimizer, loader = dist.to_distributed(
        model, optimizer, given, device_num=2, node_num=1, config=config
    )
    return trained(
        loader, lambda ids, labels: model(ids, labels=labels)[0], optimizer
    )


CASES = {"parallelize": parallelized, "to_distributed": to_distributed}


def with_both(train):
    plain, seen = train(), []
    with paddle_shard.patch_paddle(on_loader=seen.append):
        ours = train()
    assert len(seen) == 1, "the guide's loader is this library's"
    return {"plain": plain, "ours": ours}


if __name__ == "__main__":
    mend_process_mesh()  # with numpy 2.4, plain Paddle needs it
    report({name: with_both(CASES[name]) for name in sys.argv[1:]})
