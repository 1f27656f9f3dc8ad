"""Which connections are ranks of a group, where anything may connect?

A rank shows the group's token at once. Everything else (a port scanner, a health check, an attacker) is a stranger: it
never delays a rank, whether it is silent, shows something else or sends without an end. All connections are read side
by side, no more than the token is read of any, and few strangers are kept. A rank that was dropped with them connects
again.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import secrets
import select
import socket
import struct
import time

from paddle_shard.ranks.rendezvous import noted

_HELLO = struct.Struct("<16sI")
_STRANGERS = 64
"""Most connections that have shown nothing yet; the oldest goes when one more comes."""
_PAUSE = 0.02
"""Seconds before the next attempt to accept a connection, if it has too many open files."""
_GRACE = 2.0
"""Seconds in which a connection has to show the token."""


def hello(token: str, position: int) -> bytes:
    """Return what a rank says first, so that `Reception` takes it for the member of the group at this position."""
    return _HELLO.pack(bytes.fromhex(token), position)


class Reception:
    """Sockets that listen where the ranks of a group look for its first one."""

    def __init__(self, host: str, *, several_hosts: bool, poll: select.poll) -> None:
        """Begin to listen, at the addresses of `host` only, or at all of this machine if that cannot be.

        Args:
            host: Name or address by which the others reach this rank.
            several_hosts: True if some of them are on other hosts.
            poll: Reports when `arrived` should be called.

        Raises:
            OSError: This process cannot listen.
        """
        self.token = secrets.token_bytes(16)
        self._poll = poll
        self._strangers: dict[
            int, tuple[socket.socket, bytearray, float]
        ] = {}  # the oldest first
        self._servers = _listening(host, several_hosts)
        self.port: int = self._servers[0].getsockname()[1]
        for server in self._servers:
            server.setblocking(False)
            poll.register(server, select.POLLIN)

    def close(self) -> None:
        """Stop listening, and drop all connections that have not shown the token."""
        for server in self._servers:
            self._poll.unregister(server)
            server.close()
        for number in list(self._strangers):
            self._drop(number)
        self._servers = []

    def arrived(self) -> list[tuple[int, socket.socket]]:
        """Return (position, connection) of each rank that has shown the token; never waits."""
        for server in self._servers:
            self._accept(server)
        found = []
        for number, (peer, said, came) in list(self._strangers.items()):
            got = None
            with contextlib.suppress(BlockingIOError):
                try:
                    got = peer.recv(_HELLO.size - len(said))
                except ConnectionError:
                    got = b""
            said += got or b""
            token, position = (
                _HELLO.unpack(said) if len(said) == _HELLO.size else (b"", 0)
            )
            if hmac.compare_digest(token, self.token):
                self._poll.unregister(number)
                found.append((position, self._strangers.pop(number)[0]))
            elif token or got == b"" or time.monotonic() > came + _GRACE:
                self._drop(number)
        return found

    def _accept(self, server: socket.socket) -> None:
        """Accept who waits, but not more at once than are kept."""
        for _ in range(_STRANGERS):
            try:
                peer = noted(lambda: server.accept()[0])
            except BlockingIOError:
                return
            except OSError:  # it has left, or too many files are open
                if self._strangers:
                    self._drop(next(iter(self._strangers)))
                time.sleep(_PAUSE)
                return
            if len(self._strangers) >= _STRANGERS:
                self._drop(next(iter(self._strangers)))
            peer.setblocking(False)
            self._strangers[peer.fileno()] = peer, bytearray(), time.monotonic()
            self._poll.register(peer, select.POLLIN)

    def _drop(self, number: int) -> None:
        self._poll.unregister(number)
        self._strangers.pop(number)[0].close()


def _listening(host: str, several_hosts: bool) -> list[socket.socket]:
    """Return sockets that listen at one port of all addresses of a host that this machine has, or at any address."""
    make = functools.partial(socket.create_server, backlog=socket.SOMAXCONN)
    made, reason = list[socket.socket](), "it has no address"
    try:
        for family, address in dict.fromkeys(
            (found[0], found[4]) for found in socket.getaddrinfo(host, 0)
        ):
            if several_hosts and str(address[0]).startswith(("127.", "::1")):
                raise OSError(f"{address[0]} is another machine on each host")
            port = made[0].getsockname()[1] if made else 0
            try:
                made.append(
                    noted(
                        functools.partial(
                            make, (address[0], port, *address[2:]), family=family
                        )
                    )
                )
            except OSError as error:  # a name may have addresses of other machines, too, or of a kind that is off here
                reason = str(error)
    except OSError as error:
        reason = str(error)
        for one in made:
            one.close()
        made = []
    if made:
        return made
    logging.getLogger(__name__).warning(
        f"The ranks meet at {host}, where this rank cannot listen ({reason}). So it listens at every address of this "
        "machine until they have met. Give the ranks an address that this machine has: PADDLE_TRAINER_ENDPOINTS, or "
        "PADDLE_MASTER for rank 0."
    )
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return [noted(functools.partial(make, ("", 0), family=family, dualstack_ipv6=dual))]
