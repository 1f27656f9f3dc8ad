"""Ranks that do not know each other: each case on real ranks, `paddle.distributed` not initialized."""

import io
import json
import logging
import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import PaddleShardError
from paddle_shard.ranks import protocol as agreements
from paddle_shard.testing import report
from tests.deadlines import HANG

RANK, SIZE = dist.get_rank(), dist.get_world_size()
FOLDER = Path(os.environ["PADDLE_SHARD_REPORT_DIR"])


class Numbers(paddle.io.Dataset):
    def __init__(self, length, bad=None):
        self.length, self.bad = length, bad

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError("no disk")
        return np.array(index)


def mesh(ids=None, names=("dp",)):
    return dist.ProcessMesh(
        list(range(SIZE)) if ids is None else ids, dim_names=list(names)
    )


def sharded(
    data, size=4, ids=None, workers=0, shuffled=False, num_parts=None, **options
):
    data = data if num_parts is None else Stream.of(data).in_parts(num_parts)
    options = {"shard_dims": "dp", **options}
    given = paddle.io.DataLoader(
        data, batch_size=size, num_workers=workers, shuffle=shuffled
    )
    return paddle_shard.shard_dataloader(given, mesh(ids), **options)


def steps_of(loader):
    """[real local rows of each step], or up to an error [.., "its class: its text"]."""
    found = []
    try:
        batches = iter(loader)
        for batch in batches:
            leaf = batch[0] if isinstance(batch, list) else batch
            valid = batches.valid._local_value().numpy()
            found.append(
                leaf._local_value()
                .numpy()
                .reshape(len(valid), -1)[valid, 0]
                .tolist()
            )
    except PaddleShardError as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def number_of(row):
    return int(row["n"])


def csv(counts, **options):
    return sharded(
        Stream.csv([FOLDER / "0.csv", FOLDER / "1.csv"], counts=counts).map(
            number_of
        ),
        size=8,
        **options,
    )


def numbers_in(files, counts=False, mixed=False):
    """A loader over files of so many rows, which each rank has in a folder of its own."""
    folder = FOLDER / f"{'-'.join(files)} of {RANK}"
    folder.mkdir(exist_ok=True)
    for name, rows in files.items():
        (folder / f"{name}.csv").write_text("n\n" + "1\n" * rows)
    stream = Stream.csv(sorted(folder.glob("*.csv")), counts=counts).map(
        number_of
    )
    other = Stream.csv([FOLDER / "0.csv", FOLDER / "1.csv"]).map(number_of)
    return sharded(
        Stream.mixture({"own": stream, "other": other}, {"own": 1, "other": 1})
        if mixed
        else stream
    )


# Cases: (what to report) by name


def streams():
    return [
        steps_of(csv(counts, workers=workers, num_parts=2))
        for counts in (False, True)
        for workers in (0, 2)
    ]


def thinned(i):
    """Leaves much more of some parts than of others."""
    return i % 4 > 1 or i < 20


def mixed():
    """Rows that are shuffled in windows, of parts that end at different times: by the number of samples."""
    found = {}
    for length in (17, 18, 33, 40):
        stream = Stream.of(range(length)).shuffle(3)
        found[f"{length} of {length}"] = steps_of(sharded(stream, size=8))
        uneven = Stream.of(range(length)).filter(thinned)
        kept = sum(map(thinned, range(length)))
        for window in (2, 3):
            found[f"{kept} of {length}, {window}"] = steps_of(
                sharded(uneven.shuffle(window), num_parts=4)
            )
    for workers in (0, 2):
        stream = (
            Stream.csv([FOLDER / "0.csv", FOLDER / "1.csv"], counts=False)
            .map(number_of)
            .shuffle(3)
        )
        found[f"159 of files, {workers}"] = steps_of(
            sharded(stream, num_parts=2, workers=workers)
        )
    return found


def fails():
    return steps_of(sharded(Numbers(40, bad=21)))


def certificate():
    loader = sharded(Numbers(22), shuffled=True, seed=3)
    steps_of(loader)
    return [loader.certificate().exact, str(loader.certificate())]


