"""Local tensors: make tensors of this process from arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle.framework import core

from paddle_shard.placement.device import DeviceQueue, is_cpu, name_of


class TensorMaker:
    """Makes the tensors of one epoch iterator on the loader's place, and on a device without waiting for it.

    `paddle.to_tensor` takes up to four times as long, and in Paddle 3.3 it leaks about 110 bytes per call.
    """

    def __init__(self, place: Any) -> None:
        """Set the place: a `CPUPlace`, `CUDAPlace` or the like."""
        if type(place) is core.Place and str(place) != str(core.Place()):
            # A tensor's place is such an object, which has no stream.
            place = paddle.device._convert_to_place(name_of(place))
        self._place = place
        self.is_on_cpu = is_cpu(place)
        """True if its tensors are in host memory, so that any thread may make all of them."""
        self._queue = None if self.is_on_cpu else DeviceQueue(place)
        # From other memory a GPU's copy is not asynchronous.
        self._pins = isinstance(place, core.CUDAPlace)
        self._host: Any = (
            core.CUDAPinnedPlace() if self._pins else core.CPUPlace()
        )
        """Place where arrays are put first."""

    def __call__(
        self, leaves: Sequence[Any], owned: bool
    ) -> Callable[[], list[Any]]:
        """Begin to make tensors of leaves, and return a function that makes the rest of them: that of the device.

        Beginning may be done in any thread; the rest belongs to the one that computes with them.

        Args:
            leaves: Numpy arrays, Paddle's tensors, or another library's tensors. Tensors are detached. On a device,
                what is in host memory is moved there, as Paddle moves a collate_fn's results.
            owned: True if nothing else uses the leaves, and no two of them are one array, so that a tensor may share
                their memory. False: what is in host memory is copied, since it may be used again before a device has
                copied it, or a thread handed it over.
        """
        if self._queue is not None:
            self._queue.free()
        if self._pins:  # else another thread would take memory of the first GPU
            core.set_cuda_current_device_id(self._place.get_device_id())
        parts = []
        dense: dict[int, Any] = {}
        """Number of a leaf -> the leaf in Paddle's dense form; all of them become tensors at once."""
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, np.ndarray):
                part = dense[number] = self._from_array(leaf, owned)
            else:
                part = self._from_tensor(leaf, owned)
                if not self.is_on_cpu and _is_on_host(part):
                    # `part` holds its memory
                    dense[number] = part.value().get_tensor()
            parts.append(part)
        return partial(self._finish, parts, dense)

    def _from_array(self, array: Any, owned: bool) -> Any:
        # A subclass of ndarray may share its memory, and a tensor can only use that of a C-contiguous array.
        is_usable = (
            owned and type(array) is np.ndarray and array.flags.c_contiguous
        )
        if not is_usable and not self._pins:
            # numpy takes large pages for its copy, and Paddle small ones.
            array = np.array(array, order="C")
        dense = core.DenseTensor()
        dense.set(array, self._host, not self._pins and array.size > 0)
        return dense

    def _from_tensor(self, leaf: Any, owned: bool) -> Any:
        is_paddle = isinstance(leaf, paddle.Tensor)
        tensor = (
            leaf.detach()
            if is_paddle
            else paddle.utils.dlpack.from_dlpack(leaf)
        )
        # On a device, what is owned is copied, too: a copy does not know of strides, and frees what it holds when the
        # device is done with it.
        if _is_on_host(tensor) and not (owned and self.is_on_cpu):
            tensor = tensor._copy_to(self._host, True)
        return tensor

    def _finish(self, parts: list[Any], dense: Mapping[int, Any]) -> list[Any]:
        if dense:
            tensors = core.eager.read_next_tensor_list(list(dense.values()))
            if self._queue is not None:
                tensors = self._queue.copied(tensors)
            for number, tensor in zip(dense, tensors, strict=True):
                parts[number] = tensor
        return parts


def _is_on_host(tensor: Any) -> bool:
    place = tensor.place
    return tensor.is_dense() and (is_cpu(place) or place.is_cuda_pinned_place())
