"""What the recipes have in common: rows, seeds and checks of the share that a library reads, and its state in JSON.

Copy this file beside the recipe.
"""

from __future__ import annotations

import base64
import hashlib
import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from paddle_shard import ShardOptions
from paddle_shard.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    MissingDependencyError,
    SplitError,
    StateError,
)


@contextmanager
def needs(packages: str) -> Iterator[None]:
    """Turn a failed import in the `with` block into an error that says what to install.

    Raises:
        MissingDependencyError: A package cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(
            f"{error.name or error} cannot be imported ({error}). Install it with: pip install {packages}"
        ) from error


def check_batch_size(batch_size: int) -> None:
    """Check the size of a global batch.

    Raises:
        ArgumentError: It is not an int >= 1.
    """
    is_int = isinstance(batch_size, numbers.Integral) and batch_size is not True
    if not is_int or batch_size < 1:
        raise ArgumentError(
            f"batch_size must be an int >= 1, got {batch_size!r}."
        )


def local_rows(batch_size: int, share: ShardOptions) -> int:
    """Return the rows that one data rank reads of a global batch.

    Raises:
        ArgumentError: The batch size is not an int >= 1.
        BatchSizeError: The data ranks do not divide it.
    """
    check_batch_size(batch_size)
    rows, rest = divmod(batch_size, share.num_shards)
    if rest:
        raise BatchSizeError(
            f"batch_size={batch_size} cannot be split evenly over {share.num_shards} data ranks. Give a multiple of "
            f"{share.num_shards}."
        )
    return rows


def seed_of(share: ShardOptions, *purpose: Any, bits: int = 31) -> int:
    """Return a seed of `bits` bits for this epoch, the same on every data rank."""
    parts = repr((share.seed, share.epoch, *purpose)).encode()
    digest = hashlib.blake2b(parts, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits)


def check_share(
    found: Mapping[str, Any], share: ShardOptions, what: str, fix: str
) -> None:
    """Check that an object of a library has the data rank and the number of data ranks of a share.

    Args:
        found: Exactly two entries, the library's name -> the object's value: first the data rank, then the number of
            data ranks.
        share: The share that the values must agree with.
        what: The object that has the values, for the message.
        fix: What to write instead.

    Raises:
        SplitError: The values differ from the share's.
    """
    (rank, has_rank), (count, has_count) = found.items()
    if (has_rank, has_count) != (share.shard, share.num_shards):
        raise SplitError(
            f"{what} has {rank}={has_rank} and {count}={has_count}, but this process is data rank {share.shard} of "
            f"{share.num_shards} (which is not the global rank, nor the world size). {fix}"
        )


def check_same(share: ShardOptions, **values: Any) -> None:
    """Check that what a saved state depends on is the same as when it was saved.

    Args:
        share: The share; nothing is checked if it has no state.
        values: Values that the saved state has under the same names.

    Raises:
        StateError: One differs.
    """
    for name, value in values.items():
        if share.state is not None and share.state.get(name) != value:
            raise StateError(
                f"state: {name} was {share.state.get(name)!r} when it was saved, and is {value!r} now. Go on with the "
                "same data and batch size, or begin the epoch anew."
            )


def build_watched(
    build: Callable[[Any], Any], share: ShardOptions, library: str
) -> Any:
    """Return what a user's function builds for a share.

    Raises:
        SplitError: The function has not read both `shard` and `num_shards`, so every data rank would read all the data.
    """
    asked: set[str] = set()

    class Watched:
        """The share, which records what the function reads of it."""

        def __getattr__(self, name: str) -> Any:
            asked.add(name)
            return getattr(share, name)

    built = build(Watched())
    if share.num_shards > 1 and not {"shard", "num_shards"} <= asked:
        raise SplitError(
            f"{library}: the function that builds the loader has looked at neither share.shard nor share.num_shards, "
            f"or at one only, so that each of the {share.num_shards} data ranks would read all of the data. Split it "
            "there, in the function itself, not later in a worker."
        )
    return built


_TAG = "$"
"""The only key of a dict that encodes a value of another kind: {"$": [kind, content, ...]}."""


def to_json(value: Any, path: str = "state") -> Any:
    """Return a value that JSON can hold and that `from_json` turns back. Nothing is pickled.

    Args:
        value: None, numbers, strings, bytes, numpy arrays, torch tensors, and lists, tuples and dicts of these.
        path: Path of the value in the state, for messages.

    Raises:
        ArgumentTypeError: The value contains another type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return to_json(value.item(), path)
    if isinstance(value, list | tuple):
        items = [to_json(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: ["tuple", items]}
    if isinstance(value, Mapping):
        pairs = [
            [
                to_json(key, f"a key of {path}"),
                to_json(item, f"{path}[{key!r}]"),
            ]
            for key, item in value.items()
        ]
        plain = all(isinstance(key, str) and key != _TAG for key in value)
        return dict(pairs) if plain else {_TAG: ["dict", pairs]}
    if isinstance(value, bytes):
        return {_TAG: ["bytes", base64.b64encode(value).decode()]}
    kind = (
        "array"
        if isinstance(value, np.ndarray)
        else "tensor"
        if type(value).__module__ == "torch"
        else None
    )
    array = np.ascontiguousarray(value) if kind else None
    if array is None or array.dtype.hasobject:
        raise ArgumentTypeError(
            f"{path} is a {type(value).__name__}, which cannot be saved as JSON: {value!r:.200}"
        )
    return {
        _TAG: [
            kind,
            base64.b64encode(array.tobytes()).decode(),
            array.dtype.str,
            list(value.shape),
        ]
    }


def from_json(value: Any) -> Any:
    """Return the value that `to_json` has encoded.

    Raises:
        StateError: The value has an unknown kind, so `to_json` has not encoded it.
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() != {_TAG}:
        return {key: from_json(item) for key, item in value.items()}
    kind, content, *about = value[_TAG]
    if kind in ("tuple", "dict"):
        return (
            tuple(from_json(content))
            if kind == "tuple"
            else dict(from_json(content))
        )
    if kind not in ("bytes", "array", "tensor"):
        raise StateError(f"state: {kind!r} is no kind of value that is known.")
    data = base64.b64decode(content)
    if kind == "bytes":
        return data
    dtype, shape = about
    array = np.frombuffer(data, dtype).reshape(shape).copy()
    if kind == "array":
        return array
    import torch

    return torch.from_numpy(array)
