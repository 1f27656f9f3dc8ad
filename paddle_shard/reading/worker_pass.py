"""How does a pass read in worker processes?"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.parcel import ToTensors
from paddle_shard.reading.passes import Pass, Share, finished, keep
from paddle_shard.reading.request import Request
from paddle_shard.reading.workers import WorkerPool, WorkersLostError


class WorkerPass(Pass):
    """Reads in worker processes, ahead of the caller."""

    def __init__(
        self,
        requests: Iterator[Request],
        pool: WorkerPool,
        idle: list[WorkerPool],
        to_tensors: ToTensors,
        share: Share = keep,
    ) -> None:
        """Start the pass.

        Args:
            requests: The requests, which are drawn ahead on the caller's thread.
            pool: A pool that is not in use.
            idle: The list that a persistent pool returns to when the pass has ended.
            to_tensors: Converts arrays that only the batch holds to tensors.
            share: Sends what was read to other ranks.
        """
        self._pool: WorkerPool | None = pool
        self._idle = idle
        self._to_tensors, self._share = to_tensors, share
        self._over = False
        """True if all answers have come and no more requests will be sent."""
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
            found = finished(self._share(request, batch), self._to_tensors, self.skipped)
        except StopIteration:
            self._leave(pool)
            raise
        except WorkersLostError as lost:
            if pool.interrupted:
                raise StopIteration from None
            self.close()
            failure = ReadFailure.of(lost, what="reading", index=None, worker=lost.worker)
            raise failure.error(pool.pending[0]) from None
        except BaseException:  # from the sampler or a signal handler: the missing answers are unknown
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
        """Return whether the next batches are ready, so that `next` need not wait for the workers."""
        pool = self._pool
        return pool is None or self._over or pool.at_hand(count)

    def interrupt(self) -> None:
        """End the connections to the workers, so that a waiting call of `next` returns."""
        pool = self._pool
        if pool is not None:
            pool.interrupt()

    def finish(self) -> None:
        """End the pass; persistent workers finish their requests and wait for another pass."""
        pool = self._pool
        if pool is None or self._over or not pool.persistent or pool.unsent or pool.error:
            self.close()
            return
        pool.stop_asking()
        try:
            while pool.pending:  # requests that were sent cannot be taken back
                pool.next()
        except WorkersLostError:
            self.close()
            return
        except BaseException:
            self.close()
            raise
        self._leave(pool)

    def close(self) -> None:
        """End the workers, also persistent ones: they may be in the middle of a batch."""
        if self._pool is not None:
            self._pool.shut_down()
        self._pool = None  # only now, as a signal handler may raise before this line

    def _leave(self, pool: WorkerPool) -> None:
        """End the pass when all answers have come; `close` waits for workers that do not persist."""
        if pool.persistent and not pool.interrupted:
            self._idle.append(pool)
            self._pool = None
        else:
            self._over = True
            pool.let_go()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # else the interpreter has ended the workers already
            self.close()
