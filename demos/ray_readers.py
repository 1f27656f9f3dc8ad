"""Actors of a Ray cluster read in place of worker processes; some are killed, and every byte is the same.

    make test-adapters ADAPTERS=ray                                 # on a fresh clone: the tests, too
    python launch/local.py --processes 2 demos/ray_readers.py       # where Ray is installed

Starts a cluster of this machine alone, with Ray's token authentication. Asserts that each epoch's batches are those
that worker processes read, bit for bit, that its certificate is exact, and that all actors are gone at the end.
"""

import gc
import hashlib
import os
import signal
import sys
import tempfile
import time

# ray.init(address=) asks for it, before Ray is imported
os.environ.setdefault("RAY_AUTH_MODE", "token")

import numpy as np
import paddle.distributed as dist
import ray
from paddle.io import DataLoader, Dataset

import paddle_shard

LENGTH, BATCH_SIZE, EPOCHS, KILLS = 403, 16, 2, 3


class Pictures(Dataset):
    """Random crops of pictures that are made from their number, in 2 ms of CPU."""

    def __init__(self, trap):
        self.trap = trap

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        # the process that removes it is killed in the middle of its batch
        if os.path.exists(self.trap):
            try:
                os.unlink(self.trap)
            except FileNotFoundError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            picture = np.full((40, 40), index, "float32")
        top, left = np.random.randint(0, 8, 2)
        return picture[top : top + 32, left : left + 32] + np.random.rand(
            32, 32
        ).astype("float32"), np.int64(index)


def read(mesh, trap, *, kills=0, **options):
    """(digests of all batches, certificates, images a second) of this rank."""
    dataloader = DataLoader(
        Pictures(trap),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
    )
    loader = paddle_shard.shard_dataloader(
        dataloader, mesh, shard_dims="dp", seed=7, **options
    )
    digests, certificates, began = [], [], time.monotonic()
    for epoch in range(EPOCHS):
        for step, batch in enumerate(loader):
            if step % 5 == 3 and epoch * len(loader) + step < kills * 5:
                with open(trap, "w"):
                    pass
            rows = [field._local_value().numpy() for field in batch]
            digests.append(
                hashlib.sha256(
                    b"".join(one.tobytes() for one in rows)
                ).hexdigest()
            )
        certificates.append(loader.certificate())
    return (
        digests,
        certificates,
        loader.stats.total.samples / (time.monotonic() - began),
    )


def alive():
    """Reading actors of the cluster."""
    from ray._private.state import actors

    return [
        one
        for one in actors().values()
        if one["State"] == "ALIVE" and "ReadingActor" in one["ActorClassName"]
    ]


if __name__ == "__main__":
    dist.init_parallel_env()
    rank, world = dist.get_rank(), dist.get_world_size()
    address = [None]
    if rank == 0:
        started = ray.init(
            "local",
            num_cpus=2 * world,
            object_store_memory=200_000_000,
            include_dashboard=False,
        )
        address = [started.address_info["address"]]
    if world > 1:
        dist.broadcast_object_list(address, src=0)
    if rank > 0:
        ray.init(address=address[0])
    mesh = dist.ProcessMesh(list(range(world)), dim_names=["dp"])
    with tempfile.TemporaryDirectory() as folder:
        trap = os.path.join(folder, "trap")
        by_workers = read(mesh, trap)
        by_actors = read(
            mesh, trap, kills=KILLS, readers=paddle_shard.RayReaders(num=2)
        )
    assert by_actors[0] == by_workers[0], "the same bytes in the same order"
    assert by_actors[1] == by_workers[1]
    assert all(one.exact for one in by_actors[1])
    print(
        f"rank {rank}: {len(by_actors[0])} batches as read by worker processes, {by_actors[2]:.0f} images/s"
    )
    # the loader, and with it the actors that were to serve another epoch
    gc.collect()
    deadline = time.monotonic() + 60
    while alive() and rank == 0:
        assert time.monotonic() < deadline, "an actor was left behind"
        time.sleep(0.1)
    if rank == 0:
        print(
            f"{EPOCHS} epochs, {KILLS} kills on each rank: each of {LENGTH} images exactly once; no actor is left"
        )
    sys.stdout.flush()
    if world > 1:
        dist.barrier()
    ray.shutdown()
