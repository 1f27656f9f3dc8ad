"""Shared readers: of the ranks of a host that read the same samples, one reads and the others take what it has read."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import paddle.distributed as dist

from paddle_shard.errors import DifferentDataError, PeerLostError
from paddle_shard.plan.step import Step
from paddle_shard.ranks.agreement import Agreement
from paddle_shard.ranks.broadcast import Broadcast, address_of, connected
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.channel import Channel
from paddle_shard.reading.digest import digest
from paddle_shard.reading.executor import Executor, read_errors
from paddle_shard.reading.failure import ReadFailure

_LOOK_SECONDS = 0.05
"""Seconds between two looks at the agreement while no message comes."""
_GRACE = 5.0
"""Seconds in which the agreement may say that it is another rank that has not come, before the leader is blamed."""


class LeaderStoppedError(PeerLostError):
    """The rank that reads for this one has stopped, and the agreement on steps tells why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How a loader shares its reading; one for all its iterations."""

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

    def shared(self, reader: Executor | None, agreement: Agreement) -> Executor:
        """Return the executor of a new iteration, which publishes or subscribes.

        Args:
            reader: Reads; None if this rank follows.
            agreement: Of all ranks, on the steps.
        """
        if not self.ranks:
            assert reader is not None
            return reader
        address = address_of(self.ranks[0], agreement.name)
        if reader is None:
            return Subscribing(self.ranks[0], address, agreement)
        return Publishing(reader, Broadcast(address, len(self.ranks) - 1, agreement))


class Publishing(Executor):
    """An executor that reads, and sends what it reads to other ranks."""

    def __init__(self, reader: Executor, broadcast: Broadcast) -> None:
        self._reader = reader
        self._broadcast = broadcast

    @property
    def depth(self) -> int:
        """See `Executor`."""
        return self._reader.depth

    @property
    def runs_in_thread(self) -> bool:
        """See `Executor`."""
        return self._reader.runs_in_thread

    @property
    def reads_last_here(self) -> bool:
        """See `Executor`."""
        return self._reader.reads_last_here

    def submit(self, step: Step, *, is_last: bool = False) -> None:
        """See `Executor`."""
        self._reader.submit(step, is_last=is_last)

    def interrupt(self) -> None:
        """See `Executor`."""
        self._reader.interrupt()

    def take(self, *, in_thread: bool = False) -> Batch:
        """See `Executor`."""
        batch = self._reader.take(in_thread=in_thread)
        action = "handing the batch to the ranks that share this rank's reader (replicas='each' reads on each)"
        with read_errors(batch.step, action):
            self._broadcast.send(batch)
        return batch

    def stop(self) -> None:
        """See `Executor`."""
        self._broadcast.close()
        self._reader.stop()

    def close(self, *, ended: bool = False) -> None:
        """See `Executor`."""
        self._reader.close(ended=ended)
        self._broadcast.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self._broadcast.close()


class Subscribing(Executor):
    """Takes what another rank of this host has read for the same steps. It connects when it first waits for a batch."""

    def __init__(self, leader: int, address: str, agreement: Agreement) -> None:
        self._leader = leader
        self._address = address
        self._agreement = agreement
        self._name = (
            f"global rank {leader}, which reads for global rank {dist.get_rank()} too"
        )
        self._channel: Channel | None = None
        self._is_closed = False
        self._steps: deque[Step] = deque()
        """Steps that were submitted and whose batches were not taken."""

    def submit(self, step: Step, *, is_last: bool = False) -> None:
        """See `Executor`."""
        self._steps.append(step)

    def take(self, *, in_thread: bool = False) -> Batch:
        """See `Executor`.

        Raises:
            StopIteration: All steps that were submitted were taken.
            LeaderStoppedError: The leader has stopped, or the iteration is over.
            PeerLostError: The leader is lost, or has sent nothing for too long.
            DifferentDataError: The leader has read other samples.
        """
        if not self._steps:
            raise StopIteration
        batch = self._receive()
        step = self._steps.popleft()
        if isinstance(batch, ReadFailure):
            raise batch.error(step)
        if _key_of(batch.step) != _key_of(step):
            raise DifferentDataError(
                f"step {step.number}: {self._name}, has read other samples than this rank's sampler asks for "
                "(replicas=). Seed the sampler alike on all ranks."
            )
        # A source that has a state of its own is read by the leader only.
        sampler = batch.step.sampler
        batch.step = replace(step, sampler=sampler) if step.parts else step
        return batch

    def interrupt(self) -> None:
        """See `Executor`."""
        self._is_closed = True
        if self._channel is not None:
            self._channel.interrupt()

    def close(self, *, ended: bool = False) -> None:
        """See `Executor`."""
        self._is_closed = True
        if self._channel is not None:
            self._channel.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():
            self.close()

    def _receive(self) -> Batch | ReadFailure:
        """Return what the leader has sent next."""
        start = time.monotonic()
        while True:
            try:
                if self._channel is None:
                    self._channel = connected(self._address)
                return self._channel.receive(_failure)  # type: ignore[no-any-return]
            except BlockingIOError:  # the leader has not begun yet, or is reading
                self._check(time.monotonic() - start)
            except (EOFError, OSError) as error:
                if self._is_closed or self._channel is not None:
                    raise self._stopped() from None
                text = (
                    f"{self._name}, cannot be reached on this host: {error}. With replicas='each', every rank reads for "
                    "itself."
                )
                raise PeerLostError.of(text, [self._leader]) from error
            if self._channel is not None:
                self._channel.wait(_LOOK_SECONDS)
            else:
                time.sleep(min(0.001 + time.monotonic() - start, _LOOK_SECONDS))

    def _check(self, waited: float) -> None:
        """Look at what has become of the others while no message comes.

        Raises:
            LeaderStoppedError: The iteration is over, or a rank is lost.
            PeerLostError: The leader has sent nothing for too long.
        """
        timeout = self._agreement.terms.timeout
        if self._is_closed or self._agreement.is_decided:
            raise self._stopped()
        if waited > timeout + _GRACE:
            raise PeerLostError.of(
                f"{self._name}, has sent nothing for {timeout:g} s. If a batch may take longer than that, use a "
                "longer timeout.",
                [self._leader],
                timeout,
            )

    def _stopped(self) -> PeerLostError:
        return LeaderStoppedError.of(
            f"{self._name}, has ended its loop.", [self._leader]
        )


def _key_of(step: Step) -> int:
    """Return a number by which a follower knows that a batch is of its own step."""
    return digest(step.ids, step.number) if len(step.ids) else step.number


def _failure(error: Exception) -> ReadFailure:
    return ReadFailure.of(error, what="receiving the batch")
