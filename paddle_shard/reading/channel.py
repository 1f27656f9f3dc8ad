"""Channels: messages between two processes, a rank and its worker or two ranks of a host."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import socket
import struct
import weakref
from collections.abc import Callable
from typing import Any

from paddle_shard.errors import described
from paddle_shard.reading.serialization import layout, pickled, read, write

HEAD = struct.Struct("<BxxxIQQ")
"""Kind of payload, number of pieces, where it begins in shared memory, number of bytes."""
_FILE = struct.Struct("i")
_ONE_FILE = socket.CMSG_SPACE(_FILE.size)
INLINE, SHARED, MEMORY = range(3)
"""The payload follows the head; it is in shared memory; it is in new shared memory, whose file comes with the head."""
_SMALL = 16 << 10
"""Largest payload in bytes that is sent through the socket."""
_GRAIN = 64 << 10


def ample(size: int) -> int:
    """Return a size with some reserve, in bytes, since batches differ in size."""
    return -(-(size + size // 4) // _GRAIN) * _GRAIN


class Slots:
    """Slots of equal size in an unnamed file in memory. It exists as long as a process has it open or mapped.

    Dropping the slots closes the file, so that its number is free.
    """

    def __init__(self, num_slots: int, room: int) -> None:
        """Make the file and map it; it takes no memory yet.

        Raises:
            OSError: The file cannot be made or mapped.
        """
        self.room = room
        """Size of a slot in bytes."""
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("paddle_shard")
        else:  # Python was built for a C library from before 2018
            close_on_exec = 1
            libc = ctypes.CDLL(None, use_errno=True)
            self.file = libc.memfd_create(b"paddle_shard", close_on_exec)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, num_slots * self.room)
        self.memory = memoryview(mmap.mmap(self.file, num_slots * self.room))

    def slot(self, number: int) -> tuple[int, memoryview]:
        """Return where a slot begins, and its memory."""
        start = number * self.room
        return start, self.memory[start : start + self.room]


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
        self._connection = connection
        self._num_slots = num_slots
        # The finalizer holds the socket: so the collector closes it with this channel, and never finds it open.
        self._close_socket = weakref.finalize(self, connection.close)
        self._close_socket.atexit = False
        self._small = memoryview(bytearray(HEAD.size + _SMALL))
        self._theirs: memoryview | None = None
        self._ours: Slots | None = None
        self._has_sent_ours = False
        self._num_sent = 0
        # Not `select`: it fails for file numbers above 1023, which are common in training.
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait for a message or for the end of the connection; return whether one of them has come."""
        return bool(self._poll.poll(seconds * 1000))

    def receive(self) -> Any:
        """Return the next message. Only the caller holds its arrays.

        Raises:
            BlockingIOError: No message has come yet.
            EOFError: The other side has closed, and everything that it sent was received.
            Exception: The message cannot be read. Those after it still can.
        """
        while True:
            try:
                received, files, *_ = self._connection.recvmsg_into(
                    [self._small], _ONE_FILE, socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionResetError:
                continue  # raised once; earlier messages can still be received
            if not received:
                raise EOFError
            kind, num_pieces, start, size = HEAD.unpack_from(self._small)
            if kind == MEMORY:
                self._theirs = _memory_of(files)
            # Another thread may close this end.
            theirs = (
                self._small[HEAD.size :] if kind == INLINE else self._theirs
            )
            if theirs is None:
                text = "memory was sent that cannot be mapped; see ulimit -n and -v"
                raise OSError(errno.EMFILE, text)
            try:
                return read(theirs[start : start + size], num_pieces)
            except (OSError, EOFError) as error:
                # Not as it is: it would say that nothing has come, or that the other side has closed.
                raise ValueError(
                    f"unpickling failed: {described(error)}"
                ) from error

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            BlockingIOError: Nothing was sent: the other side must receive earlier messages first.
            OSError: The other side has closed, or there is not enough memory.
            Exception: Whatever pickling raises; nothing was sent.
        """
        frame = framed(message, self._slot)
        if self._ours is None or frame[0] != MEMORY:
            self._connection.send(frame)
        else:
            socket.send_fds(self._connection, [frame], [self._ours.file])
            self._has_sent_ours = True
        self._num_sent += 1

    def interrupt(self) -> None:
        """End the connection, so that a `wait` in another thread returns."""
        self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end, and let go of the memory: an error that was caught may keep this object for a while."""
        self._close_socket()
        self._theirs = self._ours = None

    def _slot(self, size: int) -> tuple[int, int, memoryview]:
        """Return the place of a payload in the next slot; see `framed`. If that is too small, new memory is made."""
        if self._ours is None or self._ours.room < size:
            self._ours = Slots(self._num_slots, ample(size))
            self._has_sent_ours = False
        kind = SHARED if self._has_sent_ours else MEMORY
        return kind, *self._ours.slot(self._num_sent % self._num_slots)


def framed(
    message: Any, place: Callable[[int], tuple[int, int, memoryview]]
) -> bytes | bytearray:
    """Return what goes through the socket for a message; a large payload goes into memory.

    Args:
        message: Anything that pickles.
        place: Returns, for a payload of so many bytes, `SHARED`, or `MEMORY` if the receiver has not mapped the memory
            yet; where in the memory the payload begins; and the memory from there on.

    Raises:
        Exception: Whatever pickling raises; then `place` was not called.
    """
    pieces = pickled(message)
    starts, size = layout([piece.nbytes for piece in pieces])
    if size > _SMALL:
        kind, start, memory = place(size)
        write(memory, pieces, starts)
        return HEAD.pack(kind, len(pieces), start, size)
    frame = bytearray(HEAD.size + size)
    HEAD.pack_into(frame, 0, INLINE, len(pieces), 0, size)
    write(memoryview(frame)[HEAD.size :], pieces, starts)
    return frame


def _memory_of(files: list[tuple[int, int, bytes]]) -> memoryview | None:
    """Map the file that came with a message; None if there was no room for it."""
    if not files:
        return None
    [file] = _FILE.unpack(files[0][2])
    return map_file(file, os.fstat(file).st_size)


def map_file(file: int, size: int) -> memoryview | None:
    """Map a file in memory and close it; None if no addresses are left."""
    try:
        return memoryview(mmap.mmap(file, size))
    except OSError:
        return None
    finally:
        os.close(file)
