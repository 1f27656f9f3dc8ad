"""Loaders whose runs the tests stop and resume, and samplers of users."""

import numpy as np
import paddle.distributed as dist
from paddle.io import BatchSampler, DataLoader, Dataset

import paddle_shard

ONE = dist.ProcessMesh([0], dim_names=["dp"])


class Ids(Dataset):
    def __init__(self, length):
        self.length, self.reads = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads += 1
        return np.array(index), np.random.rand()


def make(
    length=23,
    batch_size=4,
    mesh=ONE,
    *,
    workers=0,
    accumulation=1,
    sampler=None,
    shuffle=True,
    **options,
):
    if isinstance(shuffle, paddle_shard.Blocks):
        options["shuffle"] = shuffle
    batch_sampler = sampler
    if sampler is None:
        batch_sampler = BatchSampler(
            Ids(length), batch_size=batch_size, shuffle=shuffle is True
        )
        batch_sampler._acc_steps = accumulation
    given = DataLoader(
        Ids(length), batch_sampler=batch_sampler, num_workers=workers
    )
    return paddle_shard.shard_dataloader(
        given, mesh, shard_dims="dp", **options
    )


def content(batch):
    return [leaf._local_value().numpy().tolist() for leaf in batch]


def rest(loader):
    return [content(batch) for batch in loader]


class Draws(BatchSampler):
    """Draws each batch from numpy's global generator when asked."""

    def __init__(self, length, batch_size):
        super().__init__(Ids(length), batch_size=batch_size)
        self.length = length

    def __iter__(self):
        left = list(range(self.length))
        while left:
            yield [
                left.pop(np.random.randint(len(left)))
                for _ in range(min(self.batch_size, len(left)))
            ]


class Counts(Draws):
    """Has a state of its own, and counts how many batches all of them have drawn."""

    drawn = 0

    def __init__(self, length, batch_size):
        super().__init__(length, batch_size)
        self.at = 0

    def __iter__(self):
        while self.at < self.length:
            first, self.at = self.at, self.at + self.batch_size
            Counts.drawn += 1
            yield list(range(first, min(self.at, self.length)))
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def run_epoch(loader):
    for _ in loader:
        pass
    return loader.certificate()
