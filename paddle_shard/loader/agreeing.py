"""Through what do the ranks of this run keep in step?"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from functools import cache

import paddle.distributed as dist
from paddle.framework import core

from paddle_shard.agree import Agreement, Coordinator
from paddle_shard.replicas.shared_board import join_board
from paddle_shard.replicas.star_group import group_of

PREFETCH = 8
"""Steps that workers have read ahead of the one that is delivered; half of them is the window that is agreed on."""
PREFETCH_ALONE = 2
"""The same where the training thread reads."""

QUICK = 0.001
"""Seconds from step to step, below which some microseconds count."""
_AGREED_AHEAD, _SEEN_AHEAD = 0.02, 0.0005
"""Seconds of steps that are read ahead, so that a round of the agreement is over when half of them are needed: it takes
up to some milliseconds on a busy host. And where ranks see on a board how far the others are: they differ by that."""
_HELD, _HELD_SEEN = 8 << 20, 1 << 20
"""Bytes of batches that may be held for that; so few, where steps are quick, that they stay in the cache."""
_MOST = 32


def steps_ahead(least: int, step_seconds: float, num_bytes: int, *, on_board: bool = False) -> int:
    """Return how many steps to read ahead so that quick ones do not wait for the agreement.

    Args:
        least: At least so many, but for quick steps on a board.
        step_seconds: From one step to the next.
        num_bytes: Of a batch.
        on_board: Whether no rounds are needed.

    Examples:
        >>> steps_ahead(2, 0.0002, 1000), steps_ahead(2, 0.0002, 1 << 20), steps_ahead(2, 0.05, 1000)
        (32, 8, 2)
        >>> steps_ahead(8, 0.0002, 1 << 20, on_board=True)
        2
    """
    seconds, held = (_SEEN_AHEAD, _HELD_SEEN) if on_board else (_AGREED_AHEAD, _HELD)
    if on_board and step_seconds < QUICK:
        least = min(least, PREFETCH_ALONE)
    wanted = 2 * math.ceil(seconds / max(step_seconds, 1e-6))
    return max(least, min(wanted, held // max(num_bytes, 1), _MOST))


def ranks_of_run() -> tuple[int, ...]:
    """Return the global ranks of this run; a single one where `paddle.distributed` is not initialized."""
    return tuple(range(dist.get_world_size())) if dist.is_initialized() else (dist.get_rank(),)


def open_agreement(
    ranks: Sequence[int], *, prefetch: int, ends_must_agree: bool, label: str, timeout: float, on_lost: str
) -> Agreement:
    """Start a pass of which all ranks deliver the same steps; all ranks open theirs in the same order.

    Args:
        ranks: Who takes part, this process among them.
        prefetch: Steps that are read ahead of the one that is delivered.
        ends_must_agree: Whether it is an error that the data of some ends before that of others.
        label: What is read; the same on every rank.
        timeout: Seconds for which a rank may be silent.
        on_lost: "raise" or "exit".
    """
    coordinator = _coordinator(tuple(ranks), timeout, os.getpid())
    return coordinator.open(prefetch, ends_must_agree=ends_must_agree, label=label, exit_when_lost=on_lost == "exit")


@cache
def _coordinator(ranks: tuple[int, ...], timeout: float, process: int) -> Coordinator:
    """Return this process's coordinator with some ranks; a forked process has one of its own."""
    if len(ranks) == 1:
        return Coordinator(_Alone(), timeout=timeout)
    key = f"loaders of {','.join(map(str, ranks)) if len(ranks) < dist.get_world_size() else 'all'} {timeout:g}"
    group = group_of(ranks, key, timeout)
    return Coordinator(group, timeout=timeout, end_process=_end_process, join_board=join_board)


def _end_process() -> None:
    """End this process, whatever its training thread does; its workers follow."""
    core._cleanup_mmap_fds()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


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
