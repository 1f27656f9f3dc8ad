"""How does one rank hand what it has read to other ranks of its host?

The leader writes each message once, into memory that all followers have mapped, and sends each follower a few bytes
that say where it lies. They go through one socket per follower, from which the follower takes them in order, so its
socket never fills up while it takes messages. A follower answers with the number of messages that it has taken, which
frees their memory.

The leader never waits for a follower. What does not fit into a socket is sent later, by a thread that waits until there
is room. If no memory is free, the leader makes more. It is the agreement on steps that keeps it from running away: a
step is delivered only when every rank has announced it, and a follower announces what it has received.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from paddle_shard.ranks.rendezvous import noted
from paddle_shard.reading.channel import HEAD, MEMORY, Channel, Slots, ample, framed
from paddle_shard.reading.worker_guards import signals_held

_NUM_SLOTS = 64
"""Slots of a memory. Only those that are used take memory: the first ones, if the followers keep up."""
_ALL = 2**62
"""Number of messages that a follower counts as having taken when it is gone."""
_TAKEN = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")
_SECRET = secrets.token_hex(8)
_PAUSE = 0.1
"""Seconds before this process tries again to accept a connection, if it has too many open files."""


class Broadcast:
    """The leader's end in one pass."""

    def __init__(self, name: str, num_followers: int) -> None:
        """Let the followers connect, at any time; each of them gets all messages.

        Args:
            name: Name of the pass, unique on the host.
            num_followers: Number of ranks that this one reads for.

        Raises:
            OSError: The sockets cannot be made.
        """
        self._lock = threading.RLock()  # not a Lock: garbage may be collected, and a pass be closed, while it is held
        self._slots: Slots | None = None
        self._used = [0] * _NUM_SLOTS
        """For each slot: number of messages when it was used last."""
        self._count = 0
        self._followers: list[_Follower] = []
        try:
            for number in range(num_followers):
                self._followers.append(_Follower(_address(name, number), self._lock))
        except BaseException:
            self.close()
            raise

    def send(self, message: Any) -> None:
        """Send a message to all followers; nothing happens if this end is closed.

        Args:
            message: Anything that pickles; Paddle's tensors arrive as arrays.

        Raises:
            OSError: There is not enough memory.
            Exception: Whatever pickling raises; nothing was sent.
        """
        with self._lock:
            frame = framed(message, self._place)
            self._count += 1
            for follower in self._followers:
                follower.send(frame)

    def close(self) -> None:
        """End the connections and free the memory; safe to call again. Followers can still take what they were sent."""
        with self._lock:
            followers, self._followers = self._followers, []
            for follower in followers:
                follower.go_on()  # it may have connected just now
                follower.close()
            self._slots = None

    def _place(self, size: int) -> tuple[int, memoryview]:
        """Return where a free slot begins, and its memory; see `framed`. New memory is made if there is none."""
        taken = min(
            (follower.num_taken() for follower in self._followers), default=_ALL
        )
        number = next(
            (number for number, used in enumerate(self._used) if used <= taken), None
        )
        room = 0 if self._slots is None else self._slots.room
        if self._slots is None or number is None or size > room:
            slots = Slots(_NUM_SLOTS, max(room, ample(size)))
            for follower in (
                self._followers
            ):  # each of them maps it before it takes a message that lies in it
                follower.send(HEAD.pack(MEMORY, 0, 0, len(slots.memory)), slots)
            self._slots, self._used, number = slots, [0] * _NUM_SLOTS, 0
        self._used[number] = self._count + 1
        return self._slots.slot(number)


