"""Connections between ranks: lines over TCP, to a hub on the first rank of the group.

A rank shows the token of the group in its first line. Everything else (a port scanner, a health check, an attacker) is
a stranger: it never delays a rank, whether it is silent, shows something else or sends without an end. All connections
are read side by side, and few strangers are kept.

It does not use gloo: Paddle's gloo groups give up after 30 s, which cannot be changed (3.3.1), and then close every
connection. A rank whose interpreter is held for longer (by a compiler or a debugger) would end a healthy job. Gloo's
errors name a neighbour and not the dead rank, its groups need `GLOO_SOCKET_IFNAME` across hosts, and they are never
freed. Here, the kernel reports a dead process on any host. CUDA and NCCL are not involved.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from functools import partial
from selectors import EVENT_READ
from typing import Any

import paddle.distributed as dist

from paddle_shard.core.warn_once import warn_once
from paddle_shard.errors import PeerLostError
from paddle_shard.ranks.protocol import Message
from paddle_shard.ranks.rendezvous import (
    connect_to,
    ended_early,
    hosts_of_ranks,
    registered,
    rendezvous_of,
)
from paddle_shard.ranks.reports import Loss, loss_of

MAX_STRANGERS = 64
"""Most connections that have not shown the token; the oldest goes when one more comes."""
ENDED = "has ended or was killed"
_PAUSE = 0.1
"""Seconds between two looks at the store, whose own waits cannot be ended."""
_FLUSH = 2.0
"""Seconds for which a rank that leaves waits until the others have taken what it has sent."""
_CHUNK = 1 << 16
_HOST_TIMEOUT = 60
"""Seconds without an answer of the other host's kernel after which the host counts as dead."""
_LOOK = 0.5
"""Seconds between two looks of the hub at the store, for missing ranks that have ended."""
_MANY = 16
"""Connections; with more, the hub gathers messages before it applies them."""
_GATHER = 1e-5
"""Seconds of gathering for each connection; in all at least `_MIN_GATHER`."""
_MIN_GATHER = 2e-3
_RETRY = 0.01
"""Seconds between two attempts to send what a connection does not take."""


