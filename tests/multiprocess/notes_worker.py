"""What a rank cannot see of another's rows: that they have another shape, and that they could not be read."""

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import BatchStructureError
from paddle_shard.testing import report

dist.init_parallel_env()
ME = dist.get_rank()
DP = dist.ProcessMesh([0, 1], dim_names=["dp"])
MP = dist.ProcessMesh([0, 1], dim_names=["mp"])


def lengths(i):
    """From the third global batch of 4 on, the rows of data rank 1 are longer; inside a rank all are alike."""
    return np.full(3 + 2 * (i >= 8 and i % 4 >= 2), i, "float32")


def flaky(i):
    """A server that fails one rank only."""
    if i in (5, 6 + ME):
        raise OSError(f"no {i} for global rank {ME}")
    return np.full(3, i, "float32")


class Rows(paddle.io.Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return self.make(index)


def loader(kind, make, mesh, workers, **options):
    data = Rows(make) if kind == "index" else Stream.of(range(16)).map(make)
    axis = "dp" if mesh is DP else None
    data = data.in_parts(2) if kind == "stream" and axis else data
    given = paddle.io.DataLoader(data, batch_size=4, num_workers=workers)
    return paddle_shard.shard_dataloader(
        given, mesh, shard_dims=axis, timeout=60, **options
    )


found = {}
for kind in ("index", "stream"):
    for workers in (0, 2):
        steps = 0
        try:
            for _ in loader(kind, lengths, DP, workers):
                steps += 1
            error = None
        except BatchStructureError as raised:
            error = str(raised)
        masks = []
        batches = iter(loader(kind, flaky, MP, workers, on_error="skip"))
        for batch in batches:
            mask = batches.valid._local_value().numpy().tolist()
            rows = batch._local_value().numpy()[:, 0].tolist()
            masks.append(
                [
                    (row if good else None)
                    for row, good in zip(rows, mask, strict=True)
                ]
            )
        found[f"{kind} {workers}"] = (steps, error, masks)


def of_pairs(samples):
    """As many rows of the second field on each rank, but for the second step of rank 1."""
    rows = 1 + (ME and samples[0] >= 4)
    return [
        paddle.to_tensor(np.array(samples)),
        paddle.to_tensor(np.zeros([rows, 2], "float32")),
    ]


given = paddle.io.DataLoader(
    Rows(lambda i: i), batch_size=4, collate_fn=of_pairs
)
try:
    steps = [
        list(batch[1].shape)
        for batch in paddle_shard.shard_dataloader(
            given, DP, shard_dims="dp", placements={1: "as read"}, timeout=60
        )
    ]
except BatchStructureError as raised:
    steps = str(raised)
found["own rows"] = steps
report(found)
dist.barrier()
