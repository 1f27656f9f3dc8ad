"""How do all ranks exchange a few numbers in the background, and learn within milliseconds which rank died?

Rank 0 of the group listens, the others connect to it, and each call is one message up and one down. It does not use
gloo: Paddle's gloo groups give up after 30 s, which cannot be changed (3.3.1), and then close every connection. A rank
whose interpreter is held for longer (by a compiler or a debugger) would end a healthy job. Gloo's errors name a
neighbour and not the dead rank, its groups need `GLOO_SOCKET_IFNAME` across hosts, and they are never freed. Here, the
kernel reports a dead process on any host, and this module sets every deadline. CUDA and NCCL are not involved.
"""

from __future__ import annotations

import contextlib
import functools
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import paddle.distributed as dist

from paddle_shard.errors import PeerLostError
from paddle_shard.ranks.group import ABSENT, FINE, LOST, Group, TwoLevelGroup, loss, told_loss
from paddle_shard.ranks.reception import Reception, hello
from paddle_shard.ranks.rendezvous import connected, gone, hosts_of_ranks, rendezvous_of

_HEAD = struct.Struct("<Ic")
_POLL = 0.02
"""Seconds between two looks at the store, whose own waits cannot be ended; also the least timeout of a socket."""
_GRACE = 2.0
"""Seconds in which rank 0 tells who is missing after a timeout: the others wait so much longer, and name the same
ranks."""
_LINGER = 1.0
"""Seconds for which rank 0 stays, if a rank is lost, for those that have not connected yet and shall hear of it."""
_SILENT = 3.0
"""Seconds after which rank 0 is named, if it has said nothing; it tells the others earlier for whom it waits."""

MAX_STAR = 64
"""Most ranks that one rank talks to if they are on several hosts."""


