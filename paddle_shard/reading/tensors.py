"""Which leaves of a batch are arrays and tensors, and how are they made into Paddle's tensors?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle

from paddle_shard.errors import BatchStructureError
from paddle_shard.tree import leaves, mapped

_NO_TENSOR = "OSUVMm"
"""Kinds of numpy arrays that no tensor can hold; such arrays stay as they are."""

ToTensors = Callable[[Sequence[Any], bool], Callable[[], Sequence[Any]]]
"""Begins to convert arrays and tensors to tensors, and returns a function that returns them. If nothing else refers to
the arrays (True), the tensors may share their memory."""


def is_tensor(value: Any) -> bool:
    """Return whether a leaf is a framework's tensor: it is not an array, and has a shape, and a place or DLPack."""
    if isinstance(value, np.ndarray | np.generic):
        return False
    return hasattr(value, "shape") and (hasattr(value, "place") or hasattr(value, "__dlpack__"))


def arrays_of(value: Any) -> Iterator[Any]:
    """Yield the arrays and tensors of a batch."""
    return (leaf for leaf in leaves(value) if hasattr(leaf, "shape"))


def becomes_tensor(leaf: Any) -> bool:
    """Return whether a leaf is a tensor, or an array that Paddle can hold."""
    return leaf.dtype.kind not in _NO_TENSOR if isinstance(leaf, np.ndarray) else is_tensor(leaf)


def num_rows_of(batch: Any) -> int:
    """Return the number of rows of a batch: the first dim of its first array or tensor that has a dim."""
    for leaf in arrays_of(batch):
        if len(leaf.shape):
            return int(leaf.shape[0])
    raise BatchStructureError(f"a batch has no array or tensor with rows: {type(batch).__name__}.")


def dtype_of(leaf: Any) -> str:
    """Return the name of the dtype of an array or a tensor; arrays of uint16 are Paddle's bfloat16."""
    name = str(leaf.dtype).rpartition(".")[2]
    return "bfloat16" if name == "uint16" else name


def as_array(leaf: Any) -> np.ndarray[Any, Any]:
    """Return an array, or the array of a tensor of any framework.

    Raises:
        TypeError: No array has the tensor's dtype.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    tensor = leaf if isinstance(leaf, paddle.Tensor) else paddle.utils.dlpack.from_dlpack(leaf)
    if "float8" in str(tensor.dtype):  # it would become an int8 array
        raise TypeError(
            f"a tensor of dtype {tensor.dtype} cannot leave a worker, nor can its rows be taken; convert it, or view "
            "it as int8."
        )
    found: np.ndarray[Any, Any] = tensor.numpy()
    return found


def begin_tensors(value: Any, begin: ToTensors, owned: bool) -> Callable[[], Any]:
    """Begin to make tensors of every array of a batch that can be one, and of every tensor.

    Args:
        value: The batch.
        begin: Begins to convert arrays and tensors, all at once.
        owned: True if nothing else refers to the arrays.

    Returns:
        A function that returns the batch with tensors in their places.

    Raises:
        TypeError: An array has a dtype or a byte order that Paddle does not have.
    """
    if type(value) is np.ndarray:
        if not _check_dtype(value, ""):
            return lambda: value
        made = begin([value], owned)
        return lambda: made()[0]
    found: list[Any] = []

    def note(leaf: Any, path: str) -> None:
        if _check_dtype(leaf, path) if isinstance(leaf, np.ndarray) else is_tensor(leaf):
            found.append(leaf)

    mapped(value, note)
    made, converted = begin(found, owned), set(map(id, found))

    def finished() -> Any:
        tensors = iter(made())
        return mapped(value, lambda leaf, _: next(tensors) if id(leaf) in converted else leaf)

    return finished


def _check_dtype(array: np.ndarray[Any, Any], path: str) -> bool:
    """Return whether an array can become a tensor.

    Raises:
        TypeError: It holds numbers, but Paddle does not have its dtype or its byte order.
    """
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind in _NO_TENSOR:
        return False
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
