"""How does a pass meet the ranks that it reads for, or the rank that reads for it?"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import paddle.distributed as dist

from paddle_shard.errors import PeerLostError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.ranks.agreement import Agreement
from paddle_shard.ranks.broadcast import (
    END,
    READ_YOURSELF,
    STOP,
    Broadcast,
    PassKey,
    Receiver,
    connected,
    reception,
)
from paddle_shard.reading import sharing

_LOOK_SECONDS = 0.05
"""Seconds between two looks at the agreement while no message comes."""
_GRACE = 5.0
"""Seconds in which the agreement may say that it is another rank that has not come, before the leader is blamed."""
_NOTICE = 5.0
"""Seconds after which a rank that waits says so, once a pass."""


def pass_key(ranks: Sequence[int], agreement: Agreement) -> PassKey:
    """Return what stands for a pass in a connection between two of the ranks that agree on it."""
    return zlib.crc32(repr(tuple(ranks)).encode()), agreement.number


class Leading:
    """The leader's end: what its pass reads goes to the followers."""

    def __init__(self, num_followers: int, *, measured: bool, on_each: Callable[[], None]) -> None:
        """Begin; `begin` lets the followers connect.

        Args:
            num_followers: Number of ranks that this one reads for.
            measured: True if they are told to read for themselves if that is as quick.
            on_each: Called when they are told so.
        """
        self.measured, self._on_each = measured, on_each
        self._broadcast = Broadcast(num_followers)
        self._key: PassKey | None = None

    def begin(self, ranks: Sequence[int], agreement: Agreement) -> None:
        """Let the followers connect."""
        self._key = pass_key(ranks, agreement)
        reception().enter(self._key, self._broadcast)

    def send(self, key: int, message: Any) -> None:
        """See `Leads`."""
        self._broadcast.send(key, message)

    def end(self) -> None:
        """See `Leads`."""
        self._broadcast.say(END)

    def stop(self) -> None:
        """See `Leads`."""
        self._broadcast.say(STOP)

    def read_yourself(self) -> None:
        """See `Leads`."""
        self._broadcast.say(READ_YOURSELF)
        self._on_each()

    def close(self) -> None:
        """See `Leads`."""
        if self._key is not None:
            reception().leave(self._key)
        self._broadcast.close()


class Following:
    """A follower's end. It connects when it first waits for a message."""

    def __init__(self, leader: int, position: int, *, timeout: float, on_each: Callable[[], None]) -> None:
        """Begin; `begin` says which pass it is.

        Args:
            leader: Global rank that reads.
            position: This rank's position among those that it reads for.
            timeout: Seconds for which the leader may say nothing.
            on_each: Called when the leader says that each rank had better read for itself.
        """
        self.leader, self._position, self._timeout, self._on_each = leader, position, timeout, on_each
        self._agreement: Agreement | None = None
        self._key: PassKey = (0, 0)
        self._receiver: Receiver | None = None
        self._closed = self._noticed = False

    def begin(self, ranks: Sequence[int], agreement: Agreement) -> None:
        """Learn which pass it is, and where to ask what has become of it."""
        self._key, self._agreement = pass_key(ranks, agreement), agreement

    def at_hand(self) -> int:
        """See `Follows`."""
        return 0 if self._receiver is None else self._receiver.at_hand()

    def receive(self, failed: Callable[[Exception], Any]) -> Any:
        """See `Follows`."""
        began, pause = time.monotonic(), 0.001
        while not self.at_hand():
            self._look_at_the_clock(time.monotonic() - began)
            if self._receiver is None:
                self._connect()
                if self._receiver is None:
                    time.sleep(pause)
                    pause = min(2 * pause, _LOOK_SECONDS)
            elif not self._receiver.wait(_LOOK_SECONDS):
                raise PeerLostError.of(f"{self._named}, has left its loop or was killed.", [self.leader])
        assert self._receiver is not None
        kind, key, message = self._receiver.take(failed)
        if kind == END:
            raise StopIteration
        if kind == STOP:
            raise self._stopped()
        if kind == READ_YOURSELF:
            self._on_each()
            return sharing.READ_YOURSELF
        return key, message

    def interrupt(self) -> None:
        """See `Follows`."""
        self._closed = True
        if self._receiver is not None:
            self._receiver.interrupt()

    def close(self) -> None:
        """See `Follows`."""
        self._closed = True
        if self._receiver is not None:
            self._receiver.close()

    def _connect(self) -> None:
        assert self._agreement is not None
        name = self._agreement.introduction_of(self.leader)
        if name is None:
            return
        try:
            self._receiver = connected(name.decode(), self._key, self._position)
        except OSError as error:
            raise_if_a_handlers(error)
            raise PeerLostError.of(
                f"{self._named}, cannot be reached on this host: {error}. With replicas='each', every rank reads for "
                "itself.",
                [self.leader],
            ) from error

    def _look_at_the_clock(self, waited: float) -> None:
        """See what has become of the others if no message comes.

        Raises:
            LeaderStoppedError: The pass is over, or a rank is lost.
            PeerLostError: The leader has said nothing for too long.
        """
        if self._closed or self._agreement is None or self._agreement.is_decided:
            raise self._stopped()
        if waited > self._timeout + (0.0 if self._receiver else _GRACE):
            raise PeerLostError.of(
                f"{self._named}, has sent nothing for {self._timeout:g} s. If a batch may take longer than that, use a "
                "longer timeout.",
                [self.leader],
                self._timeout,
            )
        if waited > _NOTICE and not self._noticed:
            self._noticed = True
            logging.getLogger("paddle_shard").warning(
                "global rank %d has waited %.0f s for a batch from global rank %d, which reads for it. It keeps "
                "waiting, up to timeout=%g s.",
                dist.get_rank(),
                waited,
                self.leader,
                self._timeout,
            )

    def _stopped(self) -> Exception:
        return sharing.LeaderStoppedError.of(f"{self._named}, has ended its pass.", [self.leader])

    @property
    def _named(self) -> str:
        return f"global rank {self.leader}, which reads for global rank {dist.get_rank()} too"
