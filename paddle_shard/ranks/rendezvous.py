"""Where do the ranks of a group find each other, and how does a forked child not keep their connections open?

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
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import paddle.distributed as dist
from paddle.framework import core

from paddle_shard.core.forks import no_fork
from paddle_shard.core.warn_once import say_once
from paddle_shard.errors import ArgumentError, PeerLostError

_PAUSE = 0.02
"""Seconds between two attempts to reach a store that its owner may not have made yet."""

_GONE = "paddle_shard/gone"
"""Key of the number of ranks that have ended before they have met others."""
_MOST_TEXT, _LONGEST_WORD = 1000, 3.0
"""Characters of what a rank says when it ends, and seconds that it takes for it."""
_DYING = 0.2
"""Seconds for which a process that was killed may still take connections."""
_is_child = False
"""True if this process is a forked child of a rank, whose end is not the rank's."""
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def noted(make: Callable[[], socket.socket]) -> socket.socket:
    """Return a socket that a forked child closes: a worker that held one would hide the death of its rank.

    Args:
        make: Makes the socket; it must not block.
    """
    with no_fork:
        made = make()
        _sockets.add(made)
    return made


def _leave_sockets_to_the_parent() -> None:
    global _is_child
    _is_child = dist.is_initialized()
    for found in list(_sockets):
        with contextlib.suppress(OSError):
            found.close()


os.register_at_fork(after_in_child=_leave_sockets_to_the_parent)