def stages():
    """The certificate of a pipeline of which the first stage has two data ranks and the second has one."""
    both = paddle.io.TensorDataset([paddle.arange(22), paddle.arange(22)])
    meshes = [mesh([0, 1]), mesh([2])]
    loader = paddle_shard.shard_dataloader(
        paddle.io.DataLoader(both, batch_size=4), meshes, shard_dims="dp"
    )
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    half, saved = str(loader.certificate()), loader.state_dict()
    batches.close()
    loader.load_state_dict(saved)
    for _ in loader:
        pass
    return [half, str(loader.certificate())]


def differ():
    """What each rank says of arguments that are not the same on all."""
    second = RANK == 1
    made = {
        "batch size": lambda: sharded(Numbers(48), size=6 if second else 8),
        "mesh": lambda: sharded(Numbers(48), ids=[1, 0] if second else [0, 1]),
        "shard_dims": lambda: sharded(
            Numbers(48), shard_dims=None if second else "dp"
        ),
        "seed": lambda: sharded(Numbers(48), seed=1 if second else 0),
        "length": lambda: sharded(Numbers(40 if second else 48)),
        "tail": lambda: sharded(Numbers(45), tail="drop" if second else "pad"),
        "epoch": lambda: at_epoch(1 if second else 0),
        "timeout": lambda: sharded(
            Numbers(48), timeout=70.0 if second else 60.0
        ),
        "a file": lambda: numbers_in(
            dict.fromkeys("ac" if second else "abc", 8)
        ),
        "a file's size": lambda: numbers_in({"a": 8, "b": 5 if second else 8}),
        "a file's rows": lambda: numbers_in(
            {"a": 8, "b": 5 if second else 8}, counts=True
        ),
        "a file of a source": lambda: numbers_in(
            dict.fromkeys("abc" if second else "ac", 8), mixed=True
        ),
        "data set": lambda: csv(True) if second else sharded(Numbers(48)),
        "version": lambda: of_version(
            "9.9" if second else paddle_shard.__version__
        ),
        "stream": lambda: csv(True, num_batches=2 if second else 3),
        "on_error": lambda: sharded(
            Numbers(48), on_error="skip" if second else "raise"
        ),
        "balance": lambda: sharded(
            Numbers(48), balance=np.arange(48) % (5 if second else 7)
        ),
        "skip": lambda: sharded(Numbers(48), skip_steps=[(int(second), 2)]),
        "weights": lambda: mixture(
            [(0, {"a": 1}), (16, {"a": 1, "b": 1 + second})]
        ),
        "batch size by schedule": lambda: sharded(
            Numbers(48), batch_size=[(0, 8), (16, 4 if second else 12)]
        ),
    }
    return {name: steps_of(make()) for name, make in made.items()}


def of_rank_0():
    sampler = paddle.io.DistributedBatchSampler(
        Numbers(48), 4, num_replicas=SIZE, rank=0
    )
    given = paddle.io.DataLoader(Numbers(48), batch_sampler=sampler)
    return paddle_shard.shard_dataloader(given, mesh(), shard_dims="dp")


def not_made():
    """What each rank says where the second alone cannot make its loader, or none can; and of a loop after that."""
    made = {
        "a sampler of another rank": of_rank_0,
        "an option": lambda: sharded(
            Numbers(48), tail="none" if RANK == 1 else "pad"
        ),
        "on all": lambda: sharded(Numbers(48), tail="none"),
    }
    found = {}
    for name, make in made.items():
        began = time.monotonic()
        try:
            found[name] = steps_of(make())
        except Exception as error:
            found[name] = [f"{type(error).__name__}: {error}"]
        found[name].append(time.monotonic() - began)
    return {**found, "later": steps_of(sharded(Numbers(16)))}


def mixture(weights):
    return sharded(
        paddle_shard.Mixture(
            {"a": Numbers(48), "b": Numbers(48)}, weights, num_samples=48
        )
    )


