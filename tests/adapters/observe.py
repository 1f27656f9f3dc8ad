"""What one rank sees of another library's loader: run by the workers of all libraries, checked by `claims.py`."""

import hashlib
import json
import os
import sys

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.testing import report

SEED = 5
TORCH_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def mesh_of(num_data_ranks):
    """The first axis carries the data; the others are replicas."""
    ids = np.arange(dist.get_world_size()).reshape(num_data_ranks, -1)
    return dist.ProcessMesh(ids.tolist(), dim_names=["dp", "mp"])


def loader_of(foreign, num_data_ranks=2, **options):
    return paddle_shard.shard_dataloader(
        foreign,
        mesh_of(num_data_ranks),
        shard_dims="dp",
        **{"seed": SEED, "tail": "pad", **options},
    )


def steps_of(loader, limit=None, *, collective=False):
    """[{ids, valid, digest} of each step]; the batches are (anything .., ids)."""
    found, batches = [], iter(loader)
    for *fields, ids in batches:
        valid = batches.valid._local_value().numpy()
        ids = ids._local_value().numpy().reshape(-1)
        digest = hashlib.sha256()
        for field in fields:
            local = field._local_value().numpy()
            assert len(local) == len(ids)
            digest.update(local[valid].tobytes())
        found.append(
            {
                "ids": ids[valid].tolist(),
                "rows": len(ids),
                "digest": digest.hexdigest(),
            }
        )
        if collective:
            counted = paddle.to_tensor([len(found)])
            dist.all_reduce(counted)
            assert counted.item() == len(found) * dist.get_world_size(), (
                "all ranks are at the same step"
            )
        if len(found) == limit:
            break
    return found


def resumed(make, step):
    """The steps of an epoch that is stopped at a step and gone on with by another loader."""
    first, second = loader_of(make()), loader_of(make())
    begun = steps_of(first, step)
    state = json.dumps(first.state_dict())
    second.load_state_dict(json.loads(state))
    return {
        "steps": begun + steps_of(second),
        "next epoch": steps_of(second),
        "size": len(state),
    }


def refusal(function):
    """The name and text of the error that a function raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def observe(make, *, resume=True):
    """All that is claimed of every library; `make` returns a fresh ExternalLoader."""
    before = dict(os.environ)
    loader = loader_of(make())
    found = {"epochs": [steps_of(loader, collective=True), steps_of(loader)]}
    state = loader.state_dict()
    again = loader_of(make())
    found["again"] = [steps_of(again), steps_of(again)]
    found["other seed"] = steps_of(loader_of(make(), seed=SEED + 1))
    found["dropped"] = steps_of(loader_of(make(), tail="drop"))
    if resume:
        found["resumed"] = [
            resumed(make, step)
            for step in range(1, len(found["epochs"][0]) + 1)
        ]
    found["other data ranks"] = refusal(
        lambda: loader_of(make(), num_data_ranks=1).load_state_dict(state)
    )
    changed = {
        k
        for k in before.keys() | dict(os.environ).keys()
        if before.get(k) != os.environ.get(k)
    }
    found["environment"] = sorted(
        changed | (set(TORCH_NAMES) & set(os.environ))
    )
    torch = sys.modules.get("torch")
    found["torch runs"] = bool(
        torch
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    )
    return found


def main(observed):
    """Report what `observed()` returns."""
    dist.init_parallel_env()
    report(observed())
    dist.barrier()
