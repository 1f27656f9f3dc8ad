"""Which groups, coordinators and shared tables do the ranks of this job use?"""

from __future__ import annotations

import json
import logging
import mmap
import os
import secrets
import sys
import zlib

import paddle.distributed as dist
from paddle.framework import core

from paddle_shard.errors import PeerLostError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.ranks.agreement import Agreement, Coordinator
from paddle_shard.ranks.broadcast import own_name
from paddle_shard.ranks.group import PASSES, Group, ProgressTable
from paddle_shard.ranks.star import group_of
from paddle_shard.ranks.verdict import Terms

_TOKEN = 16

_coordinators: dict[tuple[tuple[int, ...], int], Coordinator] = {}
"""(global ranks, process) -> their coordinator; a forked process has its own."""
_gatherers: dict[tuple[tuple[int, ...], int], Group] = {}
"""(global ranks, process) -> the group for gathers on the training thread."""


def open_agreement(ranks: tuple[int, ...], terms: Terms) -> Agreement:
    """Start a pass in which all ranks deliver the same steps; all ranks open their passes in the same order.

    Args:
        ranks: Global ranks that take part, including this process; at least two.
        terms: What they agree on.
    """
    found = ranks, os.getpid()
    if found not in _coordinators:
        timeout = terms.timeout or 1800.0
        introduction = f"{own_name()}-{zlib.crc32(repr(ranks).encode())}"
        _coordinators[found] = Coordinator(
            group_of(ranks, f"loaders of {_named(ranks)}", timeout),
            timeout=timeout,
            end_process=_end_process,
            meet=lambda group: meet(group, introduction),
            introduction=introduction,
        )
    return _coordinators[found].open(terms)


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
    group = _gatherers[found]
    group.timeout = timeout
    try:
        return group.gather(payload)
    except PeerLostError:
        raise
    except BaseException:  # a signal handler's: half of the exchange is done, so a later call would get this answer
        group.close()
        raise


def meet(group: Group, introduction: str = "") -> tuple[ProgressTable | None, dict[int, str]]:
    """Return a progress table in memory that all ranks have mapped, or None if a rank cannot, and all introductions.

    Collective. The first rank makes a file without a name, and the others open it through /proc, so the file disappears
    when they end. A token proves that it is that file, and not a file of another host or container.
    """
    size, memory, mine = _TOKEN + 8 * PASSES * group.size, -1, {"name": introduction}
    try:
        if group.rank == 0:
            try:
                memory = os.memfd_create("paddle_shard")
            except (AttributeError, OSError) as error:  # a C library from before 2018
                raise_if_a_handlers(error)
                logging.getLogger(__name__).debug("no progress table: %s", error)
            else:
                token = secrets.token_bytes(_TOKEN)
                os.write(memory, token)
                os.truncate(memory, size)
                mine |= {"path": f"/proc/{os.getpid()}/fd/{memory}", "token": token.hex()}
        told = [json.loads(one) for one in group.gather(json.dumps(mine).encode())]
        names, first = {rank: one["name"] for rank, one in zip(group.names, told, strict=True)}, told[0]
        shared = memory >= 0
        if not shared and "path" in first:
            try:
                memory = os.open(first["path"], os.O_RDWR)
                shared = os.fstat(memory).st_size == size and os.pread(memory, _TOKEN, 0).hex() == first["token"]
            except OSError as error:
                raise_if_a_handlers(error)
                logging.getLogger(__name__).debug("no progress table: %s", error)
        if not all(fine == b"+" for fine in group.gather(b"+" if shared else b"-")):
            return None, names
        words = memoryview(mmap.mmap(memory, size))[_TOKEN:].cast("q")
        return ProgressTable(words, group.rank, group.size), names  # type: ignore[arg-type]
    finally:
        if memory >= 0:
            os.close(memory)


def _named(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) < dist.get_world_size() else "all"


def _end_process() -> None:
    """End this process, whatever its training thread does; its workers end, too."""
    core._cleanup_mmap_fds()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
