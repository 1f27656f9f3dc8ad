"""How do ranks exchange a few numbers?"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from paddle_shard.errors import PeerLostError

_HEAD = struct.Struct("<qq")
"""Position of a rank, and number of bytes of its payload, which follow."""
FINE, LOST = b".", b"!"
"""First byte of a message: it carries payloads, or the error `loss` of the rank that sends it."""


class Group(Protocol):
    """Ranks that make the same calls in the same order, each from one thread at a time.

    `minimum` and `gather` block until all ranks have called them. They raise PeerLostError, which names global ranks,
    if a rank cannot. After that the group cannot be used any more.
    """

    @property
    def rank(self) -> int:
        """Position of this process in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def names(self) -> Sequence[int]:
        """Global rank of each position, for messages."""
        ...

    timeout: float
    """Seconds to wait for the others in one call; may be changed between calls."""

    def absent(self) -> Sequence[int]:
        """Return the global ranks that are known not to have connected yet."""
        ...

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the least of each value over all ranks; every rank gives the same number of int64 values."""
        ...

    def gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, by position."""
        ...

    def close(self) -> None:
        """Leave the group, and wake a call that waits in another thread. The others learn of it in their next call."""
        ...


class MergingGroup:
    """A group that merges the bytes of all ranks in one exchange; a subclass defines how they are sent."""

    rank: int
    names: Sequence[int]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.names)

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the least of each value over all ranks; see `Group`."""
        layout = struct.Struct(f"<{len(values)}q")

        def least(parts: Sequence[bytes]) -> bytes:
            return layout.pack(*map(min, zip(*map(layout.unpack, parts), strict=True)))

        return list(layout.unpack(self._exchange(layout.pack(*values), least)))

    def gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, by position; see `Group`."""
        everything = self._exchange(_HEAD.pack(self.rank, len(payload)) + payload, b"".join)
        found, start = {}, 0
        while start < len(everything):
            rank, length = _HEAD.unpack_from(everything, start)
            start += _HEAD.size + length
            found[rank] = everything[start - length : start]
        return [found[rank] for rank in range(self.size)]

    def _exchange(self, payload: bytes, merge: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Return the merge of all ranks' payloads. `merge` takes payloads and merged payloads, in any grouping."""
        raise NotImplementedError


class TwoLevelGroup(MergingGroup):
    """Ranks in local groups (hosts). The first members of the local groups form a second group.

    Every exchange is among the members of one local group, or among the first members of all.
    """

    def __init__(self, local: Group, across: Group | None, *, rank: int, names: Sequence[int]) -> None:
        """Compose two groups.

        Args:
            local: The ranks of this host, or of another subset; every rank is in exactly one.
            across: The first members of all local groups; None on all other ranks.
            rank: Position of this process among all ranks.
            names: Global rank of each position.

        Raises:
            ValueError: `across` is given on a rank that is not the first of its local group, or missing on one that is.
        """
        if (across is not None) != (local.rank == 0):
            raise ValueError(f"across must be given on local rank 0 only, got {across!r} on local rank {local.rank}.")
        self._local, self._across = local, across
        self.rank, self.names = rank, tuple(names)

    @property
    def timeout(self) -> float:
        """Seconds to wait for the others in one call."""
        return self._local.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._local.timeout = seconds
        if self._across is not None:
            self._across.timeout = seconds

    def absent(self) -> Sequence[int]:
        """Return the global ranks that are known not to have connected yet."""
        return [*self._local.absent(), *(() if self._across is None else self._across.absent())]

    def close(self) -> None:
        """Leave both groups."""
        self._local.close()
        if self._across is not None:
            self._across.close()

    def _exchange(self, payload: bytes, merge: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Return the merge of all ranks' payloads: sent up to the first members, across, and down again."""
        if self._across is None:
            self._local.gather(payload)
            return _heard(self._local.gather(b"")[:1])[0]
        others: Group = self._across
        try:
            mine = merge(self._local.gather(payload))
            others = self._local
            found = merge(_heard(self._across.gather(FINE + mine)))
            others = self._across  # the other hosts have this result, and learn of a loss in their next call
            self._local.gather(FINE + found)
        except PeerLostError as error:
            others.gather(LOST + told_loss(error))
            raise
        return found


def told_loss(error: PeerLostError) -> bytes:
    """Return the error for another rank, which `loss` raises there."""
    return json.dumps([str(error), error.ranks, error.timeout]).encode()


def loss(told: bytes) -> PeerLostError:
    """Return the error that another rank has told."""
    return PeerLostError.of(*json.loads(told))


def _heard(words: Sequence[bytes]) -> list[bytes]:
    """Return the payloads of messages from the other level; raise PeerLostError if one of them reports a loss."""
    for word in words:
        if word[:1] == LOST:
            raise loss(word[1:])
    return [word[1:] for word in words]
