"""Checks of delivery to the stand-in device: python -m tests.device.real.checks NAME

Each prints its measurements, a line of JSON each, and fails if what must hold does not. `check_real_device.py` runs
them. CHECK_SMALL=1: fewer steps and smaller batches, for the device without a GPU.
"""

import ctypes
import json
import os
import statistics
import sys
import time

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.framework import core

import paddle_shard
from paddle_shard.placement.device import DeviceQueue
from tests.device import on_standin
from tests.device.on_standin import plugin

SMALL = bool(os.environ.get("CHECK_SMALL"))
PINNED = os.environ.get("STANDIN_PIN") != "0"
PLACE = paddle.device._convert_to_place(on_standin.DEVICE)
STREAM = on_standin.stream()
ROWS = 16
"""Rows of a batch."""
WAYS = {
    "default": ({}, {}),
    "prefetch=2": ({}, {"prefetch": 2}),
    "prefetch=0": ({}, {"prefetch": 0}),
    "2 workers": ({"num_workers": 2}, {}),
}
DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
]
DTYPES += ["float32", "float64", "complex64", "complex128"]


def facts():
    """Return what the copies since the last call were; none of CUDA's calls may have failed."""
    found = on_standin.read_json(plugin.standin_facts)
    assert found["errors"] == 0, "calls of CUDA failed"
    return found


def host_tensors(arrays):
    """Return tensors on the CPU that share the memory of arrays, as this library makes them."""
    dense = [core.DenseTensor() for _ in arrays]
    for tensor, array in zip(dense, arrays, strict=True):
        tensor.set(array, paddle.CPUPlace(), array.size > 0)
    return core.eager.read_next_tensor_list(dense)


def loader_of(data, way):
    given, options = WAYS[way]
    dataloader = paddle.io.DataLoader(data, batch_size=ROWS, **given)
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    return paddle_shard.shard_dataloader(
        dataloader, mesh, shard_dims="dp", **options
    )


