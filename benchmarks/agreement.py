"""What does it cost that all ranks agree on each step ahead? Steps of 10 ms and reads of 8 ms, on two real ranks.

    python benchmarks/agreement.py

Prints the ratio of the time of a step with the agreement to that without, for a stream and for a data set with an
index; medians of alternating runs in one job. Two workers read, eight steps ahead, in windows of four.
"""

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

STEPS, RUNS, COMPUTE, READ = 150, 5, 0.010, 0.008


def rank():
    import paddle
    import paddle.distributed as dist

    import paddle_shard
    from paddle_shard import Stream
    from paddle_shard.testing import report

    dist.init_parallel_env()
    mesh = dist.ProcessMesh(np.arange(dist.get_world_size()), dim_names=["dp"])
    batch = 4 * dist.get_world_size()

    def slow(i):
        time.sleep(READ / 4)  # a rank reads four samples a step
        return np.full(256, i, "float32")

    class Slow(paddle.io.Dataset):
        def __len__(self):
            return STEPS * batch

        def __getitem__(self, index):
            return slow(index)

    data = {"stream": Stream.of(range(STEPS * batch)).sharding_filter().map(slow), "index": Slow()}

    def seconds_a_step(kind, agree):
        options = {"num_batches": STEPS} if kind == "stream" else {}
        given = paddle.io.DataLoader(data[kind], batch_size=batch, num_workers=2)
        loader = paddle_shard.shard_dataloader(given, mesh, shard_dims="dp", **options)
        if not agree:  # as if each rank were alone; users have no such choice
            setup = loader._shared.setup
            loader._shared.setup = replace(setup, agreeing_ranks=(dist.get_rank(),))
        times, last = [], None
        for _ in loader:
            time.sleep(COMPUTE)
            now = time.perf_counter()
            times += [] if last is None else [now - last]
            last = now
        dist.barrier()
        return float(np.mean(times[10:]))

    found = {}
    for kind in data:
        pairs = [(seconds_a_step(kind, True), seconds_a_step(kind, False)) for _ in range(RUNS)]
        found[kind] = pairs
    report(found)
    dist.barrier()


def main():
    from paddle_shard.testing import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        reports = run_ranks(Path(__file__), 2, Path(folder), args=["rank"], timeout=300)
    print(f"{STEPS} steps of {COMPUTE * 1e3:g} ms, reads of {READ * 1e3:g} ms by 2 workers, 2 ranks, {RUNS} runs each")
    for kind in reports[0]:
        pairs = np.array([report[kind] for report in reports]).max(0)  # the slower rank
        ratio = np.median(pairs[:, 0] / pairs[:, 1])
        agreed, alone = np.median(pairs, axis=0) * 1e3
        print(f"  {kind}: a step takes {agreed:.2f} ms, {alone:.2f} ms without agreement: ratio {ratio:.3f}")


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
