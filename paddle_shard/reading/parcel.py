"""How are batches of any structure sent to another process, and made into tensors?"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.tree import mapped

_NO_TENSOR = "OSUVMm"
"""Kinds of numpy arrays that no tensor can hold; such arrays stay as they are."""

ToTensors = Callable[[Sequence[Any]], Sequence[Any]]
"""Converts arrays and tensors to Paddle's tensors."""


@dataclass(frozen=True, slots=True)
class _Slot:
    number: int


def _as_array(tensor: Any) -> Any:
    # A bfloat16 tensor becomes a uint16 array, and Paddle reads a uint16 array as bfloat16.
    if "float8" in str(tensor.dtype):  # it would become an int8 array
        raise TypeError(f"a tensor of dtype {tensor.dtype} cannot leave a worker; convert it, or view it as int8.")
    return np.asarray, (tensor.numpy(),)


def _as_memory(array: np.ndarray[Any, Any]) -> Any:
    """Reduce an array for pickling as numpy does, in half the time."""
    dtype = array.dtype
    if dtype.kind in "biufc" and dtype.isnative and array.flags.c_contiguous:
        return _of_memory, (array.shape, dtype.char, pickle.PickleBuffer(array))  # type: ignore[arg-type]
    return array.__reduce_ex__(5)


def _of_memory(shape: tuple[int, ...], dtype: str, memory: Any) -> Any:
    return np.ndarray(shape, dtype, memory)


_REDUCERS = {np.ndarray: _as_memory, paddle.Tensor: _as_array}


def pickled(messages: Sequence[Any]) -> list[memoryview]:
    """Return the pickles of messages, then the memory of each array; Paddle's tensors are sent as arrays.

    When they are unpickled, no two messages share an object.

    Raises:
        Exception: Whatever pickling raises.
    """
    text, arrays = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = pickle.Pickler(text, 5, buffer_callback=arrays.append)
    pickler.dispatch_table = {**copyreg.dispatch_table, **_REDUCERS}  # users may add to copyreg's table
    for message in messages:
        pickler.dump(message)
        pickler.clear_memo()
    return [text.getbuffer(), *[array.raw() for array in arrays]]


def unpickled(text: Any, arrays: Sequence[Any], count: int, failed: Callable[[Exception], Any]) -> list[Any]:
    """Return `count` messages. If one cannot be unpickled, the result of `failed` replaces it and those after it."""
    pickles, memory, found = io.BytesIO(text), iter(arrays), list[Any]()
    try:
        while len(found) < count:  # each with its own Unpickler, since an Unpickler remembers objects
            found.append(pickle.Unpickler(pickles, buffers=memory).load())
    except Exception as error:
        raise_if_a_handlers(error)
        found.extend([failed(error)] * (count - len(found)))
    return found


def check_dtype(array: np.ndarray[Any, Any], path: str) -> bool:
    """Return whether an array can become a tensor.

    Raises:
        TypeError: It holds numbers, but Paddle does not have its dtype or its byte order.
    """
    if array.dtype.kind in _NO_TENSOR:
        return False
    kind, size = array.dtype.kind, array.dtype.itemsize
    at = f" at field {path}" if path else ""
    if (kind == "u" and size > 2) or (kind == "f" and size > 8) or size > 16:
        raise TypeError(
            f"Paddle has no tensors of dtype {array.dtype}{at}; convert it, for instance with .astype('int64')."
        )
    if not array.dtype.isnative:
        raise TypeError(
            f"array of dtype {array.dtype!r}{at} is in another byte order than this machine's; convert it with "
            f".astype({array.dtype.name!r})."
        )
    return True


def is_tensor(value: Any) -> bool:
    """Return whether a leaf is a framework's tensor: it is not an array, and has a shape, and a place or DLPack."""
    if isinstance(value, np.ndarray | np.generic):
        return False
    return hasattr(value, "shape") and (hasattr(value, "place") or hasattr(value, "__dlpack__"))


def as_array(leaf: Any) -> np.ndarray[Any, Any]:
    """Return an array, or the array of a tensor of any framework.

    Raises:
        TypeError: No array has the tensor's dtype.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    tensor = leaf if isinstance(leaf, paddle.Tensor) else paddle.utils.dlpack.from_dlpack(leaf)
    if "float8" in str(tensor.dtype):  # it would become an int8 array
        raise TypeError(f"rows of a tensor of dtype {tensor.dtype} cannot be taken; convert it, or view it as int8.")
    found: np.ndarray[Any, Any] = tensor.numpy()
    return found


def _flatten(value: Any, leaves: list[Any]) -> Any:
    def slot(leaf: Any, path: str) -> Any:
        if not (check_dtype(leaf, path) if isinstance(leaf, np.ndarray) else is_tensor(leaf)):
            return leaf
        leaves.append(leaf)
        return _Slot(len(leaves) - 1)

    return mapped(value, slot)


def _restore(value: Any, leaves: Sequence[Any]) -> Any:
    return mapped(value, lambda leaf, _: leaves[leaf.number] if isinstance(leaf, _Slot) else leaf)


def map_leaves(value: Any, to_tensors: ToTensors) -> Any:
    """Return a batch in which tensors replace every array that can be a tensor, and every tensor.

    Args:
        value: The batch.
        to_tensors: Converts arrays and tensors.

    Raises:
        TypeError: An array has a dtype or a byte order that Paddle does not have.
    """
    if type(value) is np.ndarray:
        return to_tensors([value])[0] if check_dtype(value, "") else value
    leaves: list[Any] = []
    skeleton = _flatten(value, leaves)
    return _restore(skeleton, to_tensors(leaves))
