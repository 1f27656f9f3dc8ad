"""Data and batches as PaddleOCR makes them, retyped small from files of `ppocr/data`."""

import random
from collections import defaultdict

import numpy as np
import paddle
import paddle.distributed as dist


class SimpleDataSet(paddle.io.Dataset):
    """Follows `simple_dataset.py`: a line that is drawn stands in for one that cannot be read, if it can be read."""

    def __init__(self, bad=(5, 6, 11)):
        self.bad = bad

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index in self.bad:
            return self[np.random.randint(len(self))]
        return {
            "image": np.full((2,), index),
            "label": index,
            "img_path": f"{index}.png",
        }


class Rotations(paddle.io.Dataset):
    """Each sample is an image in four rotations, and their labels."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return np.full((4, 3), index, "float32"), np.arange(4)


class DictCollator:
    """Makes tensors of numbers and arrays, and leaves lists of others, in a defaultdict."""

    def __call__(self, batch):
        found = defaultdict(list)
        for sample in batch:
            for key, value in sample.items():
                found[key].append(value)
        for key in ("image", "label"):
            found[key] = paddle.to_tensor(np.array(found[key]))
        return found


class SSLRotateCollate:
    """Four rows for each sample."""

    def __call__(self, batch):
        return [
            np.concatenate(field, axis=0) for field in zip(*batch, strict=True)
        ]


class MultiScaleDataSet(paddle.io.Dataset):
    """Follows `simple_dataset.py`: its indices are (width, height, row, ratio)."""

    def __len__(self):
        return 48

    def __getitem__(self, properties):
        width, height, row, _ = properties
        return np.full((height, width), row), row


class MultiScaleSampler(paddle.io.Sampler):
    """Follows `multi_scale_sampler.py`: batches of this rank, of several widths, whose list it shuffles.

    So the order of an epoch depends on the orders of the epochs before it.
    """

    def __init__(
        self, data_source, first_bs=4, scales=((4, 2), (6, 2), (8, 2))
    ):
        self.data_source, self.epoch = data_source, 0
        self.rank, self.num_replicas = dist.get_rank(), dist.get_world_size()
        rows, sizes = list(range(len(data_source))), list(scales)
        random.seed(self.epoch)
        random.shuffle(rows)
        mine = rows[self.rank :: self.num_replicas]
        cuts = [
            mine[first : first + first_bs]
            for first in range(0, len(mine), first_bs)
        ]
        shapes = [sizes[number % len(sizes)] for number in range(len(cuts))]
        random.shuffle(shapes)
        self.batchs_in_one_epoch = [
            [(*shape, row, None) for row in cut]
            for shape, cut in zip(shapes, cuts, strict=True)
        ]
        self.batchs_in_one_epoch_id = list(range(len(self.batchs_in_one_epoch)))

    def __iter__(self):
        random.seed(self.epoch)
        self.epoch += 1
        random.shuffle(self.batchs_in_one_epoch_id)
        for number in self.batchs_in_one_epoch_id:
            yield self.batchs_in_one_epoch[number]

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.batchs_in_one_epoch)
