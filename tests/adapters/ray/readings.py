"""What is read, by worker processes and by actors: data sets and streams that draw, fail and kill."""

import os
import signal

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.io import DataLoader, Dataset, IterableDataset

import paddle_shard
from paddle_shard import Stream
from paddle_shard.core.trees import leaves

MESH = dist.ProcessMesh([0], dim_names=["dp"])
LENGTH, BATCH = 203, 8


class Draws(Dataset):
    """Samples that draw from all generators."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return {
            "id": np.int64(index),
            "noise": np.random.rand(3),
            "paddle": paddle.rand([2]),
            "name": f"sample {index}",
        }


class Opens(Dataset):
    """The lines of a file that is opened for each."""

    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 40

    def __getitem__(self, index):
        with open(self.name) as file:
            return np.int64(file.readlines()[index])


class Gathers(Dataset):
    """A data set that reads a batch at once."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        return [
            (np.int64(index), np.full(5, index / 3, "float32"))
            for index in indices
        ]


class Bulky(Gathers):
    """Batches of 4 MB."""

    def __getitems__(self, indices):
        return [
            (np.int64(index), np.full((512, 256), index / 3, "float32"))
            for index in indices
        ]


class Noting(Dataset):
    """Batches of 40 MB, each of which is noted in a folder when it was read."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 40 * BATCH

    def __getitems__(self, indices):
        (self.folder / f"{min(indices)}").touch()
        return [np.full(5 * 2**18, index, "float32") for index in indices]


class Broken(Draws):
    """Some samples cannot be read."""

    def __getitem__(self, index):
        if index % 50 == 7:
            raise OSError(f"cannot read {index}")
        return super().__getitem__(index)


class Deadly(Draws):
    """One sample ends the process that reads it."""

    def __getitem__(self, index):
        if index == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Tells(Dataset):
    """What a worker is told, and which process it is."""

    told = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        info = paddle.io.get_worker_info()
        return np.array(
            [index, info.id, info.num_workers, self.told, os.getpid()]
        )


def told(number):
    paddle.io.get_worker_info().dataset.told = number + 100


class Narrowed(IterableDataset):
    """A stream that `worker_init_fn` may narrow."""

    def __init__(self):
        self.end = 10 * LENGTH

    def __iter__(self):
        return iter(range(self.end))


def narrow(number):
    info = paddle.io.get_worker_info()
    info.dataset.end = LENGTH // info.num_workers


class Noisy:
    """A stage of the user's that draws."""

    def __call__(self, sample):
        return np.array(
            [
                float(sample)
                if not isinstance(sample, dict)
                else float(sample["x"]),
                np.random.rand(),
            ]
        )


def largest_first(samples):
    return np.stack(
        sorted(
            (np.atleast_1d(sample) for sample in samples),
            key=lambda one: -float(one[0]),
        )
    )


def reversed_columns(samples):
    return [np.stack(column) for column in zip(*samples, strict=True)][::-1]


def files(folder, count=7):
    """CSV files of unequal length, and their rows."""
    for number in range(count):
        rows = [f"{number * 100 + row},{row}" for row in range(9 + 8 * number)]
        (folder / f"{number}.csv").write_text("\n".join(["x,y", *rows]) + "\n")
    return f"{folder}/*.csv"


INDEXED = {
    "draws": (Draws, {}, {"shuffle": True}),
    "gathers": (Gathers, {}, {"shuffle": True}),
    "one by one, in order": (
        Gathers,
        {"collate_fn": reversed_columns},
        {},
    ),
    "skips": (Broken, {}, {"on_error": "skip", "shuffle": True}),
    "batches of 4 MB": (Bulky, {}, {"tail": "drop"}),
    "with a thread that prefetches": (Draws, {}, {"prefetch": 3}),
}
STREAMS = {
    "parts of files": (
        lambda path: Stream.csv(path).map(Noisy()).in_parts(4),
        {},
        {},
    ),
    "shuffled, repeated": (
        lambda path: Stream.csv(path).shuffle(16).map(Noisy()).in_parts(4),
        {},
        {"tail": "repeat"},
    ),
    "an epoch of a length": (
        lambda path: Stream.csv(path).in_parts(4).map(Noisy()),
        {},
        {"num_batches": 60},
    ),
    "read by all": (
        lambda path: Stream.of(range(LENGTH)).map(Noisy()).shuffle(16),
        {},
        {},
    ),
    "read by all, drawn before the cut": (
        lambda path: Stream.of(Drawn()).map(Noisy()),
        {},
        {},
    ),
    "narrowed": (lambda path: Narrowed(), {"worker_init_fn": narrow}, {}),
    "collated": (
        lambda path: Stream.csv(path).map(Noisy()).in_parts(8),
        {"collate_fn": largest_first},
        {},
    ),
    "whole batches": (
        lambda path: Stream.of(Batches()),
        {"batch_size": None},
        {},
    ),
}


class Drawn(IterableDataset):
    """A stream that cannot be opened in the middle and draws."""

    def __iter__(self):
        for number in range(LENGTH):
            yield number + np.random.rand()


class Batches(IterableDataset):
    """A stream of whole global batches."""

    def __iter__(self):
        for number in range(30):
            yield np.full((BATCH, 2), number + np.random.rand())


def loader_of(data, readers, settings, options, workers=3):
    dataloader = DataLoader(
        data, **{"batch_size": BATCH, "num_workers": workers, **settings}
    )
    return paddle_shard.shard_dataloader(
        dataloader, MESH, shard_dims="dp", readers=readers, **options
    )


def read(loader, epochs=1, after_step=lambda step: None):
    """The bytes of every batch, which of its rows are real, and the certificate or the state after each epoch."""
    found, step = [], 0
    for _ in range(epochs):
        batches = iter(loader)
        for batch in batches:
            arrays = [
                leaf._local_value().numpy()
                if hasattr(leaf, "_local_value")
                else leaf
                for leaf in leaves(batch)
            ]
            arrays.append(batches.valid._local_value().numpy())
            found.append(
                [
                    one.tobytes() if hasattr(one, "tobytes") else one
                    for one in arrays
                ]
            )
            after_step(step := step + 1)
        state = loader.state_dict()
        found.append(str(loader.certificate() if loader.plan else state))
    return found


def actors_alive():
    """{process id: number of an actor} of all reading actors of the cluster."""
    from ray._private.state import actors

    return {
        one["Pid"] if "Pid" in one else one["pid"]: name
        for name, one in actors().items()
        if one["State"] == "ALIVE" and "ReadingActor" in one["ActorClassName"]
    }


def environment(samples):
    return np.full(len(samples), int(os.environ["TOLD"]))
