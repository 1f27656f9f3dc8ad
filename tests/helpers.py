"""What most tests of a loader need: a data set of anything, meshes, a sharded loader, and what it delivered here."""

import time

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.plan.state import LoaderState


class Made(paddle.io.Dataset):
    """What a function makes of each index."""

    def __init__(self, function=np.array, length=16):
        self.function, self.length = function, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.function(index)


def mesh(ids, *names):
    return dist.ProcessMesh(ids, dim_names=list(names) or ["dp"])


ONE, DP2 = mesh([0]), mesh([0, 1])


def sharded(given, meshes=DP2, dims="dp", **options):
    return paddle_shard.shard_dataloader(
        given, meshes, shard_dims=dims, **options
    )


def local(batch):
    """This rank's rows of a batch that is a tensor."""
    return batch._local_value().numpy().tolist()


def indices_of(loader):
    """This rank's indices of each batch of the present epoch, by the loader's own order."""
    setup, start = loader._setup, LoaderState(epoch=loader.epoch)
    steps = setup.source.batches.steps(start, setup.rows.to_read)
    return [np.asarray(step.ids).tolist() for step in steps]


def locals_of(batches):
    return [local(batch) for batch in batches]


def places_in(value, way=()):
    """The way to each value inside a JSON value."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, one in inside:
        yield (*way, key)
        yield from places_in(one, (*way, key))


def waited_in(loader, step, steps, after=lambda: None):
    """Go through some steps of a pass; return the seconds for which the loop has waited, by its own watch."""
    began = time.perf_counter()
    batches = iter(loader)
    found = time.perf_counter() - began
    for _ in range(steps):
        began = time.perf_counter()
        next(batches)
        found += time.perf_counter() - began
        time.sleep(step)
        after()
    batches.close()
    return found


class SeededBy:
    """Seeds by a function, where the library has its `SampleRng`."""

    seeds = True

    def __init__(self, seed):
        self.seed = seed
        self.unread_sources = set()
