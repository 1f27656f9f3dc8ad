"""What does one reader for all replicas save, and what does handing its batches on cost?

    python benchmarks/replicas.py

Ranks on a mesh dp=1 x mp=1, 2, 4 of this host read the same batches of 64 samples, without workers and without a
model: each for itself ("each"), or one for all ("leader"), in turns in the same processes. The time is that of the
slowest rank. The samples: 1 KB from an array; 150 KB, decompressed; 1 ms of CPU each. Memory is what the ranks' own
memory (not shared) has grown by, all together, when a data set has been read that keeps what it has read.
"""

import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

BATCH, TURNS = 64, 5
STEPS = {"1 KB": 400, "150 KB": 30, "1 ms": 6}
WAYS = ("each", "leader")


def worker():
    import paddle
    import paddle.distributed as dist

    import paddle_shard
    from paddle_shard.testing import report

    packed = zlib.compress(np.arange(150 << 10, dtype="uint8").tobytes(), 1)

    class Samples(paddle.io.Dataset):
        def __init__(self, kind, *, keeps=False):
            self.kind, self.reads, self.kept, self.length = (
                kind,
                0,
                {} if keeps else None,
                STEPS[kind] * BATCH,
            )
            self.rows = np.zeros((1024, 1024), "uint8")

        def __len__(self):
            return self.length

        def __getitem__(self, index):
            self.reads += 1
            if self.kind == "1 KB":
                return self.rows[index % 1024]
            if self.kind == "150 KB":
                found = np.frombuffer(zlib.decompress(packed), "uint8")
                if self.kept is not None:
                    self.kept[index] = found.copy()
                return found
            end = time.process_time() + 0.001
            while time.process_time() < end:
                pass
            return np.int64(index)

    def loader_of(data, way):
        mesh = dist.ProcessMesh(
            [list(range(dist.get_world_size()))], dim_names=["dp", "mp"]
        )
        given = paddle.io.DataLoader(data, batch_size=BATCH)
        return paddle_shard.shard_dataloader(
            given, mesh, shard_dims="dp", replicas=way, verify=None
        )

    def own_memory():
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return (
            sum(
                int(line.split()[1])
                for line in lines
                if line.startswith("Private_")
            )
            << 10
        )

    dist.init_parallel_env()
    found = {}
    for kind in STEPS:
        data = {way: Samples(kind) for way in WAYS}
        loaders = {way: loader_of(data[way], way) for way in WAYS}
        times = {way: [] for way in WAYS}
        for way in WAYS:
            for _ in range(-(-40 // STEPS[kind])):
                for _ in loaders[way]:
                    pass
        for turn in range(TURNS):
            for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                if dist.get_world_size() > 1:
                    dist.barrier()
                data[way].reads, start = 0, time.perf_counter()
                steps = sum(1 for _ in loaders[way])
                times[way].append((time.perf_counter() - start) / steps)
        grown = {}
        if kind == "150 KB":
            for way in WAYS[:2]:
                before, keeping = own_memory(), Samples(kind, keeps=True)
                for _ in loader_of(keeping, way):
                    pass
                grown[way] = own_memory() - before
        found[kind] = {
            way: [times[way], data[way].reads, grown.get(way)] for way in WAYS
        }
    report(found)
    if dist.get_world_size() > 1:
        dist.barrier()


def main():
    from common import busy, machine, print_table, print_target

    from paddle_shard.testing import run_ranks

    print(f"{machine()}; {busy()}\n")
    rows, ratios, reads = [], {}, {}
    for size in (1, 2, 4):
        folder = tempfile.mkdtemp()
        try:
            reports = run_ranks(
                __file__, size, folder, args=["worker"], timeout=570
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for kind in STEPS:
            took = {}
            for way in WAYS:
                of_turn = np.max(
                    [report[kind][way][0] for report in reports], axis=0
                )
                took[way] = float(np.median(of_turn))
                reads[size, kind, way] = sum(
                    report[kind][way][1] for report in reports
                ) / (STEPS[kind] * BATCH)
                grown = [report[kind][way][2] for report in reports]
                memory = "" if None in grown else f"{sum(grown) / 2**20:.0f} MB"
                ratios[size, kind, way] = took["each"] / took[way]
                ratio = f"{ratios[size, kind, way]:.2f}"
                rows.append(
                    [
                        f"mp={size}",
                        kind,
                        way,
                        f"{reads[size, kind, way]:.2f}",
                        f"{1 / took[way]:.0f}",
                        ratio,
                        memory,
                    ]
                )
    names = [
        "mesh",
        "samples",
        "replicas",
        "reads a sample",
        "batches a second",
        "over each",
        "memory",
    ]
    print_table(
        f"dp=1 x mp, batches of {BATCH}, median of {TURNS} turns", names, rows
    )
    quarter, faster, small = (
        reads[4, "1 ms", "leader"],
        ratios[4, "1 ms", "leader"],
        ratios[4, "1 KB", "leader"],
    )
    print_target(
        "reads a sample of 1 ms at mp=4: 1, not 4",
        f"{quarter:.2f}",
        quarter == 1,
    )
    print_target(
        "batches a second at mp=4, 1 ms: at least 1.5 times",
        f"{faster:.2f}",
        faster >= 1.5,
    )
    print_target(
        "1 KB at mp=4: no slower by more than 5 %",
        f"{small:.2f}",
        small >= 0.95,
    )


if __name__ == "__main__":
    worker() if "worker" in sys.argv else main()
