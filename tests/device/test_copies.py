"""What a delivered batch costs on the device: copies, synchronisations, and what the training thread waits for."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.placement import device
from paddle_shard.placement.local_tensor import TensorMaker
from tests.deadlines import HANG

ROWS = np.random.default_rng(0).normal(size=(160, 16)).astype("float32")
MESH = dist.ProcessMesh([0], dim_names=["dp"])
STEPS, BATCH = 16, 8 * 16 * 4 + 8 * 8
"""Steps that are counted, and bytes of a batch."""
COMPUTE = paddle.device.current_stream("standin:0").stream_base.raw_stream
SETTLE = 0.3
"""Seconds in which workers read, and copies end, that nothing holds up."""


class Data(paddle.io.Dataset):
    def __getitem__(self, index):
        return ROWS[index], index

    def __len__(self):
        return len(ROWS)


class DeviceTensors(Data):
    """Samples that are tensors on the device on purpose: the current place is the CPU while they are read."""

    def __getitem__(self, index):
        return paddle.to_tensor(
            ROWS[index], place=paddle.CustomPlace("standin", 0)
        ), index


class Empty(Data):
    def __getitem__(self, index):
        return ROWS[index], index, ROWS[index, :0]


def given(data=None, **more):
    return paddle.io.DataLoader(
        Data() if data is None else data, batch_size=8, **more
    )


def loader_of(dataloader, mesh=MESH, **options):
    return paddle_shard.shard_dataloader(
        dataloader, mesh, shard_dims="dp", **options
    )


def stream():
    return Stream.of(
        lambda: ((ROWS[index], index) for index in range(len(ROWS)))
    )


KINDS = {
    "plain": lambda: loader_of(given()),
    "prefetch 2": lambda: loader_of(given(), prefetch=2),
    "workers": lambda: loader_of(given(num_workers=2)),
    "stream": lambda: loader_of(given(stream())),
    "stream, workers": lambda: loader_of(given(stream(), num_workers=2)),
    "scattered rows": lambda: loader_of(
        given(), dist.ProcessMesh([[0, 1]], dim_names=["dp", "mp"])
    ),
    "verified": lambda: loader_of(given(), verify=1),
    "an empty field": lambda: loader_of(given(Empty())),
}


def counted(loader, counters):
    """What `STEPS` steps cost, after the first one."""
    with iter(loader) as batches:
        next(batches)
        counters()
        for _ in range(STEPS):
            next(batches)
        return counters()


NOT_AHEAD = {
    "prefetch 0": lambda data=None: loader_of(given(data), prefetch=0),
    "unbuffered": lambda data=None: loader_of(
        given(data, use_buffer_reader=False)
    ),
}
KINDS |= NOT_AHEAD


@pytest.mark.parametrize("kind", KINDS)
def test_step_costs_one_copy_a_leaf_and_waits_for_nothing(kind, counters):
    found = counted(KINDS[kind](), counters)

    assert found.pop("h2d_async") == (2 * STEPS, BATCH * STEPS, 2 * STEPS), (
        "two leaves, asked for by the training thread"
    )
    assert not {
        "h2d",
        "d2h",
        "d2h_async",
        "d2d",
        "d2d_async",
        "sync_device",
        "sync_stream",
        "sync_event",
    } & set(found)


class OneBuffer(Data):
    """A data set that gives the same memory for every batch: an array, and a tensor in host memory."""

    def __init__(self):
        self.array = np.empty([8, 16], "float32")
        self.tensor = paddle.zeros([8]).cpu()

    def __getitems__(self, indices):
        self.array[:] = ROWS[indices]
        paddle.assign(
            paddle.to_tensor(
                np.array(indices, "float32"), place=paddle.CPUPlace()
            ),
            self.tensor,
        )
        return self.array, self.tensor


@pytest.mark.parametrize("data", [None, OneBuffer])
@pytest.mark.parametrize("kind", NOT_AHEAD)
def test_queued_copy_reads_its_batch_as_it_was(kind, data, plugin):
    batches = iter(NOT_AHEAD[kind](data and data()))
    found = [next(batches)]
    plugin.standin_close(COMPUTE)
    found += [next(batches), next(batches)]
    plugin.standin_open()
    found += batches

    assert (
        np.concatenate([x._local_value().numpy() for x, _ in found]).tolist()
        == ROWS.tolist()
    )
    assert [
        i for _, y in found for i in y._local_value().numpy().tolist()
    ] == list(range(len(ROWS)))


@pytest.mark.parametrize("kind", NOT_AHEAD)
def test_queued_copies_outlive_a_dropped_loader_without_waiting(kind, plugin):
    """A signal's handler that raises while it waited would be lost, and the memory with it."""
    for _ in range(3):
        batches = iter(NOT_AHEAD[kind]())
        plugin.standin_close(COMPUTE)
        try:
            held = [next(batches) for _ in range(2)]
            begun = time.perf_counter()
            del batches
            gc.collect()
            took = time.perf_counter() - begun
            noise = [np.full([8, 16], -1, "float32") for _ in range(50)]
        finally:
            plugin.standin_open()

        assert took < HANG / 2
        assert [x._local_value().numpy().tolist() for x, _ in held] == [
            ROWS[:8].tolist(),
            ROWS[8:16].tolist(),
        ]
        del noise


