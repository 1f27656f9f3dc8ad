"""The state of a loader as a tensor, for checkpoints that can only hold tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from paddle_shard.errors import StateError

NUM_BYTES = 4096
"""Length of the tensor. It is the same for every state, so that any state can be loaded into any such tensor."""

_HINT = "Save it beside the checkpoint instead: paddle.save(loader.state_dict(), path)."


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
        A uint8[4096] tensor on the current device. It holds the state as JSON.

    Raises:
        StateError: The state is not the same after it is written as JSON and read back, or it is too long. Both can
            happen with the state of a sampler.
    """
    try:
        text = json.dumps(dict(state), separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StateError(
            f"state cannot be written as JSON ({error}). {_HINT}"
        ) from error
    if json.loads(text) != state:
        raise StateError(
            f"state is not the same after JSON (tuples become lists, keys become strings): {text:.300}. {_HINT}"
        )
    content = text.encode().ljust(NUM_BYTES)
    if len(content) > NUM_BYTES:
        raise StateError(
            f"state is {len(content)} bytes long as JSON, but a tensor holds {NUM_BYTES}. {_HINT}"
        )
    return paddle.to_tensor(np.frombuffer(content, np.uint8).copy())


def state_from_tensor(tensor: paddle.Tensor) -> dict[str, Any]:
    """Return the state in a tensor from `state_to_tensor`, for `loader.load_state_dict`.

    Args:
        tensor: The loaded tensor, on any device.

    Raises:
        StateError: It holds no state. A damaged state is an error of `load_state_dict`, by its checksum.
    """
    try:
        return dict(json.loads(tensor.numpy().tobytes()))
    except (TypeError, ValueError) as error:
        raise StateError(
            "tensor is damaged, or holds no loader's state. Load the whole tensor that was saved under this name from "
            "state_to_tensor, or an earlier checkpoint."
        ) from error
