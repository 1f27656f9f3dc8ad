"""How do worker processes read a pass?"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.parcel import ToTensors
from paddle_shard.reading.passes import Pass, finished
from paddle_shard.reading.request import Request
from paddle_shard.reading.workers import WorkerPool, WorkersLostError


class WorkerPass(Pass):
    """A pass that worker processes read, ahead of the caller."""

    def __init__(
        self,
        requests: Iterator[Request],
        pool: WorkerPool,
        idle: list[WorkerPool],
        to_tensors: ToTensors,
    ) -> None:
        """Start the pass.

        Args:
            requests: The requests; they are drawn ahead, on the caller's thread.
            pool: The workers; no other pass uses them.
            idle: The list to which a persistent pool returns after the pass.
            to_tensors: Makes tensors of arrays that nothing else refers to.
        """
        self._pool: WorkerPool | None = pool
        self._idle = idle
        self._to_tensors = to_tensors
        self._over = False
        """True if all requests were answered, and no more will be sent."""
        self.skipped = deque()
        try:
            pool.start(requests)
        except BaseException:
            self.close()
            raise

    def __next__(self) -> Any:
        pool = self._pool
        if pool is None or self._over:
            raise StopIteration
        if pool.process != os.getpid():
            raise ArgumentError(
                f"this iterator was made by process {pool.process}, whose workers read for it; a forked child makes "
                "one of its own: iter(loader)."
            )
        try:
            request, batch = pool.next()
            found = finished(batch, self._to_tensors, self.skipped)
        except StopIteration:
            self._leave(pool)
            raise
        except WorkersLostError as lost:
            if pool.interrupted:
                raise StopIteration from None
            self.close()
            failure = ReadFailure.of(lost, what="reading", index=None, worker=lost.worker)
            raise failure.error(pool.pending[0]) from None
        except BaseException:  # an error of the sampler or a handler: it is not known what was requested
            self.close()
            raise
        if not isinstance(found, ReadFailure):
            return found
        self.close()
        raise found.error(request)

    @property
    def num_ahead(self) -> int:
        """See `Pass`."""
        pool = self._pool
        return 0 if pool is None else pool.num_ahead

    def at_hand(self, count: int = 1) -> bool:
        """Return whether the next batches can be had without waiting for the workers."""
        pool = self._pool
        return pool is None or self._over or pool.at_hand(count)

    def interrupt(self) -> None:
        """Cut off the workers that `next` waits for."""
        pool = self._pool
        if pool is not None:
            pool.interrupt()

    def finish(self) -> None:
        """End the pass; persistent workers finish what they were asked for, and wait for another."""
        pool = self._pool
        if pool is None or self._over or not pool.persistent or pool.unsent or pool.error:
            self.close()
            return
        pool.stop_asking()
        try:
            while pool.pending:  # requests cannot be taken back
                pool.next()
        except WorkersLostError:
            self.close()
            return
        except BaseException:
            self.close()
            raise
        self._leave(pool)

    def close(self) -> None:
        """End the workers, also persistent ones, which may be in the middle of a batch."""
        if self._pool is not None:
            self._pool.shut_down()
        self._pool = None  # not earlier, since a handler may raise in between

    def _leave(self, pool: WorkerPool) -> None:
        """End the pass after the last answer; `close` waits for workers that are not persistent."""
        if pool.persistent and not pool.interrupted:
            self._idle.append(pool)
            self._pool = None
        else:
            self._over = True
            pool.let_go()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # the workers have ended already
            self.close()
