"""Processor time that the ranks' agreement on each step adds to a loader, for 1 to 8 ranks of a host.

    python benchmarks/agreement.py [--ranks 1 2 4 8] [--kind map|stream] [--prefetch N]

Between two batches a rank touches memory, computes for 2 ms and takes part in an all-reduce, as in training. Prints the
processor time that a loader adds to a step of a rank, all threads of its process together: its loop minus the loop
without a loader, of the same round; the median of the ranks. "Alone" is this loader as if each rank were alone, which
users cannot choose. With more ranks than cores, every loader takes longer; the agreement costs the ratio of the last
two columns.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import busy, machine, print_table, print_target
from price import COMPUTE_SECONDS, make_digits, make_work

NONE, LOCAL, ALONE, AGREED = (
    "no loader",
    "paddle.io.DataLoader",
    "alone",
    "agreed",
)
ROWS, STEPS, SKIPPED, ROUNDS = 16, 100, 20, 9
"""Rows of a rank's batch; steps that are counted; steps before them; rounds."""
AT_MOST = 1.3
"""Times the processor time of the same loader without the agreement, over all rows with several ranks."""


def run_rank(kind, prefetch):
    import paddle
    import paddle.distributed as dist

    import paddle_shard
    from paddle_shard.testing import report

    dist.init_parallel_env()
    num_ranks = dist.get_world_size()
    mesh = dist.ProcessMesh(np.arange(num_ranks), dim_names=["dp"])
    digits = make_digits((SKIPPED + STEPS + 10) * ROWS * num_ranks)
    stream = (
        paddle_shard.Stream.of(range(len(digits)))
        .sharding_filter()
        .map(digits.__getitem__)
    )

    def sharded(*, agrees):
        data = digits if kind == "map" else stream
        given = paddle.io.DataLoader(data, batch_size=ROWS * num_ranks)
        loader = paddle_shard.shard_dataloader(
            given, mesh, shard_dims="dp", prefetch=prefetch
        )
        if not agrees:
            loader._setup = replace(loader._setup, ranks=(dist.get_rank(),))
        return loader

    sampler = paddle.io.DistributedBatchSampler(digits, ROWS)
    loaders = {
        NONE: [None] * (SKIPPED + STEPS),
        LOCAL: paddle.io.DataLoader(digits, batch_sampler=sampler),
        ALONE: sharded(agrees=False),
        AGREED: sharded(agrees=True),
    }
    work = make_work("matmul")
    gradient = paddle.ones([1000])
    wait = dist.barrier if num_ranks > 1 else lambda: None
    taken = {name: [] for name in loaders}
    for number in range(ROUNDS + 1):  # the first one warms up
        for name, loader in loaders.items():
            wait()
            for step, _batch in enumerate(loader):
                if step == SKIPPED:
                    start = time.process_time()
                if step == SKIPPED + STEPS - 1:
                    spent = (time.process_time() - start) / (STEPS - 1)
                work()
                if num_ranks > 1:
                    dist.all_reduce(gradient)
            if number:
                taken[name].append(spent)
    report(taken)
    wait()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--kind", choices=["map", "stream"], default="map")
    parser.add_argument("--prefetch", type=int)
    options = parser.parse_args()
    from paddle_shard.testing import run_ranks

    print(machine(), busy(), sep="; ")
    lines = []
    sums = {ALONE: 0.0, AGREED: 0.0}
    for num_ranks in options.ranks:
        args = ["rank", options.kind, str(options.prefetch)]
        with tempfile.TemporaryDirectory() as folder:
            reports = run_ranks(
                Path(__file__), num_ranks, Path(folder), args=args, timeout=900
            )
        taken = {
            name: np.array([report[name] for report in reports])
            for name in (NONE, LOCAL, ALONE, AGREED)
        }
        added = {
            name: float(np.median(taken[name] - taken[NONE])) * 1e6
            for name in (LOCAL, ALONE, AGREED)
        }
        ratio = "-"  # one rank has none to agree with
        if num_ranks > 1:
            ratio = f"{added[AGREED] / added[ALONE]:.2f} x"
            for name in sums:
                sums[name] += added[name]
        cells = [f"{added[name]:,.0f}" for name in (LOCAL, ALONE, AGREED)]
        lines.append([str(num_ranks), *cells, ratio])
    title = f"Microseconds of processor time that a loader adds to a step of {COMPUTE_SECONDS * 1e3:g} ms on a rank"
    print_table(
        title, ["ranks", LOCAL, ALONE, AGREED, "agreed to alone"], lines
    )
    if sums[ALONE]:
        total = sums[AGREED] / sums[ALONE]
        print_target(
            f"agreed: at most {AT_MOST} x alone",
            f"{total:.2f} x",
            total <= AT_MOST,
        )
    print(busy())


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(
            sys.argv[2], None if sys.argv[3] == "None" else int(sys.argv[3])
        )
    else:
        main()
