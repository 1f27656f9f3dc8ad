"""How do ranks of one host share a reader: one reads and publishes, the others subscribe?"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from paddle_shard.errors import DifferentDataError, PeerLostError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.step import Step
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.digest import digest
from paddle_shard.reading.executor import Executor, Wrapper
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.samplers.randomness import Generator

_TRIALS = 8
"""Number of batches after which a leader compares what reading and sending cost."""

READ_YOURSELF = object()
"""What a leader says if reading is no dearer than receiving: its followers read from here on."""


def key_of(step: Step) -> int:
    """Return a number by which a follower knows that a message is the answer to its own step."""
    return digest(step.ids, step.number) if len(step.ids) else step.number


class LeaderStoppedError(PeerLostError):
    """The rank that reads for this one has stopped, and the agreement on steps tells why."""


class Leads(Protocol):
    """The leader's end of a connection to its followers."""

    measured: bool
    """True if the leader may find that each rank had better read for itself."""

    def send(self, key: int, message: Any) -> None:
        """Send a message; never waits."""

    def end(self) -> None:
        """Say that there is nothing more to read."""

    def stop(self) -> None:
        """Say that nothing more will come: the agreement on steps tells why."""

    def read_yourself(self) -> None:
        """Say that the followers must read from here on."""

    def close(self) -> None:
        """Leave; safe to call again."""


class Follows(Protocol):
    """A follower's end of the connection to its leader."""

    @property
    def leader(self) -> int:
        """Global rank of the leader."""

    def at_hand(self) -> int:
        """Return how many messages have come."""

    def receive(self, failed: Callable[[Exception], Any]) -> Any:
        """Return (key, message) of the next message, or `READ_YOURSELF`.

        Raises:
            StopIteration: There is nothing more to read.
            LeaderStoppedError: The leader has stopped.
            PeerLostError: The leader is lost.
        """

    def interrupt(self) -> None:
        """Make a call of `receive` in another thread return."""

    def close(self) -> None:
        """Leave; safe to call again."""


class Sender:
    """The leader's end in one pass, and whether it still sends."""

    def __init__(self, leads: Leads, *, active: bool) -> None:
        """Begin a pass.

        Args:
            leads: The connection to the followers.
            active: False if they have been told to read for themselves.
        """
        self.leads, self.active = leads, active


Sharing = Sender | Follows | None
"""How a pass shares its reading with other ranks of this host: it leads, it follows, or it is on its own."""


class Publishing(Wrapper):
    """An executor that reads, and sends what it reads to other ranks."""

    def __init__(self, inner: Executor, sender: Sender) -> None:
        super().__init__(inner)
        self._sender = sender
        self._took: list[tuple[float, float]] = []
        """(seconds of reading, seconds of sending) of the newest batches, if they are measured."""

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        began = time.perf_counter()
        found = self._inner.take(beside=beside)
        if not self._sender.active:
            return found
        read, leads = time.perf_counter(), self._sender.leads
        state = found.step.sampler_state if found.step.parts else None
        message = (found.value, found.real, found.skipped, found.fresh, found.why, found.digest, state)
        try:
            leads.send(key_of(found.step), message)
        except Exception as error:
            raise_if_a_handlers(error)
            what = "handing the batch to the ranks that share this rank's reader (replicas='each' reads on each)"
            raise ReadFailure.of(error, what=what, index=None, worker=None).error(found.step) from None
        if leads.measured:
            self._measure(read - began, time.perf_counter() - read)
        return found

    def _measure(self, reading: float, sending: float) -> None:
        self._took.append((reading, sending))
        if len(self._took) < _TRIALS:
            return
        reading, sending = np.min(self._took[1:], axis=0)  # on a busy host, a follower that is woken runs at once
        self._took.clear()
        if reading < sending:
            self._sender.active = False
            self._sender.leads.read_yourself()

    def end(self) -> None:
        """See `Executor`."""
        if self._sender.active:
            self._sender.leads.end()
        self._inner.end()

    def stop(self) -> None:
        """See `Executor`."""
        if self._sender.active:
            self._sender.leads.stop()

    def finish(self) -> None:
        """See `Executor`."""
        self._inner.finish()
        self._sender.leads.close()

    def close(self) -> None:
        """See `Executor`."""
        self._inner.close()
        self._sender.leads.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self._sender.leads.close()


class Subscribing(Executor):
    """Takes what another rank of this host has read for the same steps."""

    def __init__(self, follows: Follows, start: Callable[[], Executor] | None) -> None:
        """Start the pass.

        Args:
            follows: The connection to the leader.
            start: Starts to read here, if the leader says so; None: it never does.
        """
        self._follows, self._start = follows, start
        self._steps: deque[Step] = deque()
        self._own: Executor | None = None

    @property
    def depth(self) -> int:
        """See `Executor`."""
        return 1 if self._own is None else self._own.depth

    @property
    def owns_arrays(self) -> bool:
        """See `Executor`."""
        return self._own is None or self._own.owns_arrays

    @property
    def runs_free(self) -> bool:
        """See `Executor`."""
        return self._own is None or self._own.runs_free

    @property
    def draws_from(self) -> Sequence[Generator]:
        """See `Executor`."""
        return () if self._own is None else self._own.draws_from

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        if self._own is None:
            self._steps.append(step)
        else:
            self._own.submit(step)

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`.

        Raises:
            DifferentDataError: The leader has read other samples.
        """
        if self._own is not None:
            return self._own.take(beside=beside)
        step = self._steps[0]
        try:
            answer = self._follows.receive(_failed)
        except StopIteration:
            raise self._differs(step, "has come to its end, and this rank's sampler has not") from None
        if answer is READ_YOURSELF:
            assert self._start is not None
            own = self._start()
            while self._steps:
                own.submit(self._steps.popleft())
            self._own = own
            self._follows.close()
            return own.take(beside=beside)
        self._steps.popleft()
        key, message = answer
        if key != key_of(step):
            raise self._differs(step, "has read other samples than this rank's sampler asks for")
        if isinstance(message, ReadFailure):
            self.close()
            raise message.error(step)
        value, real, skipped, fresh, why, read, state = message
        found = Batch(step=step, value=value, real=real, skipped=skipped, fresh=fresh, why=why, digest=read)
        if state is not None:
            found.step = replace(step, sampler_state=state)
        return found

    def _differs(self, step: Step, how: str) -> DifferentDataError:
        leader = self._follows.leader
        self.close()
        return DifferentDataError(
            f"step {step.number}: global rank {leader}, which reads for this rank too (replicas=), {how}. Seed the "
            "sampler alike on all ranks."
        )

    def ready(self) -> bool:
        """See `Executor`."""
        return self._follows.at_hand() >= 1 if self._own is None else self._own.ready()

    def interrupt(self) -> None:
        """See `Executor`."""
        (self._follows if self._own is None else self._own).interrupt()

    def finish(self) -> None:
        """See `Executor`."""
        self._follows.close()
        if self._own is not None:
            self._own.finish()

    def close(self) -> None:
        """See `Executor`."""
        self._follows.close()
        if self._own is not None:
            self._own.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self._follows.close()


def _failed(error: Exception) -> ReadFailure:
    raise_if_a_handlers(error)
    return ReadFailure.of(error, what="receiving the batch", index=None, worker=None)