class Data(paddle.io.Dataset):
    """Zeros, in batches of `size` bytes that take `read` milliseconds to read."""

    def __init__(self, size, steps, read=0):
        with on_standin.unpinned():
            self.rows = np.zeros((2 * ROWS, size // ROWS // 4), "float32")
        self.steps, self.read = steps, read / 1000

    def __len__(self):
        return ROWS * self.steps

    def __getitem__(self, index):
        if index % ROWS == 0 and self.read:
            time.sleep(self.read)
        return self.rows[index % len(self.rows)], index


def check_bytes():
    """Bytes of every dtype come to the device and back."""
    rng, num_copies = np.random.default_rng(0), 0
    sizes = [
        0,
        1,
        7,
        1000,
        65536,
        65537,
        1 << 20,
        *([] if SMALL else [(1 << 24) + 3]),
    ]
    for kind in DTYPES:
        stored = "uint16" if kind == "bfloat16" else kind
        for size in sizes:
            num_bytes = size * np.dtype(stored).itemsize
            array = rng.integers(
                0, 2 if kind == "bool" else 256, num_bytes, "uint8"
            )
            array = array.view(stored)
            (tensor,) = host_tensors([array])
            if stored != kind:
                tensor = tensor.view(kind) if size else tensor.astype(kind)
            for blocking in (False, True):
                on_device = tensor._copy_to(PLACE, blocking)
                assert str(on_device.place) == str(PLACE)
                back = on_device.cpu()
                if stored != kind and size:
                    back = back.view(stored)
                assert not size or back.numpy().tobytes() == array.tobytes(), (
                    f"{kind} x {size}: other bytes came back"
                )
                num_copies += 1
    x = paddle.to_tensor(np.arange(12, dtype="float32").reshape(3, 4))
    assert float((x * 2 + 1).sum()) == 144.0
    yield {"copies": num_copies} | facts()


def check_next():
    """`next` does not wait for the 500 ms of work that are queued, where memory is pinned."""
    for size in (1 << 19, 1 << 24):
        for way in WAYS:
            batches = iter(loader_of(Data(size, steps=12), way))
            for _ in range(3):
                next(batches)
                time.sleep(0.2)  # workers read ahead
            plugin.standin_wait(STREAM)
            plugin.standin_work(STREAM, 500_000)
            began = time.perf_counter()
            next(batches)
            took = (time.perf_counter() - began) * 1e3
            plugin.standin_wait(STREAM)
            yield {"bytes": size, "way": way, "next_ms": round(took, 2)}
            assert took < 250 or not PINNED, (
                f"{way}: next() waits for the device"
            )
    facts()


def check_copies():
    """GB/s of CUDA alone and through Paddle, and how long the call takes beside queued work."""
    for size in (1 << 16, 1 << 19, 1 << 24, 1 << 26):
        block = plugin.standin_pinned(size)
        pinned = np.frombuffer(
            (ctypes.c_char * size).from_address(block), "uint8"
        )
        with on_standin.unpinned():
            pageable = np.ones(size, "uint8")
        pinned[:] = 1
        on_device = paddle.zeros([size], "uint8")
        plugin.standin_wait(STREAM)
        for kind, array in ("pageable", pageable), ("pinned", pinned):
            host, device = array.ctypes.data, on_device.data_ptr()
            to_device = min(
                plugin.standin_copy_us(device, host, size, 1) for _ in "123456"
            )
            to_host = min(
                plugin.standin_copy_us(host, device, size, 0) for _ in "123456"
            )
            (tensor,) = host_tensors([array])
            whole, calls = [], []
            for busy_us in [0] * 6 + [20_000] * 5:
                plugin.standin_work(STREAM, busy_us)
                began = time.perf_counter()
                copied = tensor._copy_to(PLACE, False)
                called = time.perf_counter()
                plugin.standin_wait(STREAM)
                if busy_us:
                    calls.append(called - began)
                else:
                    whole.append(time.perf_counter() - began)
            assert bool((copied.numpy() == 1).all()), (
                f"{size} bytes, {kind}: other numbers"
            )
            yield {
                "bytes": size,
                "from": kind,
                "cuda_h2d_GBps": round(size / to_device / 1e3, 2),
                "cuda_d2h_GBps": round(size / to_host / 1e3, 2),
                "paddle_h2d_GBps": round(size / min(whole) / 1e9, 2),
                "call_ms_with_20_ms_queued": round(
                    statistics.median(calls) * 1e3, 3
                ),
            }
    facts()


class ByHand:
    """Batches that are ready in host memory, of which each is copied in the stream that computes."""

    def __init__(self, size, steps):
        rows = [
            np.zeros((ROWS, size // ROWS // 4), "float32") for _ in range(4)
        ]
        self.arrays = [[array, np.arange(ROWS)] for array in rows]
        self.batches = [host_tensors(arrays) for arrays in self.arrays]
        self.steps = steps

    def __iter__(self):
        for step in range(self.steps):
            yield [
                tensor._copy_to(PLACE, False)
                for tensor in self.batches[step % 4]
            ]


def step_times(loader, num_skipped, busy=10):
    """Return the milliseconds of a step, and of its `next`, in an epoch of steps of 10 ms on the device."""
    waits = []
    began = asked = time.perf_counter()
    for number, _ in enumerate(loader):
        waits.append(time.perf_counter() - asked)
        time.sleep(0.003)  # as a loop that launches kernels
        plugin.standin_work(STREAM, busy * 1000)
        if number == num_skipped - 1:  # all loops begin with an idle device
            plugin.standin_wait(STREAM)
            began = time.perf_counter()
        asked = time.perf_counter()
    plugin.standin_wait(STREAM)
    step = (time.perf_counter() - began) * 1000 / (len(waits) - num_skipped)
    return round(step, 2), round(
        statistics.median(waits[num_skipped:]) * 1000, 2
    )


def check_steps():
    """Milliseconds a step, beside a loop without data, copies by hand and Paddle's own loader."""
    steps, num_skipped = (12, 4) if SMALL else (26, 6)
    sizes = {
        "512 KB": 1 << 19,
        "4 MB": 1 << 22,
        "16 MB": 1 << 24,
        "64 MB": 1 << 26,
    }
    shared = os.statvfs("/dev/shm")
    for read in (0, 6):
        for name, size in list(sizes.items())[: 2 if SMALL else 4]:
            data = Data(size, steps, read)
            loaders = {
                "no data": [None] * steps,
                "by hand": ByHand(size, steps),
            }
            for workers in (0, 2):
                # Paddle's workers put batches into /dev/shm, and crash if it is full.
                if not workers or shared.f_bavail * shared.f_frsize > 16 * size:
                    loaders[f"Paddle's own, {workers} workers"] = (
                        paddle.io.DataLoader(
                            data, batch_size=ROWS, num_workers=workers
                        )
                    )
            loaders |= {way: loader_of(data, way) for way in WAYS}
            for who, loader in loaders.items():
                facts()
                epochs = [step_times(loader, num_skipped) for _ in range(2)]
                copies = facts()
                yield {
                    "batch": name,
                    "read_ms": read,
                    "loader": who,
                    "step_ms": [step for step, _ in epochs],
                    "next_ms": [wait for _, wait in epochs],
                    "from_pinned": copies["from_pinned"],
                    "from_pageable": copies["from_pageable"],
                    "longest_copy_call_ms": copies["longest_call_us"] / 1000,
                }


class Counted(paddle.io.Dataset):
    """Row i is `base` + i."""

    def __init__(self, size, steps):
        with on_standin.unpinned():
            rng = np.random.default_rng(1)
            self.base = rng.integers(
                0, 1 << 30, size // ROWS // 4, dtype="int32"
            )
        self.steps = steps

    def __getitem__(self, index):
        return self.base + np.int32(index), np.int64(index)

    def __len__(self):
        return ROWS * self.steps

    def sums(self):
        """Return the sum that the device makes of each batch, computed on the host."""
        width = len(self.base)
        weights = 2 * np.arange(ROWS * width, dtype="uint64") + np.uint64(1)
        weights = weights.reshape(ROWS, width)
        of_base = (weights * self.base.astype("uint64")).sum(
            axis=1, dtype="uint64"
        )
        of_index = weights.sum(axis=1, dtype="uint64")
        index = np.arange(len(self), dtype="uint64").reshape(self.steps, ROWS)
        return (of_base + of_index * index).sum(axis=1, dtype="uint64")


def break_copies():
    """Write to host memory before it is copied: a fault that `check_numbers` has to see."""
    copied = DeviceQueue.copied

    def broken(queue, tensors):
        on_device = copied(queue, tensors)
        ctypes.memset(tensors[0].data_ptr(), 0xFF, 64)
        return on_device

    DeviceQueue.copied = broken


NUMBERS = [  # way, bytes of a batch, steps, microseconds of work
    ("default", 1 << 19, 2000, 300),
    ("prefetch=0", 1 << 19, 500, 300),
    ("2 workers", 1 << 19, 500, 300),
    ("default", 1 << 22, 300, 1000),
    ("prefetch=2", 1 << 24, 100, 3000),
    ("default", 1 << 14, 1000, 200),
]


def check_numbers():
    """Batches hold their numbers while the device computes: it adds up each, behind its work, after it was dropped."""
    if os.environ.get("CHECK_BREAK"):
        break_copies()
    for way, size, steps, work_us in NUMBERS:
        steps = steps // 5 if SMALL else steps
        data, held = Counted(size, steps), []
        facts()
        number = -1
        for number, (rows, index) in enumerate(loader_of(data, way)):
            local = rows._local_value()
            assert str(local.place) == str(PLACE)
            plugin.standin_work(STREAM, work_us)
            num_words = ROWS * len(data.base)
            assert (
                plugin.standin_sum(STREAM, local.data_ptr(), num_words, number)
                == 0
            )
            if number % 97 == 0:
                held.append((local, index._local_value()))
            del rows, index, local
        assert number == steps - 1
        sums = np.zeros(steps, "uint64")
        assert plugin.standin_sums(sums.ctypes.data, steps) == 0
        bad = np.flatnonzero(sums != data.sums())
        assert not len(bad), (
            f"{way}, {size} bytes: other numbers in {len(bad)} of {steps}"
        )
        for local, index in held:
            expected = data.base + index.numpy()[:, None].astype("int32")
            assert (local.numpy() == expected).all(), (
                "other numbers in a held batch"
            )
        yield {
            "way": way,
            "bytes": size,
            "steps": steps,
            "held": len(held),
        } | facts()


def share_of_waits(loader, device_ms):
    """Return which share of an epoch waits for data and is not hidden, after the first steps; and its counts."""
    first = None
    for number, _ in enumerate(loader):
        if number == 4:  # workers have started
            counts = loader.stats.epoch
            first = (
                counts.wait_seconds,
                counts.hidden_seconds,
                counts.step_seconds,
            )
        plugin.standin_work(STREAM, device_ms * 1000)
        time.sleep(0.001)
    plugin.standin_wait(STREAM)
    counts = loader.stats.epoch
    last = counts.wait_seconds, counts.hidden_seconds, counts.step_seconds
    wait, hidden, step = (
        after - before for before, after in zip(first, last, strict=True)
    )
    return (wait - hidden) / (wait + step), {
        "wait_s": round(wait, 3),
        "hidden_s": round(hidden, 3),
        "step_s": round(step, 3),
        "stats": str(loader.stats),
    }


def check_statistics():
    """The statistics say that data is late only while the device is idle."""
    for way in ("default", "prefetch=0", "2 workers"):
        for device_ms, read_ms in ((25, 0), (45, 8), (2, 50)):
            for _ in range(3):  # on a machine that others use, data may be late
                loader = loader_of(Data(1 << 14, 40, read_ms), way)
                began = time.perf_counter()
                starved, counts = share_of_waits(loader, device_ms)
                took = time.perf_counter() - began
                row = {"way": way, "device_ms": device_ms, "read_ms": read_ms}
                row |= {"starved": round(starved, 3), "took_s": round(took, 3)}
                yield row | counts
                assert counts["hidden_s"] <= counts["wait_s"]
                assert counts["wait_s"] + counts["step_s"] <= 1.02 * took
                is_right = (
                    starved < 0.1 if device_ms > read_ms else starved > 0.5
                )
                if is_right:
                    break
            assert is_right, (
                f"{way}: data is late for {starved:.0%} of the time"
            )


if __name__ == "__main__":
    for row in globals()[f"check_{sys.argv[1]}"]():
        print(json.dumps(row), flush=True)
