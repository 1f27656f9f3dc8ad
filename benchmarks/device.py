"""Does delivery overlap what the device computes? Needs the stand-in device of tests/device: `make bench-device`.

    python benchmarks/device.py [--rounds N] [--steps N]

A step is so many milliseconds of work on the host, which launches kernels, and then work that is queued on the device
and that nobody waits for, as in a loop that does not print its loss. A batch takes so long to read. No loop can be
faster than the largest of the three, which is the bound; sleeps take longer than they are asked for, so the bound is
that of the same loop without a loader, which has one batch and takes it again ("bare"). "By hand" is the least that any
loader does: batches that are ready in host memory, whose copies are queued in the stream that computes. Printed:
milliseconds a step after the first five, the median of some rounds, each of which takes every loader once.
"""

import argparse
import ctypes
import os
import statistics
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

DEVICE = "standin:0"
WORKLOADS = [(3, 10, 0), (10, 10, 0), (3, 10, 6), (10, 10, 10)]
"""(host, device, read) in milliseconds."""
SIZES = {"64 KB": 1 << 16, "512 KB": 1 << 19, "16 MB": 1 << 24}
ROWS, EPOCHS, SKIPPED = 16, 3, 5


class Data(paddle.io.Dataset):
    def __init__(self, size, read, steps):
        self.rows, self.read, self.steps = (
            np.zeros((32, size // ROWS // 4), "float32"),
            read / 1000,
            steps,
        )

    def __len__(self):
        return ROWS * self.steps

    def __getitem__(self, index):
        if index % ROWS == 0 and self.read:
            time.sleep(self.read)
        return self.rows[index % 32], index


class ByHand:
    """Nothing is read, collated, made, shared between processes, agreed on or counted."""

    def __init__(self, size, steps):
        self.steps, self.place = steps, paddle.device._convert_to_place(DEVICE)
        rows = [
            np.zeros((ROWS, size // ROWS // 4), "float32") for _ in range(4)
        ]
        self.batches = [
            [self.on_host(one), self.on_host(np.arange(ROWS))] for one in rows
        ]

    def on_host(self, array):
        return paddle.to_tensor(array, place=paddle.CPUPlace())

    def __iter__(self):
        for step in range(self.steps):
            yield [
                one._copy_to(self.place, False)
                for one in self.batches[step % len(self.batches)]
            ]


def epochs(loader, plugin, stream, host, device):
    """Return the milliseconds of a step in each epoch."""
    found = []
    for _ in range(EPOCHS):
        ends = []
        for _ in loader:
            time.sleep(host / 1000)
            plugin.standin_work(stream, device * 1000)
            ends.append(time.perf_counter())
        plugin.standin_wait(stream)
        found.append(
            (time.perf_counter() - ends[SKIPPED - 1])
            * 1000
            / (len(ends) - SKIPPED)
        )
    return found


def main():
    import paddle_shard

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=65)
    chosen = parser.parse_args()
    paddle.set_device(DEVICE)
    plugin = ctypes.CDLL(
        str(Path(os.environ["CUSTOM_DEVICE_ROOT"]) / "libstandin.so")
    )
    plugin.standin_work.argtypes = [ctypes.c_void_p, ctypes.c_long]
    plugin.standin_wait.argtypes = [ctypes.c_void_p]
    stream = paddle.device.current_stream(DEVICE).stream_base.raw_stream
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    columns = [
        "host / device / read",
        "batch",
        "workers",
        "bare",
        "by hand",
        "Paddle, epochs 0 1 2",
        "ours, epochs 0 1 2",
    ]
    print(
        "|",
        " | ".join(
            [*columns, "ours / bare", "ours / by hand", "ours / Paddle"]
        ),
        "|",
    )
    print("|---" * (len(columns) + 3) + "|")
    for host, device, read in WORKLOADS:
        bare = statistics.median(
            epochs([None] * chosen.steps, plugin, stream, host, device)
        )
        for name, size in SIZES.items():
            for workers in (0, 2):
                data = Data(size, read, chosen.steps)

                def given(data=data, workers=workers):
                    return paddle.io.DataLoader(
                        data, batch_size=ROWS, num_workers=workers
                    )

                loaders = {
                    "paddle": given(),
                    "ours": paddle_shard.shard_dataloader(
                        given(), mesh, shard_dims="dp"
                    ),
                }
                loaders["by hand"] = ByHand(size, chosen.steps)
                taken = {who: [] for who in loaders}
                for turn in range(chosen.rounds):
                    for who in sorted(loaders, reverse=bool(turn % 2)):
                        taken[who].append(
                            epochs(loaders[who], plugin, stream, host, device)
                        )
                medians = {
                    who: [
                        statistics.median(one)
                        for one in zip(*rounds, strict=True)
                    ]
                    for who, rounds in taken.items()
                }
                paddles, ours, by_hand = (
                    medians["paddle"],
                    medians["ours"],
                    statistics.median(medians["by hand"]),
                )
                times = [
                    " ".join(f"{ms:.1f}" for ms in one)
                    for one in ([bare], [by_hand], paddles, ours)
                ]
                behind = max(
                    mine / theirs
                    for mine, theirs in zip(ours, paddles, strict=True)
                )
                ratios = [
                    f"{ratio:.2f}"
                    for ratio in (max(ours) / bare, max(ours) / by_hand, behind)
                ]
                row = [
                    f"{host} / {device} / {read} ms",
                    name,
                    str(workers),
                    *times,
                    *ratios,
                ]
                print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
