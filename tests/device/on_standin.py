"""A pytest plugin (`-p tests.device.on_standin`) that makes the stand-in device the current place.

Large numpy arrays are put into pinned memory, where a GPU build of Paddle has batches of this library (STANDIN_PIN=0:
where numpy puts them).
"""

import ctypes
import json
import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

DEVICE = "standin:0"
paddle.set_device(DEVICE)
plugin = ctypes.CDLL(
    str(Path(os.environ["CUSTOM_DEVICE_ROOT"]) / "libstandin.so")
)
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
plugin.standin_work.argtypes = [_POINTER, ctypes.c_long]
plugin.standin_wait.argtypes = plugin.standin_close.argtypes = [_POINTER]
plugin.standin_counters.argtypes = [ctypes.c_char_p, _SIZE]
plugin.standin_facts.argtypes = [ctypes.c_char_p, _SIZE]
plugin.standin_sum.argtypes = [_POINTER, _POINTER, _SIZE, _SIZE]
plugin.standin_sums.argtypes = [_POINTER, _SIZE]
plugin.standin_pinned.argtypes, plugin.standin_pinned.restype = (
    [_SIZE],
    _POINTER,
)
plugin.standin_copy_us.argtypes = [_POINTER, _POINTER, _SIZE, ctypes.c_int]
plugin.standin_copy_us.restype = ctypes.c_double
plugin.standin_pin_numpy.argtypes = [_POINTER]


def stream():
    """Return the stream that Paddle takes for the current one: a cudaStream_t."""
    return paddle.device.current_stream(DEVICE).stream_base.raw_stream


def read_json(function):
    """Return what a function of the plug-in writes."""
    text = ctypes.create_string_buffer(4096)
    function(text, len(text))
    return json.loads(text.value)


def pin_numpy():
    """Let numpy put the large arrays of all threads into pinned memory: its default allocator is changed in place."""
    umath = np._core._multiarray_umath
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = _POINTER
    get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(
        get_pointer(umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p)
    )
    # PyDataMem_GetHandler in numpy/__multiarray_api.h
    get_handler = ctypes.PYFUNCTYPE(ctypes.py_object)(table[305])
    handler = get_pointer(get_handler(), b"mem_handler")
    assert ctypes.string_at(handler).startswith(b"default_allocator")
    assert plugin.standin_pin_numpy(handler) == 0


@pytest.fixture(autouse=True)
def no_call_fails():
    """Let a test fail in which a call of CUDA failed, even if nobody looked."""
    read_json(plugin.standin_facts)
    yield
    assert read_json(plugin.standin_facts)["errors"] == 0


@contextmanager
def unpinned():
    """Make arrays that forked workers read: CUDA does not say whether these may read pinned memory."""
    plugin.standin_pinning(0)
    try:
        yield
    finally:
        plugin.standin_pinning(1)


if os.environ.get("STANDIN_PIN") != "0":
    pin_numpy()

_numpy = paddle.Tensor.numpy


def numpy(tensor, *args):
    """`Tensor.numpy` without a crash of Paddle 3.3.1: on a custom device it takes a distributed tensor for a dense."""
    if tensor.is_dist() and tensor.place.is_custom_place():
        if any(
            not placement.is_replicated() for placement in tensor.placements
        ):
            tensor = dist.reshard(
                tensor,
                tensor.process_mesh,
                [dist.Replicate() for _ in tensor.placements],
            )
        tensor = tensor._local_value()
    return _numpy(tensor, *args)


paddle.Tensor.numpy = numpy


def numel(tensor):
    """`Tensor.numel` without a fault of Paddle 3.3.1: on a custom device it is copied late, from a local variable."""
    return paddle.to_tensor(tensor.size)


paddle.Tensor.numel = numel
