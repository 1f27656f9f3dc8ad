"""Exact data sharding for Paddle auto-parallel training.

`import paddle_shard` needs only numpy. The names that need Paddle are loaded on first use (PEP 562), so a plan
can be built and tested on a machine without Paddle.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from paddle_shard import errors
from paddle_shard.plan import Blocks, MeshLayout, ShardPlan

if TYPE_CHECKING:  # what type checkers and editors see of the names below
    from paddle_shard.data.arrays import ArrayDataset as ArrayDataset
    from paddle_shard.data.external import ExternalLoader as ExternalLoader
    from paddle_shard.data.external import ShardOptions as ShardOptions
    from paddle_shard.data.mixture import Mixture as Mixture
    from paddle_shard.data.packed import Packed as Packed
    from paddle_shard.data.shared_list import SharedList as SharedList
    from paddle_shard.data.stream import Stream as Stream
    from paddle_shard.extras.buckets import (
        BucketBatchSampler as BucketBatchSampler,
    )
    from paddle_shard.extras.checkpoints import Checkpoints as Checkpoints
    from paddle_shard.extras.ray_readers import RayReaders as RayReaders
    from paddle_shard.extras.state_tensor import (
        state_from_tensor as state_from_tensor,
    )
    from paddle_shard.extras.state_tensor import (
        state_to_tensor as state_to_tensor,
    )
    from paddle_shard.extras.trainers.callback import (
        TrainerCallback as TrainerCallback,
    )
    from paddle_shard.extras.trainers.patch import patch_paddle as patch_paddle
    from paddle_shard.loader.api import shard_dataloader as shard_dataloader
    from paddle_shard.loader.gather import gather_valid as gather_valid
    from paddle_shard.loader.iteration import ShardIterator as ShardIterator
    from paddle_shard.loader.loader import ShardDataloader as ShardDataloader
    from paddle_shard.placement.field import Balanced as Balanced
    from paddle_shard.reading.sample_threads import Threads as Threads

from paddle_shard.version import VERSION as __version__

_LAZY = {
    "ArrayDataset": "paddle_shard.data.arrays",
    "Balanced": "paddle_shard.placement.field",
    "BucketBatchSampler": "paddle_shard.extras.buckets",
    "Checkpoints": "paddle_shard.extras.checkpoints",
    "ExternalLoader": "paddle_shard.data.external",
    "Mixture": "paddle_shard.data.mixture",
    "Packed": "paddle_shard.data.packed",
    "RayReaders": "paddle_shard.extras.ray_readers",
    "SharedList": "paddle_shard.data.shared_list",
    "ShardDataloader": "paddle_shard.loader.loader",
    "ShardIterator": "paddle_shard.loader.iteration",
    "ShardOptions": "paddle_shard.data.external",
    "Stream": "paddle_shard.data.stream",
    "Threads": "paddle_shard.reading.sample_threads",
    "TrainerCallback": "paddle_shard.extras.trainers.callback",
    "gather_valid": "paddle_shard.loader.gather",
    "patch_paddle": "paddle_shard.extras.trainers.patch",
    "shard_dataloader": "paddle_shard.loader.api",
    "state_from_tensor": "paddle_shard.extras.state_tensor",
    "state_to_tensor": "paddle_shard.extras.state_tensor",
}
"""Public name -> its module; most of these modules import paddle."""

_ANY_SYSTEM = {"ArrayDataset", "Mixture", "Packed"}
"""Names beside the plan that work on other systems than Linux."""

__all__ = ["Blocks", "MeshLayout", "ShardPlan", "__version__", "errors", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        # With name and obj, Python adds "Did you mean".
        raise AttributeError(
            f"module 'paddle_shard' has no attribute {name!r}",
            name=name,
            obj=sys.modules[__name__],
        )
    # Worker processes, and what ranks say to each other, stand on sockets that keep messages apart, memfd and /proc.
    if sys.platform != "linux" and name not in _ANY_SYSTEM:
        raise ImportError(
            f"paddle_shard.{name} needs Linux, and this system is {sys.platform!r}: it lacks the sockets, shared "
            "memory and /proc that readers and ranks use. ShardPlan works here; loaders do in a Linux container (on "
            "Windows: in WSL 2)."
        )
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
