"""Through what do the ranks of this run keep in step?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import paddle.distributed as dist

from paddle_shard.agree import Agreement, Coordinator
from paddle_shard.replicas.star_group import world_group

PREFETCH = 8
"""Steps of a stream that are read ahead of the one that is delivered; half of them is the window that is agreed on."""


def open_agreement(*, tail: str, label: str) -> Agreement:
    """Start a pass of which all ranks deliver the same steps; all ranks open theirs in the same order.

    Args:
        tail: Where a stream's parts end at different times.
        label: What is read; the same on every rank.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    return _coordinator(size, os.getpid()).open(PREFETCH, ends_must_agree=tail == "error", label=label)


@cache
def _coordinator(world_size: int, process: int) -> Coordinator:
    """Return this process's only coordinator; a forked process has one of its own."""
    if world_size == 1:
        return Coordinator(_Alone())
    return Coordinator(world_group("loaders"))


class _Alone:
    """The group of a single process."""

    rank, size, names = 0, 1, (0,)

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the values."""
        return list(values)

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the payload."""
        return [payload]

    def close(self) -> None:
        """Leave nothing behind."""
