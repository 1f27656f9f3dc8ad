"""Connections between ranks: lines over TCP, to a hub on the first rank of the group.

With more than 64 ranks on several hosts, the first rank of each host relays: the other ranks of the host connect to it,
and it copies their lines to the hub and the hub's lines to them.

It does not use gloo: Paddle's gloo groups give up after 30 s, which cannot be changed (3.3.1), and then close every
connection. A rank whose interpreter is held for longer (by a compiler or a debugger) would end a healthy job. Gloo's
errors name a neighbour and not the dead rank, its groups need `GLOO_SOCKET_IFNAME` across hosts, and they are never
freed. Here, the kernel reports a dead process on any host. CUDA and NCCL are not involved.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paddle.distributed as dist

from paddle_shard.errors import PeerLostError
from paddle_shard.ranks.protocol import Message, encoded, lost_as
from paddle_shard.ranks.reception import Reception, hello
from paddle_shard.ranks.rendezvous import connected, gone, hosts_of_ranks, rendezvous_of

MAX_DIRECT = 64
"""Most ranks that connect to the hub directly if they are on several hosts."""
ENDED = "has ended or was killed"
_POLL = 0.02
"""Seconds between two looks at the store, whose own waits cannot be ended."""
_FLUSH = 2.0
"""Seconds for which a rank that leaves waits until the others have taken what it has sent."""
_LINGER = 1.0
"""Seconds for which the hub stays, if a rank is lost, for those that have not connected yet and shall hear of it."""
_CHUNK = 1 << 16
_ALIVE = encoded([""])


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Which ranks connect to this one, and to which rank this one connects."""

    rank: int
    """Global rank of this process."""
    up: int | None
    """Global rank that this one connects to; None on the hub."""
    down: tuple[int, ...] = ()
    """Global ranks that connect to this one."""
    several_hosts: bool = False
    """True if this rank and those are on several hosts."""

    @classmethod
    def of(
        cls, ranks: Sequence[int], rank: int, hosts: Sequence[str]
    ) -> tuple[Route, dict[int, int]]:
        """Return the route of a rank, and which ranks are relayed by which others.

        Args:
            ranks: Global ranks that take part, ascending.
            rank: One of them.
            hosts: The host of each global rank.
        """
        first, *others = ranks
        together: dict[str, list[int]] = {}
        for one in ranks:
            together.setdefault(hosts[one], []).append(one)
        relays: dict[int, int] = {}
        if len(ranks) > MAX_DIRECT and len(together) > 1:
            relays = {
                one: members[0]
                for members in together.values()
                for one in members[1:]
                if members[0] != first
            }
        up = None if rank == first else relays.get(rank, first)
        down = tuple(one for one in others if relays.get(one, first) == rank)
        several_hosts = len({hosts[one] for one in (rank, *down)}) > 1
        return cls(rank=rank, up=up, down=down, several_hosts=several_hosts), relays


class _Link:
    """A connection to one rank."""

    def __init__(self, rank: int, peer: socket.socket) -> None:
        self.rank = rank
        self.peer = peer
        self.unsent = bytearray()
        self._unread = bytearray()
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, lines: bytes) -> None:
        """Send lines, or what of them the connection takes now; the rest follows."""
        self.unsent += lines
        with contextlib.suppress(BlockingIOError):
            try:
                del self.unsent[: self.peer.send(self.unsent)]
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    raise
                self.unsent.clear()  # what the other side sent before it left can still be read

    def receive(self) -> tuple[list[bytes], bool]:
        """Return the lines that have come, and whether the connection has ended."""
        try:
            found = self.peer.recv(_CHUNK)
        except BlockingIOError:
            return [], False
        except OSError:
            found = b""
        self._unread += found
        *lines, self._unread = self._unread.split(b"\n")
        return [bytes(line) for line in lines], not found


