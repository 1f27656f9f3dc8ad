"""How is a library's state that holds bytes and arrays written as JSON?"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from paddle_shard.errors import ArgumentTypeError, StateError

_TAG = "$"
"""The only key of a dict that encodes a value of another kind: {"$": [kind, ...]}."""


def to_json(value: Any, path: str = "state") -> Any:
    """Return a value that JSON can hold and that `from_json` turns back. Nothing is pickled.

    Args:
        value: None, numbers, strings, bytes, numpy arrays, torch tensors, and lists, tuples and dicts of these.
        path: Path of the value in the state, for messages.

    Raises:
        ArgumentTypeError: The value contains another type.

    Examples:
        >>> from_json(to_json({1: (b"ab", 2.5)}))
        {1: (b'ab', 2.5)}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {_TAG: ["bytes", _text(value)]}
    if isinstance(value, np.generic):
        return to_json(value.item(), path)
    if isinstance(value, list):
        return [to_json(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: ["tuple", *(to_json(item, f"{path}[{i}]") for i, item in enumerate(value))]}
    if isinstance(value, Mapping):
        pairs = [(key, to_json(item, f"{path}[{key!r}]")) for key, item in value.items()]
        if all(isinstance(key, str) and key != _TAG for key, _ in pairs):
            return dict(pairs)
        return {_TAG: ["dict", *([to_json(key, f"a key of {path}"), item] for key, item in pairs)]}
    kind = "array" if isinstance(value, np.ndarray) else "tensor" if type(value).__module__ == "torch" else None
    array = np.ascontiguousarray(value) if kind else None
    if array is None or array.dtype.hasobject:
        raise ArgumentTypeError(f"{path} is a {type(value).__name__}, which cannot be saved as JSON: {value!r:.200}")
    return {_TAG: [kind, array.dtype.str, list(value.shape), _text(array.tobytes())]}


def from_json(value: Any) -> Any:
    """Return the value that `to_json` has encoded.

    Raises:
        StateError: The value has an unknown kind, so `to_json` has not encoded it.
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) != {_TAG}:
        return {key: from_json(item) for key, item in value.items()}
    kind, *rest = value[_TAG]
    if kind == "bytes":
        return base64.b64decode(rest[0])
    if kind == "tuple":
        return tuple(from_json(item) for item in rest)
    if kind == "dict":
        return {from_json(key): from_json(item) for key, item in rest}
    if kind not in ("array", "tensor"):
        raise StateError(f"state: {kind!r} is no kind of value that is known.")
    dtype, shape, text = rest
    array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
    if kind == "array":
        return array
    import torch

    return torch.from_numpy(array)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
