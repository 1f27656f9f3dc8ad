"""Does a long run leak? Memory, files, threads and shared memory over many steps on two ranks.

    python benchmarks/soak.py [--steps 100000] [--ranks 2]

Epochs of about 1,000 steps, one loader after another in turns: half of the epochs are of a data set with an index, half
of a stream, both read without workers; every tenth is of a data set with two workers, which persist. (A set of workers
that is made and ended leaves something behind in Paddle's machinery; that is measured by itself, beside Paddle's own.)
Resident memory is taken after `gc.collect()` at the end of each epoch, and a line is laid through what follows the
first 20 % (least squares). Ends with exit code 1 where it rises too steeply, or where files, threads, worker processes
or shared memory are left over.
"""

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from common import bytes_of, machine, print_table, print_target
from peers import end_pass

EPOCH, BATCH, WARM_UP, MOST = 1000, 8, 0.2, 10_000
SETS = 30
WITH_WORKERS = 10
"""Every so many epochs, one is read by two workers."""


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children():
    return {
        pid
        for path in Path("/proc/self/task").glob("*/children")
        for pid in path.read_text().split()
    }


def held(workers):
    """What this process holds besides memory; `workers` are the processes that it ever had."""
    # as Paddle names what its workers share
    own = tuple(f"paddle_{pid}_" for pid in (os.getpid(), *workers))
    mapped = Path("/proc/self/maps").read_text().count("/memfd:paddle_shard")
    return {
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "threads of the system": len(os.listdir("/proc/self/task")),
        "child processes": len(children()),
        "shared memory": mapped
        + sum(name.startswith(own) for name in os.listdir("/dev/shm")),
    }


class Small:
    width = 32

    def __len__(self):
        return EPOCH * BATCH

    def __getitem__(self, index):
        return np.full(self.width, index, "float32"), index


class Wide(Small):
    width = 1024
    """So wide that workers' batches go through shared memory."""


def rank(steps):
    import paddle
    import paddle.distributed as dist

    import paddle_shard
    from paddle_shard import Stream
    from paddle_shard.testing import report

    dist.init_parallel_env()
    mesh = dist.ProcessMesh(np.arange(dist.get_world_size()), dim_names=["dp"])
    small = Small()
    stream = (
        Stream.of(range(EPOCH * BATCH)).sharding_filter().map(small.__getitem__)
    )

    def loader(data, workers, persistent=True, **options):
        given = paddle.io.DataLoader(
            data,
            batch_size=BATCH,
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
        )
        return paddle_shard.shard_dataloader(
            given, mesh, shard_dims="dp", **options
        )

    loaders = {
        "index": loader(small, 0, shuffle=True),
        "stream": loader(stream, 0),
        "workers": loader(Wide(), 2, shuffle=True),
    }
    kinds = dict.fromkeys(loaders, 0)
    workers: set[str] = set()
    # each has been used once before anything is counted
    for data in loaders.values():
        run_epoch(data, 20, workers)
    gc.collect()
    taken, before, done, epoch, start = (
        [(0, resident())],
        held(workers),
        0,
        0,
        time.perf_counter(),
    )
    while done < steps:
        kind = (
            "workers"
            if epoch % WITH_WORKERS == WITH_WORKERS - 1
            else ("index", "stream")[epoch % 2]
        )
        count = run_epoch(loaders[kind], min(EPOCH, steps - done), workers)
        done, epoch, kinds[kind] = done + count, epoch + 1, kinds[kind] + count
        gc.collect()
        taken.append((done, resident()))
        if dist.get_rank() == 0:
            took = time.perf_counter() - start
            print(
                f"{done:,} steps, {took:.0f} s, {taken[-1][1] / 1e6:.2f} MB resident",
                file=sys.stderr,
                flush=True,
            )
    for data in loaders.values():
        data.close()
    dist.barrier()
    time.sleep(2)  # threads that were told to end
    gc.collect()
    after = held(workers)
    theirs = paddle.io.DataLoader(Wide(), batch_size=BATCH, num_workers=2)
    sets = {
        "paddle_shard": sets_of_workers(loader(Wide(), 2, persistent=False)),
        "Paddle": sets_of_workers(theirs),
    }
    report(
        {
            "taken": taken,
            "before": before,
            "after": after,
            "kinds": kinds,
            "sets": sets,
        }
    )
    dist.barrier()


