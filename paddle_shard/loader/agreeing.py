"""Through what do the ranks of this run keep in step?"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import paddle.distributed as dist
from paddle.framework import core

from paddle_shard.agree import Agreement, Coordinator, Group, described
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


def open_agreement(
    ranks: tuple[int, ...],
    *,
    prefetch: int,
    ends_must_agree: bool,
    facts: Mapping[str, Any],
    name: str,
    timeout: float,
    on_lost: str,
    same_data: bool = False,
    ends_apart: int | None = None,
    first_step: int = 0,
) -> Agreement:
    """Start a pass of which all ranks deliver the same steps; all ranks open theirs in the same order.

    Args:
        ranks: Who takes part, this process among them.
        prefetch: Steps that are read ahead of the one that is delivered.
        ends_must_agree: Whether it is an error that the data of some ends before that of others.
        facts: What must be the same on every rank: name -> value.
        name: Of the loader, for messages.
        timeout: Seconds for which a rank may be silent.
        on_lost: "raise" or "exit".
        same_data: Whether each of them reads all, to keep its own rows.
        ends_apart: By how many steps their ends may differ then; None: by any number.
        first_step: The epoch's step with which the pass begins.
    """
    found = ranks, os.getpid()  # a forked process has coordinators of its own
    if found not in _coordinators:
        _coordinators[found] = _coordinator(ranks, timeout)
    return _coordinators[found].open(
        prefetch,
        ends_must_agree=ends_must_agree,
        label=described(facts),
        name=name,
        timeout=timeout,
        same_data=same_data,
        ends_apart=ends_apart,
        exit_when_lost=on_lost == "exit",
        first_step=first_step,
    )


def gather_of(ranks: tuple[int, ...], payload: bytes, timeout: float) -> list[bytes]:
    """Return what each of some ranks gives, by rank; collective, on the thread that calls.

    Raises:
        PeerLostError: One of them is gone, or did not come in time.
    """
    if len(ranks) == 1:
        return [payload]
    found = ranks, os.getpid()
    if found not in _gatherers:
        _gatherers[found] = group_of(ranks, f"gathers of {_named(ranks)}", timeout)
    _gatherers[found].timeout = timeout
    return _gatherers[found].gather(payload)


_coordinators: dict[tuple[tuple[int, ...], int], Coordinator] = {}
"""(global ranks, process) -> what they agree through."""
_gatherers: dict[tuple[tuple[int, ...], int], Group] = {}
"""The same for what is asked for on the training thread."""


def _coordinator(ranks: tuple[int, ...], timeout: float) -> Coordinator:
    if len(ranks) == 1:
        return Coordinator(_Alone(), timeout=timeout)
    group = group_of(ranks, f"loaders of {_named(ranks)}", timeout)
    return Coordinator(group, timeout=timeout, end_process=_end_process, join_board=join_board)


def _named(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) < dist.get_world_size() else "all"


def _end_process() -> None:
    """End this process, whatever its training thread does; its workers follow."""
    core._cleanup_mmap_fds()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class _Alone:
    """The group of a single process."""

    rank, size, names, timeout = 0, 1, (0,), 0.0

    def absent(self) -> Sequence[int]:
        """Return nobody."""
        return ()

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the values."""
        return list(values)

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the payload."""
        return [payload]

    def close(self) -> None:
        """Leave nothing behind."""
