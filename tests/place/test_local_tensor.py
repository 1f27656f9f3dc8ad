"""Arrays become tensors of the same values, dtypes and shapes, in order, and nobody else's memory with them."""

import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import paddle
import pytest
from paddle.framework import core
from paddle.io import DataLoader

from paddle_shard.place.local_tensor import DeviceFeed, DeviceQueue, TensorMaker
from tests.deadlines import HANG

CPU = DataLoader([0], batch_size=1).places[0]
DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
SHAPES = [(), (1,), (3, 4), (0,), (3, 0, 2), (1, 5, 1), (2, 3, 4, 5)]


def plain():
    return TensorMaker(CPU)


def fed():
    """As on a device, in this host's memory."""
    maker = TensorMaker(CPU)
    maker._feed, maker._on_cpu = DeviceFeed(CPU), False
    return maker


MAKERS = pytest.mark.parametrize("maker", [plain, fed])
OWNED = pytest.mark.parametrize("owned", [False, True], ids=["copied", "owned"])


def layouts(array):
    """Arrays of the same values that lie in memory in different ways."""
    turned = np.ascontiguousarray(array[..., ::-1])[..., ::-1] if array.ndim else array
    twice = np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array
    frozen = array.copy()
    frozen.flags.writeable = False
    return [array, np.asfortranarray(array), turned, twice, frozen]


@MAKERS
@OWNED
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_dtypes_and_shapes_are_the_arrays(maker, owned, dtype):
    arrays = [
        layout for shape in SHAPES for layout in layouts(np.random.default_rng(0).integers(0, 99, shape).astype(dtype))
    ]
    tensors = maker()(arrays, owned)()

    assert len(tensors) == len(arrays)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.dtype == getattr(paddle, dtype)
        assert tuple(tensor.shape) == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.place.is_cpu_place()
        assert tensor.stop_gradient


@MAKERS
@OWNED
def test_uint16_is_bfloat16_as_it_is_to_paddle(maker, owned):
    tensor = paddle.to_tensor([1.0, -2.5], "bfloat16")
    (made,) = maker()([tensor.numpy()], owned)()

    assert made.dtype == paddle.bfloat16
    assert made.cast("float32").tolist() == [1.0, -2.5]


@MAKERS
def test_a_copy_and_its_array_can_be_written_to_apart(maker):
    array = np.arange(10)
    (tensor,) = maker()([array], False)()
    array[:] = -1
    assert tensor.tolist() == list(range(10))
    tensor.fill_(7)
    assert array.tolist() == [-1] * 10


@MAKERS
def test_an_array_that_is_given_twice_becomes_two_tensors(maker):
    array = np.arange(10)
    first, second = maker()([array, array], True)()
    first.fill_(7)

    assert second.tolist() == list(range(10))


@MAKERS
def test_a_zero_copy_array_lives_as_long_as_its_tensor(maker):
    tensors = [maker()([np.full(100_000, number)], True)()[0] for number in range(20)]
    gc.collect()
    noise = [np.full(100_000, -1) for _ in range(20)]

    assert all((tensor.numpy() == number).all() for number, tensor in enumerate(tensors))
    del noise


@MAKERS
def test_a_subclass_of_an_array_is_copied(maker):
    base = np.arange(6)
    (tensor,) = maker()([base.view(np.recarray)], True)()
    tensor.fill_(7)

    assert base.tolist() == list(range(6))


@MAKERS
def test_arrays_empty_arrays_and_tensors_keep_their_places_among_each_other(maker):
    make, rng = maker(), np.random.default_rng(1)
    for _ in range(30):
        leaves, kinds = [], rng.integers(0, 3, rng.integers(1, 12))
        for number, kind in enumerate(kinds):
            array = np.zeros((0, number)) if kind == 1 else np.full((2, 3), float(number))
            leaves.append(paddle.to_tensor(array) if kind == 2 else array)
        made = make(leaves, True)()
        assert [tuple(tensor.shape) for tensor in made] == [tuple(leaf.shape) for leaf in leaves]
        assert all(np.array_equal(tensor.numpy(), np.asarray(leaf)) for tensor, leaf in zip(made, leaves, strict=True))


# The feed


