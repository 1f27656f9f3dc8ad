"""Two ranks in Paddle's auto-DP mode, as PaddleFormers 1.2.0 trains in it: `auto_dp_worker.py CASE...`."""

import sys

import numpy as np
import paddle.distributed as dist
from paddle.io import DataLoader, Dataset, IterableDataset

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import PaddleShardError
from paddle_shard.loader.compat import mend_process_mesh
from paddle_shard.testing import report

RANK = dist.get_rank()
MESH = dist.ProcessMesh([[0], [1]], dim_names=["dp", "mp"])
LENGTHS = [3, 1, 7, 2, 2, 2, 2, 2, 5, 4, 4, 4]


class Rows(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"ids": np.array([index])}


class Texts(Rows):
    """Rows of several lengths."""

    def __getitem__(self, index):
        return {"ids": np.full(LENGTHS[index], index)}


class Unindexed(IterableDataset):
    """A stream with a length, which Paddle's DataLoader asks for in this mode."""

    def __init__(self, rows=range(12)):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return ({"ids": np.array([row])} for row in self.rows)


class OfThisRank(Unindexed):
    """A stream that each rank splits itself; it may say so."""

    def __init__(self, says=True):
        super().__init__()
        if says:
            self.is_dataset_splitted = True

    def __iter__(self):
        return ({"ids": np.array([row])} for row in self.rows[RANK::2])


def padded(samples):
    longest = max(len(sample["ids"]) for sample in samples)
    rows = [
        np.pad(
            sample["ids"], (0, longest - len(sample["ids"])), constant_values=-1
        )
        for sample in samples
    ]
    return {
        "ids": np.stack(rows),
        "documents": np.concatenate([sample["ids"] for sample in samples]),
    }


def read(given, mesh=MESH, **options):
    """[ids, documents, valid, all real rows] of each step, and the error, if there is one."""
    steps, error = [], ""
    try:
        batches = iter(paddle_shard.shard_dataloader(given(), mesh, **options))
        for batch in batches:
            here = [batch[key]._local_value().numpy().tolist() for key in batch]
            valid, first = batches.valid, batch["ids"]._local_value()[:, 0]
            real = paddle_shard.gather_valid(first, valid)
            again = (
                paddle_shard.gather_valid(batch["ids"], valid)
                if len(here) == 1
                else None
            )
            assert again is None or again[:, 0].tolist() == real.tolist()
            assert [str(one) for one in batch["ids"].placements] == [
                "Replicate()"
            ] * len(batch["ids"].placements)
            steps.append(
                [
                    *here,
                    valid._local_value().numpy().tolist(),
                    real.numpy().tolist(),
                ]
            )
    except (PaddleShardError, TypeError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"steps": steps, "error": error}


def ragged():
    """What is said where values of several lengths are to be gathered."""
    batches = iter(
        paddle_shard.shard_dataloader(
            loader(Texts(), collate_fn=padded)(), MESH
        )
    )
    try:
        paddle_shard.gather_valid(next(batches)["ids"], batches.valid)
    except PaddleShardError as error:
        return str(error)


def loader(data, size=4, **settings):
    return lambda: DataLoader(data, batch_size=size, **settings)


CASES = {
    "rows": lambda: read(
        loader(Rows()), shard_dims="dp", is_dataset_splitted=True
    ),
    "rows, no axis": lambda: read(loader(Rows())),
    "rows, another name": lambda: read(
        loader(Rows()), dist.ProcessMesh([0, 1], dim_names=["x"])
    ),
    "rows, no data axis": lambda: read(
        loader(Rows()), dist.ProcessMesh([[0], [1]], dim_names=["x", "mp"])
    ),
    "stream": lambda: read(loader(Unindexed())),
    "stream, axis": lambda: read(loader(Unindexed()), shard_dims="dp"),
    "stream of this rank": lambda: read(loader(OfThisRank())),
    "stream of this rank, unsaid": lambda: read(loader(OfThisRank(says=False))),
    "batches": lambda: read(
        lambda: Stream.of(lambda: iter(Unindexed())).batch(4)
    ),
    "no length": lambda: read(
        lambda: DataLoader(Stream.of(lambda: iter(Unindexed())), batch_size=4)
    ),
    "texts": lambda: read(loader(Texts(), collate_fn=padded)),
    "texts, gathered": ragged,
    "texts, stream": lambda: read(loader(Unindexed(), collate_fn=padded)),
}


if __name__ == "__main__":
    # the mode's DataLoader needs it before a loader of ours is made
    mend_process_mesh()
    dist.enable_auto_dp()
    dist.init_parallel_env()
    report({name: CASES[name]() for name in sys.argv[1:]})