class Whole(paddle.io.IterableDataset):
    def __iter__(self):
        return (np.arange(i, i + 4).reshape(-1, 1) for i in range(0, 48, 4))


def resumed_apart():
    """The steps after a resume of whole batches, for ranks with different numbers of workers."""
    loader = sharded(Whole(), size=None)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    batches.close()
    loader = sharded(Whole(), size=None, workers=0 if RANK else 2)
    loader.load_state_dict(state)
    return len(list(loader))


def at_epoch(epoch):
    loader = sharded(Numbers(48))
    loader.set_epoch(epoch)
    return loader


def of_version(version):
    loader = sharded(Numbers(48))
    loader._setup.config["paddle_shard"] = version
    return loader


def too_large():
    try:
        return steps_of(
            sharded(Numbers(8), ids=list(range(SIZE + 1)), size=SIZE + 1)
        )
    except PaddleShardError as error:
        return f"{type(error).__name__}: {error}"


def on_the_mesh_only():
    """A stream's loader that the ranks of its mesh alone make."""
    ids = list(range(1, SIZE))
    return (
        steps_of(csv(False, ids=ids, num_parts=2, shard_dims="dp"))
        if RANK in ids
        else None
    )


def on_no_mesh():
    """The last rank is on no mesh, and makes as many steps."""
    steps, batches = 0, iter(csv(False, ids=list(range(SIZE - 1)), num_parts=2))
    for _ in batches:
        steps += 1
    return steps


def split(**data):
    """Data that is split already, and where something is wrong with rank 0's."""
    start = time.monotonic()
    found = steps_of(sharded(data[str(RANK)], size=2, is_dataset_splitted=True))
    return [found, time.monotonic() - start]


def split_fails():
    return split(**{"0": Numbers(8, bad=0), "1": Numbers(8)})


def split_empty():
    class Nothing(paddle.io.Sampler):
        def __iter__(self):
            return iter([] if RANK == 0 else [[0, 1], [2, 3]])

    start = time.monotonic()
    given = paddle.io.DataLoader(Numbers(8), batch_sampler=Nothing())
    found = steps_of(
        paddle_shard.shard_dataloader(
            given, mesh(), shard_dims="dp", is_dataset_splitted=True
        )
    )
    return [found, time.monotonic() - start]


class Unseeded(paddle.io.IterableDataset):
    """The same numbers on each rank, in an order of its own from some number on."""

    def __init__(self, generator, differs_from=0, length=64):
        self.generator, self.differs_from, self.length = (
            generator,
            differs_from,
            length,
        )

    def __iter__(self):
        numbers = np.arange(self.length)
        yield from numbers[: self.differs_from]
        yield from self.generator.permutation(numbers[self.differs_from :])


class WithinTurns(Unseeded):
    """Whose first number of each global batch is the same on each rank."""

    def __iter__(self):
        for first in range(0, 64, 8):
            yield from (
                first,
                *self.generator.permutation(np.arange(first + 1, first + 8)),
            )


class UnseededSampler(paddle.io.Sampler):
    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        return iter(self.generator.permutation(64).tolist())

    def __len__(self):
        return 64


def batches_of(generator):
    return [
        np.stack([row, row]) for row in generator.permutation(64).reshape(8, 8)
    ]


def sampled(generator):
    sampler = paddle.io.BatchSampler(
        sampler=UnseededSampler(generator), batch_size=8
    )
    return paddle_shard.shard_dataloader(
        paddle.io.DataLoader(Numbers(64), batch_sampler=sampler),
        mesh(),
        shard_dims="dp",
    )


def alike():
    return np.random.default_rng(7)


