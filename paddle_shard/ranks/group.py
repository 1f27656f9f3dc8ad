"""How do ranks exchange a few numbers: by calls that all of them make, or in memory that they share?"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, MutableSequence, Sequence

from paddle_shard.errors import PeerLostError

_HEAD = struct.Struct("<qq")
"""Position of a rank, and number of bytes of its payload, which follow."""
PASSES = 64
"""Most passes that are on a progress table at the same time; further open passes use rounds only."""
_MAX_STEP = 1 << 32
FINE, LOST, ABSENT = b".", b"!", b"?"
"""First byte of a message: it carries payloads, the error `loss` of the rank that sends it, or who is missing yet."""


class Group:
    """Ranks that make the same calls in the same order, each from one thread at a time.

    `minimum` and `gather` block until all ranks have called them. They raise PeerLostError, which names global ranks,
    if a rank cannot. After that the group cannot be used any more. A subclass says how bytes are exchanged.
    """

    def __init__(self, rank: int, names: Sequence[int], timeout: float = 1800.0) -> None:
        """Store who takes part.

        Args:
            rank: Position of this process in the group.
            names: Global rank of each position, for messages.
            timeout: Seconds to wait for the others in one call; may be changed between calls.
        """
        self.rank, self.names, self.timeout = rank, tuple(names), timeout
        self.size = len(self.names)

    def absent(self) -> Sequence[int]:
        """Return the global ranks that have not connected yet, or for which the present call has waited for long."""
        return []

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the least of each value over all ranks; every rank gives the same number of int64 values."""
        layout = struct.Struct(f"<{len(values)}q")

        def least(parts: Sequence[bytes]) -> bytes:
            return layout.pack(*map(min, zip(*map(layout.unpack, parts), strict=True)))

        return list(layout.unpack(self._exchange(layout.pack(*values), least)))

    def gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, by position."""
        everything = self._exchange(_HEAD.pack(self.rank, len(payload)) + payload, b"".join)
        found, start = {}, 0
        while start < len(everything):
            rank, length = _HEAD.unpack_from(everything, start)
            start += _HEAD.size + length
            found[rank] = everything[start - length : start]
        return [found[rank] for rank in range(self.size)]

    def close(self, why: PeerLostError | None = None) -> None:
        """Leave the group, and wake a call that waits in another thread. The others learn of it in their next call.

        Args:
            why: Whom this rank has waited for in vain, which the others raise instead of naming this rank.
        """

    def _exchange(self, payload: bytes, merge: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Return the merge of all ranks' payloads. `merge` takes payloads and merged payloads, in any grouping."""
        raise NotImplementedError


class TwoLevelGroup(Group):
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
        super().__init__(rank, names, local.timeout)
        self._local, self._across = local, across
        self._levels = [local] if across is None else [local, across]

    def absent(self) -> Sequence[int]:
        """See `Group`."""
        found = [rank for level in self._levels for rank in level.absent()]
        # The first rank of this host may be silent because it waits for another host.
        return [] if self._across is None and found == [self._local.names[0]] else found

    def close(self, why: PeerLostError | None = None) -> None:
        """Leave both groups."""
        for level in self._levels:
            level.close(why)

    def _exchange(self, payload: bytes, merge: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Return the merge of all ranks' payloads: sent up to the first members, across, and down again."""
        for level in self._levels:
            level.timeout = self.timeout
        if self._across is None:
            self._local.gather(payload)
            return _heard(self._local.gather(b"")[:1])[0]
        others = self._across
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


def loss(told: bytes | str) -> PeerLostError:
    """Return the error that another rank has told."""
    return PeerLostError.of(*json.loads(told))


def _heard(words: Sequence[bytes]) -> list[bytes]:
    """Return the payloads of messages from the other level; raise PeerLostError if one of them reports a loss."""
    for word in words:
        if word[:1] == LOST:
            raise loss(word[1:])
    return [word[1:] for word in words]


class ProgressTable:
    """The number of steps of a pass that each rank can serve, in memory that all ranks share.

    Reading it costs a fraction of a microsecond, but it tells less than a round: neither why a rank stops, nor its
    notes. A rank's entry is correct whenever it is read, and only grows within a pass.
    """

    def __init__(self, words: MutableSequence[int], rank: int, size: int) -> None:
        """Use the shared memory.

        Args:
            words: `PASSES * size` int64 words, all 0 at first; each word is written as a whole.
            rank: Position of this process among the ranks.
            size: Number of ranks.
        """
        self._words, self._rank, self._size = words, rank, size

    def post(self, number: int, step: int) -> None:
        """Post that this rank can serve every step before `step` of pass `number`."""
        self._words[number % PASSES * self._size + self._rank] = (number + 1) * _MAX_STEP + min(step, _MAX_STEP - 1)

    def least(self, number: int) -> int:
        """Return the number of steps of pass `number` that every rank can serve, as far as the table shows."""
        start, none = number % PASSES * self._size, (number + 1) * _MAX_STEP
        found: Sequence[int] = self._words[start : start + self._size]
        least = min(found)
        return least - none if least >= none and max(found) < none + _MAX_STEP else 0
