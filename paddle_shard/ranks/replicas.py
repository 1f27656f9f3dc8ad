"""Shared readers: of the ranks of a host that read the same samples, one reads and the others take what it has read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import paddle.distributed as dist

from paddle_shard.errors import PeerLostError
from paddle_shard.plan.step import Step
from paddle_shard.ranks.agreement import Agreement
from paddle_shard.ranks.broadcast import Broadcast, address_of, connected
from paddle_shard.ranks.reports import loss_of
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.channel import Channel
from paddle_shard.reading.executor import Executor, read_error

Place: TypeAlias = Callable[[Batch], Batch]
_LOOK_SECONDS = 0.05
"""Seconds between two looks at the agreement while no message comes."""
_PAUSE = 0.005
"""Seconds between two attempts to connect to the leader."""
_GRACE = 5.0
"""Seconds in which the agreement may say that it is another rank that has not come, before the leader is blamed."""


class LeaderStoppedError(PeerLostError):
    """The rank that reads for this one has stopped, and the agreement on steps reports why, unless it was killed."""


class Replicas(NamedTuple):
    """Shared reading of a loader; one for all its iterations."""

    ranks: tuple[int, ...] = ()
    """Global ranks of this host that read the same samples, ascending; the first reads for all. Empty: each rank reads
    for itself."""

    @property
    def follows(self) -> bool:
        """True if another rank reads for this one."""
        return bool(self.ranks) and dist.get_rank() != self.ranks[0]

    def __str__(self) -> str:
        """Text that says which ranks read for which; empty if each rank reads for itself."""
        if not self.ranks:
            return ""
        if self.follows:
            return f"read by global rank {self.ranks[0]}"
        return (
            f"reads for global ranks {', '.join(map(str, self.ranks[1:]))} too"
        )

    def shared(
        self, reader: Executor | None, agreement: Agreement, place: Place
    ) -> tuple[Executor, Place]:
        """Return the executor of a new iteration, which may subscribe, and what places its batches, which may publish.

        Args:
            reader: Reads; None if this rank follows.
            agreement: Agreement of all ranks on the steps.
            place: Places a batch on this rank.
        """
        if reader is not None and not self.ranks:
            return reader, place
        leader, *followers = self.ranks
        address = address_of(leader, agreement.name)
        if reader is None:
            return Subscribing(leader, address, agreement), place
        broadcast = Broadcast(address, len(followers), agreement)
        return reader, partial(_publish, broadcast, place)


def _publish(broadcast: Broadcast, place: Place, batch: Batch) -> Batch:
    """Send a batch to the ranks that share this rank's reader, and place it."""
    try:
        broadcast.send(batch)
    except Exception as error:
        raise read_error(
            error,
            batch.step,
            "handing the batch to the ranks that share this rank's reader (replicas='each' reads on each)",
        ) from None
    return place(batch)


class Subscribing(Executor):
    """Takes what another rank of this host has read for the same steps. It connects when it first waits for a batch."""

    reads_elsewhere = True

    def __init__(self, leader: int, address: str, agreement: Agreement) -> None:
        self._leader = leader
        self._address = address
        self._agreement = agreement
        self._channel: Channel | None = None
        self._steps: deque[Step] = deque()
        """Steps that were submitted and whose batches were not taken."""

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        self._steps.append(step)

    def take(self, *, in_thread: bool = False) -> Batch:
        """See `Executor`.

        Raises:
            StopIteration: All steps that were submitted were taken.
            LeaderStoppedError: The leader has stopped, or the iteration is over.
            PeerLostError: The leader is lost, or has sent nothing for too long.
            DataReadError: The leader cannot be reached, or what it has sent cannot be read.
        """
        if not self._steps:
            raise StopIteration
        step = self._steps[0]
        try:
            batch = self._receive()
        except Exception as error:
            raise read_error(error, step, "receiving the batch") from None
        self._steps.popleft()
        # A source that has a state of its own is read by the leader only.
        sampler = batch.step.sampler
        batch.step = step._replace(sampler=sampler) if step.parts else step
        if step.digest:  # of what this rank's sampler has drawn
            batch.digest = step.digest
        return batch

    def close(self, *, ended: bool = False) -> None:
        """See `Executor`."""
        if self._channel is not None:
            self._channel.close()

    def _receive(self) -> Batch:
        """Return what the leader has sent next."""
        timeout = self._agreement.terms.timeout
        # First the agreement may name another rank that has not come.
        deadline = time.monotonic() + timeout + _GRACE
        while not self._agreement.is_over:
            try:
                if self._channel is None:
                    self._channel = connected(self._address)
                if self._channel.wait(_LOOK_SECONDS):
                    return self._channel.receive()  # type: ignore[no-any-return]
            # The leader has not begun yet.
            except (BlockingIOError, ConnectionRefusedError):
                time.sleep(_PAUSE)
            except (EOFError, ConnectionError):
                break
            if time.monotonic() > deadline:
                raise PeerLostError.of(
                    f"global rank {self._leader}, which reads for this rank too, has sent nothing for {timeout:g} s. "
                    "If a batch may take longer than that, use a longer timeout.",
                    [self._leader],
                    timeout,
                )
        raise LeaderStoppedError.of(
            *loss_of([self._leader], "has ended or was killed")
        )