class _Follower:
    """What the leader keeps of a follower. All is done with the lock of its `Broadcast` held."""

    def __init__(self, address: str, lock: threading.RLock) -> None:
        self._lock = lock
        self._unsent: deque[tuple[bytes | bytearray, Slots | None]] = deque()
        """(frame, memory whose file goes with it), in order."""
        self._taken = 0
        self._connected = False
        self._socket = noted(
            lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        )
        """Listens until the follower has connected, then it is the connection."""
        self._socket.setblocking(False)
        self._socket.bind(address)
        self._socket.listen(1)
        _watcher(os.getpid()).when_ready(self._socket, select.EPOLLIN, self.go_on)

    def send(self, frame: bytes | bytearray, memory: Slots | None = None) -> None:
        """Send a frame now or later; never waits.

        Args:
            frame: What `Channel.receive` reads.
            memory: Memory whose file goes with it.
        """
        if self._taken < _ALL:  # else it is gone
            self._unsent.append((frame, memory))
            self._flush()

    def num_taken(self) -> int:
        """Return how many messages the follower is known to have taken."""
        with contextlib.suppress(BlockingIOError):
            while self._connected and self._taken < _ALL:
                try:
                    said = self._socket.recv(_TAKEN.size)
                except ConnectionError:
                    said = b""
                if not said:
                    self.close()
                    break
                (self._taken,) = _TAKEN.unpack(said)
        return self._taken

    def close(self) -> None:
        """Take the follower for gone: it keeps no memory occupied, and is sent nothing."""
        self._taken = _ALL
        self._socket.close()
        self._unsent.clear()

    def go_on(self) -> bool:
        """Accept the follower if it has come, and send what did not fit into its socket; return False if it cannot."""
        with self._lock:
            if self._taken == _ALL:
                return True
            accepted = self._connected or self._accept()
            if self._connected:
                self._flush()
            else:
                _watcher(os.getpid()).when_ready(
                    self._socket, select.EPOLLIN, self.go_on
                )
            return accepted

    def _accept(self) -> bool:
        try:
            connection = noted(lambda: self._socket.accept()[0])
            _check_user(connection)
        except (BlockingIOError, PermissionError):
            return True
        except OSError:  # most likely, too many files are open
            return False
        connection.setblocking(False)
        self._socket.close()
        self._socket, self._connected = connection, True
        return True

    def _flush(self) -> None:
        """Send what fits into the socket."""
        while self._unsent and self._connected:
            frame, memory = self._unsent[0]
            try:
                if memory is None:
                    self._socket.send(frame)
                else:
                    socket.send_fds(self._socket, [frame], [memory.file])
            except BlockingIOError:
                _watcher(os.getpid()).when_ready(
                    self._socket, select.EPOLLOUT, self.go_on
                )
                return
            except (
                OSError
            ):  # it has closed its pass or was killed, of which the agreement tells
                self.close()
                return
            self._unsent.popleft()


class _Watcher:
    """A thread that makes a call when a socket is ready."""

    def __init__(self) -> None:
        self._poll, self._calls = select.epoll(), dict[int, Callable[[], bool]]()
        with signals_held():
            threading.Thread(
                target=self._run, name="paddle_shard-reception", daemon=True
            ).start()

    def when_ready(
        self, connection: socket.socket, event: int, call: Callable[[], bool]
    ) -> None:
        """Make a call, once, when a socket is ready; a later one for the same socket replaces it.

        Args:
            connection: The socket.
            event: What it must be ready for, as `select.epoll` calls it.
            call: Returns False if the next call had better come a little later.
        """
        number = connection.fileno()
        self._calls[number] = call
        try:
            self._poll.register(number, event | select.EPOLLONESHOT)
        except FileExistsError:
            self._poll.modify(number, event | select.EPOLLONESHOT)

    def _run(self) -> None:
        while True:
            for number, _ in self._poll.poll():
                # If another socket has got the number in the meantime, it is called too early, and waits again.
                call = self._calls.pop(number, None)
                if call is not None and not call():
                    time.sleep(_PAUSE)


@functools.cache
def _watcher(process: int) -> _Watcher:
    """Return the watcher of this process; a forked child has its own."""
    return _Watcher()


def own_name() -> str:
    """Return the beginning of the names of this process's passes, unique on the host."""
    return f"paddle_shard-{os.getpid()}-{_SECRET}"


class Receiver(Channel):
    """A follower's end: a channel on which it tells the leader how much it has taken."""

    _num_taken = 0

    def receive(self, failed: Callable[[Exception], Any]) -> Any:
        """See `Channel`."""
        found = super().receive(failed)
        self._num_taken += 1
        # If it does not fit, the next one tells it, too. If the leader is gone, what it has sent can still be taken.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._connection.send(_TAKEN.pack(self._num_taken))
        return found


def connected(name: str | None, follower: int) -> Receiver:
    """Return a connection to a leader's pass.

    Args:
        name: Name of the pass; None: it is not known yet.
        follower: This rank's position among those that the leader reads for.

    Raises:
        BlockingIOError: The pass is not open (yet).
        OSError: It cannot be reached, or belongs to another user.
    """
    if name is None:
        raise BlockingIOError
    connection = noted(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        connection.setblocking(False)
        connection.connect(_address(name, follower))
        _check_user(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, ConnectionRefusedError):  # nobody listens there yet
            raise BlockingIOError from None
        raise
    return Receiver(connection, 1)


def _address(name: str, follower: int) -> str:
    """Return the address of a socket that has a name instead of a file, so that nothing is left of it."""
    return f"\0{name}-{follower}"


def _check_user(connection: socket.socket) -> None:
    """Refuse a process of another user: sockets with names have no permissions."""
    found = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    _, user, _ = _CREDENTIALS.unpack(found)
    if user != os.geteuid():
        connection.close()
        raise PermissionError(
            f"the process at the other end belongs to user {user}, not to {os.geteuid()}"
        )
