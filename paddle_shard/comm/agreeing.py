"""Through what do the ranks of this run keep in step?"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import paddle.distributed as dist
from paddle.framework import core

from paddle_shard.agree import Agreement, Coordinator, Group, described
from paddle_shard.comm.shared_table import join_table
from paddle_shard.comm.star_group import group_of

PREFETCH = 8
"""Steps that workers have read ahead of the one that is delivered; half of them is the window that is agreed on."""
PREFETCH_ALONE = 2
"""The same where the training thread reads."""


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
    group = group_of(ranks, f"loaders of {_named(ranks)}", timeout)
    return Coordinator(group, timeout=timeout, end_process=_end_process, join_table=join_table)


def _named(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) < dist.get_world_size() else "all"


def _end_process() -> None:
    """End this process, whatever its training thread does; its workers follow."""
    core._cleanup_mmap_fds()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
