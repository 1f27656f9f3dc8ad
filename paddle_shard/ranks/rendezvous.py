"""Rendezvous: where the ranks of a group find each other, and sockets that a forked child does not keep open.

They meet at the store of `paddle.distributed` if that is initialized. Paddle's own auto-parallel examples never call
`init_parallel_env`, and its global store cannot be used without it: rank 0 would wait in it, holding the interpreter,
until every rank of the job has connected (3.3.1). In that case, the first rank of the group makes its own store, at the
endpoint that the launcher has given it. That port is free: `paddle.distributed` listens at the master's address only.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import paddle.distributed as dist
from paddle.framework import core

from paddle_shard.core.forks import MAX_WAIT, no_fork
from paddle_shard.core.warn_once import warn_once
from paddle_shard.errors import ArgumentError, PeerLostError
from paddle_shard.ranks.reports import Loss, loss_of

_PAUSE = 0.02
"""Seconds between two attempts to reach a store that its owner may not have made yet."""
_NOTICE = 5.0
"""Seconds after which it is logged that a store cannot be reached yet."""
_ENDED = "paddle_shard/ended"
"""Key that counts the ranks that have ended before they have met others, and prefix of the keys that name them."""
_MAX_SECONDS = 3.0
"""Seconds that the report of an end may take."""
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_is_child = False
"""True if this process is a forked child of a rank, whose end is not the rank's."""


def registered(make: Callable[[], socket.socket]) -> socket.socket:
    """Return a socket that a forked child closes: a worker that held one would hide the death of its rank.

    Args:
        make: Makes the socket; it must not block for long.
    """
    with no_fork:
        made = make()
        _sockets.add(made)
    return made


def _close_in_child() -> None:
    global _is_child
    _is_child = dist.is_initialized()
    for made in list(_sockets):
        with contextlib.suppress(OSError):
            made.close()


os.register_at_fork(after_in_child=_close_in_child)


def connect_to(host: str, port: int) -> socket.socket:
    """Return a connection that a forked child closes."""
    return registered(lambda: socket.create_connection((host, port), MAX_WAIT))


def num_ranks() -> int:
    """Return the number of ranks of the job, whether `paddle.distributed` is initialized or not.

    Ranks that are simulated in one process are not a job: there is no other process to meet.
    """
    launched = int(os.environ.get("PADDLE_TRAINERS_NUM") or 1) > 1
    return (
        int(dist.get_world_size()) if launched or dist.is_initialized() else 1
    )


def endpoints() -> list[str]:
    """Return host:port of each global rank, as the launcher has given them; empty if it has not."""
    addresses = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
    return addresses if len(addresses) == dist.get_world_size() else []


def hosts_of_ranks() -> list[str]:
    """Return the host of each global rank, as the launcher has named it; empty if it has not."""
    hosts = [address.rpartition(":")[0] for address in endpoints()]
    return hosts if all(hosts) else []


class Rendezvous(NamedTuple):
    """The address of a store, and the rank that owns it."""

    host: str
    port: int
    owner: int
    """Global rank of the process that has the store, or will have it."""
    is_early: bool = False
    """True if that process may not have made the store yet, so others wait for it."""

    def connect(self, num_ranks: int, timeout: float) -> Any:
        """Return a new client of the store for one thread: a wait on a client blocks every other use of it.

        While Paddle makes a client, it changes the table of objects of pybind11 without the GIL. If another thread
        makes or frees a tensor meanwhile, the process may crash. So this is called on the training thread.

        Args:
            num_ranks: Number of ranks of the job.
            timeout: Seconds for which the owner is waited for if `is_early`.

        Raises:
            PeerLostError: The owner cannot be reached.
        """
        start = time.monotonic()
        while True:
            # first by a plain connection: Paddle's client would try for longer than its timeout (3.3.1)
            try:
                connect_to(self.host, self.port).close()
                return core.TCPStore(
                    self.host, self.port, False, num_ranks, max(1, int(timeout))
                )
            # Paddle raises the last two if its process ends now.
            except (OSError, RuntimeError, ValueError) as error:
                text = (
                    f"global rank {self.owner}, which has the store where these ranks meet, cannot be reached at "
                    f"{self.host}:{self.port} ({error}). Look for the reason in its own log."
                )
                waited = time.monotonic() - start
                if not self.is_early or waited > timeout:
                    raise PeerLostError.of(
                        text, [self.owner], timeout
                    ) from error
                if waited > _NOTICE:
                    warn_once(f"{text} This rank tries until timeout= is over.")
                time.sleep(_PAUSE)