def run_epoch(loader, steps, workers):
    """Read so many steps of the loader's epoch, and note its workers; returns how many steps there were."""
    count = 0
    with iter(loader) as batches:
        for numbers, _ in batches:
            assert numbers.shape[0] == BATCH
            count += 1
            if count == 1:
                workers |= children()
            if count == steps < EPOCH:
                break
    return count


def sets_of_workers(loader):
    """Bytes by which memory rises for each set of workers that is made, and ended."""
    sizes = []
    for _ in range(SETS):
        batches = iter(loader)
        for _ in range(20):
            next(batches)
        end_pass(batches)
        del batches
        gc.collect()
        sizes.append(resident())
    return float(np.polyfit(np.arange(SETS // 2), sizes[SETS // 2 :], 1)[0])


def slope(taken):
    """Bytes per 1,000 steps behind the warm-up."""
    steps, sizes = np.array(taken, float).T
    late = steps >= WARM_UP * steps[-1]
    return float(np.polyfit(steps[late] / 1000, sizes[late], 1)[0])


def follow(path, stop):
    """Copy a rank's log to stderr while it grows."""
    while not path.exists() and not stop.wait(0.5):
        pass
    if path.exists():
        with open(path) as log:
            while not stop.wait(1.0):
                for line in log:
                    if "resident" in line:
                        sys.stderr.write(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    from paddle_shard.testing import run_ranks

    print(machine())
    stop, start = threading.Event(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        following = threading.Thread(
            target=follow, args=(Path(folder, "log", "workerlog.0"), stop)
        )
        following.start()
        try:
            arguments = ["rank", str(given.steps)]
            limit = 120 + 0.1 * given.steps
            reports = run_ranks(
                Path(__file__),
                given.ranks,
                Path(folder),
                args=arguments,
                timeout=limit,
            )
        finally:
            stop.set()
            following.join()
    rows, reached = [], []
    for number, found in enumerate(reports):
        first, last = found["taken"][0][1], found["taken"][-1][1]
        rows.append(
            (
                str(number),
                bytes_of(first),
                bytes_of(last),
                f"{slope(found['taken']) / 1e3:+.2f} KB",
            )
        )
        rows[-1] += tuple(
            f"{found['before'][what]} to {found['after'][what]}"
            for what in found["before"]
        )
    kinds = ", ".join(
        f"{count:,} {kind}" for kind, count in reports[0]["kinds"].items()
    )
    print_table(
        f"{given.steps:,} steps ({kinds}) of {given.ranks} ranks in {time.perf_counter() - start:.0f} s",
        (
            "rank",
            "resident at first",
            "at last",
            "rise per 1,000 steps",
            *reports[0]["before"],
        ),
        rows,
    )
    steepest = max(slope(found["taken"]) for found in reports)
    reached.append(steepest < MOST)
    print_target(
        f"memory rises by less than {MOST / 1e3:g} KB per 1,000 steps",
        f"{steepest / 1e3:+.2f} KB",
        reached[-1],
    )
    rise = {
        who: max(found["sets"][who] for found in reports) / 1e3
        for who in reports[0]["sets"]
    }
    told = ", ".join(
        f"{who} {kilobytes:.1f} KB" for who, kilobytes in rise.items()
    )
    print(
        f"- left by a set of workers that is made and ended, without a target: {told}"
    )
    for what in reports[0]["before"]:
        more = max(
            found["after"][what] - found["before"][what] for found in reports
        )
        reached.append(more <= 0)
        print_target(
            f"no more {what} than at the beginning", f"{more:+d}", reached[-1]
        )
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(rank(int(sys.argv[2])) if sys.argv[1:2] == ["rank"] else main())
