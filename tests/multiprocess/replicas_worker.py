"""Ranks that share a reader (`replicas=`): what each of four ranks has read, delivered and said."""

import gc
import os
import sys

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import PaddleShardError
from paddle_shard.testing import report

RANK = dist.get_rank()
MESHES = {
    "dp1 x mp4": ([[0, 1, 2, 3]], ["dp", "mp"]),
    "dp2 x mp2": ([[0, 1], [2, 3]], ["dp", "mp"]),
    "mp2 x dp2": ([[0, 1], [2, 3]], ["mp", "dp"]),
    "dp4": ([0, 1, 2, 3], ["dp"]),
}


def mesh_of(name):
    ids, names = MESHES[name]
    return dist.ProcessMesh(ids, dim_names=names)


class Samples(paddle.io.Dataset):
    """Draws random numbers, counts its reads, and may fail; samples grow with `wide`."""

    def __init__(self, length=40, *, bad=(), wide=4):
        self.length, self.bad, self.wide, self.reads = length, bad, wide, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads += 1
        if index in self.bad:
            raise OSError(f"no disk for {index}")
        noise = np.random.rand(self.wide).astype("float32")
        return {"id": np.int64(index), "noise": noise, "name": f"s{index}"}


class Growing(paddle.io.Dataset):
    """Rows of one length a batch, which grow: more memory is needed again and again."""

    def __len__(self):
        return 80

    def __getitem__(self, index):
        return np.full((1 + index // 8) * 5000, index)


def with_a_function(samples):
    """A collate_fn whose batches hold what cannot be sent to another process."""
    return {
        "id": np.array([sample["id"] for sample in samples]),
        "function": lambda: 0,
    }


def given(data, *, size=8, workers=0, cls=paddle.io.DataLoader, **options):
    return cls(data, batch_size=size, num_workers=workers, **options)


def sharded(dataloader, mesh="dp2 x mp2", **options):
    options = {"shard_dims": "dp", "replicas": "leader", **options}
    return paddle_shard.shard_dataloader(dataloader, mesh_of(mesh), **options)


def rows(batch):
    """A batch of this rank as plain lists."""
    if isinstance(batch, paddle.Tensor):
        local = batch._local_value().numpy()
        return [list(local.shape), float(local.sum())]
    if isinstance(batch, dict):
        return {key: rows(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [rows(value) for value in batch]
    return batch


def steps_of(loader, limit=None):
    """The steps that are delivered, which of their rows are real, and the error."""
    found, batches = [], iter(loader)
    try:
        for batch in batches:
            valid = batches.valid._local_value().numpy().tolist()
            found.append([rows(batch), valid])
            if len(found) == limit:
                break
    except PaddleShardError as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def reads():
    """Reads and workers on each mesh, and what the loaders say."""
    found = {}
    for mesh in MESHES:
        data = Samples()
        loader = sharded(given(data), mesh)
        steps = len(steps_of(loader))
        found[mesh] = [
            steps,
            data.reads,
            str(loader._setup.replicas),
            str(loader._setup.replicas) in repr(loader),
        ]
    data = Samples()
    batches = iter(sharded(given(data, workers=2, persistent_workers=True)))
    next(batches)
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        found["workers"] = len(children.read().split())
    batches.close()
    return found


def same_as_each():
    """{case: [steps with a leader and workers, steps as each rank reads them without]}"""
    cases = {
        "workers": (
            2,
            lambda workers, **how: sharded(
                given(Samples(), workers=workers, shuffle=True), **how
            ),
        ),
        "random samples": (
            0,
            lambda _, **how: sharded(
                given(Samples(), shuffle=True), "mp2 x dp2", **how
            ),
        ),
        "accumulation of steps": (
            0,
            lambda _, **how: sharded(
                given(Samples(37), size=4), "dp1 x mp4", **how
            ),
        ),
        "prefetch": (
            0,
            lambda _, **how: sharded(given(Samples()), prefetch=2, **how),
        ),
        "growing": (
            0,
            lambda _, **how: sharded(given(Growing()), "dp1 x mp4", **how),
        ),
        "skips errors": (
            0,
            lambda _, **how: sharded(
                given(Samples(bad=(3, 17, 18))), on_error="skip", **how
            ),
        ),
        "whole items": (
            0,
            lambda _, **how: sharded(
                [np.full((4, 2), i) for i in range(6)], **how
            ),
        ),
        "stream": (
            0,
            lambda _, **how: sharded(
                given(
                    Stream.of(range(45)).shuffle(8).map(lambda i: np.array([i]))
                ),
                **how,
            ),
        ),
        "stream, workers": (
            2,
            lambda workers, **how: sharded(
                given(
                    Stream.of(range(45))
                    .sharding_filter()
                    .map(lambda i: np.array([i])),
                    workers=workers,
                ),
                **how,
            ),
        ),
        "stream, other workers": (
            0 if RANK % 2 else 3,
            lambda workers, **how: sharded(
                given(
                    Stream.of(range(45)).map(lambda i: np.array([i])),
                    workers=workers,
                ),
                **how,
            ),
        ),
        "bare rank fields": (
            1,
            lambda workers, **how: sharded(
                given(Samples(24), workers=workers), shard_dims=None, **how
            ),
        ),
    }
    found = {}
    for name, (workers, make) in cases.items():
        num_epochs = 2 if name in ("random samples", "stream, workers") else 1
        found[name] = [
            [steps_of(made) for _ in range(num_epochs)]
            for made in (make(workers), make(0, replicas="each"))
        ]
    return found


def long():
    """Steps of a loop that waits for all ranks at each, so that a follower finds its batches without looking."""

    class Longer(paddle.io.Dataset):
        def __len__(self):
            return 8 * 150

        def __getitem__(self, index):
            return np.full((1 + 9 * (index >= 8 * 110)) * 2000, index)

    found = []
    for batch in sharded(given(Longer()), "dp1 x mp4"):
        found.append(float(batch._local_value().sum()))
        paddle.distributed.all_reduce(paddle.to_tensor([1.0]))
    return found


WIDTHS = np.random.default_rng(7).choice([1, 30, 1000, 20_000, 300_000], 24)


def sizes():
    """Sums of batches of many sizes, in any order, in loops that wait for all ranks at each step."""

    class OfManySizes(paddle.io.Dataset):
        def __len__(self):
            return 8 * len(WIDTHS)

        def __getitem__(self, index):
            return np.full(WIDTHS[index // 8], index % 100, np.uint8)

    found = {}
    for replicas, workers, prefetch in (
        ("leader", 0, 2),
        ("leader", 2, None),
        ("leader", 0, 0),
        ("each", 2, 1),
    ):
        loader = sharded(
            given(OfManySizes(), workers=workers),
            "dp1 x mp4",
            replicas=replicas,
            prefetch=prefetch,
        )
        sums = found[f"{replicas} {workers} {prefetch}"] = []
        for batch in loader:
            sums.append(int(batch._local_value().numpy().sum()))
            paddle.distributed.all_reduce(paddle.to_tensor([1.0]))
    return found


def resumes():
    """Steps before and after a stop: on one mesh with a leader, then on another mesh."""
    first = sharded(given(Samples(), shuffle=True))
    begun = steps_of(first, 2)
    second = sharded(
        given(Samples(), shuffle=True, workers=2),
        "dp1 x mp4",
        replicas="leader",
    )
    second.load_state_dict(first.state_dict())
    again = sharded(
        given(Samples(), shuffle=True), "dp1 x mp4", replicas="each"
    )
    again.load_state_dict(first.state_dict())
    assert len(begun) == 2
    return [steps_of(second), steps_of(again), second.certificate().exact]


def passes():
    """Passes that overlap, are abandoned, or are peeked at."""
    loader = sharded(given(Samples()))
    together = [
        [rows(one["id"]), rows(two["id"])]
        for one, two in zip(loader, loader, strict=True)
    ]
    for count in (0, 1, 3):
        batches = iter(loader)
        for _ in range(count):
            next(batches)
        del batches
        gc.collect()
    first = rows(next(loader)["id"])
    other = sharded(given(Samples(24)), "dp1 x mp4")
    nested = []
    for number, batch in enumerate(loader):
        nested.append(rows(batch["id"]))
        if number % 2:
            nested += [rows(inner["id"]) for inner in other]
    return [together, first, nested]


def left():
    """Errors of many short passes over parts of unequal length, that all ranks leave at the same step near the end."""
    found = []
    # each filter, and each step at which the loop is left
    for number in range(14):
        stream = (
            Stream.of(range(60))
            .sharding_filter()
            .filter(lambda i, k=2 + number % 4: i % k or i < 20)
        )
        loader = sharded(given(stream), "mp2 x dp2", tail="pad", verify=None)
        found += [
            step
            for step in steps_of(loader, 2 + number % 7)
            if isinstance(step, str)
        ]
    return found


def refused():
    """What each rank is told."""

    class Own(paddle.io.Sampler):
        def __init__(self, order):
            super().__init__()
            self.order = order

        def __iter__(self):
            return iter(self.order)

        def __len__(self):
            return len(self.order)

    def with_sampler(order):
        sampler = paddle.io.BatchSampler(sampler=Own(order), batch_size=8)
        return paddle_shard.shard_dataloader(
            paddle.io.DataLoader(Samples(), batch_sampler=sampler),
            mesh_of("dp1 x mp4"),
            shard_dims="dp",
            replicas="leader",
        )

    cases = {
        "wrong word": lambda: sharded(given(Samples()), replicas="one"),
        "not sent": lambda: sharded(
            given(Samples(), collate_fn=with_a_function)
        ),
        "another choice": lambda: sharded(
            given(Samples()), replicas="each" if RANK == 2 else "leader"
        ),
        "fails on the leader": lambda: sharded(
            given(Samples(bad=(18,) if RANK == 0 else ()))
        ),
        "fails on a follower": lambda: sharded(
            given(Samples(bad=(18,) if RANK == 1 else ()))
        ),
        "other samples": lambda: with_sampler(
            list(range(40)) if RANK != 1 else list(range(40))[::-1]
        ),
        "more samples": lambda: with_sampler(list(range(40 if RANK else 24))),
        "fewer samples": lambda: with_sampler(list(range(24 if RANK else 40))),
    }
    found = {}
    for name, make in cases.items():
        try:
            steps = steps_of(make())
            found[name] = [
                len(steps),
                steps[-1] if isinstance(steps[-1], str) else "",
            ]
        except PaddleShardError as error:
            found[name] = [0, f"{type(error).__name__}: {error}"]
    return found


if __name__ == "__main__":
    dist.init_parallel_env()
    report(globals()[sys.argv[1]]())
    dist.barrier()
