"""Arrays become tensors of the same values, dtypes and shapes, in order, and nobody else's memory with them."""

import gc

import numpy as np
import paddle
import pytest
from paddle.framework import core
from paddle.io import DataLoader

from paddle_shard.placement.device import DeviceQueue
from paddle_shard.placement.local_tensor import TensorMaker

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


def queued():
    """As on a device, in this host's memory."""
    maker = TensorMaker(CPU)
    maker._queue, maker.is_on_cpu = DeviceQueue(CPU), False
    return maker


@pytest.fixture(autouse=True)
def no_events(monkeypatch):
    """A CPU has no events: it is taken for an XPU, whose copies have ended when they return."""
    monkeypatch.setattr(core, "XPUPlace", type(CPU))


MAKERS = pytest.mark.parametrize("maker", [plain, queued])
OWNED = pytest.mark.parametrize("owned", [False, True], ids=["copied", "owned"])


def layouts(array):
    """Arrays of the same values that lie in memory in different ways."""
    turned = (
        np.ascontiguousarray(array[..., ::-1])[..., ::-1]
        if array.ndim
        else array
    )
    twice = np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array
    frozen = array.copy()
    frozen.flags.writeable = False
    return [array, np.asfortranarray(array), turned, twice, frozen]


@MAKERS
@OWNED
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_dtypes_and_shapes_are_the_arrays(maker, owned, dtype):
    arrays = [
        layout
        for shape in SHAPES
        for layout in layouts(
            np.random.default_rng(0).integers(0, 99, shape).astype(dtype)
        )
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
def test_copy_and_its_array_can_be_written_to_apart(maker):
    array = np.arange(10)
    (tensor,) = maker()([array], False)()
    array[:] = -1
    assert tensor.tolist() == list(range(10))
    tensor.fill_(7)
    assert array.tolist() == [-1] * 10


@MAKERS
def test_zero_copy_array_lives_as_long_as_its_tensor(maker):
    tensors = [
        maker()([np.full(100_000, number)], True)()[0] for number in range(20)
    ]
    gc.collect()
    noise = [np.full(100_000, -1) for _ in range(20)]

    assert all(
        (tensor.numpy() == number).all()
        for number, tensor in enumerate(tensors)
    )
    del noise


@MAKERS
def test_subclass_of_an_array_is_copied(maker):
    base = np.arange(6)
    (tensor,) = maker()([base.view(np.recarray)], True)()
    tensor.fill_(7)

    assert base.tolist() == list(range(6))


@MAKERS
def test_tensor_maker_keeps_the_order_of_arrays_and_tensors(maker):
    make, rng = maker(), np.random.default_rng(1)
    for _ in range(30):
        leaves, kinds = [], rng.integers(0, 3, rng.integers(1, 12))
        for number, kind in enumerate(kinds):
            array = (
                np.zeros((0, number))
                if kind == 1
                else np.full((2, 3), float(number))
            )
            leaves.append(paddle.to_tensor(array) if kind == 2 else array)
        made = make(leaves, True)()
        assert [tuple(tensor.shape) for tensor in made] == [
            tuple(leaf.shape) for leaf in leaves
        ]
        assert all(
            np.array_equal(tensor.numpy(), np.asarray(leaf))
            for tensor, leaf in zip(made, leaves, strict=True)
        )


@OWNED
def test_tensor_maker_moves_host_tensors_to_the_device(
    owned,
):
    maker, moved = queued(), []
    copied = maker._queue.copied
    maker._queue.copied = lambda tensors: (
        moved.extend(tensors) or copied(tensors)
    )
    mine = paddle.to_tensor(
        np.arange(6.0).reshape(2, 3), place=paddle.CPUPlace()
    )
    leaves = [np.arange(3), mine, np.zeros((0, 2)), mine * 2, np.float32([1])]

    found = maker(leaves, owned)()

    assert len(moved) == 5
    assert [leaf.numpy().tolist() for leaf in found] == [
        np.asarray(leaf).tolist() for leaf in leaves
    ]
