"""How does one rank hand what it has read to other ranks of its host?

The leader writes each message once, into memory that all followers have mapped. It never waits for them: if no slot is
free, it makes more memory. It is the agreement on steps that keeps the leader from running away: a step is delivered
only when every rank has announced it, and a follower announces what it has received.

Followers learn of messages from a table in shared memory, and only a follower that may be asleep is sent a byte. The
connection also carries new memory, and its end tells that the leader has closed or was killed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from paddle_shard.errors import PaddleShardError
from paddle_shard.reading.parcel import pickled, unpickled
from paddle_shard.reading.slots import Slots, ample, layout, mapped, write
from paddle_shard.reading.slots import read as read_slot

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
"""Word of the table's number of messages. The words behind it are the numbers that each follower has taken."""


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
        self._head = 1 + num_followers
        size = 8 * (self._head + _ROWS * _WORDS)
        self._memories = {0: Slots(1, size)}
        self._table = self._memories[0].slot(0, size)[:size].cast("q")
        self._newest = 0
        self._used: list[int] = []
        """For each slot of the newest memory: number of messages when it was used last."""
        self._last: dict[int, int] = {}
        """For each memory: number of messages when it was used last."""
        self._count = self._woken = 0
        """Number of messages; of those when the followers were woken last."""
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
            self._try(follower, lambda peer: peer.send(_WAKE))

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
        """Wake the followers that may be asleep: those that had taken all messages before the newest ones."""
        with self._lock:
            self.holds, woken, self._woken = False, self._woken, self._count
            if not self._memories or woken == self._count:
                return
            for follower, peer in enumerate(self._peers):
                if peer is not None and self._table[1 + follower] >= woken:
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
                self._try(follower, lambda peer: peer.send(_WAKE))
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

    def _try(self, follower: int, send: Callable[[socket.socket], Any]) -> bool:
        """Send something to a follower, unless it is gone; return False if much else is on its way to it."""
        peer = self._peers[follower]
        if peer is None or self._gone[follower]:
            return True
        try:
            send(peer)
        except BlockingIOError:
            return False
        except OSError:  # it has closed its pass or was killed, of which the agreement tells
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
        self._head = self._taken = 0
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
        if self._poll.poll(seconds * 1000):
            self._listen()
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
        with contextlib.suppress(OSError):
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
            except OSError:  # closed by another thread
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


def _received(connection: socket.socket) -> tuple[bytes, Sequence[int]]:
    said, files, _, _ = socket.recv_fds(connection, _MEMORY.size, 1, socket.MSG_CMSG_CLOEXEC)
    return said, files
