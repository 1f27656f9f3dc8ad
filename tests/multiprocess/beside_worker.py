"""Which thread reads, on one of two ranks, for data sets that draw nothing and for those that do?"""

import threading
import time

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard.testing import report

dist.init_parallel_env()
MESH = dist.ProcessMesh([0, 1], dim_names=["dp"])


class Rows(paddle.io.Dataset):
    def __init__(self, draws):
        self.draws, self.readers = draws, []

    def __len__(self):
        return 96

    def __getitem__(self, index):
        self.readers.append(threading.current_thread().name)
        return np.array([index, np.random.rand() if self.draws else 0.5])


class AtOnce(Rows):
    def __getitems__(self, ids):
        return [self[index] for index in ids]


def threads(kind, draws, **options):
    data = kind(draws)
    mixed = options.pop("mixed", False)
    given = (
        paddle_shard.Mixture(
            {"one": data, "other": kind(draws)}, weights={"one": 1, "other": 1}
        )
        if mixed
        else data
    )
    loader = paddle.io.DataLoader(
        given, batch_size=8, collate_fn=options.pop("collate_fn", None)
    )
    for _ in paddle_shard.shard_dataloader(
        loader, MESH, shard_dims="dp", prefetch=2, **options
    ):
        time.sleep(2e-3)  # a loop that only takes batches reads them by itself
    # the first batches show whether it draws
    return sorted(set(data.readers[len(data.readers) // 2 :]))


cases = {
    "plain": {},
    "collated": {"collate_fn": np.stack},
    "skipping": {"on_error": "skip"},
    "compared at every step": {"verify": 1},
    "not compared": {"verify": None},
    "mixed": {"mixed": True},
}
report(
    {
        f"{name}, {kind.__name__}, {'draws' if draws else 'draws nothing'}": threads(
            kind, draws, **case
        )
        for name, case in cases.items()
        for kind in (Rows, AtOnce)
        for draws in (False, True)
    }
)
dist.barrier()
