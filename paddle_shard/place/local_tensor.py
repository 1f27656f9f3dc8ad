"""How do arrays become tensors of this process?"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.framework import core

from paddle_shard.handlers import ignoring

_MOST_PUSHED = 8
"""Batches that fit into the queue of a feed: more than are ever pushed and not pulled."""
_PAUSE = 0.0005
"""Seconds between two looks at an event that is waited for."""
_MOST_QUEUED = 2
"""Batches whose copies are queued behind the device's work before the oldest is waited for: each holds host memory."""


class TensorMaker:
    """Makes the tensors of one pass, as `paddle.io.DataLoader` does: on its place, and on a device without waiting.

    `paddle.to_tensor` takes up to four times as long, and in Paddle 3.3 it leaks about 110 bytes per call.
    """

    def __init__(self, place: Any, *, ahead: bool = True) -> None:
        """Set the place.

        Args:
            place: A `CPUPlace`, `CUDAPlace` or the like.
            ahead: True if copies to a device are asked for some batches ahead; False if each is asked for when its
                batch is due.
        """
        if type(place) is core.Place and str(place) != str(core.Place()):
            # A tensor's place is such an object, which has no stream.
            place = paddle.device._convert_to_place(str(place)[len("Place(") : -1])
        self._place, self._on_cpu = place, is_cpu(place)
        self._feed: DeviceFeed | DeviceQueue | None = None
        self._host: Any = core.CPUPlace()
        """Where arrays are put first."""
        if not self._on_cpu:
            self._feed = DeviceFeed(place) if ahead else DeviceQueue(place)
            if not ahead and isinstance(place, core.CUDAPlace):  # else the copy is not asynchronous
                self._host = core.CUDAPinnedPlace()

    def __call__(self, leaves: Sequence[Any], owned: bool) -> Callable[[], list[Any]]:
        """Begin to make tensors of leaves, and return a function that returns them. It is called in the same order.

        Args:
            leaves: Numpy arrays, Paddle's tensors, or another library's tensors. Tensors are detached. On a device,
                what is in host memory is moved there, as Paddle moves a collate_fn's results.
            owned: True if nothing else uses the leaves, so that a tensor may share their memory. False: what is in host
                memory is copied, since it may be used again before a device has copied it, or a thread handed it over.
        """
        adopt = owned and len(set(map(id, leaves))) == len(leaves)  # two tensors must not share the memory of one array
        found: list[Any] = []
        dense: dict[int, Any] = {}
        """Number of a leaf -> the leaf in Paddle's own form; all of them become tensors at once."""
        for number, leaf in enumerate(leaves):
            made = one = None
            if isinstance(leaf, np.ndarray):
                # A subclass of ndarray may share its memory, and a tensor can only use that of a C-contiguous array.
                mine = adopt and type(leaf) is np.ndarray and leaf.size > 0 and leaf.flags.c_contiguous
                one = core.DenseTensor()
                one.set(leaf, self._host, mine)
            else:
                made = leaf.detach() if isinstance(leaf, paddle.Tensor) else paddle.utils.dlpack.from_dlpack(leaf)
                if made.is_dense() and (is_cpu(made.place) or made.place.is_cuda_pinned_place()):
                    # On a device, what is owned is copied, too. Paddle's reader does not know of strides. Nor may its
                    # thread be the one to free another library's memory: Paddle does it under a lock, and that needs
                    # the GIL; from_dlpack takes the lock with the GIL held.
                    if not (owned and self._on_cpu):
                        made = made._copy_to(self._host, True)
                    one = None if self._on_cpu else made.value().get_tensor()
            if one is not None and not self._on_cpu and 0 in leaf.shape:  # the feed takes none; nothing is copied here
                host = core.eager.read_next_tensor_list([one])[0] if made is None else made
                made, one = host._copy_to(self._place, False), None
            if one is not None:
                dense[number] = one
            found.append(made)
        if self._feed is not None and dense:
            self._feed.push(list(dense.values()))

        def made_tensors() -> list[Any]:
            tensors: Sequence[Any] = ()
            if self._feed is not None and dense:
                tensors = self._feed.pull()
            elif dense:
                tensors = core.eager.read_next_tensor_list(list(dense.values()))
            for number, tensor in zip(dense, tensors, strict=True):
                found[number] = tensor
            return found

        return made_tensors


def is_cpu(place: Any) -> bool:
    """Return whether a place is the CPU. Paddle has two classes for it."""
    return isinstance(place, core.CPUPlace) or (isinstance(place, core.Place) and place.is_cpu_place())


