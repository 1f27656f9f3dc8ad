"""How do ranks of one host share a reader: one reads and publishes, the others subscribe?"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import paddle.distributed as dist

from paddle_shard.errors import DifferentDataError, PeerLostError
from paddle_shard.plan.step import Step
from paddle_shard.ranks.agreement import Agreement
from paddle_shard.ranks.broadcast import Broadcast, Receiver, connected
from paddle_shard.ranks.protocol import NOTICE
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.digest import digest
from paddle_shard.reading.executor import Executor, read_errors
from paddle_shard.reading.failure import ReadFailure

BATCH, FAILED, STOP = range(3)
"""Kinds of messages, which are (kind, content). BATCH: the next batch. FAILED: a message cannot be received; the
content is a `ReadFailure`. STOP: nothing more will come, and the agreement tells why."""

_LOOK_SECONDS = 0.05
"""Seconds between two looks at the agreement while no message comes."""
_GRACE = 5.0
"""Seconds in which the agreement may say that it is another rank that has not come, before the leader is blamed."""


class LeaderStoppedError(PeerLostError):
    """The rank that reads for this one has stopped, and the agreement on steps tells why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How a loader shares its reading; one for all its passes."""

    ranks: tuple[int, ...] = ()
    """Global ranks of this host that read the same samples, ascending; the first reads for all. Empty: each rank reads
    for itself."""

    @property
    def follows(self) -> bool:
        """True if another rank reads for this one."""
        return bool(self.ranks) and dist.get_rank() != self.ranks[0]

    def __str__(self) -> str:
        """Who reads for whom; empty if each rank reads for itself."""
        if not self.ranks:
            return ""
        if self.follows:
            return f"read by global rank {self.ranks[0]}"
        return f"reads for global ranks {', '.join(map(str, self.ranks[1:]))} too"

    def shared(self, core: Executor | None, agreement: Agreement) -> Executor:
        """Return the executor of a new pass, which publishes or subscribes.

        Args:
            core: Reads; None if this rank follows.
            agreement: Of all ranks, on the steps of the pass.
        """
        if core is None:
            return Subscribing(self, agreement)
        if not self.ranks:
            return core
        name = agreement.name_of(self.ranks[0])
        assert name is not None
        return Publishing(core, Broadcast(name, len(self.ranks) - 1))


class Publishing(Executor):
    """An executor that reads, and sends what it reads to other ranks."""

    def __init__(self, inner: Executor, broadcast: Broadcast) -> None:
        self._inner = inner
        self._broadcast = broadcast
        self._ended = False

    @property
    def depth(self) -> int:
        """See `Executor`."""
        return self._inner.depth

    @property
    def runs_in_thread(self) -> bool:
        """See `Executor`."""
        return self._inner.runs_in_thread

    @property
    def reads_last_here(self) -> bool:
        """See `Executor`."""
        return self._inner.reads_last_here

    def submit(self, step: Step, *, is_last: bool = False) -> None:
        """See `Executor`."""
        self._inner.submit(step, is_last=is_last)

    def take(self, *, in_thread: bool = False) -> Batch:
        """See `Executor`."""
        found = self._inner.take(in_thread=in_thread)
        if not self._ended:
            action = "handing the batch to the ranks that share this rank's reader (replicas='each' reads on each)"
            with read_errors(found.step, action):
                self._broadcast.send((BATCH, found))
        return found

    def interrupt(self) -> None:
        """See `Executor`."""
        self._inner.interrupt()

    def stop(self) -> None:
        """See `Executor`."""
        if not self._ended:
            self._ended = True
            self._broadcast.send((STOP, None))
        self._inner.stop()

    def close(self, *, ended: bool = False) -> None:
        """See `Executor`."""
        self._inner.close(ended=ended)
        self._broadcast.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self._broadcast.close()


class Subscribing(Executor):
    """Takes what another rank of this host has read for the same steps. It connects when it first waits for a batch."""

    def __init__(self, replicas: Replicas, agreement: Agreement) -> None:
        self._replicas = replicas
        self._agreement = agreement
        self._leader = replicas.ranks[0]
        self._named = f"global rank {self._leader}, which reads for global rank {dist.get_rank()} too"
        self._receiver: Receiver | None = None
        self._closed = False
        self._noticed = False
        self._steps: deque[Step] = deque()
        """Steps that were submitted and whose batches were not taken."""

    def submit(self, step: Step, *, is_last: bool = False) -> None:
        """See `Executor`."""
        self._steps.append(step)

    def take(self, *, in_thread: bool = False) -> Batch:
        """See `Executor`.

        Raises:
            StopIteration: All steps that were submitted were taken.
            LeaderStoppedError: The leader has stopped, or the pass is over.
            PeerLostError: The leader is lost, or has said nothing for too long.
            DifferentDataError: The leader has read other samples.
        """
        if not self._steps:
            raise StopIteration
        kind, content = self._receive()
        if kind == STOP:
            raise self._stopped()
        return self._received(self._steps.popleft(), kind, content)

    def _received(self, step: Step, kind: int, content: Any) -> Batch:
        """Return what the leader has sent for a step."""
        if kind == FAILED:
            raise content.error(step)
        found: Batch = content
        if _key_of(found.step) != _key_of(step):
            raise DifferentDataError(
                f"step {step.number}: {self._named}, has read other samples than this rank's sampler asks for "
                "(replicas=). Seed the sampler alike on all ranks."
            )
        # A source that has a state of its own is read by the leader only.
        found.step = replace(step, sampler=found.step.sampler) if step.parts else step
        return found

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
        if not ending() and self._receiver is not None:
            self._receiver.close()

    def _receive(self) -> tuple[int, Any]:
        """Return the next message."""
        began, position = (
            time.monotonic(),
            self._replicas.ranks.index(dist.get_rank()) - 1,
        )
        while True:
            try:
                if self._receiver is None:
                    self._receiver = connected(
                        self._agreement.name_of(self._leader), position
                    )
                return self._receiver.receive(_failed)  # type: ignore[no-any-return]
            except (
                BlockingIOError
            ):  # the leader has not opened the pass yet, or is reading
                waited = time.monotonic() - began
            except (EOFError, OSError) as error:
                if self._closed or self._receiver is not None:
                    raise self._stopped() from None
                how = f"cannot be reached on this host: {error}. With replicas='each', every rank reads for itself."
                raise PeerLostError.of(
                    f"{self._named}, {how}", [self._leader]
                ) from error
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
        return LeaderStoppedError.of(
            f"{self._named}, has ended its pass.", [self._leader]
        )


def _key_of(step: Step) -> int:
    """Return a number by which a follower knows that a batch is of its own step."""
    return digest(step.ids, step.number) if len(step.ids) else step.number


def _failed(error: Exception) -> tuple[int, ReadFailure]:
    return FAILED, ReadFailure.of(error, what="receiving the batch")
