"""How does a pass that reads hand on what it reads to other ranks?"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.passes import Pass
from paddle_shard.reading.request import ReadRequest, Request, key_of

_TRIALS = 8
"""Number of batches after which a leader compares what reading and sending cost."""


class Leads(Protocol):
    """The leader's end of a connection to its followers."""

    measured: bool
    """True if the leader may find that each rank had better read for itself."""

    def send(self, key: int, message: Any) -> None:
        """Send a message; never waits."""

    def hold(self) -> None:
        """Wake no follower until `wake` is called."""

    def wake(self) -> None:
        """Wake the followers that may be asleep."""

    def end(self) -> None:
        """Say that there is nothing more to read."""

    def stop(self) -> None:
        """Say that nothing more will come: the agreement on steps tells why."""

    def read_yourself(self) -> None:
        """Say that the followers must read from here on."""

    def close(self) -> None:
        """Leave; safe to call again."""


class Sender:
    """Sends what a leader's pass has read."""

    def __init__(self, leads: Leads, *, active: bool) -> None:
        """Begin a pass.

        Args:
            leads: The connection to the followers.
            active: False if they have been told to read for themselves.
        """
        self._leads, self.active = leads, active
        self.per_message = 1
        """Number of answers that are sent together: a stream's step has one from each worker."""
        self._held: list[Any] = []
        self._took: list[tuple[float, float]] = []
        """(seconds of reading, seconds of sending) of the newest batches, if they are measured."""
        self._began = 0.0

    def begin(self) -> None:
        """Note that a batch is about to be read."""
        self._began = time.perf_counter()

    def __call__(self, request: Request, batch: Any) -> Any:
        """Send a batch and return it, or the failure to send it."""
        if not self.active or isinstance(batch, ReadFailure):
            return batch
        read = time.perf_counter()
        if self.per_message > 1 or not isinstance(request, ReadRequest):
            self._held.append(batch)
            if len(self._held) < self.per_message:
                return batch
        try:
            self._leads.send(key_of(request), self._held or batch)
            self._held = []
        except Exception as error:
            raise_if_a_handlers(error)
            what = "handing the batch to the ranks that share this rank's reader (replicas='each' reads on each)"
            return ReadFailure.of(error, what=what, index=None, worker=None)
        if self._leads.measured:
            self._measure(read - self._began, time.perf_counter() - read)
        return batch

    def _measure(self, reading: float, sending: float) -> None:
        self._took.append((reading, sending))
        if len(self._took) < _TRIALS:
            return
        reading, sending = np.min(self._took[1:], axis=0)  # on a busy host, a follower that is woken runs at once
        self._took.clear()
        if reading < sending:
            self.active = False
            self._leads.read_yourself()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wake the followers once, for all that is sent meanwhile."""
        self._leads.hold()
        try:
            yield
        finally:
            self._leads.wake()

    def end(self) -> None:
        """Say that there is nothing more to read."""
        if self.active:
            self._leads.end()

    def stop(self) -> None:
        """Say that nothing more will come."""
        if self.active:
            self._leads.stop()

    def close(self) -> None:
        """Leave; safe to call again."""
        self._leads.close()


class LeaderPass(Pass):
    """A pass that reads in this process or its workers, and whose core sends what it reads to other ranks."""

    def __init__(self, core: Pass, sender: Sender) -> None:
        self._core, self._sender = core, sender
        self._raised: Exception | None = None
        """What was raised after some batches of `several`, to be raised by the next call."""

    def __next__(self) -> Any:
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
        self._sender.begin()
        try:
            return next(self._core)
        except StopIteration:
            self._sender.end()
            raise

    @property
    def skipped(self) -> deque[list[tuple[int, str]]]:  # type: ignore[override]
        """See `Pass`."""
        return self._core.skipped

    @property
    def num_ahead(self) -> int:
        """See `Pass`."""
        return self._core.num_ahead

    @property
    def runs_free(self) -> bool:
        """See `Pass`."""
        return self._core.runs_free

    def marks(self) -> Any:
        """See `Pass`."""
        return self._core.marks()

    def next_free(self) -> Any:
        """See `Pass`."""
        self._sender.begin()
        try:
            return self._core.next_free()
        except StopIteration:
            self._sender.end()
            raise

    def at_hand(self, count: int = 1) -> bool:
        """See `Pass`."""
        return self._core.at_hand(count)

    def several(self, count: int) -> Sequence[Any]:
        """See `Pass`. The core reads one by one: what it reads in one go may have to be read again."""
        if not self._sender.active:
            return self._core.several(count)
        found: list[Any] = []
        with self._sender.together():
            try:
                while len(found) < count:
                    found.append(next(self))
            except Exception as error:
                raise_if_a_handlers(error)
                if not found:
                    raise
                self._raised = error
        return found

    def interrupt(self) -> None:
        """See `Pass`."""
        self._core.interrupt()

    def let_go(self) -> None:
        """See `Pass`."""
        self._sender.stop()

    def finish(self) -> None:
        """See `Pass`."""
        self._core.finish()
        self._sender.close()

    def close(self) -> None:
        """See `Pass`."""
        self._core.close()
        self._sender.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self._sender.close()