def test_loop_may_compute_in_several_streams(plugin):
    """The first batch's copy is queued behind the work of one, and the second's, in another, is over at once."""
    other = paddle.device.Stream("standin:0")
    batches = iter(KINDS["plain"]())
    plugin.standin_close(COMPUTE)
    try:
        held = [next(batches)]
        with paddle.device.stream_guard(other):
            held.append(next(batches))
        del batches
        gc.collect()
        noise = [np.full([8, 16], -1, "float32") for _ in range(50)]
    finally:
        plugin.standin_open()
    plugin.standin_wait(other.stream_base.raw_stream)

    assert [x._local_value().numpy().tolist() for x, _ in held] == [
        ROWS[:8].tolist(),
        ROWS[8:16].tolist(),
    ]
    del noise


def test_device_queue_frees_memory_of_a_dropped_loader():
    for _ in range(5):
        next(iter(KINDS["plain"]()))
    paddle.device.synchronize()
    next(iter(KINDS["plain"]()))

    assert sum(map(len, device._copies_to.values())) <= 1


def test_forked_child_does_not_wait_for_the_parents_device(
    plugin,
):
    batches = iter(KINDS["plain"]())
    plugin.standin_close(COMPUTE)
    try:
        held = next(batches)
        child = os.fork()
        if child == 0:
            del batches, held
            gc.collect()
            os._exit(0)
        deadline = time.monotonic() + HANG
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            assert time.monotonic() < deadline, os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
    finally:
        plugin.standin_open()
    assert held[0]._local_value().numpy().tolist() == ROWS[:8].tolist()


def test_queued_copies_let_other_threads_run_while_full(plugin):
    """Host memory that is not copied yet is held, so that some copies at most are queued."""
    batches, ran, over = iter(NOT_AHEAD["prefetch 0"]()), [], threading.Event()

    def run():
        while not over.wait(0.001):
            ran.append(time.perf_counter())

    threading.Thread(target=run, daemon=True).start()
    plugin.standin_work(COMPUTE, int(SETTLE * 1e6))
    began = time.perf_counter()
    for _ in range(3):
        next(batches)
    took = time.perf_counter() - began
    over.set()

    assert took > SETTLE / 2
    assert max(np.diff([began, *ran, began + took])) < took / 2, (
        f"of {took:.3f} s"
    )


def test_scattered_rows_need_no_index_on_the_device(monkeypatch):
    """A copy of an array to a GPU, as paddle.to_tensor makes it, waits for all that is queued there."""
    dataloader, two = given(), dist.ProcessMesh([0, 1], dim_names=["dp"])
    dataloader.batch_sampler._acc_steps = 2
    batches = iter(
        paddle_shard.shard_dataloader(
            dataloader, [two, two], shard_dims=["dp", None]
        )
    )
    monkeypatch.setattr(paddle, "to_tensor", None)
    rows, indices = (leaf._local_value() for leaf in next(batches))

    assert rows.numpy().tolist() == ROWS[[*range(4), *range(8, 12)]].tolist()
    assert indices.numpy().tolist() == list(range(16))


def test_copy_leaves_the_current_place_as_it_is(monkeypatch):
    """It is the same for all threads: another one may be reading on the CPU, or computing on another device."""
    seen, current_stream = [], paddle.device.current_stream

    def stream(*place):
        seen.append(paddle.get_device())
        return current_stream(*place)

    monkeypatch.setattr(paddle.device, "current_stream", stream)
    batches = iter(
        loader_of(given(places=[paddle.CustomPlace("standin", 1)]), prefetch=0)
    )
    next(batches)

    assert seen == ["standin:0"]


def test_place_may_be_that_of_a_tensor(plugin):
    """It is an object of another class, which Paddle takes for no choice of a device where it makes an event."""
    other = paddle.CustomPlace("standin", 1)
    maker = TensorMaker(paddle.ones([1])._copy_to(other, True).place)
    plugin.standin_close(
        paddle.device.current_stream(other).stream_base.raw_stream
    )
    made = [maker([np.arange(3)], True)()]
    time.sleep(SETTLE)
    made.append(maker([np.arange(3)], True)())  # gives up what was copied
    held = len(maker._queue._queued)
    plugin.standin_open()

    assert held == 2, "host memory is given up that was not copied yet"
    assert [(str(one.place), one.numpy().tolist()) for (one,) in made] == [
        (str(other), [0, 1, 2])
    ] * 2


