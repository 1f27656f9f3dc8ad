"""A rank that reads with actors: what it reads by them and by worker processes, and who reads."""

import os
import sys
import tempfile
import threading

import numpy as np
import paddle.distributed as dist
import ray
import ray.data
from paddle.io import DataLoader

import paddle_shard
from paddle_shard.testing import report
from tests.adapters.ray import readings
from tests.adapters.ray.conftest import ROOT

sys.path.insert(0, str(ROOT / "demos/adapters"))
import ray_data_recipe

# Ray's processes do not have the recipe's folder in their path.
ray.cloudpickle.register_pickle_by_value(ray_data_recipe)


def hashes(loader, after_step=lambda step: None):
    return [
        hash_of(one) for one in readings.read(loader, after_step=after_step)
    ]


def hash_of(batch):
    return (
        batch
        if isinstance(batch, str)
        else [one.hex() if isinstance(one, bytes) else one for one in batch]
    )


def leader():
    """Two ranks that read the same rows, of which one has actors."""
    dist.init_parallel_env()
    mesh = dist.ProcessMesh(
        [list(range(dist.get_world_size()))], dim_names=["dp", "mp"]
    )
    found = {}
    for name, readers in (
        ("workers", None),
        ("actors", paddle_shard.RayReaders(num=2)),
    ):
        dataloader = DataLoader(readings.Draws(), batch_size=8, num_workers=2)
        loader = paddle_shard.shard_dataloader(
            dataloader,
            mesh,
            shard_dims="dp",
            replicas="leader",
            readers=readers,
        )
        seen = set()
        found[name] = hashes(
            loader, lambda step, seen=seen: seen.update(readings.actors_alive())
        )
        found[f"{name} seen"] = len(seen)
        found["who"] = str(loader._setup.replicas)
    dist.barrier()
    return found


def data():
    """Ranks that read a data set of Ray Data, of which some batches cost more than others."""
    dist.init_parallel_env()
    world = dist.get_world_size()

    def loader_of(data_ranks, **options):
        shape = [
            list(
                range(
                    row * world // data_ranks, (row + 1) * world // data_ranks
                )
            )
            for row in range(data_ranks)
        ]
        made = ray.data.range(103, override_num_blocks=7).map(
            lambda row: {"id": row["id"], "half": row["id"] / 2}
        )
        stream = ray_data_recipe.ray_loader(made, batch_size=8)
        mesh = dist.ProcessMesh(shape, dim_names=["dp", "mp"])
        return paddle_shard.shard_dataloader(
            stream, mesh, shard_dims="dp", tail="pad", **options
        )

    def epoch(loader):
        found, batches = [], iter(loader)
        for batch in batches:
            valid = batches.valid._local_value().numpy()
            ids, halves = (
                batch[name]._local_value().numpy() for name in ("id", "half")
            )
            assert (halves == ids / 2).all()
            found.append(ids[valid].tolist())
        return found

    loader = loader_of(2)
    found = {
        "epochs": [epoch(loader) for _ in range(2)],
        "refused": [],
        "leader": epoch(loader_of(1, replicas="leader")),
    }
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    batches.close()
    for refused in (
        lambda: loader_of(2).load_state_dict(state),
        lambda: epoch(loader_of(1)),
    ):
        try:
            refused()
        except Exception as error:
            found["refused"].append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return found


def host():
    """A rank on a host without CPUs for readers."""
    data = readings.Draws()
    expected = hashes(
        readings.loader_of(data, None, {"num_workers": 2}, {"shuffle": True})
    )
    readers = paddle_shard.RayReaders(num=2)
    found = hashes(readings.loader_of(data, readers, {}, {"shuffle": True}))
    loader = readings.loader_of(readings.Broken(), readers, {}, {})
    try:
        list(loader)
    except Exception as error:
        return {"same": found == expected, "failed": str(error)}


def killed():
    """A rank that is killed while it reads."""
    loader = readings.loader_of(
        readings.Draws(), paddle_shard.RayReaders(num=2), {}, {}
    )
    batches = iter(loader)
    next(batches)
    print("begun", *sorted(readings.actors_alive()), flush=True)
    threading.Event().wait()


def relative():
    """Files of this rank's folder, by relative names, for a data set and a stream."""
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    with open("lines.txt", "w") as file:
        file.writelines(f"{number}\n" for number in range(40))
    stream = paddle_shard.Stream.lines("lines.txt", counts=True).map(np.int64)
    found = []
    for data in (
        DataLoader(readings.Opens("lines.txt"), batch_size=4),
        DataLoader(stream, batch_size=4),
    ):
        loader = paddle_shard.shard_dataloader(
            data,
            readings.MESH,
            shard_dims="dp",
            readers=paddle_shard.RayReaders(num=2),
        )
        found.append(
            [
                number
                for batch in loader
                for number in batch._local_value().numpy().tolist()
            ]
        )
    return {"found": found}


if __name__ == "__main__":
    case = sys.argv[1]
    if "RAY_ADDRESS" in os.environ:
        ray.init(address="auto", log_to_driver=False)
    report(
        {
            "leader": leader,
            "host": host,
            "data": data,
            "killed": killed,
            "relative": relative,
        }[case]()
    )