def batch(number, size=3):
    """The host's tensors of a batch."""
    tensors = []
    for at in range(1 + number % size):
        dense = core.DenseTensor()
        dense.set(np.array([number, at]), core.CPUPlace(), False)
        tensors.append(dense)
    return tensors


def is_batch(tensors, number, size=3):
    return [tensor.tolist() for tensor in tensors] == [[number, at] for at in range(1 + number % size)]


def moved(feed, tensors):
    feed.push(tensors)
    return feed.pull()


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_batches_come_back_in_their_order(ahead):
    feed = DeviceFeed(CPU)
    for number in range(ahead):
        feed.push(batch(number))
    found = []
    for number in range(ahead, 300):
        feed.push(batch(number))
        found.append(feed.pull())
    found += [feed.pull() for _ in range(ahead)]

    assert all(is_batch(tensors, number) for number, tensors in enumerate(found))


def test_passes_that_are_open_at_once_each_get_their_own():
    feeds, wrong = [DeviceFeed(CPU) for _ in range(4)], []

    def work(feed, first):
        wrong.extend(n for n in range(first, first + 200) if not is_batch(moved(feed, batch(n)), n))

    threads = [threading.Thread(target=work, args=(feed, 1000 * n)) for n, feed in enumerate(feeds)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def threads_of_this_process(wanted):
    deadline = time.monotonic() + HANG
    while (found := len(os.listdir("/proc/self/task"))) > wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_a_feed_that_is_gone_leaves_no_thread():
    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    for used in (True, False, True):
        feed = DeviceFeed(CPU)
        if used:
            moved(feed, batch(1))
            assert len(os.listdir("/proc/self/task")) > before
        del feed
    cycle = [DeviceFeed(CPU)]
    moved(cycle[0], batch(1))
    cycle.append(cycle)
    del cycle
    gc.collect()

    assert threads_of_this_process(before) <= before


ENDS = {
    "by itself": "",
    "with sys.exit": "sys.exit(0)",
    "in a fork": "if os.fork(): os.wait(); assert is_fed(2)",
    "in a fork that drops it": """
pid = os.fork()
if pid == 0:
    del feed
    gc.collect()
    sys.exit(3)
assert os.waitpid(pid, 0)[1] == 3 << 8
assert is_fed(2)
""",
}


@pytest.mark.processes
@pytest.mark.parametrize("how", ENDS)
def test_a_process_with_a_feed_ends(how):
    script = f"""
import gc, os, sys
import numpy as np
from paddle.framework import core
from paddle.io import DataLoader
from paddle_shard.place.local_tensor import DeviceFeed, DeviceQueue, TensorMaker

feed = DeviceFeed(DataLoader([0], batch_size=1).places[0])

def is_fed(number):
    dense = core.DenseTensor()
    dense.set(np.array([number]), core.CPUPlace(), False)
    feed.push([dense])
    return feed.pull()[0].tolist() == [number]

assert is_fed(1)
{ENDS[how]}
"""
    found = subprocess.run([sys.executable, "-c", script], timeout=HANG, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]


@OWNED
def test_a_tensor_that_is_in_the_hosts_memory_goes_to_the_device_as_an_array_does(owned):
    maker, moved = fed(), []
    push = maker._feed.push
    maker._feed.push = lambda tensors: moved.extend(tensors) or push(tensors)
    mine = paddle.to_tensor(np.arange(6.0).reshape(2, 3), place=paddle.CPUPlace())
    leaves = [np.arange(3), mine, np.zeros((0, 2)), mine * 2, np.float32([1])]

    found = maker(leaves, owned)()

    assert len(moved) == 4, "all but the one without elements"
    assert [leaf.numpy().tolist() for leaf in found] == [np.asarray(leaf).tolist() for leaf in leaves]


def test_on_an_xpu_no_event_is_asked_for(monkeypatch):
    """A copy to an XPU has ended when it returns, and Paddle 3.0 has no event for it, as here it has none for a CPU."""
    monkeypatch.setattr(core, "XPUPlace", type(CPU))
    queue = DeviceQueue(CPU)
    tensor = core.DenseTensor()
    tensor.set(np.arange(3), core.CPUPlace())

    queue.push([tensor])

    assert queue.pull()[0].numpy().tolist() == [0, 1, 2]