def test_device_samples_are_stacked_on_the_device(monkeypatch):
    """Operators run by fallback here, with copies of their own, so the copies say nothing."""
    stacked = []
    stack = paddle.stack
    monkeypatch.setattr(
        paddle,
        "stack",
        lambda tensors: stacked.append(len(tensors)) or stack(tensors),
    )

    rows = [x._local_value() for x, _ in loader_of(given(DeviceTensors()))]

    assert stacked == [8] * 20
    assert (
        np.concatenate([row.numpy() for row in rows]).tolist() == ROWS.tolist()
    )


WAYS = {
    "Paddle's own": lambda: given(),
    "plain": lambda: loader_of(given()),
    "prefetch 2": lambda: loader_of(given(), prefetch=2),
    "workers": lambda: loader_of(given(num_workers=2)),
    "stream": lambda: loader_of(given(stream())),
    "padded": lambda: loader_of(given(), pad_to={0: ("longest", 0)}),
    **NOT_AHEAD,
}


@pytest.mark.parametrize("way", WAYS)
def test_next_does_not_wait_for_what_the_device_has_to_compute(way, plugin):
    """Work is queued that does not end: a batch whose copy was asked for before, or is queued behind it, comes."""
    loader = WAYS[way]()
    for _ in range(2):  # the second epoch meets an idle device first
        batches = iter(loader)
        next(batches)
        time.sleep(SETTLE)  # workers have read ahead
        next(batches)
        time.sleep(SETTLE)  # what was asked for is copied
        plugin.standin_close(COMPUTE)
        found = []
        waiting = threading.Thread(
            target=lambda batches=batches, found=found: found.append(
                next(batches)
            ),
            daemon=True,
        )
        try:
            waiting.start()
            waiting.join(HANG)
            assert found, "next() waits for what the device has to compute"
        finally:
            plugin.standin_open()
            waiting.join(HANG)
        del batches


def test_valid_does_not_wait_for_what_the_device_has_to_compute(plugin):
    batches = iter(loader_of(given(), tail="fill"))
    next(batches)
    plugin.standin_close(COMPUTE)
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(batches.valid), daemon=True
    )
    try:
        waiting.start()
        waiting.join(HANG)
        assert found, "valid waits for what the device has to compute"
    finally:
        plugin.standin_open()
        waiting.join(HANG)
    assert found[0]._local_value().numpy().all()


def ended_well(code, megabytes):
    """A process with so much memory on the device, which has ended without a crash."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"STANDIN_MEMORY_MB": megabytes},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_queued_part_of_a_batch_that_does_not_fit_is_kept():
    """The device reads it after the error, when it has done what was queued before."""
    code = """
import ctypes, gc, os
import numpy as np, paddle, paddle.distributed as dist
paddle.set_device("standin:0")
import paddle_shard
from paddle_shard.errors import DataReadError
plugin = ctypes.CDLL(os.environ["CUSTOM_DEVICE_ROOT"] + "/libstandin.so")
stream = ctypes.c_void_p(paddle.device.current_stream("standin:0").stream_base.raw_stream)
class Growing(paddle.io.Dataset):
    def __getitem__(self, index):
        return np.zeros(20 << 20, "float32"), np.zeros((12 + 12 * index) << 20, "float32")
    def __len__(self):
        return 4
given = paddle.io.DataLoader(Growing(), batch_size=1)
loader = paddle_shard.shard_dataloader(given, dist.ProcessMesh([0], dim_names=["dp"]), shard_dims="dp", prefetch=0)
batches = iter(loader)
first = next(batches)
plugin.standin_wait(stream)
plugin.standin_work(stream, ctypes.c_long(700000))
try:
    next(batches)
except DataReadError as error:
    print("not there", "making tensors of the batch" in str(error))
del batches, loader
gc.collect()
plugin.standin_wait(stream)
print("lives")
"""
    done = ended_well(code, "270")

    assert done.stdout == "not there True\nlives\n"


def test_device_out_of_memory_names_the_step():
    code = """
import numpy as np, paddle, paddle.distributed as dist
paddle.set_device("standin:0")
import paddle_shard
from paddle_shard.errors import DataReadError
given = paddle.io.DataLoader([np.zeros(1 << 22, "float32")] * 8)
batches = iter(paddle_shard.shard_dataloader(given, dist.ProcessMesh([0], dim_names=["dp"]), shard_dims="dp"))
held = []
try:
    while True:
        held.append(next(batches))
except DataReadError as error:
    print("step", len(held), error)
del batches
print("dropped")
"""
    done = ended_well(code, "64")

    assert "making tensors of the batch" in done.stdout
    assert done.stdout.endswith("dropped\n")
    assert "Traceback" not in done.stderr
