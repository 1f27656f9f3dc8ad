"""How does a pass take what another rank has read?"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Protocol

from paddle_shard.errors import DifferentDataError, PeerLostError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.leader import Sender
from paddle_shard.reading.parcel import ToTensors
from paddle_shard.reading.passes import Pass, finished
from paddle_shard.reading.request import Request, key_of

READ_YOURSELF = object()
"""What a leader says if reading is no dearer than receiving: its followers read from here on."""


class LeaderStoppedError(PeerLostError):
    """The rank that reads for this one has stopped, and the agreement on steps tells why."""


class Follows(Protocol):
    """A follower's end of the connection to its leader."""

    @property
    def leader(self) -> int:
        """Global rank of the leader."""

    def at_hand(self) -> int:
        """Return how many messages have come."""

    def receive(self, failed: Callable[[Exception], Any]) -> tuple[int, Any]:
        """Return (key, message) of the next message, or `READ_YOURSELF`.

        Raises:
            StopIteration: The leader has nothing more to read.
            LeaderStoppedError: Nothing will come: the leader has failed, or the ranks have agreed on an end.
            PeerLostError: The leader has left its pass, was killed, or is silent.
        """

    def interrupt(self) -> None:
        """Make a call of `receive` in another thread return."""

    def close(self) -> None:
        """Leave; safe to call again."""


class FollowerPass(Pass):
    """A pass that takes what another rank of this host has read for the same requests."""

    def __init__(
        self,
        requests: Iterator[Request],
        follows: Follows,
        to_tensors: ToTensors,
        start: Callable[[Iterator[Request]], Pass] | None,
    ) -> None:
        """Start the pass.

        Args:
            requests: The requests that this rank would read.
            follows: The connection to the leader.
            to_tensors: Converts arrays that only the batch holds to tensors.
            start: Starts a pass of this rank's own, if the leader may ask for it.
        """
        self._requests, self._follows, self._to_tensors, self._start = requests, follows, to_tensors, start
        self._request: Request | None = None
        """The request that is waited for."""
        self._own: Pass | None = None
        self._skipped: deque[list[tuple[int, str]]] = deque()

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            DataReadError: Receiving it failed.
            DifferentDataError: The leader has read something else.
            LeaderStoppedError: The leader has failed or ended: the agreement tells which.
            PeerLostError: The leader has left its pass, was killed, or is silent.
        """
        if self._own is not None:
            return next(self._own)
        if self._request is None:
            self._request = next(self._requests)
        request = self._request
        try:
            answer = self._follows.receive(_failed)
        except StopIteration:
            raise self._differs(request, "has come to its end, and this rank's sampler has not") from None
        if answer is READ_YOURSELF:
            return self._reads_itself(request)
        key, batch = answer
        self._request = None
        if key != key_of(request):
            raise self._differs(request, "has read other samples than this rank's sampler asks for")
        found = finished(batch, self._to_tensors, self._skipped)
        if not isinstance(found, ReadFailure):
            return found
        self.close()
        raise found.error(request)

    def _differs(self, request: Request, how: str) -> DifferentDataError:
        leader = self._follows.leader
        self.close()
        return DifferentDataError(
            f"step {request.step}: global rank {leader}, which reads for this rank too (replicas=), {how}. Seed the "
            "sampler alike on all ranks."
        )

    def _reads_itself(self, request: Request) -> Any:
        assert self._start is not None
        self._own = self._start(chain([request], self._requests))
        self._request = None
        self._follows.close()
        return next(self._own)

    @property
    def skipped(self) -> deque[list[tuple[int, str]]]:  # type: ignore[override]
        """See `Pass`."""
        return self._skipped if self._own is None else self._own.skipped

    @property
    def num_ahead(self) -> int:
        """See `Pass`."""
        return 0 if self._own is None else self._own.num_ahead

    @property
    def runs_free(self) -> bool:
        """See `Pass`."""
        return self._own is None or self._own.runs_free

    def marks(self) -> Any:
        """See `Pass`."""
        return None if self._own is None else self._own.marks()

    def next_free(self) -> Any:
        """See `Pass`."""
        return next(self) if self._own is None else self._own.next_free()

    def at_hand(self, count: int = 1) -> bool:
        """See `Pass`."""
        return self._follows.at_hand() >= count if self._own is None else self._own.at_hand(count)

    def interrupt(self) -> None:
        """See `Pass`."""
        (self._follows if self._own is None else self._own).interrupt()

    def finish(self) -> None:
        """See `Pass`."""
        self._follows.close()
        if self._own is not None:
            self._own.finish()

    def close(self) -> None:
        """See `Pass`."""
        self._follows.close()
        if self._own is not None:
            self._own.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self._follows.close()


def _failed(error: Exception) -> ReadFailure:
    raise_if_a_handlers(error)
    return ReadFailure.of(error, what="receiving the batch", index=None, worker=None)


Sharing = Sender | Follows | None
"""How a pass shares its reading with other ranks of this host: it leads, it follows, or it is on its own."""
