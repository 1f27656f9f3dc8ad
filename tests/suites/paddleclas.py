"""Samplers as PaddleClas gives them to its loaders, retyped small from the files of `ppcls/data/dataloader` named."""

import random

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.io import DistributedBatchSampler


class Labelled(paddle.io.Dataset):
    """Rows of a few identities; what is drawn for a row stands beside its number."""

    def __init__(self, length=48, identities=12):
        self.labels = [number % identities for number in range(length)]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return np.array([index]), np.random.rand(1)


class PKSampler(DistributedBatchSampler):
    """Follows `pk_sampler.py`: each rank draws identities from numpy's generator, and orders its own list in place."""

    def __init__(self, dataset, batch_size, per_label=2):
        super().__init__(dataset, batch_size, shuffle=True, drop_last=True)
        self.per_label, self.rows_of = per_label, {}
        for row, label in enumerate(dataset.labels):
            self.rows_of.setdefault(label, []).append(row)
        self.label_list = list(self.rows_of)

    def __iter__(self):
        np.random.RandomState(self.epoch).shuffle(self.label_list)
        for _ in range(len(self)):
            labels = np.random.choice(
                self.label_list,
                size=self.batch_size // self.per_label,
                replace=False,
            )
            rows = [
                np.random.choice(
                    self.rows_of[label], size=self.per_label, replace=False
                )
                for label in labels
            ]
            yield list(np.concatenate(rows))


class RandomIdentities(DistributedBatchSampler):
    """Follows `DistributedRandomIdentitySampler.py`: no `super().__init__`, so it does not say which rank it is."""

    def __init__(self, dataset, batch_size, per_label=2):
        self.dataset, self.batch_size, self.per_label = (
            dataset,
            batch_size,
            per_label,
        )
        self.drop_last = True

    def __iter__(self):
        rows_of = {}
        for row, label in enumerate(self.dataset.labels):
            rows_of.setdefault(label, []).append(row)
        for rows in rows_of.values():
            random.shuffle(rows)
        while len(rows_of) >= self.batch_size // self.per_label:
            batch = []
            for label in random.sample(
                sorted(rows_of), self.batch_size // self.per_label
            ):
                batch += [rows_of[label].pop() for _ in range(self.per_label)]
                if len(rows_of[label]) < self.per_label:
                    del rows_of[label]
            yield batch

    def __len__(self):
        return len(self.dataset) // self.batch_size // 2


class MixSampler(DistributedBatchSampler):
    """Follows `mix_sampler.py`: keeps the iterator of another sampler, so that nothing can copy it."""

    def __init__(self, dataset, batch_size):
        super().__init__(dataset, batch_size)
        self.sampler = PKSampler(dataset, batch_size)
        self.batches = iter(self.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.batches)


class RepeatedAugmentation(DistributedBatchSampler):
    """Follows `ra_sampler.py`: each row once on each rank at the same step, to be augmented in different ways."""

    def __iter__(self):
        rows = (
            np.random.RandomState(self.epoch)
            .permutation(len(self.dataset))
            .tolist()
        )
        rows = [row for row in rows for _ in range(self.nranks)][
            self.local_rank :: self.nranks
        ]
        for first in range(0, len(rows), self.batch_size):
            yield rows[first : first + self.batch_size]

    def __len__(self):
        return len(self.dataset) // self.batch_size


class OneOrderCut(paddle.io.BatchSampler):
    """A common order that is drawn from numpy's generator, of which each rank takes its rows.

    It is nobody's, but written by many: it finds its rank out where nobody sees it.
    """

    def __init__(self, dataset, batch_size):
        self.dataset, self.batch_size, self.drop_last = (
            dataset,
            batch_size,
            True,
        )

    def __iter__(self):
        rows = np.random.permutation(len(self.dataset))[
            dist.get_rank() :: dist.get_world_size()
        ].tolist()
        for first in range(0, len(rows), self.batch_size):
            yield rows[first : first + self.batch_size]

    def __len__(self):
        return len(self.dataset) // dist.get_world_size() // self.batch_size


class MultiScale(paddle.io.Sampler):
    """Follows `multi_scale_sampler.py`: yields (size, row) pairs of this rank's rows, and shuffles by the epoch."""

    def __init__(self, data_source, batch_size, scales=(4, 8)):
        self.data_source, self.batch_size, self.scales, self.epoch = (
            data_source,
            batch_size,
            scales,
            0,
        )
        self.rank, self.num_replicas = dist.get_rank(), dist.get_world_size()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        draw = random.Random(self.epoch)
        rows = list(range(len(self.data_source)))
        draw.shuffle(rows)
        mine = rows[self.rank :: self.num_replicas]
        for first in range(0, len(mine), self.batch_size):
            size = draw.choice(self.scales)
            yield [(size, row) for row in mine[first : first + self.batch_size]]

    def __len__(self):
        return len(self.data_source) // self.num_replicas // self.batch_size


class Scaled(Labelled):
    """Follows `multi_scale_dataset.py`: its indices are (size, row) pairs."""

    def __getitem__(self, index):
        size, row = index
        return np.full((size,), row), np.random.rand(1)
