"""How does a batch of any structure pass through Paddle's worker queue unchanged?"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_shard.collate import is_sequence, rebuild

_MARKER = np.zeros(1, np.uint8)
_NO_TENSOR = "OSUVMm"
"""numpy's kinds of arrays that no tensor can hold; they travel as they are."""


@dataclass(frozen=True, slots=True)
class _Slot:
    number: int


def pack(batch: Any) -> list[Any]:
    """Flatten a batch into a list of arrays and one pickle of everything else.

    Paddle's queue ends the epoch silently for a batch without any array, takes tuples for lists, and loses
    what cannot be pickled without a word; so there is always an array, and the pickling is done here.

    Returns:
        [bytes, array or tensor, ...]; with an array that says nothing where the batch has none.

    Raises:
        TypeError: An array of a dtype that Paddle does not have.
        Exception: Whatever pickling a leaf raises.
    """
    leaves: list[Any] = []
    skeleton = _flatten(batch, leaves, "")
    # A tensor's memory may be gone before the queue's thread sends it. (bfloat16 is uint16 to numpy and back.)
    leaves = [leaf.numpy() if is_tensor(leaf) else leaf for leaf in leaves]
    # Shared memory has no arrays without elements; they travel in the pickle.
    sent = [leaf for leaf in leaves if not _is_empty(leaf)]
    empty = {number: leaf for number, leaf in enumerate(leaves) if _is_empty(leaf)}
    return [pickle.dumps((skeleton, empty, len(leaves))), *(sent or [_MARKER])]


def unpack(parcel: Sequence[Any], to_tensor: Callable[[Any], Any]) -> Any:
    """Return the batch that `pack` flattened, with what became of its leaves on the way."""
    text, *sent = parcel
    skeleton, empty, count = pickle.loads(text)
    arrived = iter(sent)
    leaves = [to_tensor(empty[number]) if number in empty else next(arrived) for number in range(count)]
    return _restore(skeleton, leaves)


def check_dtype(array: np.ndarray[Any, Any], path: str) -> bool:
    """Return whether an array can become a tensor.

    Raises:
        TypeError: It looks like one, but Paddle does not have its dtype.
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
    """Return whether a leaf is a framework's tensor: no array, but with a shape, and a place or DLPack."""
    if isinstance(value, np.ndarray | np.generic):
        return False
    return hasattr(value, "shape") and (hasattr(value, "place") or hasattr(value, "__dlpack__"))


def _flatten(value: Any, leaves: list[Any], path: str) -> Any:
    if isinstance(value, np.ndarray):
        if not check_dtype(value, path):
            return value
    elif isinstance(value, Mapping):
        children = {key: _flatten(child, leaves, f"{path}[{key!r}]") for key, child in value.items()}
        return rebuild(value, children)
    elif is_sequence(value):
        return rebuild(value, [_flatten(child, leaves, f"{path}[{i}]") for i, child in enumerate(value)])
    elif not is_tensor(value):
        return value
    leaves.append(value)
    return _Slot(len(leaves) - 1)


def _restore(value: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(value, _Slot):
        return leaves[value.number]
    if isinstance(value, Mapping):
        return rebuild(value, {key: _restore(child, leaves) for key, child in value.items()})
    if isinstance(value, list | tuple):
        return rebuild(value, [_restore(child, leaves) for child in value])
    return value


def map_leaves(value: Any, to_tensor: Callable[[Any], Any]) -> Any:
    """Return a batch with every array that can be a tensor, and every tensor, replaced by `to_tensor` of it."""
    if type(value) is np.ndarray:
        return to_tensor(value) if check_dtype(value, "") else value
    leaves: list[Any] = []
    skeleton = _flatten(value, leaves, "")
    return _restore(skeleton, [to_tensor(leaf) for leaf in leaves])


def _is_empty(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.size == 0