class TcpNetwork:
    """Connections of this rank, for one thread; others may call `wake` and `interrupt`."""

    def __init__(
        self,
        route: Route,
        hosts: Sequence[str],
        key: str,
        connect_store: Callable[[Callable[[], bool]], Any],
    ) -> None:
        """Store who takes part, and send nothing; `network_of` creates networks.

        Args:
            route: Of this rank.
            hosts: Host at which each global rank can be reached.
            key: Key of the group in the store. It is the same on all ranks, and each rank uses it equally often: their
                forked children may meet with it, too.
            connect_store: Returns a store (`set`, `get`, `add`) that all ranks share and that no other thread uses. It
                is called by `connect`, with a function that says if this rank still takes part.
        """
        self._route = route
        self._hosts = hosts
        self._key = key
        self._connect_store = connect_store
        self._store: Any = None
        self._reception: Reception | None = None
        """Where ranks connect, until all have."""
        self._looks_at = 0.0
        """When the store is asked again whether a rank that has not connected has ended."""
        self._links: dict[int, _Link] = {}
        """File descriptor -> connection."""
        self._up: _Link | None = None
        self._is_closed = False
        self._poll = (
            select.poll()
        )  # not select: file descriptors above 1023 are common in a training process
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._signal, select.POLLIN)

    def __del__(self) -> None:
        os.close(self._signal)

    def connect(self) -> None:
        """Connect to the hub. Ranks that connect to this one may still be missing."""
        route = self._route
        self._store = self._connect_store(lambda: not self._is_closed)
        # The n-th rendezvous of this rank is the n-th of the others.
        self._key += f"/{self._store.add(f'{self._key}/of {route.rank}', 1)}"
        if route.down:
            host = self._hosts[route.rank]
            self._reception = Reception(
                host, several_hosts=route.several_hosts, poll=self._poll
            )
            self._store.set(
                f"{self._key}/address {route.rank}",
                f"{self._reception.port} {self._reception.token.hex()}",
            )
            self._store.add(f"{self._key}/there {route.rank}", 1)
        if route.up is not None:
            self._up = self._add(route.up, self._join(route.up))
        if self._reception is None:
            self._store = None  # the process with the store need not keep a connection for each rank

    def receive(self, seconds: float) -> list[Message]:
        """Wait for messages, or for `wake`; a connection that has ended is a message "gone"."""
        if self._reception is not None:
            seconds = min(seconds, 1.0)
        messages: list[Message] = []
        for number, event in self._poll.poll(1000 * seconds):
            if number == self._signal:
                os.eventfd_read(number)
            elif (link := self._links.get(number)) is not None:
                if event & select.POLLOUT:
                    self._send(link, b"")
                if event & ~select.POLLOUT:
                    messages += self._take(link)
        if self._is_closed:
            raise PeerLostError.of("This rank has left the group.", [self._route.rank])
        if self._reception is not None:
            messages += self._let_in(self._reception)
        return messages

    def send(self, messages: list[Message]) -> None:
        """Send messages to the hub, or from the hub to all other ranks; never waits."""
        lines = b"".join(map(encoded, messages))
        if self._up is not None:
            self._send(self._up, lines)
            lines = _ALIVE  # so that a silent hub is not taken for a silent relay
        for link in self._links.values():
            if link is not self._up:
                self._send(link, lines)

    def wake(self) -> None:
        """End a `receive` that waits."""
        os.eventfd_write(self._signal, 1)

    def interrupt(self) -> None:
        """Have `connect` and `receive` raise PeerLostError."""
        self._is_closed = True
        self.wake()

    def close(self, lost: PeerLostError) -> None:
        """Send what was not sent, and end the connections.

        Args:
            lost: Why; told to ranks that have not connected yet.
        """
        later = {rank for rank in self._missing() if rank not in lost.ranks}
        if self._reception is not None and not self._is_closed:
            with contextlib.suppress(Exception):  # the store may have gone
                error = json.dumps([str(lost), lost.ranks, lost.timeout])
                self._store.set(f"{self._key}/address {self._route.rank}", error)
        if self._up is not None:
            for link in self._links.values():
                link.unsent += encoded(["lost", str(lost), lost.ranks, lost.timeout])
        until = time.monotonic() + _FLUSH
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.peer.settimeout(max(until - time.monotonic(), _POLL))
                link.peer.sendall(link.unsent)
        # This rank may have the store, and end as soon as it knows: who has not connected yet is to hear it first.
        until = time.monotonic() + _LINGER
        with contextlib.suppress(Exception):
            while later and not self._is_closed and time.monotonic() < until:
                if self._store.add(f"{self._key}/heard", 0) >= len(later):
                    break
                time.sleep(_POLL)
        if self._reception is not None:
            self._reception.close()
        for link in self._links.values():
            link.peer.close()
        self._links.clear()
        self._store = None

    # Lines

    def _add(self, rank: int, peer: socket.socket) -> _Link:
        link = self._links[peer.fileno()] = _Link(rank, peer)
        self._poll.register(peer, select.POLLIN)
        return link

    def _send(self, link: _Link, lines: bytes) -> None:
        had_unsent = bool(link.unsent)
        link.send(lines)
        if had_unsent != bool(link.unsent):
            self._poll.modify(
                link.peer, select.POLLIN | (select.POLLOUT if link.unsent else 0)
            )

    def _take(self, link: _Link) -> list[Message]:
        """Return the messages that have come from a rank, and pass them on if this rank relays."""
        lines, has_ended = link.receive()
        messages: list[Message] = [json.loads(line) for line in lines]
        if has_ended:
            self._poll.unregister(link.peer)
            del self._links[link.peer.fileno()]
            link.peer.close()
            messages.append(
                ["gone", link.rank if self._up is not link else [link.rank], ENDED]
            )
            lines.append(encoded(messages[-1]).rstrip())
        if self._up is None:
            return messages
        copied = b"".join(line + b"\n" for line in lines)
        if link is not self._up:
            self._send(self._up, copied)
            return []
        for other in list(self._links.values()):
            if other is not link:
                self._send(other, copied)
        return messages

    # Connecting

    def _missing(self) -> list[int]:
        there = {link.rank for link in self._links.values()}
        return [rank for rank in self._route.down if rank not in there]

    def _let_in(self, reception: Reception) -> list[Message]:
        """Take in the ranks that have connected; return who has ended meanwhile."""
        for rank, peer in reception.arrived():
            if rank in self._missing():
                self._send(self._add(rank, peer), _ALIVE)
            else:
                peer.close()
        missing = self._missing()
        if not missing:
            reception.close()
            self._reception = None
            self._store = None
        found = self._look_for_gone(missing)
        messages: list[Message] = [] if found is None else [["gone", *found]]
        if self._up is None or not messages:
            return messages
        self._send(self._up, encoded(messages[0]))
        return []

    def _look_for_gone(self, ranks: Sequence[int]) -> tuple[int, str] | None:
        """Once a second, return a rank that has said that it ends, and the text."""
        now = time.monotonic()
        if not ranks or now < self._looks_at:
            return None
        self._looks_at = now + 1.0
        return gone(self._store, ranks)

    def _join(self, rank: int) -> socket.socket:
        """Return a connection to a rank that others connect to."""
        address, host = "", self._hosts[rank]
        peer: socket.socket | None = None
        try:
            # `wait` and `get` would block forever if a rank never comes; adding 0 reads the value and returns.
            while not self._is_closed and not self._store.add(
                f"{self._key}/there {rank}", 0
            ):
                found = self._look_for_gone([rank])
                if found is not None:
                    raise PeerLostError.of(*lost_as([found[0]], found[1]))
                time.sleep(
                    5 * _POLL
                )  # many ranks may wait for minutes for one that starts slowly
            while peer is None and not self._is_closed:
                before, address = (
                    address,
                    self._store.get(f"{self._key}/address {rank}").decode(),
                )
                if address.startswith("["):  # the error of the hub
                    self._store.add(f"{self._key}/heard", 1)
                    raise PeerLostError.of(*json.loads(address))
                try:
                    peer = self._knock(host, *address.split())
                except ConnectionError:  # if the hub has given up, it has written why before it stopped to listen
                    if address == before:
                        raise
                if peer is None:
                    time.sleep(_POLL)
        except PeerLostError:
            raise
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # the store raises the last two if its host is gone
            raise PeerLostError.of(
                *lost_as([rank], f"cannot be reached at {host} ({error})")
            ) from error
        if peer is None:
            raise PeerLostError.of("This rank has left the group.", [self._route.rank])
        return peer

    def _knock(self, host: str, port: str, token: str) -> socket.socket | None:
        """Return a connection on which the other rank has answered; None if it was dropped among many strangers."""
        peer = connected(host, int(port), None)
        with contextlib.ExitStack() as stack, contextlib.suppress(ConnectionError):
            stack.enter_context(peer)
            poll = select.poll()
            poll.register(peer, select.POLLIN)
            peer.sendall(hello(token, self._route.rank))
            while not self._is_closed:
                if poll.poll(10_000 * _POLL):
                    if not peer.recv(1, socket.MSG_PEEK):
                        break
                    stack.pop_all()
                    return peer
        return None


