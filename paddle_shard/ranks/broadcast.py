"""How does one rank hand what it has read to other ranks of its host?

The leader writes each message once, into memory that all followers have mapped. It never waits for them: if no slot is
free, it makes more memory. It is the agreement on steps that keeps the leader from running away: a step is delivered
only when every rank has announced it, and a follower announces what it has received.

Followers learn of messages from a table in shared memory. A follower that has to wait says so in the table, and only
then is it sent a byte, so that a follower that never waits never has to read its connection. The connection also
carries new memory, and its end tells that the leader has closed or was killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from paddle_shard.errors import PaddleShardError
from paddle_shard.plan.handlers import ignoring, raise_if_a_handlers
from paddle_shard.ranks.rendezvous import noted
from paddle_shard.reading.parcel import pickled, unpickled
from paddle_shard.reading.slots import Slots, ample, layout, mapped, write
from paddle_shard.reading.slots import read as read_slot
from paddle_shard.reading.worker_guards import signals_held

MESSAGE, END, STOP, READ_YOURSELF = range(1, 5)
"""A message; the data has ended; the leader has failed or is done; the follower must read from here on."""

_ROWS, _WORDS = 4096, 6
"""Rows of the table, more than messages are ever on their way; 64-bit words of a row: kind of message, key, number of
the memory, slot, number of pieces, bytes."""
_FEWEST_SLOTS = 8
_MEMORY = struct.Struct("<qqq")
"""Number of the memory, number of slots, bytes. Memory 0 holds the table."""
_WAKE = b"w"
_NOT_MAPPED = "memory of another rank cannot be mapped; see ulimit -n and -v"
_PUBLISHED = 0
"""Word of the table's number of messages. Behind it is one word per follower: the number of messages that it has taken;
then one per follower: 1 while it is asleep."""


class Broadcast:
    """The leader's end."""

    def __init__(self, num_followers: int) -> None:
        """Begin without a connection; followers may connect at any time, and get all messages.

        Raises:
            OSError: There is not enough memory.
        """
        self._lock, self._fence = threading.RLock(), threading.Lock()
        self._peers: list[socket.socket | None] = [None] * num_followers
        self._gone = [False] * num_followers
        self._head = 1 + 2 * num_followers
        size = 8 * (self._head + _ROWS * _WORDS)
        self._memories = {0: Slots(1, size)}
        self._table = self._memories[0].slot(0, size)[:size].cast("q")
        self._newest = 0
        self._used: list[int] = []
        """For each slot of the newest memory: number of messages when it was used last."""
        self._last: dict[int, int] = {}
        """For each memory: number of messages when it was used last."""
        self._count = 0
        """Number of messages."""
        self.holds = False
        """True while nobody is woken, since more messages follow at once."""

    def connect(self, follower: int, connection: socket.socket) -> None:
        """Give a follower what was sent so far.

        Args:
            follower: Its position.
            connection: Keeps messages apart (SOCK_SEQPACKET). It belongs to this object from here on.
        """
        connection.setblocking(False)
        with self._lock:
            if not self._memories:  # closed
                connection.close()
                return
            self._peers[follower] = connection
            for number in sorted(self._memories):
                self._tell(follower, number)

    def send(self, key: int, message: Any) -> None:
        """Send a message to all followers.

        Args:
            key: A number below 2**62 that followers compare with theirs.
            message: Anything that pickles; Paddle's tensors arrive as arrays.

        Raises:
            OSError: There is not enough memory.
            Exception: Whatever pickling raises; nothing was sent.
        """
        pieces = pickled([message])
        starts, size = layout([piece.nbytes for piece in pieces])
        with self._lock:
            if not self._memories:
                return
            slot = self._slot(size)
            write(self._memories[self._newest].slot(slot, size), pieces, starts)
            self._used[slot] = self._last[self._newest] = self._count + 1
            self._publish(MESSAGE, key, self._newest, slot, len(pieces), size)

    def say(self, kind: int) -> None:
        """Send `END`, `STOP` or `READ_YOURSELF`; no message follows it."""
        with self._lock:
            if self._memories:
                self._publish(kind, 0, 0, 0, 0, 0)

    def wake(self) -> None:
        """Wake the followers that are asleep. One that is about to sleep may be missed, but looks again soon."""
        with self._lock:
            self.holds = False
            if not self._memories:
                return
            for follower in range(len(self._peers)):
                asleep = 1 + len(self._peers) + follower
                if self._table[asleep]:
                    self._table[asleep] = 0  # one byte per sleep: a follower that is slow to wake is not sent more
                    self._try(follower, lambda peer: peer.send(_WAKE))

    def close(self) -> None:
        """End the connections and free the memory; safe to call again. Followers can still take what was sent."""
        with self._lock:
            memories, self._memories = self._memories, {}
            for memory in memories.values():
                memory.close()
            for peer in self._peers:
                if peer is not None:
                    peer.close()

    def _publish(self, *row: int) -> None:
        if self._count - self._taken() >= _ROWS:
            raise PaddleShardError(f"more than {_ROWS} messages to other ranks are on their way at once.")
        at = self._head + self._count % _ROWS * _WORDS
        for word, value in enumerate(row):
            self._table[at + word] = value
        with self._fence:  # what was written before must be seen before
            self._count += 1
        self._table[_PUBLISHED] = self._count
        if not self.holds:
            self.wake()

    def _taken(self) -> int:
        """Return how many messages all followers have taken that are not gone."""
        return min((self._table[1 + i] for i, gone in enumerate(self._gone) if not gone), default=self._count)

    def _slot(self, size: int) -> int:
        """Return a free slot of the newest memory, which is made if there is none."""
        self._free_memory()
        room = self._memories[self._newest].room if self._newest else 0
        slot = self._free_slot() if size <= room else None
        if slot is None and size <= room:
            for follower in range(len(self._peers)):  # it may be gone: then it keeps nothing occupied
                self._look_at(follower)
            self._free_memory()
            slot = self._free_slot()
        if slot is not None:
            return slot
        count = 2 * len(self._used) if size <= room else _FEWEST_SLOTS
        self._memories[self._newest + 1] = Slots(count, max(room, ample(size)))
        self._newest += 1
        self._used, self._last[self._newest] = [0] * count, 0
        for follower, peer in enumerate(self._peers):
            if peer is not None:
                self._tell(follower, self._newest)
        return 0

    def _free_slot(self) -> int | None:
        """Return a free slot of the newest memory, if there is one."""
        taken = self._taken()
        return next((slot for slot, used in enumerate(self._used) if used <= taken), None)

    def _free_memory(self) -> None:
        """Free the older memory that all followers have read."""
        taken = self._taken()
        for number in [n for n in self._memories if 0 < n < self._newest and self._last[n] <= taken]:
            self._memories.pop(number).close()

    def _tell(self, follower: int, number: int) -> None:
        memory = self._memories[number]
        slots = len(memory.memory) // memory.room
        head = _MEMORY.pack(number, slots, len(memory.memory))
        if not self._try(follower, lambda peer: socket.send_fds(peer, [head], [memory.file])):
            self._gone[follower] = True  # it sees the end of the connection
            cast(socket.socket, self._peers[follower]).close()

    def _look_at(self, follower: int) -> None:
        """See whether a follower is gone, without a message to it: followers send nothing."""
        peer = self._peers[follower]
        if peer is not None and not self._gone[follower]:
            with contextlib.suppress(BlockingIOError):
                try:
                    self._gone[follower] = not peer.recv(1)
                except ConnectionError:
                    self._gone[follower] = True

    def _try(self, follower: int, send: Callable[[socket.socket], Any]) -> bool:
        """Send something to a follower, unless it is gone; return False if much else is on its way to it."""
        peer = self._peers[follower]
        if peer is None or self._gone[follower]:
            return True
        try:
            send(peer)
        except BlockingIOError:
            return False
        except OSError as error:  # it has closed its pass or was killed, of which the agreement tells
            raise_if_a_handlers(error)
            self._gone[follower] = True
        return True