class DeviceQueue:
    """Moves batches to a device when they are due: each copy is queued behind what the device has to compute.

    Nobody waits for it, as what is computed from the batch is queued behind the copy. The host's memory is held until
    it has been copied.
    """

    def __init__(self, place: Any) -> None:
        """Set the device."""
        self._place = place
        self._made = deque[list[Any]]()
        """Batches that were pushed and not pulled."""
        self._held = deque[tuple[Any, Sequence[Any]]]()
        """Of the last batches, an event that is passed when it was copied, and its tensors in host memory."""
        weakref.finalize(self, _wait_for_all, self._held, os.getpid())

    def push(self, tensors: Sequence[Any]) -> None:
        """Queue the copies of a batch.

        Args:
            tensors: One or more `core.DenseTensor`s in host memory, which nothing else writes to.
        """
        found = core.eager.read_next_tensor_list(list(tensors))
        self._made.append([tensor._copy_to(self._place, False) for tensor in found])
        place = self._place
        if isinstance(place, core.XPUPlace):  # it has copied, and Paddle 3.0 has no event for it
            return
        # `paddle.device.Event` is the current place's, which is the same for all threads: it must not be changed here.
        if isinstance(place, core.CustomPlace):
            event = core.CustomDeviceEvent(place.get_device_type(), place.get_device_id(), False, False, False)
        else:
            event = core.CUDAEvent(False, False, False)  # of the thread's current device, which a copy sets
        event.record(paddle.device.current_stream(place).stream_base)
        self._held.append((event, found))
        while self._held and (len(self._held) > _MOST_QUEUED or self._held[0][0].query()):
            _wait_for(self._held[0][0])
            self._held.popleft()

    def pull(self) -> list[Any]:
        """Return the tensors of the first batch that was not pulled yet, on the device."""
        return self._made.popleft()


def _wait_for_all(held: deque[tuple[Any, Sequence[Any]]], process: int) -> None:
    if held and os.getpid() == process:  # in a forked child the device cannot be used
        _wait_for(held[-1][0])


def _wait_for(event: Any) -> None:
    while not event.query():  # `synchronize` would hold the GIL, so that no other thread could run
        time.sleep(_PAUSE)


class DeviceFeed:
    """Moves the batches of one pass to a device, on a stream and a thread of their own, first in, first out.

    It uses the reader of `paddle.io.DataLoader`, which copies two batches ahead. A copy waits for what the device had
    to compute when it was asked for, since the memory that it writes may have been in use; the caller waits for the
    copy only. So a batch that was pushed two steps before it is pulled is there.
    """

    def __init__(self, place: Any) -> None:
        """Set the device; the first call of `push` starts the reader."""
        self._place = place
        self._started: tuple[Any, Any] | None = None
        """The queue and the reader."""

    def push(self, tensors: Sequence[Any]) -> None:
        """Ask for a batch to be moved.

        Args:
            tensors: One or more `core.DenseTensor`s in host memory, all with elements.
        """
        batch = core.DenseTensorArray()
        for tensor in tensors:
            batch.append(tensor)
        if self._started is None:
            queue = core.init_dense_tensor_blocking_queue(core.Variable(), _MOST_PUSHED, False)
            # As `paddle.io.DataLoader` does: no names, shapes and dtypes, double buffering, no pinned memory.
            how: tuple[Any, ...] = (queue, [], [], [], [], [self._place], True, True, False)
            try:
                reader = core.create_py_reader(*how, 2)
            except TypeError:  # Paddle < 3.1 does not take the last argument
                reader = core.create_py_reader(*how)
            weakref.finalize(self, _end, queue, reader, os.getpid())
            self._started = queue, reader
        self._started[0].push(batch)

    def pull(self) -> list[Any]:
        """Return the tensors of the first batch that was not pulled yet, on the device."""
        assert self._started is not None
        return list(core.eager.read_next_tensor_list(self._started[1].read_next_list()[0]))


def _end(queue: Any, reader: Any, process: int) -> None:
    if os.getpid() != process:  # a forked child lacks the reader's thread, for which even a destructor would wait
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((queue, reader)))
        return
    # The destructor joins the reader's thread with the GIL held, and that thread needs the GIL to free an array; and
    # shutdown() forgets what is pending, so that buffers go while they are used. So it comes to its end first.
    # After an error of a copy, such as too little memory on the device, it has no end: each read fails.
    queue.close()
    try:
        with ignoring(Exception):
            while reader.read_next_list()[0]:
                pass
    finally:
        reader.shutdown()