def different_data():
    """What is read by all: with a generator of each rank's own, and with one that is seeded alike."""
    found = {}
    for seeded in (False, True):

        def generator(seeded=seeded):
            # by chance two would begin with the same sample
            return np.random.default_rng(7 if seeded else 100 + RANK)

        length = 64 if seeded else 64 - 24 * RANK
        made = {
            "stream": lambda g: sharded(Unseeded(g()), size=8),
            "stream, late": lambda g: sharded(Unseeded(g(), 40), size=8),
            "stream, workers": lambda g: sharded(
                Unseeded(g()), size=8, workers=2, num_parts=4
            ),
            "within a turn": lambda g: sharded(WithinTurns(g()), size=8),
            "length": lambda g, n=length: sharded(
                Unseeded(alike(), 64, length=n), size=8
            ),
            "number of batches": lambda g, n=length: (
                paddle_shard.shard_dataloader(
                    lambda: iter(
                        [batch.T for batch in batches_of(alike())][: n // 8]
                    ),
                    mesh(),
                    shard_dims="dp",
                )
            ),
            "tail": lambda g: sharded(Unseeded(g()), size=8, tail="drop"),
            "batches": lambda g: paddle_shard.shard_dataloader(
                [b.T for b in batches_of(g())], mesh(), shard_dims="dp"
            ),
            "cut later": lambda g: sharded(
                Stream.of(Unseeded(g()))
                .map(int)
                .sharding_filter()
                .map(np.array),
                size=8,
            ),
            "sampler": lambda g: sampled(g()),
            "costs": lambda g, own=0 if seeded else RANK: sharded(
                Numbers(64), size=8, balance=lambda ids: (ids + own) % 7
            ),
        }
        found |= {
            f"{name}, seeded" if seeded else name: steps_of(make(generator))
            for name, make in made.items()
        }
    return found


class Noted(Numbers):
    """Notes which samples are read."""

    def __init__(self, length):
        super().__init__(length)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def nothing_ahead():
    """How many samples were read when each step has come."""
    data = Noted(32)
    return [len(data.read) for _ in sharded(data, prefetch=0)]


class OwnGenerator(paddle.io.DistributedBatchSampler):
    """Draws from a generator of its own, so that each epoch is another."""

    def __init__(self, data):
        super().__init__(data, 4, num_replicas=1, rank=0)
        self.random = np.random.RandomState(3)

    def __iter__(self):
        return iter(self.random.permutation(8).reshape(2, 4).tolist())


def one_data_rank():
    """Three epochs of a sampler of data that is split already, where one data rank has all of it."""
    data = Numbers(8)
    given = paddle.io.DataLoader(data, batch_sampler=OwnGenerator(data))
    loader = paddle_shard.shard_dataloader(
        given, mesh([list(range(SIZE))], ("dp", "mp")), shard_dims="dp"
    )
    return [steps_of(loader) for _ in range(3)]


def alone():
    """Rank 0 takes a batch before the others, which join when it has said that it waits."""
    agreements.NOTICE = 0.5
    text, said = io.StringIO(), FOLDER / "said"
    handler = logging.StreamHandler(text)
    logging.getLogger("paddle_shard").addHandler(handler)
    loader = sharded(Numbers(16))
    if RANK:
        deadline = time.monotonic() + HANG
        while not said.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    else:
        handler.emit = lambda record: (
            text.write(record.getMessage()),
            said.touch(),
        )
    found = steps_of(loader)
    agreements.NOTICE = 5.0
    return [found, text.getvalue()]


def child(results):
    results.put(steps_of(sharded(Numbers(16))))


def forked():
    """Children of ranks that have met, which meet themselves, twice."""
    found = [steps_of(sharded(Numbers(16)))]
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        results = context.SimpleQueue()
        process = context.Process(target=child, args=[results])
        process.start()
        found.append(results.get())
        process.join(HANG)
    return [*found, steps_of(sharded(Numbers(16)))]


def initialized():
    """Paddle's own environment can be made later."""
    dist.init_parallel_env()
    return steps_of(sharded(Numbers(24), size=6))


if __name__ == "__main__":
    found = {}
    for name in json.loads(sys.argv[1]):
        print("case:", name, flush=True)
        found[name] = globals()[name]()
    report(found)
    if dist.is_initialized():
        dist.barrier()
    else:
        # rank 0 has the store that others may be on their way to
        time.sleep(1.0)
