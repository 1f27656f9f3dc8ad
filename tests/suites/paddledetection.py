"""Batches as PaddleDetection makes them, retyped small from `ppdet/data/reader.py` and its `batch_operators.py`."""

import numpy as np
import paddle


class Boxes(paddle.io.Dataset):
    """Images of several sizes with one to four boxes, as dicts; `sizes` are repeated."""

    def __init__(self, sizes=(6, 3, 5, 4), length=16):
        self.sizes, self.length = sizes, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        size = self.sizes[index % len(self.sizes)]
        boxes = np.full((1 + index % 4, 4), index, "float32")
        return {
            "image": np.full((size, size), index, "float32"),
            "gt_bbox": boxes,
            "h": size,
            "flipped": False,
        }


class ManyBoxes(Boxes):
    """Reads the samples of a batch at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class BatchCompose:
    """A collate function of steps that change the samples; it pops what the model does not need, then stacks."""

    def __init__(self, *steps, lists=False):
        self.steps, self.lists, self.calls = steps, lists, 0

    def __call__(self, samples):
        self.calls += 1
        for step in self.steps:
            samples = step(samples)
        for sample in samples:
            for key in ("h", "flipped"):
                if key in sample:
                    sample.pop(key)
        fields = {
            key: [sample[key] for sample in samples] for key in samples[0]
        }
        return {
            key: v if self.lists and key.startswith("gt_") else np.stack(v)
            for key, v in fields.items()
        }


class BatchRandomResize:
    """One size for all images of a batch, drawn from numpy's generator."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __call__(self, samples):
        size = np.random.choice(self.sizes)
        for sample in samples:
            sample["image"] = np.resize(sample["image"], (size, size))
        return samples


class PadBatch:
    """Pads images to the largest, up to a stride; and boxes to the most, with -1, if asked."""

    def __init__(self, stride=1, boxes=False):
        self.stride, self.boxes = stride, boxes

    def __call__(self, samples):
        largest = max(len(sample["image"]) for sample in samples)
        largest = -(-largest // self.stride) * self.stride
        most = max(len(sample["gt_bbox"]) for sample in samples)
        for sample in samples:
            missing = largest - len(sample["image"])
            sample["image"] = np.pad(sample["image"], (0, missing))
            if self.boxes:
                behind = most - len(sample["gt_bbox"])
                sample["gt_bbox"] = np.pad(
                    sample["gt_bbox"], ((0, behind), (0, 0)), constant_values=-1
                )
        return samples