def connected(host: str, port: int, timeout: float | None) -> socket.socket:
    """Return a connection, as `socket.create_connection` does, that a forked child closes."""
    failure: OSError = ConnectionError("the host has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        peer = noted(functools.partial(socket.socket, family, kind, protocol))
        peer.settimeout(timeout)
        try:
            peer.connect(address)
            return peer
        except OSError as error:
            peer.close()
            failure = error
    raise failure


def num_ranks() -> int:
    """Return the number of ranks of the job, whether `paddle.distributed` is initialized or not.

    Ranks that are simulated in one process are not a job: there is no other process to meet.
    """
    launched = int(os.environ.get("PADDLE_TRAINERS_NUM") or 1) > 1
    return int(dist.get_world_size()) if launched or dist.is_initialized() else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address of a store, and the rank that owns it."""

    host: str
    port: int
    owner: int
    """Global rank of the process that has the store, or will have it."""
    early: bool
    """True if that process may not have made the store yet, so others wait for it."""

    def store(
        self, size: int, timeout: float, wanted: Callable[[], bool] = lambda: True
    ) -> Any:
        """Return a new client of the store for this thread: a wait on a client blocks every other use of it.

        Args:
            size: Number of ranks of the job.
            timeout: Seconds for one attempt to connect.
            wanted: Returns False when the store is no longer needed. Until then, the owner is waited for if `early`.

        Raises:
            PeerLostError: The owner cannot be reached.
        """
        while True:
            try:  # first by a plain connection: Paddle's client would try for longer than its timeout (3.3.1)
                connected(self.host, self.port, timeout).close()
                return core.TCPStore(
                    self.host, self.port, False, size, max(1, int(timeout))
                )
            except (
                OSError,
                RuntimeError,
                ValueError,
            ) as error:  # Paddle raises the last two if its process ends now
                if self.early and wanted():
                    if isinstance(error, OSError) and not isinstance(
                        error, ConnectionError
                    ):  # else it comes later
                        say_once(
                            "global rank %d is where these ranks meet, and cannot be reached at %s:%d: %s. It is tried "
                            "until timeout= is over.",
                            *(self.owner, self.host, self.port, str(error)),
                        )
                    time.sleep(_PAUSE)
                    continue
                whose = (
                    f"global rank {self.owner}, which"
                    if self.early
                    else "Global rank 0, whose process"
                )
                what = (
                    "should have the store for these ranks"
                    if self.early
                    else "has the store of paddle.distributed"
                )
                raise PeerLostError.of(
                    f"{whose} {what}, cannot be reached at {self.host}:{self.port} ({error}). Look for the reason in "
                    "its own log.",
                    [self.owner],
                ) from error


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
        named = (
            "PADDLE_MASTER"
            if "PADDLE_MASTER" in os.environ
            else "PADDLE_TRAINER_ENDPOINTS"
        )
        host, port = _address(os.environ.get(named, "").split(",")[0], named)
        return Rendezvous(host=host, port=port, owner=0, early=False)
    endpoints = [
        end for end in os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",") if end
    ]
    if "PADDLE_MASTER" not in os.environ or len(endpoints) != dist.get_world_size():
        raise ArgumentError(
            "the ranks of a loader agree on its steps. They meet at the store of paddle.distributed, which is not "
            "initialized. Call paddle.distributed.init_parallel_env() on every rank before the first loop, or start "
            "the ranks with python -m paddle.distributed.launch."
        )
    host, port = _address(endpoints[ranks[0]], "PADDLE_TRAINER_ENDPOINTS")
    if dist.get_rank() == ranks[0]:
        try:
            _make_store(port)
        except Exception as error:
            raise ArgumentError(
                f"the ranks of a loader cannot meet at {host}:{port}, this rank's endpoint from the launcher: {error}. "
                "Call paddle.distributed.init_parallel_env() on every rank before the first loop."
            ) from error
    return Rendezvous(host=host, port=port, owner=ranks[0], early=True)


@atexit.register
def _say_gone() -> None:
    """Say in Paddle's store that this rank ends, and why, for ranks that wait to meet it.

    Who has met it sees its connections end, and needs no word. (A rank that is killed before says nothing.)
    """
    error = getattr(sys, "last_value", None)  # what the interpreter has printed
    met = any(one.fileno() >= 0 for one in list(_sockets))
    if (
        (met and error is None)
        or _is_child
        or not dist.is_initialized()
        or num_ranks() == 1
    ):
        return
    why = "" if error is None else f": {type(error).__name__}: {error}"[:_MOST_TEXT]
    with (
        contextlib.suppress(Exception),
        open(os.devnull, "w") as nowhere,
    ):  # the store has gone before
        # If its process is stopped, Paddle's client would wait for it, and this process would not end.
        faulthandler.dump_traceback_later(_LONGEST_WORD, exit=True, file=nowhere)
        place, rank = rendezvous_of([0]), dist.get_rank()
        connected(place.host, place.port, 1.0).close()
        time.sleep(_DYING)
        store = place.store(num_ranks(), 1.0)
        store.set(
            f"{_GONE}/why {rank}", f"has ended before it could meet the others{why}"
        )
        store.add(f"{_GONE}/{rank}", 1)
        store.add(_GONE, 1)
    faulthandler.cancel_dump_traceback_later()


def gone(store: Any, ranks: Iterable[int]) -> tuple[int, str] | None:
    """Return one of some ranks that has ended before it has met the others, and a text that says so; or None."""
    found = (
        (rank for rank in ranks if store.add(f"{_GONE}/{rank}", 0))
        if store.add(_GONE, 0)
        else iter(())
    )
    return next(
        ((rank, store.get(f"{_GONE}/why {rank}").decode()) for rank in found), None
    )


def hosts_of_ranks() -> list[str] | None:
    """Return the host of each global rank, as the launcher has named it; None if it has not."""
    hosts = [
        end.rpartition(":")[0]
        for end in os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
    ]
    return hosts if len(hosts) == dist.get_world_size() and all(hosts) else None


@functools.cache
def _make_store(port: int) -> Any:
    """Make a store at a port. It lives as long as this process; its forked children use it, too."""
    return core.TCPStore("127.0.0.1", port, True, 1, 30)


def _address(found: str, named: str) -> tuple[str, int]:
    host, _, port = found.rpartition(":")
    if not host or not port.isdecimal() or int(port) == 0:
        raise ArgumentError(
            f"the ranks of a loader meet at the store of paddle.distributed, but {named} gives its address as "
            f"{found!r}, which is not host:port. Start the ranks with paddle.distributed.launch or "
            "paddle.distributed.spawn, or set PADDLE_MASTER=host:port, the same on every rank, before "
            "init_parallel_env()."
        )
    return host.strip("[]"), int(port)
