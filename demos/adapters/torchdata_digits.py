"""torchdata's StatefulDataLoader, read by two data ranks.

    python launch/local.py --processes 2 demos/adapters/torchdata_digits.py

Asserts that each image is read once, that the ranks make equal steps, and that a stopped run goes on exactly.
"""

import paddle.distributed as dist
from torchdata_recipe import stateful_dataloader
from training import BATCH_SIZE, digits, train


class Digits:
    def __init__(self):
        self.images, self.labels = digits()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index], index


if __name__ == "__main__":
    dist.init_parallel_env()
    train(
        "torchdata",
        lambda: stateful_dataloader(
            Digits(), batch_size=BATCH_SIZE, shuffle=True
        ),
    )
