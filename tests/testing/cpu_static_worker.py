"""Trains small models by `dist.to_static` on CPU; the arguments name what to do, one after the other."""

import itertools
import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local
from paddle.distributed.auto_parallel.static.dist_input_spec import (
    DistributedInputSpec,
)
from paddle.distributed.auto_parallel.static.engine import Engine
from paddle.distributed.auto_parallel.static.process_group import ProcessGroup

from paddle_shard.testing import report

sys.path.insert(0, str(Path(__file__).parents[2] / "demos"))
import cpu_static as cpu_static_module
from cpu_static import StaticGroupsError, cpu_static

STEPS, WIDTH, ROWS = 5, 8, 8
dist.init_parallel_env()
RANK, WORLD = dist.get_rank(), dist.get_world_size()
numbers = itertools.count()
DP = dist.ProcessMesh(list(range(WORLD)), ["dp"])
DP_MP = dist.ProcessMesh(np.arange(WORLD).reshape(2, -1).tolist(), ["dp", "mp"])


class Mlp(paddle.nn.Layer):
    def __init__(self, mesh, shard_mp=False):
        super().__init__()
        self.weights = paddle.nn.ParameterList()
        for i in range(2):
            placements = [dist.Replicate()] * mesh.ndim
            if shard_mp:
                placements[1] = dist.Shard(1 - i % 2)
            weight = dist.shard_tensor(
                self.create_parameter([WIDTH, WIDTH]), mesh, placements
            )
            self.weights.append(weight)

    def forward(self, x):
        for weight in self.weights:
            x = paddle.tanh(x @ weight)
        return x


def loss_fn(logits, label):
    return paddle.nn.functional.mse_loss(logits, label)


def batches(mesh):
    """Yield (inputs, labels) of `ROWS` global rows, each rank's fed by its coordinate on axis 0."""
    rng = np.random.default_rng(7)
    local = ROWS // mesh.shape[0]
    first = mesh.process_ids.index(RANK) // (WORLD // mesh.shape[0]) * local
    placements = [dist.Shard(0)] + [dist.Replicate()] * (mesh.ndim - 1)
    for _ in range(STEPS):
        arrays = rng.normal(size=(2, ROWS, WIDTH)).astype("float32")
        yield [
            dtensor_from_local(
                paddle.to_tensor(a[first : first + local]), mesh, placements
            )
            for a in arrays
        ]


def model_and_optimizer(mesh, **kwargs):
    paddle.seed(1)
    # `train()` starts Paddle's names anew, and static models whose weights have one name share the weight.
    with paddle.utils.unique_name.guard(f"model{next(numbers)}_"):
        model = Mlp(mesh, **kwargs)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    return model, dist.shard_optimizer(optimizer)


def dynamic(mesh):
    model, optimizer = model_and_optimizer(mesh)
    losses = []
    for x, y in batches(mesh):
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(
            dist.reshard(loss, mesh, [dist.Replicate()] * mesh.ndim)
            ._local_value()
            .item()
        )
    return losses


def to_static(mesh, **kwargs):
    model, optimizer = model_and_optimizer(mesh, **kwargs)
    specs = [
        DistributedInputSpec.from_dtensor(t, f"field{i}")
        for i, t in enumerate(next(batches(mesh)))
    ]
    return dist.to_static(
        model, None, loss_fn, optimizer, input_spec=[specs[:1], specs[1:]]
    )


def global_mean(local_mean):
    mean = paddle.to_tensor(np.reshape(local_mean, [1]))
    dist.all_reduce(mean)
    return mean.item() / WORLD


def steps(model, mesh, between=lambda: None):
    losses = []
    for x, y in batches(mesh):
        between()
        losses.append(global_mean(model(x, y)))
    return losses


def use_other_group():
    """Communicate with the neighbour only, as any dynamic tensor-parallel layer does."""
    pair = dist.ProcessMesh([RANK // 2 * 2, RANK // 2 * 2 + 1], ["pair"])
    partial = dtensor_from_local(paddle.ones([1]), pair, [dist.Partial()])
    assert (
        dist.reshard(partial, pair, [dist.Replicate()])._local_value().item()
        == 2
    )


def patched():
    return "POD_NAME" in os.environ, Engine._init_comm, ProcessGroup.instantiate


def refusal(model):
    try:
        model.train()
    except (StaticGroupsError, AssertionError) as error:
        return [type(error).__name__, str(error), paddle.in_dynamic_mode()]
    return None


def parity():
    with cpu_static():
        model = to_static(DP)
        model.train()
        return {"dynamic": dynamic(DP), "static": steps(model, DP)}


def replicas():
    """No operator of the program communicates."""
    mesh = dist.ProcessMesh([list(range(WORLD))], ["dp", "mp"])
    with cpu_static():
        model = to_static(mesh)
        model.train()
        return {
            "dynamic": dynamic(mesh),
            "static": [float(model(x, y)) for x, y in batches(mesh)],
        }


def losses_in_numpy(weights):
    rng = np.random.default_rng(7)
    for _ in range(STEPS):
        x, y = rng.normal(size=(2, ROWS, WIDTH)).astype("float32")
        for weight in weights:
            x = np.tanh(x @ weight)
        yield float(np.mean((x - y) ** 2))


def second_model():
    runs = []
    patch = cpu_static()
    for _ in range(2):
        model = to_static(DP)
        model.train()
        trained = steps(model, DP)
        model.eval()
        evaluated = steps(model, DP)
        weights = [
            w._local_value().numpy() for w in model.state_dict("param").values()
        ]
        runs.append(
            {
                "train": trained,
                "eval": evaluated,
                "numpy": list(losses_in_numpy(weights)),
            }
        )
    patch.undo()
    return {"runs": runs, "eval_after_undo": steps(model, DP)}


def other_groups():
    with cpu_static():
        use_other_group()
        model = to_static(DP)
        model.train()
        # its weights are not split: it communicates along dp only
        replicas = to_static(DP_MP)
        replicas.train()
        return {
            "dynamic": dynamic(DP),
            "static": steps(model, DP, between=use_other_group),
            "replicas": steps(replicas, DP_MP),
            "again": steps(model, DP),
        }


def two_groups():
    with cpu_static():
        refused = refusal(to_static(DP_MP, shard_mp=True))
        # a program that is fine is not held back by the one before
        model = to_static(DP)
        model.train()
        return {
            "refused": refused,
            "dynamic": dynamic(DP),
            "static": steps(model, DP),
        }


def one_rank():
    groups = cpu_static_module._groups

    def wider(programs, global_rank):
        return groups(programs, global_rank) + (
            [(0, 1, 2)] if global_rank == 1 else []
        )

    with mock.patch.object(cpu_static_module, "_groups", wider), cpu_static():
        return refusal(to_static(DP))


def undo():
    before = patched()
    first, second = cpu_static(), cpu_static()
    during = patched()
    first.undo()
    first.undo()
    still = patched()
    second.undo()
    after = patched()
    with mock.patch.dict(os.environ):
        # with it, DistModel would first build groups for fleet
        del os.environ["POD_NAME"]
        refused = refusal(to_static(DP))
    paddle.disable_static()
    return {
        "pod_name": [before[0], during[0], still[0], after[0]],
        "changed": [
            state[1:] != before[1:] for state in (before, during, still, after)
        ],
        "refused": refused,
    }


found = {}
for name in sys.argv[1:]:
    print("case:", name, flush=True)
    found[name] = globals()[name]()
    # whatever this one has left: the cases say themselves
    paddle.disable_static()
dist.barrier()
report(found)
