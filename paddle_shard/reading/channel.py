"""How do messages travel between two processes: a rank and its worker, or two ranks of a host?"""

from __future__ import annotations

import errno
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from paddle_shard.reading.parcel import pickled, unpickled
from paddle_shard.reading.slots import Slots, ample, layout, mapped, read, write

HEAD = struct.Struct("<BxHIQQ")
"""Kind of payload, number of messages, number of pieces, where it begins in shared memory, number of bytes."""
_FILE = struct.Struct("i")
_ONE_FILE = socket.CMSG_SPACE(_FILE.size)
INLINE, SHARED, MEMORY = range(3)
"""The payload follows the head; the payload is in shared memory; new shared memory is sent, without a payload."""
_SMALL = 16 << 10
"""Largest payload in bytes that is sent through the socket."""


class Channel:
    """One end of a connection between two processes. It carries whole messages, in order, in both directions.

    A large payload lies in memory that both processes have mapped, in one of several slots. Slots have no lock: before
    a sender reuses a slot, it must know that the last payload in it was received. This is certain if slots are taken in
    turn, each `send` is answered by one `send`, and at most `num_slots` of them are unanswered. All slots are in one
    file, since each mapping needs one of the process's open files, and often only 1024 are allowed.
    """

    def __init__(self, connection: socket.socket, num_slots: int) -> None:
        """Take over one of a pair of sockets that keep messages apart (SOCK_SEQPACKET).

        Args:
            connection: The socket. It must be non-blocking if `receive` and `send` must not wait.
            num_slots: Number of slots for what this end sends.
        """
        self._connection, self._num_slots = connection, num_slots
        self._small = memoryview(bytearray(HEAD.size + _SMALL))
        self._theirs: memoryview | None = None
        self._ours: Slots | None = None
        self._num_sent = 0
        self.num_bytes = 0
        """Size in bytes of the last payload that was received."""
        self._poll = select.poll()  # not select: it fails for file numbers above 1023, which are common in training
        self._poll.register(connection, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait for a message or for the end of the connection; return whether one of them has come."""
        return bool(self._poll.poll(seconds * 1000))

    def receive(self, failed: Callable[[Exception], Any]) -> list[Any]:
        """Return the next messages that were sent together. Only the caller holds their arrays.

        Args:
            failed: Returns the replacement for a message that cannot be read, and for those after it.

        Raises:
            BlockingIOError: No message has come yet.
            EOFError: The other side has closed, and everything that it sent was received.
        """
        while True:
            try:
                received, files, *_ = self._connection.recvmsg_into([self._small], _ONE_FILE, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:  # raised once; earlier messages can still be received
                continue
            if not received:
                raise EOFError
            kind, count, num_pieces, start, self.num_bytes = HEAD.unpack_from(self._small)
            if kind == MEMORY:
                self._theirs = mapped(_FILE.unpack(files[0][2])[0], self.num_bytes) if files else None
                continue
            if kind == INLINE:
                return unpickled(*read(self._small[HEAD.size :], num_pieces), count, failed)
            theirs = self._theirs  # another thread may close this end
            if theirs is None:
                error = OSError(errno.EMFILE, "memory was sent that cannot be mapped; see ulimit -n and -v")
                return [failed(error)] * count
            return unpickled(*read(theirs[start : start + self.num_bytes], num_pieces), count, failed)

    def send(self, *messages: Any, slot: int | None = None) -> None:
        """Send messages, which are received together.

        Args:
            messages: One or more.
            slot: The slot to use if they are large; None: the next slot in turn.

        Raises:
            BlockingIOError: Nothing was sent: the other side must receive earlier messages first.
            OSError: The other side has closed, or there is not enough memory.
            Exception: Whatever pickling raises; nothing was sent.
        """
        number = self._num_sent % self._num_slots if slot is None else slot
        self._connection.send(framed(messages, lambda size: self._slot(number, size)))
        self._num_sent += 1

    def interrupt(self) -> None:
        """End the connection, so that a `wait` in another thread returns."""
        self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end, and let go of the memory: an error that was caught may keep this object for a while."""
        self._connection.close()
        self._theirs = None
        ours, self._ours = self._ours, None
        if ours is not None:
            ours.close()

    def _slot(self, number: int, size: int) -> tuple[int, memoryview]:
        """Return where a slot begins, and its memory. If that is too small, new memory is made and sent."""
        if self._ours is None or self._ours.room < size:
            slots = Slots(self._num_slots, ample(size))
            try:
                socket.send_fds(self._connection, [HEAD.pack(MEMORY, 0, 0, 0, len(slots.memory))], [slots.file])
            except BaseException:
                slots.close()
                raise
            if self._ours is not None:
                self._ours.close()
            self._ours = slots
        return number * self._ours.room, self._ours.slot(number, size)


def framed(messages: Sequence[Any], place: Callable[[int], tuple[int, memoryview]]) -> bytes | bytearray:
    """Return what goes through the socket for messages that are received together; a large payload goes into memory.

    Args:
        messages: One or more.
        place: Returns where a payload of so many bytes begins in the memory that the receiver has mapped, and the
            memory from there on.

    Raises:
        OSError: There is not enough memory.
        Exception: Whatever pickling raises; then `place` was not called.
    """
    pieces = pickled(messages)
    starts, size = layout([piece.nbytes for piece in pieces])
    if size > _SMALL:
        start, memory = place(size)
        write(memory, pieces, starts)
        return HEAD.pack(SHARED, len(messages), len(pieces), start, size)
    frame = bytearray(HEAD.size + size)
    HEAD.pack_into(frame, 0, INLINE, len(messages), len(pieces), 0, size)
    write(memoryview(frame)[HEAD.size :], pieces, starts)
    return frame
