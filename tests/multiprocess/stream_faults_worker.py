"""What every rank sees when the stream of one rank fails, or ends early."""

import os
import sys
import time

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard import Stream
from paddle_shard.testing import report

dist.init_parallel_env()
RANK, SIZE = dist.get_rank(), dist.get_world_size()
MESH = dist.ProcessMesh(np.arange(SIZE), dim_names=["dp"])


def fails_at_30(i):
    if i == 30:
        raise ValueError("sample 30 is broken")
    return i


def fails_on_the_last_rank(i):
    """As a disk that only one host has lost."""
    if i >= 20 and RANK == SIZE - 1:
        raise OSError("no disk")
    return i


def own_batches():
    """Local batches, of which each rank has another number, the last one short."""
    for k in range(3 + RANK):
        yield np.arange(4 if k < 2 + RANK else 2) + 100 * RANK + 10 * k


class Indexed(paddle.io.Dataset):
    """One sample cannot be read."""

    def __init__(self, bad, rank):
        self.bad, self.rank = bad, rank

    def __len__(self):
        return 96

    def __getitem__(self, index):
        if index == self.bad and self.rank in (None, RANK):
            raise OSError("no disk")
        return index


def sharded(stream, workers, mesh, **options):
    loader = paddle.io.DataLoader(stream, batch_size=8, num_workers=workers)
    return paddle_shard.shard_dataloader(
        loader, mesh, shard_dims="dp", **options
    )


def shard(stream, workers, **options):
    return sharded(stream, workers, MESH, **options)


def outcome(loader):
    """[steps delivered, what then: an error's text, or "end"], and the seconds from the last step to it."""
    steps, then = 0, "end"
    start = time.monotonic()
    try:
        for _ in loader:
            steps += 1
            start = time.monotonic()
    except Exception as error:
        then = [type(error).__name__, str(error), getattr(error, "index", None)]
    return [steps, then, time.monotonic() - start]


def local(iterable, **options):
    loader = paddle_shard.shard_dataloader(
        iterable, MESH, shard_dims="dp", is_dataset_splitted=True, **options
    )
    batches = iter(loader)
    return [
        [
            b._local_value().numpy().tolist(),
            batches.valid._local_value().numpy().tolist(),
        ]
        for b in batches
    ]


found = {}
for workers in (0, 2):
    found[f"every rank {workers}"] = outcome(
        shard(Stream.of(range(64)).map(fails_at_30), workers)
    )
    found[f"one rank {workers}"] = outcome(
        shard(Stream.of(range(64)).map(fails_on_the_last_rank), workers)
    )
    # The stream that is split before it fails: only one rank reads the broken sample.
    found[f"its own part {workers}"] = outcome(
        shard(Stream.of(range(64)).sharding_filter().map(fails_at_30), workers)
    )
    uneven = (
        Stream.of(range(60))
        .sharding_filter()
        .filter(lambda i: i % 8 > 1 or i < 40)
    )
    for tail in ("pad", "drop", "repeat", "error"):
        found[f"uneven {tail} {workers}"] = outcome(
            shard(uneven, workers, tail=tail)
        )
    found[f"num_batches {workers}"] = outcome(
        shard(uneven, workers, num_batches=11)
    )
    # Sample 8 * 5 + 7 is in the last rank's rows of step 5.
    found[f"indexed {workers}"] = outcome(shard(Indexed(47, None), workers))
    # A loop on this rank alone, before the others come to it.
    alone = sharded(
        Indexed(47, None), workers, dist.ProcessMesh([RANK], dim_names=["dp"])
    )
    found[f"indexed, alone {workers}"] = (
        outcome(alone) if RANK == SIZE - 1 else None
    )
for tail in ("pad", "drop", "repeat"):
    found[f"own {tail}"] = local(own_batches, tail=tail)
try:
    local(own_batches, tail="error")
except Exception as error:
    found["own error"] = type(error).__name__
if "kill" in sys.argv:
    batches = iter(shard(Stream.of(range(10**6)), 2))
    for step, _ in enumerate(batches):
        if step == 5 and RANK == SIZE - 1:
            os.kill(os.getpid(), 9)
report(found)
dist.barrier()
