"""Streams of many kinds, read by real ranks in `stream_worker.py`; the oracle is the same stream read alone."""

import io
import itertools
import json
import os
import tarfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard import Stream

BATCH = 8
MESHES = {
    2: [([0, 1], ["dp"]), ([[1, 0]], ["dp", "mp"])],
    4: [([[0, 1], [2, 3]], ["mp", "dp"]), ([3, 1, 0, 2], ["dp"])],
}
RESUMED = {2: ([[0], [1]], ["dp", "mp"]), 4: ([[0, 1], [2, 3]], ["dp", "mp"])}
"""The mesh on which runs are stopped and resumed."""
RESUMES = {2: [(1, 0, 2), (3, 3, 2), (6, 2, 0)], 4: [(2, 2, 0), (5, 0, 2)]}
"""(step at which a run is stopped, its workers before, its workers after); the sources take them in turn."""


class Numbers(paddle.io.IterableDataset):
    """0 .. n-1, each with a random number."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        for i in range(self.length):
            yield i, np.random.rand()


class SplitsItself(paddle.io.IterableDataset):
    """0 .. n-1, every worker its own of them, as Paddle's documentation shows it."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        info = paddle.io.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(start, self.length, step):
            yield i, np.random.rand()


def noisy(i):
    return i, np.random.rand()


def whole_batches():
    for first in range(0, 56, 8):
        yield np.arange(first, first + 8), np.random.rand(8)


def folder():
    """Where the files are, which the test has written before the ranks start."""
    return Path(os.environ["STREAM_CASES_FOLDER"])


SIZES = (7, 2, 13, 5, 1, 9, 4, 3, 6)


def write_files():
    """Nine tars and nine text files of unequal size, 50 numbers in all."""
    numbers = iter(range(sum(SIZES)))
    for shard, size in enumerate(SIZES):
        own = list(itertools.islice(numbers, size))
        (folder() / f"{shard}.txt").write_text("".join(f"{n}\n" for n in own))
        with tarfile.open(folder() / f"{shard}.tar", "w") as tar:
            for n in own:
                member = tarfile.TarInfo(f"{n:03}.cls")
                member.size = len(str(n))
                tar.addfile(member, io.BytesIO(str(n).encode()))


def number_of(sample):
    return noisy(int(sample["cls"]))


def lines(**options):
    paths = [folder() / f"{shard}.txt" for shard in range(len(SIZES))]
    return Stream.lines(paths, **options).shuffle(6).map(int).map(noisy)


def mixed(*, counts, stop):
    """Files and numbers, some of which are drawn several times, or not at all."""
    others = lines(counts=counts).map(
        lambda sample: (100 + sample[0], sample[1])
    )
    numbers = Stream.of(range(45)).shuffle(5).map(noisy)
    return Stream.mixture(
        {"files": others, "numbers": numbers},
        {"files": 2, "numbers": 1},
        stop=stop,
    ).shuffle(3)


def loader_of(stream, workers, size=BATCH):
    return paddle.io.DataLoader(
        stream,
        batch_size=size,
        num_workers=workers,
        persistent_workers=workers == 2,  # so that two epochs start them once
    )


SOURCES = {
    "iterable": lambda workers: loader_of(Numbers(45), workers),
    "self split": lambda workers: loader_of(
        Stream.of(SplitsItself(45), splits_itself=True), workers
    ),
    "shuffled": lambda workers: loader_of(
        Stream.of(range(45)).shuffle(16).map(noisy).shuffle(4), workers
    ),
    "cut, then filtered": lambda workers: loader_of(
        Stream.of(range(70))
        .sharding_filter()
        .map(noisy)
        .filter(lambda s: s[0] % 3 != 0),
        workers,
    ),
    "tars": lambda workers: loader_of(
        Stream.webdataset(f"{folder()}/{{0..8}}.tar", index=False)
        .shuffle(4)
        .map(number_of),
        workers,
    ),
    "files": lambda workers: loader_of(lines(counts=False), workers),
    "counted files": lambda workers: loader_of(lines(counts=True), workers),
    "items": lambda workers: loader_of(Stream.of(whole_batches), workers, None),
    "mixture of files": lambda workers: loader_of(
        mixed(counts=False, stop="all"), workers
    ),
    "mixture of counted files": lambda workers: loader_of(
        mixed(counts=True, stop="first"), workers
    ),
}
"""Name -> a DataLoader; each sample is (id, a random number)."""
if not find_spec("webdataset"):
    del SOURCES["tars"]
SAMPLES = {
    "iterable": list(range(45)),
    "self split": list(range(45)),
    "shuffled": list(range(45)),
    "cut, then filtered": [i for i in range(70) if i % 3],
    "tars": list(range(50)),
    "files": list(range(50)),
    "counted files": list(range(50)),
    "items": list(range(56)),
    "mixture of files": list(range(45)) + list(range(100, 150)),
    "mixture of counted files": list(range(45)) + list(range(100, 150)),
}


def cases(num_ranks):
    """(name of the case, source, mesh, workers, tail) for a number of ranks.

    Simulated ranks read every combination (`tests/inputs`); here each source is read with or without workers by four
    ranks, and with and without by two, and the sources take the meshes and the ends in turn.
    """
    for number, source in enumerate(SOURCES):
        tail = ["pad", "drop", "repeat"][number % 3]
        first, other = (
            MESHES[num_ranks] if number % 4 < 2 else MESHES[num_ranks][::-1]
        )
        with_workers, without = (
            (*first, 2 + number % 2, tail),
            (*other, 0, "pad"),
        )
        for case in (
            [with_workers, without]
            if num_ranks == 2
            else [without if number % 2 else with_workers]
        ):
            yield f"{source} {' '.join(map(str, case))}", source, *case


def resumes(num_ranks):
    """(name of the case, source, the step at which it is stopped, workers before, workers after)"""
    sources = list(SOURCES)[1::2] if num_ranks == 4 else SOURCES
    for number, source in enumerate(sources):
        step, *workers = RESUMES[num_ranks][number % len(RESUMES[num_ranks])]
        yield f"{source} resumed at {step}", source, step, *workers


def make(source, ids, names, workers, tail, **options):
    mesh = dist.ProcessMesh(ids, dim_names=names)
    # Without replicas nothing is shared.
    options = {"seed": 3, "replicas": "leader", **options}
    return paddle_shard.shard_dataloader(
        SOURCES[source](workers), mesh, shard_dims="dp", tail=tail, **options
    )


def steps_of(loader, limit=None, *, collective=False):
    """[[local ids, noise, valid] of each step] of one pass, or of its first steps."""
    batches, found = iter(loader), []
    for ids, noise in batches:
        leaves = [ids, noise, batches.valid]
        found.append([leaf._local_value().numpy().tolist() for leaf in leaves])
        if collective and dist.get_world_size() > 1:
            steps = paddle.to_tensor([len(found)])
            dist.all_reduce(steps)
            assert steps.item() == len(found) * dist.get_world_size()
        if len(found) == limit:
            break
    return found


def resumed(source, ids, names, workers, tail, step, other_workers):
    """The steps after a stop at a step, and a start with other workers."""
    first = make(source, ids, names, workers, tail)
    begun = steps_of(first, step)
    state = json.loads(json.dumps(first.state_dict()))
    second = make(source, ids, names, other_workers, tail)
    second.load_state_dict(state)
    return begun + steps_of(second)