def rendezvous_of(ranks: Sequence[int]) -> Rendezvous:
    """Return where some ranks meet; the first of them makes the store if Paddle has none.

    Args:
        ranks: Global ranks, ascending, including that of this process.

    Raises:
        ArgumentError: The environment does not tell where, or the store cannot be made.
    """
    if dist.is_initialized():
        # Its address is PADDLE_MASTER, which the launcher sets, else the first of PADDLE_TRAINER_ENDPOINTS, which
        # `paddle.distributed.spawn` sets. Paddle reads MASTER_ADDR and MASTER_PORT too, but not for its store (3.3.1).
        addresses = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "")
        address = os.environ.get("PADDLE_MASTER", addresses.split(",")[0])
        host, port = _parsed(address)
        return Rendezvous(host=host, port=port, owner=0)
    if "PADDLE_MASTER" not in os.environ or not endpoints():
        raise ArgumentError(
            "the ranks of a loader agree on its steps. They meet at the store of paddle.distributed, which is not "
            "initialized. Call paddle.distributed.init_parallel_env() on every rank before the first loop, or start "
            "the ranks with python -m paddle.distributed.launch."
        )
    host, port = _parsed(endpoints()[ranks[0]])
    if dist.get_rank() == ranks[0]:
        try:
            _make_store(port)
        except Exception as error:
            raise ArgumentError(
                f"the ranks of a loader cannot meet at {host}:{port}, this rank's endpoint from the launcher: {error}. "
                "Call paddle.distributed.init_parallel_env() on every rank before the first loop."
            ) from error
    return Rendezvous(host=host, port=port, owner=ranks[0], is_early=True)


def _parsed(address: str) -> tuple[str, int]:
    """Return the host and the port of an address, which Paddle has parsed before."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@functools.cache
def _make_store(port: int) -> Any:
    """Make a store at a port. It lives as long as this process; its forked children use it, too."""
    return core.TCPStore("127.0.0.1", port, True, 1, 30)


@atexit.register
def _report_end() -> None:
    """Report in Paddle's store that this rank ends, if it has not met the others, who may wait for it.

    Ranks that have met see its connections end. (A rank that is killed before reports nothing.)
    """
    if _is_child or any(made.fileno() >= 0 for made in list(_sockets)):
        return
    if dist.is_initialized() and num_ranks() > 1:
        # The store may have gone before. If its process is stopped, Paddle's client would wait for it forever.
        faulthandler.dump_traceback_later(_MAX_SECONDS, exit=True)
        with contextlib.suppress(Exception):
            store = rendezvous_of([0]).connect(num_ranks(), 1.0)
            store.add(f"{_ENDED}/{dist.get_rank()}", 1)
            store.add(_ENDED, 1)
        faulthandler.cancel_dump_traceback_later()


def ended_early(store: Any, ranks: Iterable[int]) -> Loss | None:
    """Return the loss of ranks that have ended before they have met the others; None if there are none."""
    if not store.add(_ENDED, 0):  # each request takes 44 ms (3.3.1)
        return None
    ended = [rank for rank in ranks if store.add(f"{_ENDED}/{rank}", 0)]
    return (
        loss_of(ended, "has ended before it could meet the others")
        if ended
        else None
    )
