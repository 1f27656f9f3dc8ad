"""Data that say who has read them, loaders over them, and what is missing after a fault."""

import os
import time

import numpy as np
import paddle.distributed as dist
from paddle.io import DataLoader, Dataset

import paddle_shard
from paddle_shard import Stream

WIDTH = 1024
"""So wide that workers' batches go through shared memory."""


def row_of(number):
    """A row: the number, the process that reads it, and zeros."""
    row = np.zeros(WIDTH, np.int64)
    row[:2] = number, os.getpid()
    return row


class Rows(Dataset):
    """A row for each number; `fault(number)` is called before each."""

    def __init__(self, length, fault=None):
        self.length, self.fault = length, fault

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.fault is not None:
            self.fault(index)
        return row_of(index)


class Faulty:
    """A transform of a stream: the row of a number."""

    def __init__(self, fault):
        self.fault = fault

    def __call__(self, number):
        if self.fault is not None:
            self.fault(number)
        return row_of(number)


def loader_of(
    kind,
    length,
    *,
    workers=0,
    batch_size=8,
    fault=None,
    mesh=None,
    settings=None,
    **own,
):
    """A loader over the numbers below a length: "map", with an index; "stream", read whole by all; "cut", in parts."""
    if kind == "map":
        dataset = Rows(length, fault)
    else:
        stream, faulty = Stream.of(range(length)), Faulty(fault)
        dataset = (
            stream.map(faulty).sharding_filter()
            if kind == "stream"
            else stream.sharding_filter().map(faulty)
        )
    mesh = dist.ProcessMesh([0], dim_names=["dp"]) if mesh is None else mesh
    dataloader = DataLoader(
        dataset, batch_size=batch_size, num_workers=workers, **(settings or {})
    )
    # rows tell who has read them, so those of replicas differ
    own = {
        "verify": None,
        **own,
    }
    return paddle_shard.shard_dataloader(
        dataloader, mesh, shard_dims="dp", **own
    )


def drawn_options(rng):
    """Options that must not matter."""
    return {"prefetch": rng.choice([0, 1, 3])}


def rows(batch):
    """The rows of this rank."""
    return batch._local_value().numpy()


def numbers(batches):
    """The numbers of this rank's rows that are real."""
    found = []
    for batch in batches:
        valid = (
            batches.valid._local_value().numpy()
            if hasattr(batches, "valid")
            else slice(None)
        )
        found += rows(batch)[valid][:, 0].tolist()
    return found


def read_until(batches, *, steps=None, pause=0.0, each=lambda: None):
    """(numbers read, processes that have read, the failure, seconds of the last wait); `each` runs at each step."""
    found, pids, start = [], set(), time.monotonic()
    try:
        while steps is None or steps > 0:
            start = time.monotonic()
            batch = next(batches)
            valid = batches.valid._local_value().numpy()
            found += rows(batch)[valid][:, 0].tolist()
            pids |= set(rows(batch)[:, 1].tolist())
            steps = None if steps is None else steps - 1
            each()
            if pause:
                time.sleep(pause)
    except StopIteration:
        return found, pids, None, 0.0
    except Exception as error:
        return found, pids, error, time.monotonic() - start
    return found, pids, None, 0.0


def the_rest(state, kind, length, **how):
    """What a fresh loader that goes on from a state delivers, read by this process."""
    loader = loader_of(kind, length, **how)
    loader.load_state_dict(state)
    found = numbers(iter(loader))
    if kind == "map":
        assert loader.certificate().exact, str(loader.certificate())
    return found