class _Link:
    """A connection to one rank, or to a stranger."""

    def __init__(self, peer: socket.socket, rank: int | None) -> None:
        self.peer = peer
        self.rank = rank
        """Global rank; None until it has shown the token."""
        self.unsent = bytearray()
        self._unread = b""
        peer.setblocking(False)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, _HOST_TIMEOUT // 2),
            (socket.TCP_KEEPINTVL, _HOST_TIMEOUT // 6),
            (socket.TCP_USER_TIMEOUT, 1000 * _HOST_TIMEOUT),
        ):
            peer.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, data: bytes = b"") -> None:
        """Send data, or what of it the connection takes now; the next call sends the rest."""
        self.unsent += data
        try:
            del self.unsent[: self.peer.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # what the other side sent before it left can still be read
            self.unsent.clear()

    def receive(self) -> tuple[list[bytes], bool]:
        """Return the lines that have come, and whether the connection has ended."""
        try:
            received = self.peer.recv(_CHUNK)
        except BlockingIOError:
            return [], False
        except OSError:
            received = b""
        *lines, self._unread = (self._unread + received).split(b"\n")
        is_endless = self.rank is None and len(self._unread) > _CHUNK
        return lines, is_endless or not received


class TcpNetwork:
    """Connections of this rank, for one thread; others may call `wake` and `interrupt`."""

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        host: str,
        key: str,
        store: Any,
        *,
        listen_host: str = "",
    ) -> None:
        """Store who takes part, and send nothing; `network_of` creates networks.

        Args:
            rank: Global rank of this process.
            ranks: Global ranks that take part, ascending; the first has the hub.
            host: Host at which the hub can be reached.
            key: Key of the group in the store. It is the same on all ranks, and each rank uses it equally often: their
                forked children may meet with it, too.
            store: A store (`set`, `get`, `add`) that all ranks share and that no other thread uses.
            listen_host: Host at whose address alone the hub listens; "": at all addresses.
        """
        self._rank = rank
        self._hub = ranks[0]
        self._missing = {*ranks[1:]} if rank == ranks[0] else set()
        """Global ranks that connect to this one, and have not yet."""
        self._next_look = 0.0
        """When to look in the store next for missing ranks that have ended."""
        self._host = host
        self._listen_host = listen_host
        self._key = key
        self._store = store
        self._token = secrets.token_hex(16)
        self._server: socket.socket | None = None
        self._links: list[_Link] = []
        self._is_closed = False
        # Not select: file descriptors above 1023 are common in a training process.
        self._selector = selectors.PollSelector()
        self._signal = signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(
            signal, EVENT_READ, lambda: [] * os.eventfd_read(signal)
        )

    def __del__(self) -> None:
        os.close(self._signal)

    def wake(self) -> None:
        """End a `receive` that waits."""
        os.eventfd_write(self._signal, 1)

    def interrupt(self) -> None:
        """Have `connect` and `receive` raise PeerLostError."""
        self._is_closed = True
        self.wake()

    def receive(self, seconds: float) -> list[Message]:
        """Wait for messages, or for `wake`."""
        messages: list[Message] = []
        # A turn of the hub takes longer the more ranks there are.
        if len(self._links) > _MANY:
            time.sleep(max(_MIN_GATHER, _GATHER * len(self._links)))
        unsent = [link for link in self._links if link.unsent]
        for link in unsent:
            link.send()
        for key, _ in self._selector.select(_RETRY if unsent else seconds):
            messages += key.data()
        self._check_open()
        now = time.monotonic()
        if self._missing and now >= self._next_look:
            self._next_look = now + _LOOK
            ended = ended_early(self._store, self._missing)
            if ended is not None:
                messages.append(["lost", *ended])
        return messages

    def send(self, messages: list[Message]) -> None:
        """Send messages to the hub, or from the hub to all other ranks; never waits."""
        data = "".join(
            f"{json.dumps(message)}\n" for message in messages
        ).encode()
        for link in self._links:
            if link.rank is not None:
                link.send(data)

    def close(self, loss: Loss) -> None:
        """Send what was not sent, and end the connections.

        Args:
            loss: Why; for ranks that have not connected yet.
        """
        if self._missing and not self._is_closed:
            with contextlib.suppress(Exception):  # the store may have gone
                self._store.set(self._key, json.dumps(loss))
                for _ in range(3):  # a rank may just have connected
                    self.receive(_RETRY)
                self.send([["lost", *loss]])
        for link in self._links:
            with contextlib.suppress(OSError):
                link.peer.settimeout(_FLUSH)
                link.peer.sendall(link.unsent)
            link.peer.close()
        if self._server is not None:
            self._server.close()
        self._links.clear()
        self._store = None

    # Connecting

    def connect(self) -> None:
        """Connect to the hub. On the hub, other ranks may still be missing."""
        # The n-th rendezvous of this rank is the n-th of the others.
        self._key += f"/{self._store.add(f'{self._key}/of {self._rank}', 1)}"
        if not self._missing:
            self._join()
            return
        self._server = registered(partial(_listen, self._listen_host))
        accept = partial(self._accept, self._server)
        self._selector.register(self._server, EVENT_READ, accept)
        address = [self._server.getsockname()[1], self._token]
        self._store.set(self._key, json.dumps(address))
        self._store.add(f"{self._key} is set", 1)

    def _join(self) -> None:
        try:
            # `get` would block forever if the hub never comes; adding 0 reads the value and returns.
            while not self._store.add(f"{self._key} is set", 0):
                self._check_open()
                ended = ended_early(self._store, [self._hub])
                if ended is not None:
                    raise PeerLostError.of(*ended)
                # many ranks may wait for minutes for a slow one
                time.sleep(_PAUSE)
            port, token, *loss = json.loads(self._store.get(self._key))
            if loss:  # the hub has given up
                raise PeerLostError.of(port, token, *loss)
            link = self._add(connect_to(self._host, port), self._hub)
        except PeerLostError:
            raise
        # The store raises the last two if its host is gone.
        except (OSError, RuntimeError, ValueError) as error:
            what = f"cannot be reached at {self._host} ({error})"
            raise PeerLostError.of(*loss_of([self._hub], what)) from error
        link.send(f"{token} {self._rank}\n".encode())

    def _accept(self, server: socket.socket) -> list[Message]:
        """Accept one connection."""
        try:
            self._add(registered(lambda: server.accept()[0]), None)
        except OSError as error:  # it has left, or too many files are open
            if error.errno == errno.EMFILE:
                warn_once(
                    "this process has as many open files as it may, so other ranks cannot connect: raise ulimit -n."
                )
            time.sleep(_PAUSE)
        strangers = [link for link in self._links if link.rank is None]
        if len(strangers) > MAX_STRANGERS:
            self._drop(strangers[0])
        return []

    def _greet(self, link: _Link, line: bytes) -> None:
        """Take a connection for that of a rank if its first line shows the token, else drop it."""
        token, _, rank = line.partition(b" ")
        is_known = hmac.compare_digest(token, self._token.encode())
        if not is_known or int(rank) not in self._missing:
            self._drop(link)
            return
        link.rank = int(rank)
        self._missing.remove(link.rank)
        if not self._missing and self._server is not None:
            self._selector.unregister(self._server)
            self._server.close()
            for other in [other for other in self._links if other.rank is None]:
                self._drop(other)

    def _add(self, peer: socket.socket, rank: int | None) -> _Link:
        link = _Link(peer, rank)
        self._links.append(link)
        self._selector.register(peer, EVENT_READ, partial(self._take, link))
        return link

    def _drop(self, link: _Link) -> None:
        self._selector.unregister(link.peer)
        self._links.remove(link)
        link.peer.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerLostError.of(
                "This rank has left the group.", [self._rank]
            )

    # Messages

    def _take(self, link: _Link) -> list[Message]:
        """Receive what has come from a connection; return the messages for this rank."""
        lines, has_ended = link.receive()
        if lines and link.rank is None:
            self._greet(link, lines.pop(0))
        if has_ended and link in self._links:
            self._drop(link)
        if link.rank is None:
            return []
        messages: list[Message] = [json.loads(line) for line in lines]
        if has_ended:
            messages.append(["lost", *loss_of([link.rank], ENDED)])
        return messages


