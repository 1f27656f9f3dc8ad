"""How do ranks of one host share a reader: one reads and publishes, the others subscribe?"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import paddle.distributed as dist

from paddle_shard.clock import LEADER, at
from paddle_shard.errors import DifferentDataError, PeerLostError
from paddle_shard.plan.step import Step
from paddle_shard.ranks.agreement import NOTICE, Agreement
from paddle_shard.ranks.broadcast import Broadcast, Receiver, connected
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.digest import digest
from paddle_shard.reading.executor import Executor, Wrapper, told_of
from paddle_shard.reading.failure import ReadFailure

BATCH, FAILED, STOP, READ_YOURSELF = range(4)
"""Kinds of messages, which are (kind, content). BATCH: the next batch. FAILED: a message cannot be received; the
content is a `ReadFailure`. STOP: nothing more will come, and the agreement tells why. READ_YOURSELF: the followers read
so many of the next batches themselves; None: all of them."""

_TRIALS = 16
"""Batches that are read in each of the two ways, before the faster one is kept."""
_SLOWER = 1.03
"""How much longer a batch may take with one reader, which saves memory and the reading of the other ranks."""
_LOOK_SECONDS = 0.05
"""Seconds between two looks at the agreement while no message comes."""
_GRACE = 5.0
"""Seconds in which the agreement may say that it is another rank that has not come, before the leader is blamed."""


class LeaderStoppedError(PeerLostError):
    """The rank that reads for this one has stopped, and the agreement on steps tells why."""


@dataclass(slots=True, kw_only=True)
class Replicas:
    """How a loader shares its reading; one for all its passes."""

    ranks: tuple[int, ...] = ()
    """Global ranks of this host that read the same samples, ascending; the first reads for all. Empty: each rank reads
    for itself."""
    num_alike: int = 1
    """Number of ranks of this host that read the same samples, each for itself."""
    measured: bool = False
    """True if the leader tries both ways (`replicas="auto"`), and has not decided yet."""
    on_each: bool = False
    """True if it has found that each rank had better read for itself after all."""
    took: list[float] = field(default_factory=list)
    """Seconds from batch to batch while the leader tries: of batches that it sends, then of others."""

    @property
    def follows(self) -> bool:
        """True if another rank reads for this one."""
        return bool(self.ranks) and not self.on_each and dist.get_rank() != self.ranks[0]

    def __str__(self) -> str:
        """Who reads for whom; empty if each rank reads for itself, and nothing else was possible."""
        if not self.ranks:
            return ""
        if self.on_each:
            return "each replica reads for itself, as that is faster than handing on"
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
            return Subscribing(self, agreement, read)
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
        self._left = 0
        """Number of batches that the followers were told to read themselves and that were not taken here yet."""
        self._before: float | None = None

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`."""
        replicas, before = self._replicas, self._before or time.perf_counter()
        if not (self._left or self._ended):
            self._choose()
        found = self._inner.take(beside=beside)
        if self._ended:
            return found
        alone = self._left > 0
        if alone:
            self._left -= 1
        else:
            what = "handing the batch to the ranks that share this rank's reader (replicas='each' reads on each)"
            with told_of(found.step, what):
                self._broadcast.send((BATCH, found))
        self._before = time.perf_counter()
        if replicas.measured and alone == (len(replicas.took) >= _TRIALS):
            replicas.took.append(self._before - before)  # the pace of the loop, which the slowest rank sets
        return found

    def _choose(self) -> None:
        """Tell the followers if they read the next batches themselves. Several passes may be open at the same time."""
        replicas, took = self._replicas, self._replicas.took
        if replicas.measured and len(took) >= 2 * _TRIALS:
            # Of each way the middle half: the first steps of a training are slow, and a rank may be two steps ahead.
            halves = np.sort(np.reshape(took[: 2 * _TRIALS], (2, -1)))[:, _TRIALS // 4 : -_TRIALS // 4]
            one, each = halves.mean(axis=1)
            replicas.on_each, replicas.measured = bool(one > _SLOWER * each), False
        if replicas.on_each:
            self._end(READ_YOURSELF)
        elif replicas.measured and len(took) >= _TRIALS:
            self._left = 2 * _TRIALS - len(took)
            self._broadcast.send((READ_YOURSELF, self._left))

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
    """Takes what another rank of this host has read for the same steps; reads itself while that rank says so.

    It connects when it first waits for a batch.
    """

    def __init__(self, replicas: Replicas, agreement: Agreement, read: Callable[[], Executor]) -> None:
        super().__init__(Executor())  # none, while the leader reads
        self._replicas, self._agreement, self._leader = replicas, agreement, replicas.ranks[0]
        self._named = f"global rank {self._leader}, which reads for global rank {dist.get_rank()} too"
        self._receiver: Receiver | None = None
        self._closed = self._noticed = False
        self._steps: deque[Step] = deque()
        """Steps that were submitted and whose batches were not taken."""
        self._nobody, self._read = self._inner, read
        self._own: Executor | None = None
        self._left = 0.0
        """Number of steps that this rank reads itself before it receives again."""

    def submit(self, step: Step) -> None:
        """See `Executor`."""
        self._steps.append(step)

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`.

        Raises:
            StopIteration: All steps that were submitted were taken.
            LeaderStoppedError: The leader has stopped, or the pass is over.
            PeerLostError: The leader is lost, or has said nothing for too long.
            DifferentDataError: The leader has read other samples.
        """
        if not self._steps:
            raise StopIteration
        while not self._left:
            self._inner = self._nobody
            with at(LEADER):
                kind, content = self._receive()
            if kind == STOP:
                raise self._stopped()
            if kind != READ_YOURSELF:
                return self._received(self._steps.popleft(), kind, content)
            self._replicas.on_each = content is None
            self._left = math.inf if content is None else content
        if self._own is None:
            self._own = self._read()
        self._inner, self._left = self._own, self._left - 1
        self._own.submit(self._steps.popleft())
        return self._own.take(beside=beside)

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
        found.step = replace(step, sampler_state=found.step.sampler_state) if step.parts else step
        found.contents = ()  # of the leader's data
        return found

    def ready(self) -> bool:
        """See `Executor`."""
        if self._inner is self._own:
            return self._own.ready()
        return self._receiver is not None and self._receiver.wait(0)

    def interrupt(self) -> None:
        """See `Executor`."""
        self._inner.interrupt()
        self._closed = True
        if self._receiver is not None and self._inner is self._nobody:
            self._receiver.interrupt()

    def close(self, *, ended: bool = False) -> None:
        """See `Executor`."""
        self._closed = True
        if self._receiver is not None:
            self._receiver.close()
        if self._own is not None:
            self._own.close(ended=ended)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending() and self._receiver is not None:  # what reads here ends by itself
            self._receiver.close()

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
    return FAILED, ReadFailure.of(error, what="receiving the batch")
