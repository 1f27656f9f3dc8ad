"""What the training waits for, in VisualDL: two data ranks train on digits, and the first one logs its statistics.

    python launch/local.py --processes 2 demos/adapters/visualdl_digits.py
    visualdl --logdir log/visualdl

The data set is slow on purpose, for half of the first epoch. Asserts that the curves show it.
"""

import os
import shutil
import time

import paddle
import paddle.distributed as dist
from training import MESH, digits
from visualdl import LogReader, LogWriter

import paddle_shard

FOLDER = os.path.join("log", "visualdl")
EVERY, SLOW_STEPS, STEPS = 4, 28, 57


class Digits(paddle.io.Dataset):
    def __init__(self):
        self.images, self.labels = digits()
        self.pause = 0.002

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        time.sleep(self.pause)
        return self.images[index], self.labels[index]


def main():
    dist.init_parallel_env()
    first, dataset = dist.get_rank() == 0, Digits()
    if first:
        shutil.rmtree(FOLDER, ignore_errors=True)
    given = paddle.io.DataLoader(dataset, batch_size=32, shuffle=True)
    loader = paddle_shard.shard_dataloader(
        given, MESH, shard_dims="dp", prefetch=0
    )
    model = paddle.nn.Linear(64, 10)
    dist.shard_layer(model, MESH, lambda name, layer, mesh: None)
    optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
    writer = LogWriter(logdir=FOLDER) if first else None
    for step, (images, labels) in enumerate(loader, 1):
        loss = paddle.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if step == SLOW_STEPS:
            dataset.pause = 0.0
        if step % EVERY:
            continue
        mean = float(loss)  # on all ranks: it is summed over them
        if first:
            writer.add_scalar("train/loss", mean, step)
            for name, value in loader.stats.scalars().items():
                writer.add_scalar(name, value, step)
    advice = str(loader.stats)
    if first:
        writer.close()
        check(loader, advice)


def check(loader, advice):
    """Read the log as VisualDL's page does."""
    [file] = [
        name for name in os.listdir(FOLDER) if name.startswith("vdlrecords")
    ]
    reader = LogReader(file_path=os.path.join(FOLDER, file))
    tags = reader.get_tags()["scalar"]
    assert {"train/loss", *loader.stats.scalars()} == set(tags), tags
    points = {
        record.id: record.value
        for record in reader.get_data("scalar", "data/wait_seconds")
    }
    assert list(points) == list(range(EVERY, STEPS, EVERY))
    slow, quick = (
        points[SLOW_STEPS] - points[EVERY],
        points[STEPS - 1] - points[SLOW_STEPS + EVERY],
    )
    assert slow > 5 * quick, (slow, quick)
    print(
        f"the loop waited {slow:.2f} s while the data set was slow, and {quick:.3f} s later: {len(tags)} curves"
    )
    print(advice)


if __name__ == "__main__":
    main()
