"""What PaddleNLP and PaddleFormers give to a loader and look at, retyped small from the files that are named."""

import numpy as np
import paddle


class ConsumedSamples(paddle.io.BatchSampler):
    """Follows `paddlenlp/utils/batch_sampler.py`: not Paddle's sampler, and it begins behind what was consumed."""

    def __init__(self, dataset, batch_size, num_replicas, rank):
        self.dataset, self.batch_size, self.nranks, self.local_rank = (
            dataset,
            batch_size,
            num_replicas,
            rank,
        )
        self.shuffle, self.drop_last, self._acc_steps = True, False, 1
        self.set_epoch(0)

    def set_epoch(self, epoch=0, consumed_samples=0):
        self.epoch, self.consumed_samples = epoch, consumed_samples

    def __len__(self):
        return -(-len(self.dataset) // (self.nranks * self.batch_size))

    def __iter__(self):
        order = (
            np.random.RandomState(self.epoch)
            .permutation(len(self.dataset))
            .tolist()
        )
        mine = order[self.consumed_samples + self.local_rank :: self.nranks]
        for first in range(0, len(mine), self.batch_size):
            yield mine[first : first + self.batch_size]


class LeftoversToAll(paddle.io.BatchSampler):
    """Follows `DistributedBatchSampler` of 3.0.0b4: each rank gets all rows of a last global batch that is short."""

    __module__ = "paddlenlp.utils.batch_sampler"

    def __init__(self, dataset, batch_size, num_replicas, rank):
        self.dataset, self.batch_size = dataset, batch_size
        self.nranks, self.local_rank = num_replicas, rank
        self.shuffle, self.drop_last = False, False
        self.set_epoch()

    def set_epoch(self, epoch=0, consumed_samples=0):
        self.epoch, self.consumed_samples = epoch, consumed_samples

    def __len__(self):
        num_rows = len(self.dataset) // self.nranks
        return -(-num_rows // self.batch_size)

    def __iter__(self):
        num_rows = len(self.dataset) // self.nranks * self.nranks
        global_size = self.batch_size * self.nranks
        for first in range(self.consumed_samples, num_rows, global_size):
            rows = list(range(first, min(first + global_size, num_rows)))
            if len(rows) == global_size:
                rows = rows[self.local_rank * self.batch_size :][
                    : self.batch_size
                ]
            yield rows


LeftoversToAll.__name__ = "DistributedBatchSampler"


class MappingSampler(paddle.io.DistributedBatchSampler):
    """Follows `MappingDistributedBatchSampler` in `paddleformers/utils/batch_sampler.py`: of Paddle's class."""

    consumed_samples = 0

    def set_epoch(self, epoch=0, consumed_samples=0):
        self.epoch, self.consumed_samples = epoch, consumed_samples

    def __iter__(self):
        paddle.seed(self.epoch)
        order = paddle.randperm(len(self.dataset)).tolist()
        mine = order[self.consumed_samples + self.local_rank :: self.nranks]
        for first in range(0, len(mine), self.batch_size):
            yield mine[first : first + self.batch_size]


def dpo_collate(batch, max_seq_len=16):
    """Follows `collate_fn` in `paddleformers/datasets/dpo.py`, with offsets that count inside the row.

    A sample is a row of packed pairs of answers, each (number, start, begin of the rejected answer, end).
    """
    found = {"input_ids": [], "response_indexs": []}
    for place, pairs in enumerate(batch):
        ids, before = [], 0
        for number, start, rejected, end in pairs:
            found["response_indexs"].append(
                [place, before + start, before + rejected, before + end]
            )
            ids += [number] * end
            before += end
        found["input_ids"].append(ids + [0] * (max_seq_len - len(ids)))
    return {key: np.array(value) for key, value in found.items()}


def resumed(
    given, dist_loader, sampler_class, steps_trained, steps_per_epoch, epochs
):
    """Yield the batches on which `auto_trainer.py` trains that resumes: the loop of its `_inner_training_loop`."""
    skip = steps_trained % steps_per_epoch
    train_dataloader = dist_loader()
    for epoch in range(steps_trained // steps_per_epoch, epochs):
        for inputs in train_dataloader:
            looked_at = train_dataloader._dataloader
            knows = isinstance(looked_at, paddle.io.DataLoader) and isinstance(
                looked_at.batch_sampler, sampler_class
            )
            if not knows and skip > 0:
                skip -= 1
                continue
            yield epoch, inputs
