"""How is the loader's state kept in a checkpoint that can only hold tensors?"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from paddle_shard.errors import ArgumentTypeError, StateError

VERSION = 1
"""Version of the tensor's layout."""
NUM_BYTES = 4096
"""Length of the tensor. It is the same for every state, so that any state can be loaded into any such tensor."""

_MAGIC = b"pshd"
_HEADER = struct.Struct("<4sHI")  # magic, version, length of the JSON in bytes
_CHECKSUM = struct.Struct("<I")  # CRC-32 of all bytes before it; it is at the end
_ROOM = NUM_BYTES - _HEADER.size - _CHECKSUM.size
_WAY_OUT = "Save it beside the checkpoint instead: paddle.save(loader.state_dict(), path)."


def state_to_tensor(state: Mapping[str, Any]) -> paddle.Tensor:
    """Put a loader's state into a tensor, for `paddle.distributed.save_state_dict`.

    Such a checkpoint keeps only one rank's copy of a tensor that is not distributed. To continue the certificate after
    loading, call `loader.certificate()` on all ranks before saving: then the states of all ranks are equal. To load,
    first make a tensor of a fresh loader's state; the checkpoint is loaded into it::

        dist.save_state_dict({**model.state_dict(), "data": state_to_tensor(loader.state_dict())}, path)
        ...
        found = {**model.state_dict(), "data": state_to_tensor(loader.state_dict())}
        dist.load_state_dict(found, path)
        loader.load_state_dict(state_from_tensor(found["data"]))

    On GPUs this works with any number of processes. On the CPU, Paddle's own `load_state_dict` works in a single
    process only: with several it raises "No available device found", and Paddle 3.0 ends the process.

    Args:
        state: The result of `loader.state_dict()`.

    Returns:
        A uint8[4096] tensor on the current device. It holds the state as JSON, with a version and a checksum.

    Raises:
        StateError: The state is not the same after it is written as JSON and read back, or it is too long. Both can
            happen with the state of a sampler.
    """
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(f"state must be what state_dict() returned, got {type(state).__name__}: {state!r}.")
    for name, value in state.items():
        try:
            survived = json.loads(json.dumps(value, allow_nan=False))
            same = bool(survived == value)
        except (TypeError, ValueError) as error:
            raise StateError(f"state[{name!r}] cannot be written as JSON ({error}). {_WAY_OUT}") from error
        if not same:
            was, now = (text if len(text) <= 80 else text[:77] + "..." for text in (repr(value), repr(survived)))
            raise StateError(
                f"state[{name!r}] does not come back from JSON as it was: {was} becomes {now} "
                f"(tuples become lists, keys become strings). {_WAY_OUT}"
            )
    text = json.dumps(dict(state), separators=(",", ":")).encode()
    if len(text) > _ROOM:
        sizes = {name: len(json.dumps(value, separators=(",", ":"))) for name, value in state.items()}
        largest = max(sizes, key=lambda name: sizes[name])
        raise StateError(
            f"state is {len(text)} bytes long as JSON, of which state[{largest!r}] is {sizes[largest]}, but a tensor "
            f"for a checkpoint holds {_ROOM}. {_WAY_OUT}"
        )
    content = (_HEADER.pack(_MAGIC, VERSION, len(text)) + text).ljust(NUM_BYTES - _CHECKSUM.size, b"\0")
    content += _CHECKSUM.pack(zlib.crc32(content))
    return paddle.to_tensor(np.frombuffer(content, np.uint8).copy())


def state_from_tensor(tensor: Any) -> dict[str, Any]:
    """Return the state in a tensor from `state_to_tensor`, for `loader.load_state_dict`.

    Args:
        tensor: The loaded tensor, on any device.

    Raises:
        StateError: It is not such a tensor, it has another version, or its bytes are not those that were saved.
    """
    if not isinstance(tensor, paddle.Tensor):
        raise ArgumentTypeError(f"tensor must be what state_to_tensor returned, got {type(tensor).__name__}.")
    found = tensor.numpy()
    if found.shape != (NUM_BYTES,) or found.dtype != np.uint8:
        raise StateError(
            f"tensor must be uint8[{NUM_BYTES}], as state_to_tensor makes it, got {found.dtype}{list(found.shape)}. "
            "Load the whole tensor, under the name that it was saved with."
        )
    content = found.tobytes()
    magic, version, length = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        raise StateError(
            f"tensor holds no loader's state: it begins with {magic!r}, not {_MAGIC!r}. "
            "Load the tensor that was saved under this name from state_to_tensor."
        )
    if version != VERSION:
        raise StateError(
            f"tensor has version {version}, but this paddle_shard reads version {VERSION} only. "
            "Load it with the version that saved it."
        )
    if zlib.crc32(content[: -_CHECKSUM.size]) != _CHECKSUM.unpack(content[-_CHECKSUM.size :])[0]:
        raise StateError("tensor is damaged: its checksum does not fit. Load it again, or an earlier checkpoint.")
    state: dict[str, Any] = json.loads(content[_HEADER.size : _HEADER.size + length])
    return state