def network_of(
    ranks: Sequence[int], key: str, timeout: float = 1800.0
) -> tuple[TcpNetwork, Route, dict[int, int]]:
    """Return connections of some ranks of `paddle.distributed`, the route of this one, and who relays for whom.

    Args:
        ranks: Global ranks, ascending, including that of this process; at least two.
        key: A name that is the same on all of them and is used once in a job.
        timeout: Seconds to wait for the store.

    Raises:
        ArgumentError: The environment does not tell where the ranks meet.
    """
    size = dist.get_world_size()
    rendezvous = rendezvous_of(ranks)
    hosts = hosts_of_ranks() or [rendezvous.host] * size
    route, relays = Route.of(ranks, dist.get_rank(), hosts)
    # The store's host is known to be reachable; for other hosts, use the launcher's names.
    hosts[rendezvous.owner] = rendezvous.host
    connect_store: Callable[[Callable[[], bool]], Any] = functools.partial(
        rendezvous.store, size, timeout
    )
    if not rendezvous.early:
        connect_store = _connected_now(connect_store)
    return (
        TcpNetwork(route, hosts, f"paddle_shard/agree/{key}", connect_store),
        route,
        relays,
    )


def _connected_now(
    connect: Callable[[Callable[[], bool]], Any],
) -> Callable[[Callable[[], bool]], Any]:
    """Connect to a store that is there in the caller's thread, and return a function that returns the client.

    While Paddle makes a client, it changes the table of objects of pybind11 without the GIL. If another thread makes or
    frees a tensor meanwhile, the process may abort ("Tried to deallocate unregistered instance") or crash. So it is not
    made in the thread that meets the other ranks, beside the training thread.
    """
    try:
        store = connect(lambda: True)
    except PeerLostError as error:
        lost = error

        def fail(_: Callable[[], bool]) -> Any:
            raise lost

        return fail
    return lambda _: store