class Receiver:
    """A follower's end."""

    def __init__(self, follower: int, connection: socket.socket) -> None:
        """Take over a connection to the leader.

        Args:
            follower: This rank's position among the followers.
            connection: Keeps messages apart (SOCK_SEQPACKET).
        """
        connection.setblocking(False)
        self._follower, self._connection, self._ended = follower, connection, False
        self._memories: dict[int, tuple[int, memoryview | None]] = {}
        self._table: memoryview | None = None
        self._head = self._taken = self._asleep = 0
        self._fence = threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def at_hand(self) -> int:
        """Return how many messages have come and were not taken."""
        if self._table is None and not self._ended:
            self._listen()
        return 0 if self._table is None else self._table[_PUBLISHED] - self._taken

    def wait(self, seconds: float) -> bool:
        """Wait for a message; return False if none will come any more."""
        if self.at_hand():
            return True
        if self._ended:
            return False
        if self._table is not None:
            with self._fence:  # said before the last look, so that a leader that publishes after it sees that
                self._table[self._asleep] = 1
            if self.at_hand():
                seconds = 0  # the leader may have sent a byte already: take it, or many of them would fill the socket
        if self._poll.poll(seconds * 1000):
            self._listen()
        if self._table is not None:
            self._table[self._asleep] = 0
        return True

    def take(self, failed: Callable[[Exception], Any]) -> tuple[int, int, Any]:
        """Return (kind, key, message) of the next message, which must be at hand.

        Args:
            failed: Returns the replacement for a message that cannot be read.
        """
        assert self._table is not None
        at = self._head + self._taken % _ROWS * _WORDS
        with self._fence:
            kind, key, number, slot, num_pieces, size = self._table[at : at + _WORDS]
        message = None
        if kind == MESSAGE:
            while number not in self._memories and not self._ended:  # it was sent before the message
                self._poll.poll(100)
                self._listen()
            for old in [n for n in self._memories if n < number]:
                del self._memories[old]
            count, memory = self._memories.get(number, (0, None))
            if memory is None:
                message = failed(OSError(_NOT_MAPPED))
            else:
                room = len(memory) // count
                there = memory[slot * room : slot * room + size]
                (message,) = unpickled(*read_slot(there, num_pieces), 1, failed)
        with self._fence:
            self._taken += 1
        self._table[1 + self._follower] = self._taken
        return kind, key, message

    def interrupt(self) -> None:
        """Make a call of `wait` in another thread return."""
        with ignoring(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave; safe to call again."""
        self._ended = True
        self._connection.close()

    def _listen(self) -> None:
        """Take what the connection carries: memory, bytes that wake this rank, or its end."""
        while not self._ended:
            try:
                said, files = _received(self._connection)
            except BlockingIOError:
                return
            except ConnectionResetError:  # raised once; earlier messages can still be received
                continue
            except OSError as error:  # closed by another thread
                raise_if_a_handlers(error)
                said, files = b"", []
            if not said:
                self._ended = True
            elif said != _WAKE:
                number, count, size = _MEMORY.unpack(said)
                self._keep(number, count, mapped(files[0], size) if files else None)

    def _keep(self, number: int, count: int, memory: memoryview | None) -> None:
        if number:
            self._memories[number] = count, memory
            return
        if memory is None:
            raise OSError(_NOT_MAPPED)
        words = memory.cast("q")
        self._head, self._table = len(words) - _ROWS * _WORDS, words
        self._asleep = 1 + self._head // 2 + self._follower  # behind the count and one word per follower


def _received(connection: socket.socket) -> tuple[bytes, Sequence[int]]:
    said, files, _, _ = socket.recv_fds(connection, _MEMORY.size, 1, socket.MSG_CMSG_CLOEXEC)
    return said, files


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
            except OSError as error:  # too many open files: the followers try again
                raise_if_a_handlers(error)
                threading.Event().wait(_HELLO_SECONDS)
                continue
            try:
                connection.settimeout(_HELLO_SECONDS)
                _check_user(connection)
                group, number, follower = _HELLO.unpack(connection.recv(_HELLO.size + 1))
            except (OSError, struct.error) as error:  # not one of ours
                raise_if_a_handlers(error)
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
    except (ConnectionRefusedError, BlockingIOError, TimeoutError) as error:
        raise_if_a_handlers(error)
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
