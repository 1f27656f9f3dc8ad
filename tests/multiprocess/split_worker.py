"""Loaders that are said to be split: what each rank of dp x mp makes of them; a case of `loader_worker.py`."""

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard


class Numbers(paddle.io.Dataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return np.array(self.numbers[index])


class Augmented(Numbers):
    def __getitem__(self, index):
        return self.numbers[index] + np.random.rand(2)


class Lists(Numbers):
    """Reads a whole list of indices at once, as PaddleScience's data sets."""

    def __getitem__(self, indices):
        return np.array([self.numbers[index] for index in indices])


def lists(length):
    """Arguments of a DataLoader whose sampler's items are lists, shuffled."""
    inner = paddle.io.BatchSampler(
        Numbers(range(length)), shuffle=True, batch_size=2
    )
    outer = paddle.io.BatchSampler(sampler=inner, batch_size=1)
    return {"batch_sampler": outer, "collate_fn": lambda batch: batch[0]}


class OfRank0(paddle.io.Sampler):
    """What a DistributedSampler yields whose rank was forgotten."""

    def __iter__(self):
        return iter(range(0, 8, 2))

    def __len__(self):
        return 4


def outcome(numbers, kind=Numbers, given=None, shape=(2, 2), **sampler):
    mesh = dist.ProcessMesh(np.arange(4).reshape(shape), dim_names=["dp", "mp"])
    data = kind(numbers)
    try:
        if given is not None:
            given = paddle.io.DataLoader(data, **given)
        elif sampler:
            given = paddle.io.DataLoader(
                data,
                batch_sampler=paddle.io.DistributedBatchSampler(
                    data, 2, **sampler
                ),
            )
        else:
            given = paddle.io.DataLoader(data, batch_size=2)
        loader = paddle_shard.shard_dataloader(
            given, mesh, shard_dims="dp", is_dataset_splitted=True
        )
        return [
            [batch.shape[0], batch._local_value().numpy().tolist()]
            for batch in loader
        ]
    except (
        paddle_shard.errors.SplitError,
        paddle_shard.errors.BatchStructureError,
    ) as error:
        return str(error)


def outcomes():
    rank = dist.get_rank()
    data_rank = rank // 2
    return {
        "not split": outcome(range(8)),
        "not split, shuffled": outcome(
            range(8), given={"batch_size": 2, "shuffle": True}
        ),
        "not split, augmented": outcome(range(8), Augmented),
        "not split, both": outcome(
            range(8), Augmented, given={"batch_size": 2, "shuffle": True}
        ),
        "not split, rank forgotten": outcome(
            range(8),
            Augmented,
            given={
                "batch_sampler": paddle.io.BatchSampler(
                    sampler=OfRank0(), batch_size=2
                )
            },
        ),
        "not split, lists": outcome(range(8), Lists, given=lists(8)),
        "not split, one row": outcome(range(8), given={"batch_size": 1}),
        "split, one row": outcome(
            range(8 * data_rank, 8 * data_rank + 8), given={"batch_size": 1}
        ),
        "all the same, one row": outcome([7] * 8, given={"batch_size": 1}),
        "split, lists": outcome(
            range(4 * data_rank, 4 * data_rank + 4), Lists, given=lists(4)
        ),
        "split": outcome(range(4 * data_rank, 4 * data_rank + 4)),
        "split by global rank": outcome(range(2 * rank, 2 * rank + 2)),
        "replicas of one data rank": outcome(
            range(2 * rank, 2 * rank + 2), shape=(1, 4)
        ),
        "the same replicas": outcome(range(4), shape=(1, 4)),
        "unequal": outcome(
            range(8 * data_rank, 8 * data_rank + 8 - 4 * data_rank)
        ),
        "short last": outcome(
            range(100 * data_rank, 100 * data_rank + 3 + data_rank)
        ),
        "all the same": outcome([7] * 4),
        "sampler": outcome(range(8), num_replicas=2, rank=data_rank),
        "sampler of the world": outcome(range(8), num_replicas=4, rank=rank),
    }
