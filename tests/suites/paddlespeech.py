"""Data, samplers and batches as PaddleSpeech makes them, retyped small from files of `paddlespeech/s2t/io`."""

import numpy as np
import paddle
from paddle.io import BatchSampler, DataLoader, DistributedBatchSampler


def batch_shuffle(indices, batch_size, epoch):
    """Follows `_batch_shuffle` of `sampler.py`: rows that follow each other stay together, in shuffled batches."""
    draw = np.random.RandomState(epoch)
    shift = draw.randint(0, batch_size - 1)
    batches = list(zip(*[iter(indices[shift:])] * batch_size, strict=False))
    draw.shuffle(batches)
    found = [row for batch in batches for row in batch]
    rest = len(indices) - shift - len(found)
    return found + (indices[-rest:] if rest else []) + indices[:shift]


class SortagradBatchSampler(BatchSampler):
    """Follows `sampler.py`: by length in the first epoch, then in shuffled batches; it counts its epochs itself."""

    def __init__(self, dataset, batch_size):
        self.dataset, self.batch_size, self.drop_last, self.epoch = (
            dataset,
            batch_size,
            False,
            0,
        )

    def __iter__(self):
        rows = list(range(len(self.dataset)))
        rows = (
            batch_shuffle(rows, self.batch_size, self.epoch)
            if self.epoch
            else rows
        )
        for first in range(0, len(rows), self.batch_size):
            yield rows[first : first + self.batch_size]
        self.epoch += 1

    def __len__(self):
        return -(-len(self.dataset) // self.batch_size)


class SortagradDistributedBatchSampler(DistributedBatchSampler):
    """Follows `sampler.py`: the same order of the global batches, of which each rank takes its rows."""

    def __iter__(self):
        rows = list(range(len(self.dataset)))
        rows += rows[: self.total_size - len(rows)]
        over_all, mine = self.batch_size * self.nranks, []
        rows = batch_shuffle(rows, over_all, self.epoch) if self.epoch else rows
        last = self.total_size % over_all
        for first in range(
            self.local_rank * self.batch_size, len(rows) - last, over_all
        ):
            mine += rows[first : first + self.batch_size]
        rows, share = rows[len(rows) - last :], last // self.nranks
        mine += rows[self.local_rank * share : (self.local_rank + 1) * share]
        for first in range(0, len(mine), self.batch_size):
            yield mine[first : first + self.batch_size]


class Manifest(paddle.io.Dataset):
    """Utterances by length."""

    def __init__(self, length=14):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {
            "utt": f"utt{index}",
            "feat": np.full((2 + index // 3, 2), index, "float32"),
            "text": [1] * (index + 1),
        }


def pad_list(rows, value):
    longest = max(len(row) for row in rows)
    found = np.full(
        (len(rows), longest, *rows[0].shape[1:]), value, rows[0].dtype
    )
    for padded, row in zip(found, rows, strict=True):
        padded[: len(row)] = row
    return found


class SpeechCollator:
    """Follows `collator.py`: names, padded sounds, their lengths, padded texts, their lengths."""

    def __call__(self, batch):
        sounds, texts = (
            [row["feat"] for row in batch],
            [np.array(row["text"]) for row in batch],
        )
        lengths = [
            np.array([len(row) for row in rows]) for rows in (sounds, texts)
        ]
        return (
            [row["utt"] for row in batch],
            pad_list(sounds, 0),
            lengths[0],
            pad_list(texts, -1),
            lengths[1],
        )


class TransformDataset(paddle.io.Dataset):
    """Follows `dataset.py`: each item is a batch, of as many rows as its lengths allow."""

    def __init__(self, cuts=((0, 4), (4, 8), (8, 10), (10, 12), (12, 14))):
        self.batches = [
            [Manifest()[row] for row in range(*cut)] for cut in cuts
        ]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return SpeechCollator()(self.batches[index])


class BatchDataLoader:
    """Follows `dataloader.py`: a reader that is no DataLoader, whose batches are one item each."""

    def __init__(self, distributed=False):
        data = (
            TransformDataset(((0, 4), (4, 6), (6, 10), (10, 14)))
            if distributed
            else TransformDataset()
        )
        kind = DistributedBatchSampler if distributed else BatchSampler
        sampler = kind(dataset=data, batch_size=1, shuffle=not distributed)
        self.dataloader = DataLoader(
            data, batch_sampler=sampler, collate_fn=lambda batch: batch[0]
        )

    def __len__(self):
        return len(self.dataloader)

    def __iter__(self):
        return iter(self.dataloader)

    def __call__(self):
        return iter(self)
