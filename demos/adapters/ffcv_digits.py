"""An FFCV file, read by two data ranks.

    python launch/local.py --processes 2 demos/adapters/ffcv_digits.py

Asserts that each image is read once, that the ranks make equal steps, and that a stopped run goes on exactly.
"""

import tempfile

import numpy as np
import paddle.distributed as dist
from ffcv.fields import IntField, NDArrayField
from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
from ffcv.writer import DatasetWriter
from ffcv_recipe import ffcv_loader
from training import BATCH_SIZE, digits, train, written_once

FIELDS = {
    "image": NDArrayField(np.dtype("float32"), (64,)),
    "label": IntField(),
    "id": IntField(),
}
PIPELINES = {
    "image": [NDArrayDecoder()],
    "label": [IntDecoder()],
    "id": [IntDecoder()],
}


class Digits:
    def __init__(self):
        self.images, self.labels = digits()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index]), index


def write(path):
    DatasetWriter(path, FIELDS, num_workers=1).from_indexed_dataset(Digits())
    return path


if __name__ == "__main__":
    dist.init_parallel_env()
    with tempfile.TemporaryDirectory() as own:
        path = written_once(lambda: write(f"{own}/digits.beton"))
        train(
            "ffcv",
            lambda: ffcv_loader(
                path, batch_size=BATCH_SIZE, shuffle=True, pipelines=PIPELINES
            ),
        )
