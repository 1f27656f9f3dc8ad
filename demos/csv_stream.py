"""Read two CSV files as a stream: parsed, shuffled and cut into parts, by 4 workers in each of 2 processes.

    python -m paddle.distributed.launch --nproc_per_node 2 demos/csv_stream.py

Ten epochs, each with an order of its own. Every rank asserts that an epoch delivers each row of both files exactly
once, that all ranks make the same number of steps, that another epoch is another order and that the same epoch of
another loader is the same one.
"""

import csv
import itertools
import tempfile
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard import Stream

EPOCHS, BATCH_SIZE, WORKERS, ROWS = 10, 16, 4, (700, 324)


def write_files(folder):
    """Two files of unequal length: a number and its square."""
    rows = iter(range(sum(ROWS)))
    for number, length in enumerate(ROWS):
        with open(folder / f"part{number}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["number", "square"])
            writer.writerows([i, i * i] for i in itertools.islice(rows, length))
    return sorted(folder.glob("*.csv"))


def parse(row):
    return np.array([float(row["number"])], "float32"), np.array(
        [float(row["square"])], "float32"
    )


def rows_of(files):
    """Open the files one after the other: what torchdata's FileOpener and parse_csv do."""
    for name in files:
        with open(name, newline="") as file:
            yield from csv.DictReader(file)


def streams(files):
    """Two ways to the same end."""
    # As torchdata's users know it: every worker parses all rows, shuffles them alike, and keeps its share.
    yield (
        "sharding_filter",
        Stream.of(lambda: rows_of(files))
        .shuffle(512)
        .sharding_filter()
        .map(parse),
    )
    # The files are counted and cut in the middle: every row is read by one worker only.
    yield "files", Stream.csv(files).shuffle(128).map(parse)


def make(stream, mesh):
    loader = paddle.io.DataLoader(
        stream, batch_size=BATCH_SIZE, num_workers=WORKERS
    )
    return paddle_shard.shard_dataloader(loader, mesh, shard_dims="dp", seed=5)


def numbers(loader):
    """The numbers that all ranks together get in an epoch, batch by batch."""
    batches, found = iter(loader), []
    for number, square in batches:
        assert bool((number._local_value() ** 2 == square._local_value()).all())
        found.append(
            paddle_shard.gather_valid(number, batches.valid)
            .flatten()
            .astype("int64")
            .tolist()
        )
    return found


def main():
    dist.init_parallel_env()
    mesh = dist.ProcessMesh(np.arange(dist.get_world_size()), dim_names=["dp"])
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder))
        for name, stream in streams(files):
            loader = make(stream, mesh)
            epochs = [numbers(loader) for _ in range(EPOCHS)]
            for epoch in epochs:
                assert sorted(itertools.chain(*epoch)) == list(
                    range(sum(ROWS))
                ), "each row exactly once"
            assert len({str(epoch) for epoch in epochs}) == EPOCHS, (
                "each epoch has an order of its own"
            )
            again = make(stream, mesh)
            again.set_epoch(3)
            assert numbers(again) == epochs[3], (
                "the same seed and epoch is the same order"
            )
            if dist.get_rank() == 0:
                print(
                    f"{name}: {EPOCHS} epochs of {len(epochs[0])} steps, {dist.get_world_size()} ranks x {WORKERS} "
                    f"workers: each of {sum(ROWS)} rows exactly once; "
                    f"first batches begin {[epoch[0][:3] for epoch in epochs[:3]]}"
                )
        dist.barrier()


if __name__ == "__main__":
    main()