class StarGroup(Group):
    """A group over TCP. Construction sends nothing: the first call connects.

    All calls are made in a thread of its own, so no exception is one that a signal handler has raised.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[int],
        connect_store: Callable[[Callable[[], bool]], Any],
        host: str,
        key: str,
        timeout: float,
        several_hosts: bool = False,
    ) -> None:
        """Store who takes part; `group_of` creates groups.

        Args:
            rank: Position of this process in the group.
            names: Global rank of each position.
            connect_store: Returns a store (`set`, `get`, `add`) that all ranks share and that no other thread uses.
                It is called in the thread of the first call, with a function that says if this group is still open.
            host: Host on which the first rank of the group can be reached.
            key: Key of this group in the store. It is the same on all ranks, and each rank uses it equally often:
                their forked children may meet with it, too.
            timeout: See `Group`.
            several_hosts: True if not all ranks of the group are on one host.
        """
        super().__init__(rank, names, timeout)
        self._several_hosts = several_hosts
        self._connect_store: Any = connect_store
        self._host, self._key = host, key
        self._peers: dict[int, socket.socket] = {}  # on rank 0: by position; on the others: only 0
        self._missing = [0] if rank else list(range(1, self.size))
        """Positions that have not connected to rank 0 yet, or for which the present call has waited for long."""
        self._closed, self._sending = False, threading.RLock()
        """The lock is held while a message is sent: `close` may send one from another thread."""
        self._looks_at = 0.0
        """When the store is asked again whether a rank that has not connected has ended."""

    def absent(self) -> list[int]:
        """See `Group`."""
        return [self.names[position] for position in self._missing]

    def close(self, why: PeerLostError | None = None) -> None:
        """Leave the group; a call that waits in another thread ends with PeerLostError."""
        if why is not None and not self._closed and self._sending.acquire(timeout=_GRACE):
            self._tell(LOST, told_loss(why), ())
            self._sending.release()
        self._closed = True
        for peer in list(self._peers.values()):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    def _exchange(self, payload: bytes, merge: Callable[[Sequence[bytes]], bytes]) -> bytes:
        if self.size == 1:
            return merge([payload])
        deadline = time.monotonic() + self.timeout
        if len(self._peers) < (1 if self.rank else self.size - 1):
            (self._listen if self.rank == 0 else self._join)(deadline)
            self._connect_store = None  # rank 0 of the job need not keep a connection for each rank
        if self.rank:
            return self._ask(payload, deadline)
        parts, position = {0: payload}, 0
        try:
            for position in self._ready(deadline):
                parts[position] = _receive(self._peers[position], deadline)[1]
            result = merge([parts[position] for position in range(self.size)])
            for position in self._peers:
                with self._sending:
                    _send(self._peers[position], FINE, result, deadline)
        except OSError:
            raise self._lose({position}, "has ended or was killed") from None
        self._missing = []
        return result

    def _ask(self, payload: bytes, deadline: float) -> bytes:
        """Send a message to rank 0 and return its answer; rank 0 gets extra time to report who is missing."""
        root, kind, answer = self._peers[0], ABSENT, b""
        try:
            with contextlib.suppress(ConnectionError):  # what rank 0 sent before it left can still be read
                _send(root, FINE, payload, deadline)
            root.settimeout(_SILENT)
            try:
                root.recv(1, socket.MSG_PEEK)
            except TimeoutError:
                self._missing = [0]
            while kind == ABSENT:
                kind, answer = _receive(root, deadline + _GRACE)
                self._missing = json.loads(answer) if kind == ABSENT else []
        except TimeoutError:
            raise self._lose({0}, f"did not respond for {self.timeout:g} s", self.timeout) from None
        except OSError:
            raise self._lose({0}, "has ended or was killed") from None
        if kind == LOST:
            raise loss(answer)
        return answer

    def _ready(self, deadline: float) -> Iterable[int]:
        """Yield each position once, when its connection has something to read."""
        waiting = {peer.fileno(): position for position, peer in self._peers.items()}
        poll = select.poll()  # not select: file descriptors above 1023 are common in a training process
        for number in waiting:
            poll.register(number, select.POLLIN)
        while waiting:
            left = deadline - time.monotonic()
            found = poll.poll(max(0.0, min(left, _SILENT / 2)) * 1000)
            if not found and left <= 0:
                raise self._lose(set(waiting.values()), f"did not respond for {self.timeout:g} s", self.timeout)
            if not found and sorted(waiting.values()) != self._missing:
                self._miss(sorted(waiting.values()))
            for number, _ in found:
                poll.unregister(number)
                yield waiting.pop(number)

    def _lose(self, positions: set[int], what: str, timeout: float | None = None) -> PeerLostError:
        """Tell all other ranks that this one is connected to who is lost, and return the error to raise here."""
        if self._closed:
            return PeerLostError.of("This rank has left the group.", [self.names[self.rank]])
        ranks = [self.names[position] for position in sorted(positions)]
        named = f"Global rank {ranks[0]}" if len(ranks) == 1 else f"Each of the global ranks {ranks}"
        error = PeerLostError.of(f"{named} {what}; its own log may say why.", ranks, timeout)
        self._tell(LOST, told_loss(error), positions)
        return error

    def _miss(self, positions: list[int]) -> None:
        """Note, on this rank and all that wait for it, for whom they wait."""
        self._missing = positions
        self._tell(ABSENT, json.dumps(positions).encode(), positions)

    def _tell(self, kind: bytes, payload: bytes, others: Collection[int]) -> None:
        """Send a message to all ranks that this one is connected to, except for some; who is gone is found later."""
        for position, peer in list(self._peers.items()):
            if position not in others:
                with contextlib.suppress(OSError), self._sending:
                    _send(peer, kind, payload, time.monotonic() + _GRACE)

    def _listen(self, deadline: float) -> None:
        """Let the others connect to this rank; all learn who is missing, and who has ended meanwhile."""
        store: Any = None
        try:
            with Reception(self._host, several_hosts=self._several_hosts) as reception:
                store = self._connect_store(lambda: not self._closed)
                key = self._key_of(store)
                store.set(f"{key}/address", f"{reception.port} {reception.token.hex()}")
                store.add(f"{key}/there", 1)
                try:
                    self._receive_all(reception, store, deadline)
                except PeerLostError as lost:
                    store.set(f"{key}/address", told_loss(lost).decode())  # for those who come later
                    raise
        except PeerLostError as lost:
            # This rank may have the store, and end as soon as it knows: who has not connected yet is to hear it first.
            later, until = {self.names[one] for one in self._missing} - {*lost.ranks}, time.monotonic() + _LINGER
            while store and later and time.monotonic() < until and not self._closed:
                if store.add(f"{key}/heard", 0) >= len(later):
                    break
                time.sleep(_POLL)
            raise
        if self._missing:
            raise self._lose(set(self._missing), "is not there")

    def _receive_all(self, reception: Reception, store: Any, deadline: float) -> None:
        """Take in who connects, until nobody is missing or this rank leaves."""
        while self._missing and not self._closed:
            if time.monotonic() >= deadline:
                raise self._lose(set(self._missing), f"did not connect within {self.timeout:g} s", self.timeout)
            self._look_for_gone(store)
            # Not longer, so that this loop sees if the group was closed.
            ready = {number for number, _ in reception.poll.poll(10_000 * _POLL)}
            ended = {position for position, peer in self._peers.items() if peer.fileno() in ready}
            if ended:
                raise self._lose(ended, "has ended or was killed")
            for position, peer in reception.arrived():
                if position in self._missing:
                    self._adopt(position, peer)
                    reception.poll.register(peer, select.POLLRDHUP)
                    self._miss([other for other in self._missing if other != position])
                else:
                    peer.close()

    def _join(self, deadline: float) -> None:
        """Connect to rank 0 of the group."""
        try:
            store = self._connect_store(lambda: not self._closed)
            key = self._key_of(store)
            # `wait` and `get` would block forever if a rank never comes; adding 0 reads the value and returns.
            while not store.add(f"{key}/there", 0):
                if self._closed or time.monotonic() > deadline:
                    raise TimeoutError
                self._look_for_gone(store)
                time.sleep(5 * _POLL)  # many ranks may wait for minutes for one that starts slowly
            address, peer = "", None
            while peer is None:
                before, address = address, store.get(f"{key}/address").decode()
                if address.startswith("["):  # the error of rank 0
                    store.add(f"{key}/heard", 1)
                    raise loss(address)
                try:
                    peer = self._knock(address, deadline)
                except ConnectionError:  # if rank 0 has given up, it has written why before it stopped to listen
                    if address == before:
                        raise
                if self._closed or time.monotonic() > deadline:
                    raise TimeoutError
                if peer is None:
                    time.sleep(_POLL)
        except PeerLostError:
            raise
        except TimeoutError:
            raise self._lose({0}, f"did not connect within {self.timeout:g} s", self.timeout) from None
        except (OSError, RuntimeError, ValueError) as error:  # the store raises the last two if its host is gone
            raise self._lose({0}, f"cannot be reached at {self._host} ({error})") from error
        self._adopt(0, peer)

    def _look_for_gone(self, store: Any) -> None:
        """Once a second, raise PeerLostError if a rank that this one waits for has said that it ends."""
        if (now := time.monotonic()) > self._looks_at:
            self._looks_at = now + 1.0
            if (found := gone(store, self.absent())) is not None:
                raise self._lose({self.names.index(found[0])}, found[1])

    def _knock(self, address: str, deadline: float) -> socket.socket | None:
        """Return a connection on which rank 0 has told who is missing; None if it was dropped among many strangers."""
        port, token = address.split()
        peer = connected(self._host, int(port), max(deadline - time.monotonic(), _POLL))
        with contextlib.ExitStack() as stack, contextlib.suppress(ConnectionError):
            stack.enter_context(peer)
            poll = select.poll()
            poll.register(peer, select.POLLIN)
            peer.sendall(hello(token, self.rank))
            while not self._closed and time.monotonic() < deadline:
                if poll.poll(10_000 * _POLL):
                    if not peer.recv(1, socket.MSG_PEEK):
                        break
                    stack.pop_all()
                    return peer
        return None

    def _key_of(self, store: Any) -> str:
        """Return the key of this rendezvous: the n-th rendezvous of this rank is the n-th of the others."""
        return f"{self._key}/{store.add(f'{self._key}/of {self.rank}', 1)}"

    def _adopt(self, position: int, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._peers[position] = peer
        if self._closed:
            self.close()


def group_of(ranks: Sequence[int], key: str, timeout: float = 1800.0) -> Group:
    """Return a group over some ranks of `paddle.distributed`; no other rank is waited for before its first call.

    With more than `MAX_STAR` ranks on several hosts, it has two levels: the ranks of a host, and the first rank of each
    host.

    Args:
        ranks: Global ranks, ascending, including that of this process; at least two.
        key: A name that is the same on all of them and is used once in a job.
        timeout: Seconds to wait for the others in one call.

    Raises:
        ArgumentError: The environment does not tell where the ranks meet.
    """
    size, me = dist.get_world_size(), dist.get_rank()
    rendezvous = rendezvous_of(ranks)
    hosts = hosts_of_ranks() or [rendezvous.host] * size

    connect_store: Callable[[Callable[[], bool]], Any] = functools.partial(rendezvous.store, size, timeout)
    if not rendezvous.early:
        connect_store = _connected_now(connect_store)

    def star(members: Sequence[int], name: str) -> StarGroup:
        # The store's host is known to be reachable; for other hosts, use the launcher's names.
        where = rendezvous.host if members[0] == rendezvous.owner else hosts[members[0]]
        several, name = len({hosts[member] for member in members}) > 1, f"paddle_shard/agree/{key}/{name}"
        return StarGroup(members.index(me), members, connect_store, where, name, timeout, several)

    together: dict[str, list[int]] = {}
    for rank in ranks:
        together.setdefault(hosts[rank], []).append(rank)
    if len(ranks) <= MAX_STAR or len(together) == 1:
        return star(ranks, "all")
    mine = together[hosts[me]]
    across = star([members[0] for members in together.values()], "across") if me == mine[0] else None
    return TwoLevelGroup(star(mine, f"on {hosts[me]}"), across, rank=ranks.index(me), names=ranks)


def _connected_now(connect: Callable[[Callable[[], bool]], Any]) -> Callable[[Callable[[], bool]], Any]:
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


def _send(peer: socket.socket, kind: bytes, payload: bytes, deadline: float) -> None:
    peer.settimeout(max(deadline - time.monotonic(), _POLL))
    peer.sendall(_HEAD.pack(len(payload), kind) + payload)


def _receive(peer: socket.socket, deadline: float) -> tuple[bytes, bytes]:
    length, kind = _HEAD.unpack(_exactly(peer, _HEAD.size, deadline))
    return kind, _exactly(peer, length, deadline)


def _exactly(peer: socket.socket, length: int, deadline: float) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        peer.settimeout(max(deadline - time.monotonic(), _POLL))
        got = peer.recv(length - len(parts))
        if not got:
            raise ConnectionResetError("the other side has left")
        parts += got
    return bytes(parts)
