"""How do the ranks of this run deliver the same steps?"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import paddle.distributed as dist
from paddle.framework import core

from paddle_shard.agree import Agreement, Coordinator, Group, described
from paddle_shard.comm.reception import own_name
from paddle_shard.comm.shared_table import join_table
from paddle_shard.comm.star_group import group_of

PREFETCH = 8
"""Steps that workers prefetch; the ranks agree on windows of half as many steps."""
PREFETCH_ALONE = 2
"""Steps that are prefetched if the training thread reads."""


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
    """Start a pass in which all ranks deliver the same steps; all ranks open their passes in the same order.

    Args:
        ranks: Global ranks that take part, including this process.
        prefetch: Number of steps that are prefetched.
        ends_must_agree: True if it is an error that the data of some ranks ends before that of others.
        facts: What must be the same on every rank: name -> value.
        name: Name of the loader, for messages.
        timeout: Seconds for which a rank may be silent.
        on_lost: "raise" or "exit".
        same_data: True if each rank reads all data and keeps its own rows.
        ends_apart: With `same_data`, by how many steps their ends may differ; None: by any number.
        first_step: The epoch's step with which the pass begins.
    """
    found = ranks, os.getpid()  # a forked process has its own coordinators
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
    """Return the payload of each of some ranks, by rank; collective, on the calling thread.

    Raises:
        PeerLostError: A rank is gone, or did not answer before the timeout expired.
    """
    if len(ranks) == 1:
        return [payload]
    found = ranks, os.getpid()
    if found not in _gatherers:
        _gatherers[found] = group_of(ranks, f"gathers of {_named(ranks)}", timeout)
    _gatherers[found].timeout = timeout
    return _gatherers[found].gather(payload)


_coordinators: dict[tuple[tuple[int, ...], int], Coordinator] = {}
"""(global ranks, process) -> their coordinator."""
_gatherers: dict[tuple[tuple[int, ...], int], Group] = {}
"""(global ranks, process) -> the group for gathers on the training thread."""


def _coordinator(ranks: tuple[int, ...], timeout: float) -> Coordinator:
    group = group_of(ranks, f"loaders of {_named(ranks)}", timeout)
    return Coordinator(group, timeout=timeout, end_process=_end_process, join_table=join_table, introduction=own_name())


def _named(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) < dist.get_world_size() else "all"


def _end_process() -> None:
    """End this process, whatever its training thread does; its workers end, too."""
    core._cleanup_mmap_fds()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
