"""Coordinators of the ranks of this job, and the calls in which ranks exchange something or report a failure."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import paddle.distributed as dist
from paddle.framework import core

from paddle_shard.ranks.agreement import Agreement, Coordinator
from paddle_shard.ranks.host_memory import HostTable
from paddle_shard.ranks.network import network_of
from paddle_shard.ranks.protocol import Hub, Member
from paddle_shard.ranks.rendezvous import num_ranks
from paddle_shard.ranks.reports import AgreementConfig, known_to_all, report_of

Function = TypeVar("Function", bound=Callable[..., Any])

_REPORT_SECONDS = 10.0
"""Seconds for which a rank whose call has failed tries to reach the others."""
_coordinators: dict[tuple[tuple[int, ...], int], Coordinator] = {}
"""(global ranks, process) -> their coordinator; a forked process has its own."""


def open_agreement(ranks: tuple[int, ...], terms: AgreementConfig) -> Agreement:
    """Start an iteration in which all ranks deliver the same steps; all ranks open theirs in the same order.

    Args:
        ranks: Global ranks that take part, including this process; at least two.
        terms: What they agree on.
    """
    return _coordinator(ranks, terms.timeout).open(terms)


def connect(ranks: tuple[int, ...], timeout: float) -> None:
    """Begin to connect some ranks in the background, so that they learn when one of them ends before the first loop.

    Where `paddle.distributed` is not initialized, or in a forked child, the first loop does it.
    """
    is_known = any(ranks == known for known, _ in _coordinators)
    if len(ranks) > 1 and dist.is_initialized() and not is_known:
        _coordinator(ranks, timeout).start()


def fails_on_all_ranks(
    groups_of: Callable[..., Sequence[tuple[int, ...]]], name: str = ""
) -> Callable[[Function], Function]:
    """Have the others raise what a function of the user's raises on this rank alone; no rank is waited for.

    They raise it in their next loop or call; if this rank ends or leaves its loop, in the one that they are in. It is
    reported in an iteration of its own, so that they stay in order where all ranks fail alike and go on.

    Args:
        groups_of: Returns, given the arguments, the global ranks that make the call; with several groups, all get it.
        name: Name of the call in reports to other ranks; "": that of the function.
    """

    def decorated(function: Function) -> Function:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                call = name or f"{function.__name__}()"
                report_failure(
                    f"its {call} failed", error, *groups_of(*args, **kwargs)
                )
                raise

        return cast(Function, called)

    return decorated


def report_failure(
    call: str,
    error: Exception,
    *groups: tuple[int, ...],
    by: Agreement | None = None,
) -> None:
    """See `fails_on_all_ranks`; `by` is the agreement of the iteration that has failed to begin, if it is open."""
    if getattr(error, "known_to_all", False):
        return
    for ranks in groups:
        if (
            len(ranks) > 1
            and num_ranks() > max(ranks)
            and dist.get_rank() in ranks
        ):
            # If they cannot meet, the error of this rank is the one to raise.
            with contextlib.suppress(Exception):
                report = report_of(error, call)
                terms = AgreementConfig(
                    label={"failed": report}, timeout=_REPORT_SECONDS
                )
                (by or open_agreement(ranks, terms)).fail(report)
    known_to_all(error)


def gather_payloads(
    ranks: tuple[int, ...], payload: str, timeout: float | None, call: str
) -> list[str]:
    """Return the payload of each of some ranks, by rank; collective.

    Args:
        ranks: Global ranks that take part, ascending, including this process.
        payload: What this rank sends.
        timeout: Seconds for which a rank may be silent; None: 1800.
        call: Name of the user's call, for messages.

    Raises:
        PeerLostError: A rank is gone, or did not answer before the timeout expired.
        ArgumentError: A rank has begun a loop, or made another call.
    """
    if len(ranks) == 1 or num_ranks() == 1:
        return [payload]
    terms = AgreementConfig(
        label={"call": call}, name=call, is_call=True, timeout=timeout or 1800.0
    )
    return open_agreement(ranks, terms).exchange(payload)


def groups() -> list[tuple[int, ...]]:
    """Return the global ranks of each group that this process is in."""
    return [ranks for ranks, process in _coordinators if process == os.getpid()]


def _coordinator(ranks: tuple[int, ...], timeout: float) -> Coordinator:
    """Return the coordinator of some ranks; one that is made now has this default timeout."""
    known = (ranks, os.getpid())
    if known not in _coordinators:
        group = f"{len(ranks)} ranks {zlib.crc32(repr(ranks).encode())}"
        network = network_of(ranks, group, timeout)
        rank = dist.get_rank()
        table = HostTable(ranks, rank)
        hub = Hub(ranks, table.place) if rank == ranks[0] else None
        member = Member(rank, hub_rank=ranks[0], hub=hub, table=table)
        _coordinators[known] = Coordinator(
            group, member, network, end_process=_end_process
        )
    return _coordinators[known]


def _end_process() -> None:
    """End this process, whatever its training thread does; its workers end, too."""
    core._cleanup_mmap_fds()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
