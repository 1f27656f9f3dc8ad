"""Exact data sharding for Paddle auto-parallel training.

`import paddle_shard` needs numpy only: the names that need Paddle load on first use (PEP 562), so a plan
can be drawn and tested on a machine without it.
"""

from __future__ import annotations

from typing import Any

from paddle_shard import errors
from paddle_shard.plan import Blocks, MeshLayout, ShardPlan

__version__ = "0.1.0"

_LAZY = {
    "ArrayDataset": "paddle_shard.sources.arrays",
    "Balanced": "paddle_shard.place.field",
    "Foreign": "paddle_shard.sources.foreign",
    "ShardDataloader": "paddle_shard.loader.loader",
    "Share": "paddle_shard.sources.foreign",
    "Stream": "paddle_shard.loader.stream",
    "TrainerCallback": "paddle_shard.loader.trainer",
    "gather_valid": "paddle_shard.loader.metrics",
    "patch_paddle": "paddle_shard.loader.api",
    "shard_dataloader": "paddle_shard.loader.api",
    "state_from_tensor": "paddle_shard.loader.checkpoint",
    "state_to_tensor": "paddle_shard.loader.checkpoint",
}
"""Public name -> the module that holds it; most import paddle."""

__all__ = ["Blocks", "MeshLayout", "ShardPlan", "__version__", "errors", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'paddle_shard' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
