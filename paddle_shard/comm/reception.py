"""How do the ranks of a host find the one that reads for them?

Each process that reads for others has one socket, which has a name instead of an address, and a thread that accepts
connections. All ranks learn its name when they meet. A follower says which pass it means; the connection is given to
that pass, at once or as soon as this process opens it.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading

from paddle_shard.comm.broadcast import Broadcast, Receiver
from paddle_shard.comm.sockets import noted
from paddle_shard.reading.worker_guards import signals_held

PassKey = tuple[int, int]
"""A digest of the ranks that agree, and the number of the pass among theirs."""

_HELLO = struct.Struct("<qqq")
"""Pass key, and the follower's position."""
_CREDENTIALS = struct.Struct("3i")
_HELLO_SECONDS = 2.0


class Reception:
    """Gives the connections of followers to the passes of this process that read for them."""

    def __init__(self) -> None:
        self.name = f"paddle_shard-{os.getpid()}-{secrets.token_hex(8)}"
        """Name of the socket, unique on the host."""
        self._lock = threading.RLock()  # a pass may be dropped, and leave, wherever garbage is collected
        self._server: socket.socket | None = None
        self._open: dict[PassKey, Broadcast] = {}
        self._early: dict[PassKey, list[tuple[int, socket.socket]]] = {}
        """Connections that came before their pass was opened."""
        self._newest: dict[int, int] = {}

    def enter(self, key: PassKey, broadcast: Broadcast) -> None:
        """Let followers connect to a pass.

        Raises:
            OSError: The socket cannot be made.
        """
        with self._lock:
            if self._server is None:
                self._server = self._listening()
            self._open[key] = broadcast
            self._newest[key[0]] = max(key[1], self._newest.get(key[0], -1))
            early = self._early.pop(key, [])
            for old in [one for one in self._early if one[0] == key[0] and one[1] < key[1]]:
                for _, connection in self._early.pop(old):  # of a pass that this process has not opened and never will
                    connection.close()
        for follower, connection in early:
            broadcast.connect(follower, connection)

    def leave(self, key: PassKey) -> None:
        """Accept no further connections to a pass; safe to call again."""
        with self._lock:
            self._open.pop(key, None)

    def _listening(self) -> socket.socket:
        server = noted(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            server.bind("\0" + self.name)
            server.listen(128)
            server.setblocking(False)
            with signals_held():
                threading.Thread(
                    target=self._accept, args=(server,), name="paddle_shard-reception", daemon=True
                ).start()
        except BaseException:
            server.close()
            raise
        return server

    def _accept(self, server: socket.socket) -> None:
        poll = select.poll()
        poll.register(server, select.POLLIN)
        while True:
            poll.poll()
            try:
                connection = noted(lambda: server.accept()[0])
            except (BlockingIOError, ConnectionError):
                continue
            except OSError:  # too many open files: the followers try again
                threading.Event().wait(_HELLO_SECONDS)
                continue
            try:
                connection.settimeout(_HELLO_SECONDS)
                _check_user(connection)
                group, number, follower = _HELLO.unpack(connection.recv(_HELLO.size + 1))
            except (OSError, struct.error):  # not one of ours
                connection.close()
                continue
            self._admit((group, number), follower, connection)

    def _admit(self, key: PassKey, follower: int, connection: socket.socket) -> None:
        with self._lock:
            broadcast = self._open.get(key)
            if broadcast is None and key[1] > self._newest.get(key[0], -1):
                self._early.setdefault(key, []).append((follower, connection))
                return
        if broadcast is None:  # the pass was closed
            connection.close()
        else:
            broadcast.connect(follower, connection)


def reception() -> Reception:
    """Return this process's reception; a forked child has its own."""
    found = os.getpid()
    if found not in _receptions:
        _receptions[found] = Reception()
    return _receptions[found]


def own_name() -> bytes:
    """Return the name by which other processes of this host reach this one."""
    return reception().name.encode()


_receptions: dict[int, Reception] = {}
"""Process -> its reception."""


def connected(name: str, key: PassKey, follower: int) -> Receiver | None:
    """Return a connection to a pass of another process; None if it has no socket yet.

    Args:
        name: The name of the process's socket.
        key: The pass.
        follower: This rank's position among its followers.

    Raises:
        OSError: It cannot be reached, or belongs to another user.
    """
    connection = noted(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        connection.settimeout(_HELLO_SECONDS)
        connection.connect("\0" + name)
        _check_user(connection)
        connection.send(_HELLO.pack(*key, follower))
    except (ConnectionRefusedError, BlockingIOError, TimeoutError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return Receiver(follower, connection)


def _check_user(connection: socket.socket) -> None:
    """Refuse a process of another user: sockets with names have no permissions."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    if user != os.geteuid():
        raise PermissionError(f"the process at the other end belongs to user {user}, not to {os.geteuid()}")
