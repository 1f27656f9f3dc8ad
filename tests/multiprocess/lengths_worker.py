"""Rows that are as long as the longest on each rank: what every rank gets of each case."""

import json
import sys

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from demos.cpu_static import cpu_static
from paddle_shard import Balanced
from paddle_shard.errors import PaddleShardError
from paddle_shard.testing import report
from tests.multiprocess.lengths_cases import (
    CASES,
    LENGTHS,
    collate_fn,
    document,
    padded,
)

SIZE = dist.get_world_size()


class Documents(paddle.io.Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return document(index)


class Stream(paddle.io.IterableDataset):
    def __iter__(self):
        return map(document, range(len(LENGTHS)))


def loader_of(case):
    options = dict(CASES[case])
    if "pad_to" in options:
        length = options["pad_to"]
        options["pad_to"] = {
            key: (length, value)
            for key, value in options.pop("pad_values").items()
        }
    data = Stream() if options.pop("stream", False) else Documents()
    shape, names = options.pop("mesh")
    mesh = dist.ProcessMesh(
        np.arange(SIZE).reshape(shape).tolist(), dim_names=list(names)
    )
    form, workers, size = (
        options.pop("form", dict),
        options.pop("workers", 0),
        options.pop("size", 4),
    )
    odd = (
        options.pop("odd", None)
        if dist.get_rank() == 1
        else options.pop("odd", None) and None
    )
    if options.pop("sep", None):
        options["placements"] = {
            key: {"dp": 0, "sep": 1} for key in ("ids", "labels")
        }
    if options.pop("balanced", None):
        options["placements"] = {
            key: {"dp": 0, "sep": Balanced(dim=1)} for key in ("ids", "labels")
        }
    given = paddle.io.DataLoader(
        data,
        batch_size=size,
        num_workers=workers,
        collate_fn=collate_fn(form, odd),
    )
    return paddle_shard.shard_dataloader(
        given, mesh, shard_dims="dp", **options
    )


def delivered(batches):
    """Of the next step: (field -> (global shape, this rank's part), which of its rows are real); or its error."""
    try:
        batch = next(batches)
    except PaddleShardError as error:
        return f"{type(error).__name__}: {error}"
    named = {0: batch} if isinstance(batch, paddle.Tensor) else batch
    fields = named.items() if isinstance(named, dict) else enumerate(named)
    values = {
        str(key): (leaf.shape, leaf._local_value().tolist())
        for key, leaf in fields
    }
    return values, batches.valid._local_value().tolist()


def run(case):
    loader = loader_of(case)
    batches, straight, states = iter(loader), [], []
    while len(states) < len(LENGTHS):
        try:
            straight.append(delivered(batches))
        except StopIteration:
            break
        states.append(loader.state_dict())
        if isinstance(straight[-1], str):
            break
    resumed = []
    for state in states[:2]:
        again = loader_of(case)
        again.load_state_dict(state)
        batches = iter(again)
        resumed.append(
            [delivered(batches) for _ in straight[len(resumed) + 1 :]]
        )
    return {"straight": straight, "resumed": resumed}


class Mean(paddle.nn.Layer):
    """Of the words' weights, padding too, so that the loss shows how long the rows are and what they hold."""

    def __init__(self, mesh):
        super().__init__()
        self.scale = dist.shard_tensor(
            self.create_parameter([16, 1]), mesh, [dist.Replicate()]
        )
        self.scale.set_value(paddle.full([16, 1], 0.1))

    def forward(self, weights):
        return paddle.matmul(weights, self.scale)


def static():
    """The losses of one epoch of a static model, whose rows all have one length."""

    def collate(samples):
        weights = padded(samples)["weights"] / 100
        return [
            weights,
            np.array([[len(sample["ids"])] for sample in samples], "float32"),
        ]

    mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])
    given = paddle.io.DataLoader(
        Documents(), batch_size=4, collate_fn=collate, drop_last=True
    )
    loader = paddle_shard.shard_dataloader(
        given, mesh, shard_dims="dp", pad_to={0: (16, 0.005)}
    )
    model = Mean(mesh)
    optimizer = paddle.optimizer.SGD(1e-3, parameters=model.parameters())
    losses = []
    with cpu_static():
        trained = dist.to_static(model, loader, paddle.nn.MSELoss(), optimizer)
        trained.train()
        for weights, lengths in loader:
            loss = paddle.to_tensor(
                np.array(trained(weights, lengths)).reshape([1])
            )
            dist.all_reduce(loss)
            losses.append(loss.item() / SIZE)
    return losses


if __name__ == "__main__":
    dist.init_parallel_env()
    report(
        {
            case: static() if case == "static" else run(case)
            for case in json.loads(sys.argv[1])
        }
    )
    dist.barrier()
