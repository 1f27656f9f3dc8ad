"""DataLoaders that are cut for data ranks, read under `patch_paddle()`, as a trainer reads them."""

import logging

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.io import DataLoader, DistributedBatchSampler

import paddle_shard
from paddle_shard.testing import report


class Made(paddle.io.Dataset):
    def __init__(self, function=np.array, length=16):
        self.function, self.length = function, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.function(index)


class MappingDistributedBatchSampler(DistributedBatchSampler):
    """PaddleFormers' sampler: it drops what does not go evenly into the ranks, and counts its samples."""

    __module__ = "paddleformers.utils.batch_sampler"

    def __init__(self, dataset, batch_size, *, seed=0, **options):
        super().__init__(dataset, batch_size, **options)
        self.base_seed, self.consumed_samples = seed, 0

    def set_epoch(self, epoch=0, consumed_samples=0):
        self.epoch, self.consumed_samples = epoch, consumed_samples

    def __iter__(self):
        raise AssertionError("this library reads in its place")


class LastBatchPaddingSampler(DistributedBatchSampler):
    """PaddleFormers' sampler for pipelines: each batch is whole."""

    __module__ = "paddleformers.trainer.trainer_utils"


class OwnSampler(DistributedBatchSampler):
    """A sampler that decides on its rank's rows: those that are its rank modulo the ranks."""

    def __iter__(self):
        rows = [*range(self.local_rank, len(self.dataset), self.nranks)]
        yield from (
            rows[at : at + self.batch_size]
            for at in range(0, len(rows), self.batch_size)
        )


class Endless(OwnSampler):
    """As ERNIE's: it has no length."""

    def __len__(self):
        raise TypeError("no length")


class Scales(paddle.io.Sampler):
    """As PaddleOCR's `MultiScaleSampler`: no sampler of Paddle's, but it knows its rank."""

    def __init__(self, dataset, batch_size, num_replicas, rank):
        self.length, self.batch_size = len(dataset), batch_size
        self.num_replicas, self.rank = num_replicas, rank

    def __iter__(self):
        rows = [*range(self.rank, self.length, self.num_replicas)]
        yield from (
            rows[at : at + self.batch_size]
            for at in range(0, len(rows), self.batch_size)
        )

    def __len__(self):
        return self.length // self.num_replicas // self.batch_size


class Stream(paddle.io.IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class IterableDatasetShard(paddle.io.IterableDataset):
    """PaddleFormers' data set that cuts a stream."""

    def __init__(self, dataset, batch_size, ranks, rank, *, drop_last=False):
        self.dataset, self.batch_size, self.drop_last = (
            dataset,
            batch_size,
            drop_last,
        )
        self.num_processes, self.process_index, self.num_examples = (
            ranks,
            rank,
            0,
        )

    def __iter__(self):
        raise AssertionError("this library reads in its place")


class Labelled(paddle.io.Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return {"labels": np.array([index, index]), "id": np.array(index)}


class Collate:
    label_pad_token_id = -100

    def __call__(self, samples):
        return {key: np.stack([s[key] for s in samples]) for key in samples[0]}


def rows_of(loader):
    return [batch.numpy().tolist() for batch in loader]


def mapped(
    sampler_class, length, batch_size=2, data=None, workers=0, **options
):
    data = Made(length=length) if data is None else data
    sampler = sampler_class(
        data, batch_size, num_replicas=RANKS, rank=DATA_RANK, **options
    )
    return DataLoader(data, batch_sampler=sampler, num_workers=workers)


def stream(length, workers=0, **options):
    data = IterableDatasetShard(Stream(length), 2, RANKS, DATA_RANK, **options)
    return DataLoader(data, batch_size=2, num_workers=workers)


def in_order(length, workers=0, **options):
    loader = mapped(
        MappingDistributedBatchSampler, length, workers=workers, **options
    )
    return [len(loader), rows_of(loader)]


def epochs_of(sampler_class, set_epoch, **options):
    """Three epochs of a shuffled loader, whose sampler gets the epoch from the loop or moves on."""
    loader = mapped(sampler_class, 8, shuffle=True, **options)
    found = []
    for epoch in range(3):
        if set_epoch:
            loader.batch_sampler.set_epoch(epoch)
        found.append(rows_of(loader))
    return found


def resumed(samples, epoch):
    """What is left of an epoch whose sampler says how many samples were consumed, and the next epoch."""
    loader = mapped(MappingDistributedBatchSampler, 11)
    loader.batch_sampler.set_epoch(epoch, samples)
    return [rows_of(loader), rows_of(loader)]


def counted(length, workers=0):
    loader = stream(length, workers)
    rows = rows_of(loader)
    return [rows, rows_of(loader), loader.dataset.num_examples]


def labels():
    data = Labelled()
    sampler = MappingDistributedBatchSampler(
        data, 2, num_replicas=RANKS, rank=DATA_RANK
    )
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=Collate())
    return [batch["labels"].numpy()[:, 0].tolist() for batch in loader]


def read(index):
    if index == 5:
        raise OSError("sample 5 cannot be read")
    return np.array(index)


def endless():
    loader = mapped(Endless, 8)
    try:
        len(loader)
    except TypeError as error:
        return [str(error), rows_of(loader)]
    raise AssertionError("it has no length")


def failing():
    found = []
    try:
        for batch in mapped(
            MappingDistributedBatchSampler, 8, data=Made(read, 8)
        ):
            found.append(batch.numpy().tolist())
    except paddle_shard.errors.DataReadError as error:
        return [found, str(error).partition("\n")[0]]
    raise AssertionError("sample 5 cannot be read")


WORLD = dist.get_world_size()
RANKS = min(2, WORLD)
"""Data ranks: of four ranks, two have the same rows."""
DATA_RANK = dist.get_rank() * RANKS // WORLD


def main():
    dist.init_parallel_env()
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("paddle_shard").addHandler(handler)
    seen = []
    with paddle_shard.patch_paddle(on_loader=seen.append):
        found = {
            "in order": [in_order(length) for length in (1, 3, 4, 7, 8)],
            "workers": in_order(7, workers=2),
            "drop_last": in_order(7, drop_last=True),
            "whole": rows_of(mapped(LastBatchPaddingSampler, 5)),
            "paddle": rows_of(mapped(DistributedBatchSampler, 7)),
            "own": rows_of(mapped(OwnSampler, 7)),
            "shuffled": [
                epochs_of(MappingDistributedBatchSampler, told)
                for told in (0, 1)
            ],
            "seed": epochs_of(MappingDistributedBatchSampler, 1, seed=9),
            "paddle, shuffled": [
                epochs_of(DistributedBatchSampler, told) for told in (0, 1)
            ],
            "resumed": [resumed(8, 1), resumed(0, 2)],
            "stream": [counted(length) for length in (1, 4, 7)],
            "stream, workers": counted(7, workers=2),
            "stream, drop_last": rows_of(stream(7, drop_last=True)),
            "labels": labels(),
            "endless": endless(),
            "scales": rows_of(mapped(Scales, 8)),
            "not cut": rows_of(DataLoader(Made(length=4), batch_size=2)),
            "failing": failing(),
        }
        num_made = len(seen)
    found["undone"] = rows_of(mapped(DistributedBatchSampler, 4))
    assert len(seen) == num_made
    found["messages"] = [text for text in messages if "patch_paddle" in text]
    report(found)


if __name__ == "__main__":
    main()
