"""Broadcast of messages from one rank, the leader, to other ranks of its host.

The leader writes each message once, into memory that all followers have mapped, and sends each follower a few bytes
that say where it lies. A thread sends them, so the leader never waits for a follower. If no memory is free, the leader
makes more. The agreement on steps keeps it from running away: a step is delivered only when every rank has announced
it, and a follower announces what it has received. So the agreement also determines which memory is free.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from queue import Empty, SimpleQueue
from typing import Any

from paddle_shard.ranks.agreement import Agreement
from paddle_shard.ranks.rendezvous import endpoints, registered
from paddle_shard.reading.channel import (
    MEMORY,
    SHARED,
    Channel,
    Slots,
    ample,
    framed,
)
from paddle_shard.reading.worker_guards import signals_held

_NUM_SLOTS = 64
"""Slots of a memory. Only those that are used take memory: the first ones, if the followers keep up."""
_CREDENTIALS = struct.Struct("3i")
_PAUSE = 0.05
"""Seconds between two looks at the agreement while there is nothing to do."""


def address_of(leader: int, iteration: str) -> str:
    """Return the address at which a leader broadcasts an iteration: a name instead of a file.

    Args:
        leader: Global rank of the leader. Its endpoint distinguishes it from those of other jobs on the host.
        iteration: Name of the iteration in the job.
    """
    return f"\0paddle_shard {endpoints()[leader]} {iteration}"


class Broadcast:
    """The leader's end in one iteration."""

    def __init__(
        self, address: str, num_followers: int, agreement: Agreement
    ) -> None:
        """Let the followers connect, at any time until the iteration is decided; each of them gets all messages.

        When this rank has announced its last step, or left, the connections end after what was sent before.

        Args:
            address: Where they connect.
            num_followers: Number of ranks that this one reads for.
            agreement: On the steps. A released step was announced by the followers, so that they have its message.

        Raises:
            OSError: The socket cannot be made.
        """
        self._agreement = agreement
        self._slots: Slots
        self._room = 0
        """Bytes of a slot; 0: there are none yet."""
        self._used: list[int] = []
        """For each slot: number of messages when it was used last."""
        self._num_sent = 0
        self._frames: SimpleQueue[Any] = SimpleQueue()
        """(frame, memories whose files go with it), in order."""
        listener = registered(_new_socket)
        listener.bind(address)
        listener.listen(num_followers)
        with signals_held():
            threading.Thread(
                target=self._run,
                args=(listener, num_followers),
                name="paddle_shard-broadcast",
                daemon=True,
            ).start()

    def send(self, message: Any) -> None:
        """Send a message to all followers.

        Args:
            message: Anything that pickles; Paddle's tensors arrive as arrays.

        Raises:
            OSError: There is not enough memory.
            Exception: Whatever pickling raises; nothing was sent.
        """
        frame = framed(message, self._place)
        self._num_sent += 1
        memories = [self._slots] if frame[0] == MEMORY else []
        self._frames.put((frame, memories))

    def _place(self, size: int) -> tuple[int, int, memoryview]:
        """Return the place of a payload in a free slot; see `framed`. New memory is made if there is none."""
        taken = self._agreement.released
        free = [
            number for number, used in enumerate(self._used) if used <= taken
        ]
        kind = SHARED
        if not free or size > self._room:
            kind = MEMORY
            self._slots = Slots(_NUM_SLOTS, max(self._room, ample(size)))
            self._room = self._slots.room
            self._used = [0] * _NUM_SLOTS
            free = [0]
        self._used[free[0]] = self._num_sent + 1
        return kind, *self._slots.slot(free[0])

    def _run(self, listener: socket.socket, num_followers: int) -> None:
        """Accept the followers, and send them the frames until the end."""
        connections: list[socket.socket] = []
        listener.setblocking(False)
        arrivals = select.poll()
        arrivals.register(listener, select.POLLIN)
        while (
            len(connections) < num_followers and not self._agreement.is_decided
        ):
            if not arrivals.poll(1000 * _PAUSE):
                continue
            # It has left, or it is another user, or too many files are open.
            with contextlib.suppress(OSError):
                connection = registered(lambda: listener.accept()[0])
                connection.setblocking(True)
                _check_user(connection)
                connections.append(connection)
        listener.close()
        while True:
            # before a look: nothing is put later
            is_over = self._agreement.is_over
            try:
                frame, memories = self._frames.get(timeout=_PAUSE)
            except Empty:
                if is_over:
                    break
                continue
            for connection in connections:
                # A follower has closed its iteration or was killed, which the agreement reports.
                with contextlib.suppress(OSError):
                    files = [memory.file for memory in memories]
                    socket.send_fds(connection, [frame], files)
        for connection in connections:
            connection.close()


def connected(address: str) -> Channel:
    """Return a connection to a leader.

    Raises:
        BlockingIOError, ConnectionRefusedError: The iteration is not open (yet).
        OSError: It cannot be reached, or belongs to another user.
    """
    connection = registered(_new_socket)
    try:
        connection.setblocking(False)
        connection.connect(address)
        _check_user(connection)
    except BaseException:
        connection.close()
        raise
    return Channel(connection, 1)


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _check_user(connection: socket.socket) -> None:
    """Reject and leave a process of another user: sockets with names have no permissions."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        connection.close()
        raise PermissionError(
            f"the process at the other end belongs to user {user}, not to {os.geteuid()}"
        )
