"""What does `patch_paddle()` cost a loop over a DataLoader that is cut for data ranks?

    python benchmarks/trainers.py

Two ranks of this host, each with a `paddle.io.DataLoader` of rows of 1 KB in batches of 64 and a
`DistributedBatchSampler`, without workers and with 2, read by Paddle and through the patch in turns. The loop is bare,
or has a step that multiplies matrices for 2 ms and touches 8 MB, and averages its loss over the ranks. The slower rank
counts.
"""

import shutil
import sys
import tempfile
import time

import numpy as np

BATCH, STEPS, TURNS = 64, 400, 7
WAYS = ("Paddle", "patched")


def worker():
    import paddle
    import paddle.distributed as dist

    import paddle_shard
    from paddle_shard.testing import report

    class Samples(paddle.io.Dataset):
        def __init__(self):
            self.rows = np.zeros((1024, 1024), "uint8")

        def __len__(self):
            return 2 * BATCH * STEPS

        def __getitem__(self, index):
            return self.rows[index % 1024], np.int64(index)

    def made(num_workers):
        data = Samples()
        sampler = paddle.io.DistributedBatchSampler(data, BATCH)
        return paddle.io.DataLoader(
            data,
            batch_sampler=sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )

    matrix = np.random.default_rng(0).random((256, 256), "float32")
    memory = np.zeros(8 << 20, "uint8")
    loss = paddle.zeros([1])

    def step():
        end = time.perf_counter() + 0.002
        memory[::64] += 1
        while time.perf_counter() < end:
            matrix @ matrix
        dist.all_reduce(loss)

    def seconds(loader, *, trains):
        dist.barrier()
        start = time.perf_counter()
        for _ in loader:
            if trains:
                step()
        return time.perf_counter() - start

    dist.init_parallel_env()
    found = {}
    for num_workers in (0, 2):
        plain, patched = made(num_workers), made(num_workers)
        for trains in (False, True):
            times = {way: [] for way in WAYS}
            for turn in range(1 + TURNS):
                for way in WAYS if turn % 2 else WAYS[::-1]:
                    if way == "Paddle":
                        taken = seconds(plain, trains=trains)
                    else:
                        with paddle_shard.patch_paddle():
                            taken = seconds(patched, trains=trains)
                    if turn:
                        times[way].append(taken)
            found[f"{num_workers} {'step' if trains else 'bare'}"] = times
    report(found)
    dist.barrier()


def main():
    from common import busy, machine, print_table, print_target

    from paddle_shard.testing import run_ranks

    print(f"{machine()}; {busy()}\n")
    folder = tempfile.mkdtemp()
    try:
        reports = run_ranks(__file__, 2, folder, args=["worker"], timeout=570)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    ratios = {}
    for case in reports[0]:
        taken = {}
        for way in WAYS:
            of_turns = np.max([report[case][way] for report in reports], axis=0)
            taken[way] = float(np.median(of_turns))
        ratios[case] = taken["Paddle"] / taken["patched"]
        num_workers, loop = case.split()
        speeds = [f"{2 * BATCH * STEPS / taken[way]:,.0f}" for way in WAYS]
        rows.append([num_workers, loop, *speeds, f"{ratios[case]:.2f}"])
    names = ["workers", "loop", *WAYS, "over Paddle"]
    print_table(
        f"Samples a second of two ranks, median of {TURNS} turns", names, rows
    )
    smallest = min(
        ratio for case, ratio in ratios.items() if case.startswith("2")
    )
    print_target(
        "2 workers: at least 0.95 x Paddle's loader",
        f"{smallest:.2f}",
        smallest >= 0.95,
    )


if __name__ == "__main__":
    worker() if "worker" in sys.argv else main()
