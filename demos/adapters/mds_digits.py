"""MosaicML's StreamingDataset, read by two data ranks; its shards are downloaded from a "remote" folder.

    python launch/local.py --processes 2 demos/adapters/mds_digits.py

Asserts that each image is read once, that the ranks make equal steps, and that a stopped run goes on exactly.
"""

import tempfile

import numpy as np
import paddle.distributed as dist
from mds_recipe import import_streaming, mds_stream
from training import BATCH_SIZE, digits, train, written_once


def write(folder):
    """The digits in shards of 64 KiB, packed."""
    columns = {"image": "ndarray", "label": "int", "id": "int"}
    with import_streaming().MDSWriter(
        out=folder, columns=columns, compression="zstd", size_limit=1 << 16
    ) as out:
        for number, (image, label) in enumerate(zip(*digits(), strict=True)):
            out.write({"image": image, "label": int(label), "id": number})
    return folder


def as_tuple(sample):
    return sample["image"], np.int64(sample["label"]), np.int64(sample["id"])


def make_source(folder):
    return mds_stream(
        remote=f"{folder}/remote",
        local=f"{folder}/cache",
        batch_size=BATCH_SIZE,
        shuffle=True,
        transform=as_tuple,
    )


if __name__ == "__main__":
    dist.init_parallel_env()
    with tempfile.TemporaryDirectory() as own:
        folder = written_once(
            lambda: write(f"{own}/remote").removesuffix("/remote")
        )
        train("mds", lambda: make_source(folder))
