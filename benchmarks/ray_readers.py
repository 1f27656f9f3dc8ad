"""What do readers on Ray cost? Samples per second read inline, by worker processes, and by as many actors.

    make test-adapters ADAPTERS=ray     # makes the environment
    PYTHONPATH=. .venv-ray/bin/python benchmarks/ray_readers.py

A sample burns CPU time of its reader, and is 150 KB. All read the same batches, which is asserted. Workers and actors
live for all rounds; each round is a pass. The actors run on this machine, with the priority of worker processes.
"""

import gc
import time

import numpy as np
import paddle.distributed as dist
import ray
from common import busy, in_turns, machine, print_table, print_target
from paddle.io import DataLoader, Dataset

import paddle_shard

READERS, BATCH_SIZE, ROUNDS = 2, 16, 5
LENGTHS = {1: 1600, 5: 640, 20: 192}
"""Milliseconds of a sample -> samples of a pass."""


class Burns(Dataset):
    def __init__(self, milliseconds, length):
        self.seconds, self.length = milliseconds / 1000, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        return np.full((224, 224, 3), index % 256, "uint8")


def loader_of(milliseconds, workers, readers=None):
    data = Burns(milliseconds, LENGTHS[milliseconds])
    loader = DataLoader(
        data,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0 or bool(readers),
    )
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    return paddle_shard.shard_dataloader(
        loader, mesh, shard_dims="dp", readers=readers, prefetch=0, verify=None
    )


def rate(loader):
    """Samples per second of a pass, from its second batch on."""
    loader.set_epoch(0)
    batches, began, firsts = iter(loader), 0.0, []
    for batch in batches:
        began = began or time.perf_counter()
        firsts.append(batch._local_value()[:, 0, 0, 0].numpy().tolist())
    orders.setdefault(loader.dataset.seconds, firsts)
    assert orders[loader.dataset.seconds] == firsts
    return (len(firsts) - 1) * BATCH_SIZE / (time.perf_counter() - began)


orders: dict = {}

if __name__ == "__main__":
    ray.init(
        "local",
        num_cpus=READERS,
        object_store_memory=200_000_000,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"worker_niceness": 0},
    )
    print(f"{machine()}, ray {ray.__version__}; {busy()}")
    rows, at_5 = [], 0.0
    for milliseconds in LENGTHS:
        loaders = {
            "inline": loader_of(milliseconds, 0),
            f"{READERS} worker processes": loader_of(milliseconds, READERS),
            f"{READERS} actors": loader_of(
                milliseconds, 0, paddle_shard.RayReaders(num=READERS)
            ),
        }
        for loader in loaders.values():
            rate(loader)  # starts them
        found = in_turns(
            {
                name: lambda loader=loader: rate(loader)
                for name, loader in loaders.items()
            },
            ROUNDS,
        )
        inline, workers, actors = found.values()
        seen = [f"{one:.0f}" for one in (inline, workers, actors)]
        rows.append([f"{milliseconds} ms", *seen, f"{actors / workers:.2f}"])
        if milliseconds == 5:
            at_5 = actors / workers
        del loaders, loader
        gc.collect()
    head = [
        "CPU of a sample",
        "inline",
        f"{READERS} worker processes",
        f"{READERS} actors",
        "actors to workers",
    ]
    print_table("Samples per second by who reads them", head, rows)
    print_target(
        "samples of 5 ms: actors to as many workers, at least 0.9",
        f"{at_5:.2f}",
        at_5 >= 0.9,
    )
    ray.shutdown()
