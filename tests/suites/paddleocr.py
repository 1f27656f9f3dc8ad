"""Data and batches as PaddleOCR makes them, retyped small from `ppocr/data/simple_dataset.py` and `collate_fn.py`."""

from collections import defaultdict

import numpy as np
import paddle


class SimpleDataSet(paddle.io.Dataset):
    """Lines, of which some cannot be read: a line that is drawn stands in for one, as far as it can be read."""

    def __init__(self, bad=(5, 6, 11)):
        self.bad = bad

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index in self.bad:
            return self[np.random.randint(len(self))]
        return {"image": np.full((2,), index), "label": index, "img_path": f"{index}.png"}


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
        return [np.concatenate(field, axis=0) for field in zip(*batch, strict=True)]
