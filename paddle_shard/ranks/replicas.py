"""How do ranks of one host share a reader: one reads and publishes, the others subscribe?"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle.distributed as dist

from paddle_shard.errors import DifferentDataError, PeerLostError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.step import Step
from paddle_shard.ranks.agreement import NOTICE, Agreement
from paddle_shard.ranks.broadcast import Broadcast, Receiver, connected
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.digest import digest
from paddle_shard.reading.executor import Executor, Wrapper
from paddle_shard.reading.failure import ReadFailure

BATCH, FAILED, STOP, READ_YOURSELF = range(4)
"""Kinds of messages, which are (kind, content). BATCH: the next batch. FAILED: a message cannot be received; the
content is a `ReadFailure`. STOP: nothing more will come, and the agreement tells why. READ_YOURSELF: reading is no
dearer than receiving, so the followers read from here on."""

_TRIALS = 8
"""Number of batches after which a leader compares what reading and sending cost."""
_LOOK_SECONDS = 0.05
"""Seconds between two looks at the agreement while no message comes."""
_GRACE = 5.0
"""Seconds in which the agreement may say that it is another rank that has not come, before the leader is blamed."""


class LeaderStoppedError(PeerLostError):
    """The rank that reads for this one has stopped, and the agreement on steps tells why."""


class _ReadYourselfError(Exception):
    """The leader has said that this rank must read from here on."""


@dataclass(slots=True, kw_only=True)
class Replicas:
    """How a loader shares its reading; one for all its passes."""

    ranks: tuple[int, ...] = ()
    """Global ranks of this host that read the same samples, ascending; the first reads for all. Empty: each rank reads
    for itself."""
    measured: bool = False
    """True if the leader looks whether reading costs more than handing on (`replicas="auto"`)."""
    on_each: bool = False
    """True if it has found that it does not, so that each rank reads for itself after all."""

    @property
    def follows(self) -> bool:
        """True if another rank reads for this one."""
        return bool(self.ranks) and not self.on_each and dist.get_rank() != self.ranks[0]

    def __str__(self) -> str:
        """Who reads for whom; empty if each rank reads for itself, and nothing else was possible."""
        if not self.ranks:
            return ""
        if self.on_each:
            return "each replica reads for itself, as that costs less than handing on"
        if self.follows:
            return f"read by global rank {self.ranks[0]}"
        return f"reads for global ranks {', '.join(map(str, self.ranks[1:]))} too"

    def shared(self, core: Executor | None, read: Callable[[], Executor], agreement: Agreement) -> Executor:
        """Return the executor of a new pass, which publishes or subscribes.

        Args:
            core: Reads; None if this rank follows.
            read: Starts to read, if the leader says later that each rank had better do that.
            agreement: Of all ranks, on the steps of the pass.
        """
        if core is None:
            return Subscribing(_Received(self, agreement), read)
        if not self.ranks or dist.get_rank() != self.ranks[0]:
            return core
        name = agreement.name_of(self.ranks[0])
        assert name is not None
        return Publishing(core, self, Broadcast(name, len(self.ranks) - 1))


class Publishing(Wrapper):
    """An executor that reads, and sends what it reads to other ranks."""

    def __init__(self, inner: Executor, replicas: Replicas, broadcast: Broadcast) -> None:
        super().__init__(inner)
        self._replicas, self._broadcast, self._ended = replicas, broadcast, False
        self._took: list[tuple[float, float]] = []
        """(seconds of reading, seconds of sending) of the newest batches, if they are measured."""
        if replicas.on_each:  # a follower may have left the last pass before it was told
            self._end(READ_YOURSELF)

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        began = time.perf_counter()
        found = self._inner.take(beside=beside)
        if self._ended:
            return found
        read = time.perf_counter()
        try:
            self._broadcast.send((BATCH, found))
        except Exception as error:
            raise_if_a_handlers(error)
            what = "handing the batch to the ranks that share this rank's reader (replicas='each' reads on each)"
            raise ReadFailure.of(error, what=what).error(found.step) from None
        if self._replicas.measured:
            self._took.append((read - began, time.perf_counter() - read))
        if len(self._took) == _TRIALS:
            reading, sending = np.min(self._took[1:], axis=0)  # on a busy host, a follower that is woken runs at once
            self._took.clear()
            if reading < sending:
                self._replicas.on_each = True
                self._end(READ_YOURSELF)
        return found

    def _end(self, kind: int) -> None:
        """Send the last message of the pass."""
        if not self._ended:
            self._ended = True
            self._broadcast.send((kind, None))

    def stop(self) -> None:
        """See `Executor`."""
        self._end(STOP)
        self._inner.stop()

    def close(self, *, ended: bool = False) -> None:
        """See `Executor`."""
        self._inner.close(ended=ended)
        self._broadcast.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self._broadcast.close()


class Subscribing(Wrapper):
    """Takes what another rank of this host has read for the same steps; reads itself once that rank says so."""

    def __init__(self, received: _Received, read: Callable[[], Executor]) -> None:
        super().__init__(received)
        self._received, self._read = received, read

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        try:
            return self._inner.take(beside=beside)
        except _ReadYourselfError:
            self._inner = self._read()
            self._received.close()
            for step in self._received.steps:
                self._inner.submit(step)
            return self._inner.take(beside=beside)


class _Received(Executor):
    """Takes what another rank has read. It connects when it first waits for a batch."""

    def __init__(self, replicas: Replicas, agreement: Agreement) -> None:
        self._replicas, self._agreement, self._leader = replicas, agreement, replicas.ranks[0]
        self._named = f"global rank {self._leader}, which reads for global rank {dist.get_rank()} too"
        self._receiver: Receiver | None = None
        self._closed = self._noticed = False
        self.steps: deque[Step] = deque()
        """Steps that were submitted and whose batches were not taken."""

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        self.steps.append(step)

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`.

        Raises:
            StopIteration: All steps that were submitted were taken.
            LeaderStoppedError: The leader has stopped, or the pass is over.
            PeerLostError: The leader is lost, or has said nothing for too long.
            DifferentDataError: The leader has read other samples.
        """
        if not self.steps:
            raise StopIteration
        kind, content = self._receive()
        if kind == STOP:
            raise self._stopped()
        if kind == READ_YOURSELF:
            self._replicas.on_each = True
            raise _ReadYourselfError
        step = self.steps.popleft()
        if kind == FAILED:
            raise content.error(step)
        found: Batch = content
        if _key_of(found.step) != _key_of(step):
            raise DifferentDataError(
                f"step {step.number}: {self._named}, has read other samples than this rank's sampler asks for "
                "(replicas=). Seed the sampler alike on all ranks."
            )
        # A source that has a state of its own is read by the leader only.
        found.step = replace(step, sampler_state=found.step.sampler_state) if step.parts else step
        return found

    def ready(self) -> bool:
        """See `Executor`."""
        return self._receiver is not None and self._receiver.wait(0)

    def interrupt(self) -> None:
        """See `Executor`."""
        self._closed = True
        if self._receiver is not None:
            self._receiver.interrupt()

    def close(self, *, ended: bool = False) -> None:
        """See `Executor`."""
        self._closed = True
        if self._receiver is not None:
            self._receiver.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self.close()

    def _receive(self) -> tuple[int, Any]:
        """Return the next message."""
        began, position = time.monotonic(), self._replicas.ranks.index(dist.get_rank()) - 1
        while True:
            try:
                if self._receiver is None:
                    self._receiver = connected(self._agreement.name_of(self._leader), position)
                return self._receiver.receive(_failed)  # type: ignore[no-any-return]
            except BlockingIOError:  # the leader has not opened the pass yet, or is reading
                waited = time.monotonic() - began
            except (EOFError, OSError) as error:
                raise_if_a_handlers(error)
                if self._closed or self._receiver is not None:
                    raise self._stopped() from None
                how = f"cannot be reached on this host: {error}. With replicas='each', every rank reads for itself."
                raise PeerLostError.of(f"{self._named}, {how}", [self._leader]) from error
            self._check(waited)
            if self._receiver is not None:
                self._receiver.wait(_LOOK_SECONDS)
            else:
                time.sleep(min(0.001 + waited, _LOOK_SECONDS))

    def _check(self, waited: float) -> None:
        """See what has become of the others while no message comes.

        Raises:
            LeaderStoppedError: The pass is over, or a rank is lost.
            PeerLostError: The leader has said nothing for too long.
        """
        timeout = self._agreement.timeout
        if self._closed or self._agreement.is_decided:
            raise self._stopped()
        if waited > timeout + (0.0 if self._receiver else _GRACE):
            raise PeerLostError.of(
                f"{self._named}, has sent nothing for {timeout:g} s. If a batch may take longer than that, use a "
                "longer timeout.",
                [self._leader],
                timeout,
            )
        if waited > NOTICE and not self._noticed:
            self._noticed = True
            logging.getLogger("paddle_shard").warning(
                f"global rank {dist.get_rank()} has waited {waited:.0f} s for a batch from global rank {self._leader}, "
                f"which reads for it. It keeps waiting, up to timeout={timeout:g} s."
            )

    def _stopped(self) -> PeerLostError:
        return LeaderStoppedError.of(f"{self._named}, has ended its pass.", [self._leader])


def _key_of(step: Step) -> int:
    """Return a number by which a follower knows that a batch is of its own step."""
    return digest(step.ids, step.number) if len(step.ids) else step.number


def _failed(error: Exception) -> tuple[int, ReadFailure]:
    raise_if_a_handlers(error)
    return FAILED, ReadFailure.of(error, what="receiving the batch")
