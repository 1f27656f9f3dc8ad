"""Loaders of each kind whose order is a promise: what `orders.json` and `states.json` hold of them."""

import random
from pathlib import Path

import numpy as np
import paddle
from paddle.io import DataLoader

from paddle_shard import (
    Blocks,
    BucketBatchSampler,
    Mixture,
    Packed,
    ShardPlan,
    Stream,
)
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import DP2, Made, local, sharded

EPOCHS, SAVED_AFTER = 2, 2
LENGTHS = [3, 9, 1, 7, 7, 2, 8, 5, 4, 6, 9, 1, 3, 5, 2, 8, 7, 6, 4, 9, 2, 5, 1]


def row(index):
    return np.array(index)


def drawn(index):
    """A sample that draws: it pins how the generators are seeded."""
    numbers = [
        np.random.randint(1000),
        random.randrange(1000),
        int(paddle.randint(0, 1000, [1])[0]),
    ]
    return np.array([index, *numbers])


def rows(length=23):
    return Made(row, length)


def tokens(length):
    return np.arange(length) + 100 * length


def mixture(**options):
    return Mixture(
        {
            "a": rows(7),
            "b": rows(11),
            "c": Made(lambda i: np.array(i + 100), 5),
        },
        {"a": 3, "b": 2, "c": 1},
        **options,
    )


def files(folder):
    """Return text files whose names are the same wherever they are."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number, lines in enumerate((5, 9, 2, 7)):
        Path(folder, f"{number}.txt").write_text(
            "".join(f"{10 * number + line}\n" for line in range(lines))
        )
    return [str(Path(folder, f"{number}.txt")) for number in range(4)]


def lines(folder, **options):
    return Stream.lines(files(folder), **options).map(number)


def number(line):
    return np.array(int(line))


def numbers(count):
    return Stream.of(range(count)).map(row)


def given(data, **options):
    return DataLoader(data, batch_size=6, **options)


def accumulating(loader):
    """Make three micro-batches of a step, as Paddle's `dist.to_static` sets it."""
    loader.batch_sampler._acc_steps = 3
    return loader


CASES = {
    # name: (what to shard, given a folder for files; options of `shard_dataloader`)
    "sequential": (lambda _: given(rows()), {}),
    "shuffled": (lambda _: given(rows(), shuffle=True), {}),
    "shuffled with another seed": (
        lambda _: given(rows()),
        {"shuffle": True, "seed": 7},
    ),
    "blocks": (
        lambda _: given(rows(40)),
        {"shuffle": Blocks(size=4, window=2)},
    ),
    "paddle": (lambda _: given(rows()), {"shuffle": "paddle"}),
    "tail drop": (lambda _: given(rows(), shuffle=True), {"tail": "drop"}),
    "tail fill": (lambda _: given(rows(), shuffle=True), {"tail": "fill"}),
    "accumulation": (lambda _: accumulating(given(rows(), shuffle=True)), {}),
    "batch sizes by schedule": (
        lambda _: given(rows(), shuffle=True),
        {"batch_size": [(0, 6), (12, 4)]},
    ),
    "dealt by cost": (
        lambda _: given(rows(), shuffle=True),
        {"balance": np.array(LENGTHS)},
    ),
    "samples that draw": (lambda _: given(Made(drawn, 23), shuffle=True), {}),
    "mixture": (lambda _: given(mixture()), {}),
    "mixture, shuffled": (lambda _: given(mixture(), shuffle=True), {}),
    "mixture, all": (lambda _: given(mixture(stop="all"), shuffle=True), {}),
    "mixture, weights that change": (
        lambda _: given(
            Mixture(
                {"a": rows(7), "b": rows(11)},
                [(0, {"a": 1, "b": 1}), (10, {"a": 1, "b": 5})],
                num_samples=23,
            ),
            shuffle=True,
        ),
        {},
    ),
    "packed": (
        lambda _: given(
            Packed([tokens(length) for length in LENGTHS], 10), shuffle=True
        ),
        {},
    ),
    "buckets": (
        lambda _: DataLoader(
            rows(),
            batch_sampler=BucketBatchSampler(np.array(LENGTHS), 6, window=12),
        ),
        {},
    ),
    "stream": (lambda _: given(numbers(23)), {}),
    "stream, shuffled": (lambda _: given(numbers(40).shuffle(5)), {}),
    "stream, repeated": (lambda _: given(numbers(9).repeat(3).shuffle(4)), {}),
    "stream, packed": (
        lambda _: given(Stream.of(LENGTHS).map(tokens).pack(10)),
        {},
    ),
    "files": (lambda folder: given(lines(folder)), {}),
    "files, not counted": (
        lambda folder: given(lines(folder, counts=False).in_parts(2)),
        {},
    ),
    "stream mixture": (
        lambda _: given(
            Stream.mixture(
                {"a": numbers(30), "b": numbers(20)}, {"a": 2, "b": 1}
            )
        ),
        {},
    ),
}


def loader_of(name, folder):
    made, options = CASES[name]
    return sharded(made(folder), DP2, "dp", **options)


def delivered(batches):
    """Return (rows, which are valid) of the batches that are left."""
    found = []
    for batch in batches:
        leaf = batch
        while not isinstance(leaf, paddle.Tensor):
            leaf = next(iter(leaf.values() if isinstance(leaf, dict) else leaf))
        found.append([local(leaf), local(batches.valid)])
    return found


def orders(folder):
    """Return what each data rank gets in each epoch, by case."""
    found = {}
    for name in CASES:
        loaders = on_each_rank(
            [0, 1], lambda name=name: loader_of(name, folder)
        )
        for epoch in range(EPOCHS):
            ranks = on_each_rank([0, 1], lambda: None)
            for rank, loader in loaders.items():
                ranks[rank] = on_each_rank(
                    [rank], lambda loader=loader: delivered(iter(loader))
                )[rank]
            found[f"{name}, epoch {epoch}"] = [ranks[0], ranks[1]]
    return found


def states(folder):
    """Return a state of each case, saved after some steps, as JSON values."""

    def saved(name):
        loader = loader_of(name, folder)
        batches = iter(loader)
        for _ in range(SAVED_AFTER):
            next(batches)
        return loader.state_dict()

    return {
        name: on_each_rank([0, 1], lambda name=name: saved(name))[0]
        for name in CASES
    }


def large():
    """Return some places of orders that no table could hold."""
    found = {}
    for shuffle in (True, Blocks(size=1024, window=8)):
        plan = ShardPlan(
            num_samples=10**9,
            batch_size=4096,
            num_data_ranks=64,
            shuffle=shuffle,
            seed=5,
        )
        places = [(0, 0, 0), (0, 200_000, 63), (3, 7, 31)]
        ids = [
            plan.indices(epoch=epoch, step=step, data_rank=rank)[:8].tolist()
            for epoch, step, rank in places
        ]
        found[f"1e9 samples, shuffle={shuffle!r}"] = ids
    return found
