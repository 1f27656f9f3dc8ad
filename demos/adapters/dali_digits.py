"""An NVIDIA DALI pipeline on the CPU, read by two data ranks.

    python launch/local.py --processes 2 demos/adapters/dali_digits.py

Asserts that each image is read once, that the ranks make equal steps, and that a stopped run goes on exactly,
DALI's random noise included.
"""

import tempfile

import numpy as np
import paddle.distributed as dist
from dali_recipe import dali_pipeline
from nvidia.dali import fn, pipeline_def
from training import BATCH_SIZE, digits, train, written_once


def write(folder):
    """A .npy file for each image, of which the last two numbers are the label and the id."""
    for number, (image, label) in enumerate(zip(*digits(), strict=True)):
        np.save(
            f"{folder}/{number:04}.npy",
            np.concatenate([image, [label, number]]).astype("float32"),
        )
    return folder


@pipeline_def
def noisy_digits(shard_id, num_shards, folder):
    row = fn.readers.numpy(
        file_root=folder,
        file_filter="*.npy",
        shard_id=shard_id,
        num_shards=num_shards,
        random_shuffle=True,
    )
    image = row[:64] + fn.random.normal(stddev=0.02, shape=[64])
    return (
        image,
        fn.cast_like(row[64], np.int64(0)),
        fn.cast_like(row[65], np.int64(0)),
    )


if __name__ == "__main__":
    dist.init_parallel_env()
    with tempfile.TemporaryDirectory() as own:
        folder = written_once(lambda: write(own))
        options = {"num_threads": 1, "device_id": None, "folder": folder}
        train(
            "dali",
            lambda: dali_pipeline(
                noisy_digits, batch_size=BATCH_SIZE, **options
            ),
        )
