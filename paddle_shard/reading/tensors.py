"""Arrays and tensors among the leaves of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle

from paddle_shard.core.trees import leaves
from paddle_shard.errors import BatchStructureError

SPARSE = "a sparse tensor cannot be split by rows: give its to_dense(), or its indices and values."
NO_TENSOR = "OSUVMm"
"""Kinds of numpy arrays that no tensor can hold; such arrays stay as they are."""


def is_tensor(value: Any) -> bool:
    """Return whether a leaf is a framework's tensor: it is not an array, and has a shape, and a place or DLPack."""
    if isinstance(value, np.ndarray | np.generic):
        return False
    return hasattr(value, "shape") and (
        hasattr(value, "place") or hasattr(value, "__dlpack__")
    )


def arrays_of(value: Any) -> Iterator[Any]:
    """Yield the arrays and tensors of a batch."""
    return (leaf for leaf in leaves(value) if hasattr(leaf, "shape"))


def becomes_tensor(leaf: Any) -> bool:
    """Return whether a leaf is a tensor, or an array that Paddle can hold."""
    return (
        leaf.dtype.kind not in NO_TENSOR
        if isinstance(leaf, np.ndarray)
        else is_tensor(leaf)
    )


def num_rows_of(batch: Any) -> int:
    """Return the number of rows of a batch: the first dim of its first array or tensor that has a dim."""
    for leaf in arrays_of(batch):
        if len(leaf.shape):
            return int(leaf.shape[0])
    raise BatchStructureError(
        f"a batch has no array or tensor with rows: {type(batch).__name__}."
    )


def dtype_of(leaf: Any) -> str:
    """Return the name of the dtype of an array or a tensor; arrays of uint16 are Paddle's bfloat16."""
    if getattr(leaf.dtype, "kind", "") in ("U", "S"):  # of any length
        return str(leaf.dtype.type.__name__)
    name = str(leaf.dtype).rpartition(".")[2]
    return "bfloat16" if name == "uint16" else name


def as_array(leaf: Any) -> np.ndarray[Any, Any]:
    """Return an array, or the array of a tensor of any framework.

    Raises:
        TypeError: The tensor is sparse, or no array has its dtype.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    is_paddle = isinstance(leaf, paddle.Tensor)
    tensor = leaf if is_paddle else paddle.utils.dlpack.from_dlpack(leaf)
    if not tensor.is_dense():
        raise TypeError(SPARSE)
    if "float8" in str(tensor.dtype):  # it would become an int8 array
        raise TypeError(
            f"a tensor of dtype {tensor.dtype} cannot leave a worker, nor can its rows be taken; convert it, or view "
            "it as int8."
        )
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array
