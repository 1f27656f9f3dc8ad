"""Shards that do not divide: who opens which, how many batches each rank makes, which tails work and which fail.

    python -m paddle.distributed.launch --nproc_per_node 2 demos/equal_steps.py
    python -m paddle.distributed.launch --nproc_per_node 4 demos/equal_steps.py --tail repeat --show-open --parts 4

Seven files of 3 to 20 lines are read by two workers in each process, without an index, so no rank knows how much the
others have. With each tail, all ranks make the same number of steps, though a collective in every step would hang if
one made fewer; and "error" fails on all of them at once. `--show-splits` shows the plan, `--show-open` every opening.
"""

import argparse
import itertools
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_shard
from paddle_shard import Stream

SIZES, BATCH_SIZE, WORKERS = (20, 3, 11, 7, 16, 5, 9), 8, 2
TAILS = ("pad", "drop", "repeat", "error")


class Parser:
    """Parses lines to numbers, and notes which worker reads the first line of a file, and so has opened it."""

    def __init__(self, folder):
        self.folder = folder
        first_lines = itertools.accumulate((0, *SIZES[:-1]))
        self.shards = {first: i for i, first in enumerate(first_lines)}

    def __call__(self, line):
        number = int(line)
        if number in self.shards:
            info = paddle.io.get_worker_info()
            worker = "-" if info is None else info.id
            with open(self.folder / "opened", "a") as notes:
                notes.write(
                    f"shard-{self.shards[number]} rank {dist.get_rank()} worker {worker}\n"
                )
        return number


def write_files(folder):
    numbers = iter(range(sum(SIZES)))
    for shard, size in enumerate(SIZES):
        (folder / f"shard-{shard}").write_text(
            "".join(f"{n}\n" for n in itertools.islice(numbers, size))
        )


def make_loader(folder, mesh, options, tail):
    paths = [folder / f"shard-{shard}" for shard in range(len(SIZES))]
    stream = Stream.lines(paths, counts=False, shuffle_shards=False)
    stream = stream.map(Parser(folder))
    if options.parts is not None:
        stream = stream.in_parts(options.parts)
    loader = paddle.io.DataLoader(
        stream, batch_size=BATCH_SIZE, num_workers=WORKERS
    )
    return paddle_shard.shard_dataloader(
        loader,
        mesh,
        shard_dims="dp",
        tail=tail,
        num_batches=options.num_batches,
    )


def run(loader):
    """What happens on all ranks: (steps, numbers delivered, or the name of the error)."""
    delivered, steps = [], 0
    batches = iter(loader)
    try:
        for numbers in batches:
            delivered += paddle_shard.gather_valid(
                numbers, batches.valid
            ).tolist()  # a collective in every step
            steps += 1
    except paddle_shard.errors.UnequalEndsError as error:
        return steps, type(error).__name__
    return steps, delivered


def check(tail, options, steps, delivered):
    """Assert what a tail promises, against the sizes of the files alone."""
    # the largest divisor of the batch that is at most the number of files
    parts = options.parts or 4
    # Shard i belongs to part i mod P; a step takes as many samples of each part.
    lengths = [sum(SIZES[part::parts]) for part in range(parts)]
    each = BATCH_SIZE // parts
    if options.num_batches is not None:
        assert steps == options.num_batches
    elif tail == "error":
        assert delivered == "UnequalEndsError"
        return f"UnequalEndsError on every rank, after {steps} steps"
    else:
        assert steps == (
            min(lengths) // each if tail == "drop" else -(-max(lengths) // each)
        )
    seen = Counter(delivered)
    missing, again = sum(SIZES) - len(seen), sum(seen.values()) - len(seen)
    if options.num_batches is None:
        assert missing == 0 or tail == "drop"
        assert again == 0 or tail == "repeat"
    return f"{steps} steps on every rank, {len(delivered)} samples: {missing} left out, {again} read again"


def show_opened(folder):
    for line, times in sorted(
        Counter((folder / "opened").read_text().splitlines()).items()
    ):
        print(f"      {line}: {times} x")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tail", choices=TAILS, help="only this one; all by default"
    )
    parser.add_argument("--num-batches", type=int, help="exactly so many steps")
    parser.add_argument(
        "--parts", type=int, help="into how many parts the files are dispatched"
    )
    parser.add_argument(
        "--show-splits",
        action="store_true",
        help="which part, rank and worker a file belongs to",
    )
    parser.add_argument(
        "--show-open",
        action="store_true",
        help="who opened which file, and how often",
    )
    options = parser.parse_args()
    dist.init_parallel_env()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = dist.ProcessMesh(np.arange(ranks), dim_names=["dp"])
    shared = [tempfile.mkdtemp() if rank == 0 else None]
    folder = Path(shared[0] or ".")
    if rank == 0:
        write_files(folder)
        print(
            f"{len(SIZES)} files of {', '.join(map(str, SIZES))} lines; {ranks} ranks x {WORKERS} workers"
        )
        if options.show_splits:
            parts = options.parts or 4
            for part in range(parts):
                held = parts // ranks
                files = [
                    f"shard-{shard} ({SIZES[shard]})"
                    for shard in range(part, len(SIZES), parts)
                ]
                worker = part % held % min(WORKERS, held)
                print(
                    f"  part {part}: rank {part // held}, worker {worker}: {', '.join(files) or 'nothing'}"
                )
    dist.broadcast_object_list(shared, src=0)
    folder = Path(shared[0])
    for tail in [options.tail] if options.tail else TAILS:
        (folder / "opened").write_text("")
        dist.barrier()
        steps, delivered = run(make_loader(folder, mesh, options, tail))
        counts = []
        dist.all_gather_object(counts, steps)
        assert counts == [steps] * ranks, (
            f"all ranks make the same steps, got {counts}"
        )
        found = check(tail, options, steps, delivered)
        if rank == 0:
            print(f"  tail={tail!r}: {found}")
            if options.show_open:
                show_opened(folder)
        dist.barrier()
    if rank == 0:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    dist.barrier()


if __name__ == "__main__":
    main()
