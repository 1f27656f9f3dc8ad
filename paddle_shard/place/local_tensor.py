"""How do arrays become tensors of this process?"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle.framework import core


class TensorMaker:
    """Makes tensors on one place, as `paddle.io.DataLoader` does.

    `paddle.to_tensor` takes up to four times as long, and in Paddle 3.3 it leaks about 110 bytes per call.
    """

    def __init__(self, place: Any) -> None:
        """Set the place: a `CPUPlace`, `CUDAPlace` or the like."""
        self._place = place
        self._feed = None if is_cpu(place) else DeviceFeed(place)

    def __call__(self, leaves: Sequence[Any], owned: bool) -> list[Any]:
        """Return tensors of numpy arrays, or of tensors.

        Args:
            leaves: Numpy arrays, Paddle's tensors, or another library's tensors. Paddle's tensors are detached, and
                moved to the place if they are in host memory. Another library's tensors stay in the memory they are in.
            owned: True if nothing else uses the arrays, so that a tensor may share an array's memory. False: it copies.
        """
        # Two tensors must not share the memory of one array.
        adopt = owned and (len(leaves) == 1 or len(set(map(id, leaves))) == len(leaves))
        found: list[Any] = []
        dense: dict[int, Any] = {}
        """Number of a leaf -> the leaf in Paddle's own form; all of them become tensors at once."""
        for number, leaf in enumerate(leaves):
            is_tensor, made = isinstance(leaf, paddle.Tensor), None
            # On a device, what is in host memory is moved, as Paddle moves a collate_fn's results.
            moves = self._feed is not None and is_tensor and (is_cpu(leaf.place) or leaf.place.is_cuda_pinned_place())
            if moves and leaf.size:
                dense[number] = leaf.value().get_tensor()
            elif is_tensor:
                made = leaf.detach()
            elif not isinstance(leaf, np.ndarray):
                made = paddle.utils.dlpack.from_dlpack(leaf)
            elif self._feed is not None and not leaf.size:  # the reader takes no tensor without elements
                made = paddle.to_tensor(leaf, place=self._place)
            else:
                # A subclass of ndarray may share its memory, and a tensor can only use that of a C-contiguous array.
                mine = adopt and type(leaf) is np.ndarray and leaf.size > 0 and leaf.flags.c_contiguous
                dense[number] = core.DenseTensor()
                dense[number].set(leaf, core.CPUPlace(), mine)
            found.append(made)
        if dense:
            to_tensors = core.eager.read_next_tensor_list if self._feed is None else self._feed
            for number, tensor in zip(dense, to_tensors(list(dense.values())), strict=True):
                found[number] = tensor
        return found


def is_cpu(place: Any) -> bool:
    """Return whether a place is the CPU. Paddle has two classes for it."""
    return isinstance(place, core.CPUPlace) or (isinstance(place, core.Place) and place.is_cpu_place())


class DeviceFeed:
    """Moves tensors to a device on a separate device stream, in parallel to the computation there.

    It uses the same reader as `paddle.io.DataLoader`, with one batch in flight at a time.
    """

    def __init__(self, place: Any) -> None:
        """Set the device; the first call starts the reader."""
        self._place, self._lock = place, threading.Lock()
        self._empty: tuple[Any, Any] | None = None
        """A queue and its reader, with no batch in flight."""

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the tensors on the device.

        Args:
            tensors: One or more `core.DenseTensor`s in host memory.
        """
        batch = core.DenseTensorArray()
        for tensor in tensors:
            batch.append(tensor)
        with self._lock:  # the queue is first in, first out
            (queue, reader), self._empty = self._empty or self._started(), None
            queue.push(batch)
            found = list(core.eager.read_next_tensor_list(reader.read_next_list()[0]))
            self._empty = queue, reader  # after an interrupt it stays None: the queue would be one batch late
            return found

    def _started(self) -> tuple[Any, Any]:
        queue = core.init_dense_tensor_blocking_queue(core.Variable(), 2, False)
        # As `paddle.io.DataLoader` does: no names, shapes and dtypes, double buffering, no pinned memory.
        how: tuple[Any, ...] = (queue, [], [], [], [], [self._place], True, True, False)
        try:
            reader = core.create_py_reader(*how, 2)
        except TypeError:  # Paddle < 3.1 does not take the last argument
            reader = core.create_py_reader(*how)
        weakref.finalize(self, _end, queue, reader, os.getpid())
        return queue, reader


def _end(queue: Any, reader: Any, process: int) -> None:
    if os.getpid() != process:  # a forked child lacks the reader's thread, for which even a destructor would wait
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((queue, reader)))
        return
    queue.close()  # the reader's thread waits for it
    reader.shutdown()
