"""Trains on two ranks in several ways, on the device that ON names, and reports rows, places and losses."""

import os

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard import Stream
from paddle_shard.testing import report

if os.environ["ON"] == "cpu":
    paddle.set_device("cpu")
dist.init_parallel_env()
if os.environ["ON"] == "standin":
    import on_standin  # of this folder; mends Paddle
if os.environ["ON"] != "cpu":
    paddle.set_device(f"{os.environ['ON']}:{dist.get_rank()}")

RANK, SIZE = dist.get_rank(), dist.get_world_size()
MESH = dist.ProcessMesh([0, 1], dim_names=["dp"])
REPLICAS = dist.ProcessMesh([[0, 1]], dim_names=["dp", "mp"])
ROWS = np.random.default_rng(0).normal(size=(45, 8)).astype("float32")
LABELS = (np.arange(45) % 4).astype("int64")


class Data(paddle.io.Dataset):
    def __getitem__(self, index):
        return ROWS[index], LABELS[index]

    def __len__(self):
        return 45


def loader_of(data=None, mesh=MESH, given=None, **options):
    shuffle = {} if data is not None else {"shuffle": True}
    dataloader = paddle.io.DataLoader(
        Data() if data is None else data,
        batch_size=8,
        **shuffle,
        **(given or {}),
    )
    return paddle_shard.shard_dataloader(
        dataloader, mesh, shard_dims="dp", seed=3, **options
    )


def resumed():
    before, after = loader_of(), loader_of()
    batches = iter(before)
    next(batches)
    next(batches)
    after.load_state_dict(before.state_dict())
    batches.close()
    return after


CASES = {
    "plain": loader_of,
    "workers": lambda: loader_of(given={"num_workers": 2}),
    "padded": lambda: loader_of(tail="fill"),
    "verified": lambda: loader_of(verify=1),
    "stream": lambda: loader_of(
        Stream.of(lambda: zip(ROWS, LABELS, strict=True))
    ),
    "leader": lambda: loader_of(mesh=REPLICAS, replicas="leader"),
    "resumed": resumed,
}


def trained(loader):
    paddle.seed(7)
    net = paddle.nn.Linear(8, 4)
    for parameter in net.parameters():
        weights = (
            np.random.default_rng(1)
            .normal(size=parameter.shape)
            .astype("float32")
        )
        parameter.set_value(paddle.to_tensor(weights))
    adam = paddle.optimizer.AdamW(
        learning_rate=0.05, parameters=net.parameters()
    )
    losses, places, rows = [], set(), []
    for _ in range(2):
        for x, y in loader:
            places.add(str(x.place))
            rows.append(
                np.round(
                    x._local_value().numpy()[:, 0].astype("float64"), 4
                ).tolist()
            )
            # Local tensors and plain collectives: Paddle's own reshards are for the CPU only in this wheel.
            # No matrix product: tests/device/real carries Paddle without MKL.
            products = x._local_value().unsqueeze(2) * net.weight
            loss = paddle.nn.functional.cross_entropy(
                products.sum(1) + net.bias, y._local_value()
            )
            loss.backward()
            for parameter in net.parameters():
                with paddle.no_grad():
                    dist.all_reduce(parameter.grad)
                    parameter.grad.set_value(parameter.grad / SIZE)
            adam.step()
            # Paddle writes zeros from the host
            adam.clear_grad(set_to_zero=False)
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            losses.append(round(float(whole) / SIZE, 5))
    return {"rows": rows, "places": sorted(places), "losses": losses}


def copied_back():
    """Return how often delivery alone copied from the device while every batch was compared."""
    if os.environ["ON"] != "standin":
        return 0
    counters = on_standin.plugin.standin_counters
    batches = iter(loader_of(verify=1))
    next(batches)
    on_standin.read_json(counters)
    for _ in batches:
        pass
    return sum(
        found[0]
        for name, found in on_standin.read_json(counters).items()
        if name in ("d2h", "d2h_async")
    )


report(
    {name: trained(make()) for name, make in CASES.items()}
    | {"copied back": copied_back()}
)
dist.barrier()
