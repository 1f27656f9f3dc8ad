"""Read Parquet files as a stream: two columns of three, cut in the middle of row groups, by 2 workers in each process.

    python -m paddle.distributed.launch --nproc_per_node 2 demos/sources/parquet.py

Needs `pip install 'paddle_shard[parquet]'`. Every rank asserts that each row of all files is delivered exactly once an
epoch, that less than one batch is padding, and that a run that stops after 5 steps goes on as if it had
not.
"""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import pyarrow as pa
import pyarrow.parquet as pq

import paddle_shard
from paddle_shard import Stream

BATCH_SIZE, WORKERS, ROWS = 16, 2, (300, 41, 170)


def write_files(folder):
    """Three files of unequal length, in row groups of up to 64 rows: an id, a vector, and a text that is not read."""
    first = 0
    for number, length in enumerate(ROWS):
        ids = np.arange(first, first := first + length)
        vectors = pa.FixedSizeListArray.from_arrays(
            np.repeat(ids, 4).astype("float32"), 4
        )
        table = pa.table(
            {"id": ids, "vector": vectors, "text": [f"row {i}" for i in ids]}
        )
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=64)
    return sorted(folder.glob("*.parquet"))


def make(files, mesh):
    stream = Stream.parquet(files, columns=["id", "vector"]).shuffle(64)
    loader = paddle.io.DataLoader(
        stream, batch_size=BATCH_SIZE, num_workers=WORKERS
    )
    return paddle_shard.shard_dataloader(loader, mesh, shard_dims="dp", seed=5)


def ids_of(loader, steps=None):
    """The ids that all ranks together get, batch by batch, and the rows of padding."""
    batches, found, padding = iter(loader), [], 0
    for batch in itertools.islice(batches, steps):
        ids, vectors = (
            paddle_shard.gather_valid(batch[key], batches.valid).numpy()
            for key in ("id", "vector")
        )
        assert vectors.shape == (len(ids), 4)
        assert (vectors == ids[:, None]).all()
        found.append(ids.tolist())
        padding += batch["id"].shape[0] - len(ids)
    return found, padding


def main():
    dist.init_parallel_env()
    mesh = dist.ProcessMesh(np.arange(dist.get_world_size()), dim_names=["dp"])
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder))
        loader = make(files, mesh)
        (epoch, padding), (second, _) = ids_of(loader), ids_of(loader)
        for found in (epoch, second):
            assert sorted(itertools.chain(*found)) == list(range(sum(ROWS))), (
                "each row exactly once"
            )
        assert epoch != second, "each epoch has an order of its own"
        assert padding < BATCH_SIZE, "parts differ by one row at most"

        stopped = make(files, mesh)
        begun, _ = ids_of(stopped, 5)
        resumed = make(files, mesh)
        resumed.load_state_dict(stopped.state_dict())
        assert begun + ids_of(resumed)[0] == epoch, "resumed equals straight"
        if dist.get_rank() == 0:
            print(
                f"parquet: {len(epoch)} steps of {BATCH_SIZE} rows from {len(files)} files, {dist.get_world_size()} "
                f"ranks x {WORKERS} workers: each of {sum(ROWS)} rows exactly once, {padding} of padding, resumed at 5"
            )
        dist.barrier()


if __name__ == "__main__":
    main()
