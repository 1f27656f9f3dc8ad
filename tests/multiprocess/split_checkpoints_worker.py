"""Reads data that is split already for some steps, and saves or loads where it stands: usage FOLDER STEPS."""

import sys

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.errors import PaddleShardError
from paddle_shard.testing import report

folder, steps = sys.argv[1], int(sys.argv[2])
dist.init_parallel_env()
RANK, RANKS = dist.get_rank(), dist.get_world_size()
MESH = dist.ProcessMesh(list(range(RANKS)), dim_names=["dp"])


class Numbers(paddle.io.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return np.array(index)


class OfRank(paddle.io.BatchSampler):
    """Draws for its rank alone, in an order of its own, and has a state: where it stands, and what it has drawn."""

    def __init__(self):
        self.batch_size, self.rest = (
            2,
            np.random.default_rng(RANK)
            .permutation(range(RANK, 48, RANKS))
            .tolist(),
        )

    def __iter__(self):
        while self.rest:
            batch, self.rest = self.rest[:2], self.rest[2:]
            yield batch

    def __len__(self):
        return 48 // RANKS // 2

    def state_dict(self):
        return {"rest": list(self.rest)}

    def load_state_dict(self, state):
        self.rest = list(state["rest"])


class Library:
    """Batches of the rank's own, with a state."""

    def __init__(self, share):
        self.batches = np.arange(share.shard, 48, share.num_shards).reshape(
            -1, 2
        )
        self.at = share.state or 0

    def __iter__(self):
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]


loaders = {
    "sampler": paddle_shard.shard_dataloader(
        paddle.io.DataLoader(Numbers(), batch_sampler=OfRank()),
        MESH,
        shard_dims="dp",
        is_dataset_splitted=True,
    ),
    "library": paddle_shard.shard_dataloader(
        paddle_shard.ExternalLoader(
            Library, name="library", save=lambda library: library.at
        ),
        MESH,
        shard_dims="dp",
    ),
}
checkpoints = paddle_shard.Checkpoints(folder)
found = {"error": ""}
try:
    found["step"] = checkpoints.load(**loaders)
    for name, loader in loaders.items():
        rows = []
        for number, batch in enumerate(loader, 1):
            rows += batch._local_value().numpy().tolist()
            if number == steps:
                break
        found[name] = rows
    checkpoints.save(steps, **loaders)
except PaddleShardError as error:
    found["error"] = f"{type(error).__name__}: {error}"
report(found)
dist.barrier()