def _listen(host: str) -> socket.socket:
    """Return a socket that listens at the address of a host; at all addresses if it is "" or not of this one."""
    if host:
        with contextlib.suppress(OSError):
            family, *_, address = socket.getaddrinfo(host, 0)[0]
            return socket.create_server(
                address, family=family, backlog=socket.SOMAXCONN
            )
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(
        ("", 0), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=is_dual
    )


def network_of(ranks: tuple[int, ...], key: str, timeout: float) -> TcpNetwork:
    """Return connections of some ranks of `paddle.distributed`.

    Args:
        ranks: Global ranks, ascending, including that of this process; at least two.
        key: A name that is the same on all of them and is used once in a job.
        timeout: Seconds to wait for the store.

    Raises:
        ArgumentError: The environment does not tell where the ranks meet.
        PeerLostError: The rank that has the store cannot be reached.
    """
    rendezvous = rendezvous_of(ranks)
    host = rendezvous.host  # known to be reachable
    listen_host = ""
    hosts = hosts_of_ranks()
    if hosts:
        if ranks[0] != rendezvous.owner:
            host = hosts[ranks[0]]
        # no other needs to reach it
        if len({hosts[rank] for rank in ranks}) == 1:
            listen_host = host
    store = rendezvous.connect(dist.get_world_size(), timeout)
    key = f"paddle_shard/agree/{key}"
    return TcpNetwork(
        dist.get_rank(), ranks, host, key, store, listen_host=listen_host
    )
