"""A mixture on four ranks: weights that change, a stop, and a resume on another mesh with more of the schedule."""

import json

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.io import DataLoader

import paddle_shard
from paddle_shard import Mixture
from paddle_shard.testing import report

LENGTHS = {"web": 40, "code": 11, "chat": 3}


class Numbers(paddle.io.Dataset):
    def __init__(self, first, length):
        self.first, self.length = first, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return np.array([self.first + index, np.random.rand()])


WEIGHTS = [(0, {"web": 5, "code": 3, "chat": 1}), (48, {"web": 1, "chat": 1})]
LATER = (112, {"code": 1})


def mixture(weights):
    sources = {
        name: Numbers(1000 * place, length)
        for place, (name, length) in enumerate(LENGTHS.items())
    }
    return Mixture(sources, weights, num_samples=144)


def loader_of(mesh, batch_size=8, workers=2, weights=WEIGHTS):
    given = DataLoader(
        mixture(weights),
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
    )
    return paddle_shard.shard_dataloader(given, mesh, shard_dims="dp", seed=5)


def rows(batch):
    return batch._local_value().numpy().tolist()


if __name__ == "__main__":
    dist.init_parallel_env()
    rank = dist.get_rank()
    grid = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["mp", "dp"])
    loader, found = loader_of(grid), {"steps": []}
    batches = iter(loader)
    for step, batch in enumerate(batches):
        found["steps"].append(rows(batch))
        if step == 8:
            break
    state = json.loads(json.dumps(loader.state_dict()))
    found["drawn"] = {
        name: drawn.drawn for name, drawn in loader.sources().items()
    }
    found["rest"] = [rows(batch) for batch in batches]
    line = dist.ProcessMesh([3, 1, 2, 0], dim_names=["dp"])
    again = loader_of(line, batch_size=4, workers=0, weights=[*WEIGHTS, LATER])
    again.load_state_dict(state)
    found["resumed"] = [rows(batch) for batch in again]
    found["exact"] = bool(again.certificate().exact)
    report(found)
    dist.barrier()
