"""What a real GPU should show, with what it took: docs/gpu.md says how to read it."""

import statistics
import subprocess
import sys
import time

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from tests.deadlines import HANG
from tests.device.devices import COUNT, DEVICE, ON_GPU, Work, place

pytestmark = pytest.mark.gpu
MESH = dist.ProcessMesh([0], dim_names=["dp"])
ROWS, SIZE = 16, (32 if ON_GPU else 1) << 20
"""Rows and bytes of a batch."""
STEPS = 12
WAYS = {
    "default": ({}, {}),
    "2 workers": ({"num_workers": 2}, {}),
    "prefetch=0": ({}, {"prefetch": 0}),
    "unbuffered": ({"use_buffer_reader": False}, {}),
}


class Data(paddle.io.Dataset):
    """Row i holds i and what follows, so that a copy that came too early or too late is seen."""

    def __init__(self):
        self.steps = np.arange(SIZE // ROWS // 4, dtype="float32") % 1024

    def __getitem__(self, index):
        return self.steps + index, index

    def __len__(self):
        return ROWS * STEPS


def loader_of(way):
    given, options = WAYS[way]
    dataloader = paddle.io.DataLoader(
        Data(), batch_size=ROWS, places=place(), **given
    )
    return paddle_shard.shard_dataloader(
        dataloader, MESH, shard_dims="dp", **options
    )


@pytest.fixture(scope="module")
def work():
    paddle.set_device(DEVICE)
    return Work()


def test_how_fast_is_a_copy(work):
    """Pinned memory should be copied two to four times as fast; on the stand-in there is none."""
    array, found = np.zeros(SIZE // 4, "float32"), {}
    for kind in ("pageable", "pinned") if ON_GPU else ("pageable",):
        tensor = paddle.to_tensor(
            array,
            place=paddle.CUDAPinnedPlace()
            if kind == "pinned"
            else paddle.CPUPlace(),
        )
        times = []
        for _ in range(10):
            work.wait()
            began = time.perf_counter()
            tensor._copy_to(place(), True)
            work.wait()
            times.append(time.perf_counter() - began)
        found[kind] = SIZE / min(times) / 1e9
    print(
        "\ncopies to the device, GB/s:",
        ", ".join(f"{kind} {rate:.1f}" for kind, rate in found.items()),
    )


@pytest.mark.parametrize("way", WAYS)
def test_next_does_not_wait_for_what_the_device_has_to_compute(way, work):
    assert_quick(way, iter(loader_of(way)), work)


@pytest.mark.skipif(
    not ON_GPU,
    reason="on the stand-in an operator is run on the CPU, which waits",
)
def test_next_does_not_wait_for_scattered_rows_or_empty_fields(work):
    def collate(samples):
        rows, indices = zip(*samples, strict=True)
        return [
            np.stack(rows),
            np.array(indices),
            np.empty([len(rows), 0], "float32"),
        ]

    dataloader = paddle.io.DataLoader(
        Data(), batch_size=ROWS, places=place(), collate_fn=collate
    )
    dataloader.batch_sampler._acc_steps, two = (
        2,
        dist.ProcessMesh([0, 1], dim_names=["dp"]),
    )
    loader = paddle_shard.shard_dataloader(
        dataloader, [two] * 3, shard_dims=["dp", None, None]
    )
    assert_quick("scattered rows, an empty field", iter(loader), work)


def assert_quick(way, batches, work, busy=2.0):
    for _ in range(3):
        next(batches)
        time.sleep(0.3)  # workers have read ahead
    work.wait()
    work(busy)
    began = time.perf_counter()
    next(batches)
    took = time.perf_counter() - began
    print(
        f"\n{way}: next() took {took * 1000:.1f} ms, with {busy * 1000:.0f} ms of work queued"
    )
    work.wait()

    assert took < busy / 4


CONTEXTS = """
import ctypes, sys
import numpy as np, paddle, paddle.distributed as dist
import paddle_shard
driver = ctypes.CDLL("libcuda.so.1")
def used():
    flags, active = ctypes.c_uint(), ctypes.c_int()
    found = []
    for number in range(paddle.device.cuda.device_count()):
        assert driver.cuDevicePrimaryCtxGetState(number, ctypes.byref(flags), ctypes.byref(active)) == 0
        found += [number] * (active.value != 0)
    return found
paddle.set_device("gpu:1")
paddle.ones([1]).numpy()
print("at first", used())
rows = [np.ones(4, "float32")] * 64
def given(**how):
    return paddle.io.DataLoader(rows, batch_size=8, **how)
for workers in (0, 2):
    list(given(num_workers=workers))
print("Paddle's loader", used())
mesh = dist.ProcessMesh([0], dim_names=["dp"])
for how, options in [({}, {}), ({}, {"prefetch": 2}), ({"num_workers": 2}, {}), ({}, {"prefetch": 0})]:
    batches = iter(paddle_shard.shard_dataloader(given(**how), mesh, shard_dims="dp", **options))
    for _ in batches:
        batches.valid
print("this library", used())
"""


@pytest.mark.skipif(not ON_GPU or COUNT < 2, reason="needs two GPUs")
def test_rank_takes_memory_of_its_own_gpu_only():
    """A context on another GPU takes some 500 MB there, and so do those of all ranks on the first GPU."""
    done = subprocess.run(
        [sys.executable, "-c", CONTEXTS],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(
        "\nGPUs that a process of gpu:1 uses:",
        "; ".join(done.stdout.splitlines()[-3:]),
    )
    _, paddles, ours = (
        line.split("[")[1] for line in done.stdout.splitlines()[-3:]
    )

    assert ours == paddles


@pytest.mark.parametrize("way", WAYS)
def test_batches_hold_their_numbers_while_the_device_computes(way, work):
    """Batches are dropped while the device still has to read them, so that their memory is used again."""
    sums, held = [], []
    for number, (rows, index) in enumerate(loader_of(way)):
        work(0.01)
        local = rows._local_value()
        sums.append((local[:, 0], local[:, -1]))
        if number % 3 == 0:
            held.append((local, index._local_value()))
    last = Data().steps[-1]

    firsts, lasts = (
        np.concatenate([pair[at].numpy() for pair in sums]) for at in (0, 1)
    )
    assert firsts.tolist() == list(range(len(Data())))
    assert lasts.tolist() == [row + last for row in range(len(Data()))]
    for rows, index in held:
        assert (rows.numpy() == Data().steps + index.numpy()[:, None]).all()


def test_step_takes_its_work_and_its_copy(work):
    """The copy is queued behind the work, and nothing stands still between them."""
    busy, took = 0.02, {}
    given = paddle.io.DataLoader(Data(), batch_size=ROWS, places=place())
    loops = {
        "no data": lambda: [None] * STEPS,
        "Paddle's own loader": lambda: given,
    }
    loops |= {
        way: lambda way=way: loader_of(way)
        for way in ("default", "2 workers", "prefetch=0")
    }
    for way, loop in loops.items():
        times = []
        for _ in range(2):
            work.wait()
            ends = []
            for _ in loop():
                work(busy)
                ends.append(time.perf_counter())
            work.wait()
            times.append(
                (time.perf_counter() - ends[3]) * 1000 / (len(ends) - 4)
            )
        took[way] = statistics.median(times)
    shown = ", ".join(f"{way} {ms:.1f}" for way, ms in took.items())
    print(
        f"\nms a step of {busy * 1000:.0f} ms of work, batches of {SIZE >> 20} MB: {shown}"
    )
