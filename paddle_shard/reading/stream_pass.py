"""How are the steps of a stream read, by one reader or by several workers?"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import paddle.io

from paddle_shard.errors import DifferentDataError
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.plan.partition import Rows
from paddle_shard.reading.chunk import Chunk, ChunkRequest, Even, Gather, Joiner, Slice, as_they_are
from paddle_shard.reading.chunk_reader import ChunkReader
from paddle_shard.reading.dispatch import dispatch
from paddle_shard.reading.failure import ReadFailure, log_skipped
from paddle_shard.reading.follower import FollowerPass, Sharing
from paddle_shard.reading.leader import LeaderPass, Sender
from paddle_shard.reading.local_batch import OwnRows
from paddle_shard.reading.parcel import ToTensors
from paddle_shard.reading.passes import DirectPass, Pass, keep
from paddle_shard.reading.worker_pass import WorkerPass
from paddle_shard.reading.workers import WorkerPool
from paddle_shard.samplers.randomness import Generator
from paddle_shard.sources.iterable import IterableSource
from paddle_shard.stages.round_robin import RoundRobin
from paddle_shard.stages.stage import Stage

Places = Callable[[int | None], Sequence[Rows]]
"""Returns, for each chunk of a step, the places of its rows in the slice. Its argument is the number of chunks; None:
as many as this rank's readers make."""


class StreamLoader:
    """The settings of a user's DataLoader, used to read the chunks of a stream."""

    def __init__(
        self,
        dataloader: paddle.io.DataLoader,
        stage: Stage,
        generators: Sequence[Generator],
        copied: ToTensors,
        zero_copy: ToTensors,
        gather: Gather,
        worker_timeout: float,
        even: Even = as_they_are,
    ) -> None:
        """Set up the loader.

        Args:
            dataloader: The user's DataLoader, which is not changed.
            stage: The stage that opens the stream's parts.
            generators: Global generators to seed before each call of the user's code.
            copied: Converts arrays to tensors.
            zero_copy: The same for arrays that only the batch holds, perhaps without a copy.
            gather: Joins tensors and takes rows of them.
            worker_timeout: Seconds after which a worker that has not answered counts as hung.
            even: Pads what several workers have collated to the same length, if lengths may differ.
        """
        self._dataloader, self._stage, self._generators, self.even = dataloader, stage, generators, even
        self._copied, self._zero_copy, self.gather, self._worker_timeout = copied, zero_copy, gather, worker_timeout
        self._dispatched = _dispatching(stage)
        self._idle: list[WorkerPool] = []

    def start(
        self,
        requests: Iterator[list[ChunkRequest]],
        places: Places,
        num_workers: int,
        sharing: Sharing = None,
    ) -> StreamPass:
        """Start a new pass.

        Args:
            requests: The chunk requests of each step: one for each reader, always as many.
            places: Returns, for each chunk of a step, the places of its rows in the slice.
            num_workers: Number of workers that read, at most that of the user's DataLoader; 0: this process reads.
            sharing: How the reading is shared with other ranks.
        """
        asked: deque[ChunkRequest] = deque()
        core: Pass
        if sharing is not None and not isinstance(sharing, Sender):
            steps = _noted(([step[0]] for step in requests), asked)
            core = FollowerPass(steps, sharing, self._zero_copy, None)
            return StreamPass(core, self._joiner(places), asked, lambda count: self._joiner(places, count))
        share = keep if sharing is None else sharing
        joiner = self._joiner(places)
        if self._dispatched is not None:
            requests = dispatch(requests, self._dispatched.read, self._generators, to_workers=num_workers > 0)
        flat = _noted(requests, asked)
        if num_workers == 0:
            core = DirectPass(flat, self._reader(), self._generators, self._copied, share)
        else:
            pool = self._idle.pop() if self._idle else self._pool(num_workers)
            core = WorkerPass(flat, pool, self._idle, self._zero_copy, share)
        if sharing is not None:
            sharing.per_message = len(joiner.places)
            core = LeaderPass(core, sharing)
        return StreamPass(core, joiner, asked)

    def _joiner(self, places: Places, num_chunks: int | None = None) -> Joiner:
        return Joiner(places(num_chunks), self.gather, self.even)

    def _pool(self, num_workers: int) -> WorkerPool:
        reads_all = isinstance(self._stage.source, IterableSource)
        return WorkerPool(
            self._dataloader, self._reader(), num_workers, worker_timeout=self._worker_timeout, reads_all=reads_all
        )

    def _reader(self) -> ChunkReader:
        loader = self._dataloader
        return ChunkReader(self._stage, loader.dataset, loader.collate_fn, self._generators)

    def close(self) -> None:
        """End persistent workers that wait for another pass."""
        while self._idle:
            self._idle.pop().shut_down()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # else the interpreter has ended the workers already
            self.close()


class StreamPass(Pass):
    """One pass: it yields the slices of this rank's steps, and does not end by itself."""

    def __init__(
        self,
        core: Pass,
        joiner: Joiner,
        asked: deque[ChunkRequest],
        joiner_of: Callable[[int], Joiner] | None = None,
    ) -> None:
        """Start the pass.

        Args:
            core: Yields chunks; or, if another rank reads, a list of the chunks of each step.
            joiner: Joins the chunks of a step.
            asked: The requests for what `core` yields.
            joiner_of: If another rank reads: returns the joiner for as many chunks as its readers make.
        """
        self._core, self._joiner, self._asked, self._joiner_of = core, joiner, asked, joiner_of
        self._own_rows = OwnRows(joiner.gather)

    def __next__(self) -> Slice:
        """Return the slice of the next step.

        Raises:
            DataReadError: Reading it failed.
        """
        chunks, request = self._taken()
        log_skipped(why for chunk in chunks for _, why in chunk.skipped)
        if any(chunk.digest != chunks[0].digest for chunk in chunks):
            raise DifferentDataError(
                f"step {request.step}: the workers of this rank have read different data, though each reads the same "
                "stream and keeps its own rows. Seed what draws random numbers in it alike in all of them."
            )
        try:
            found = self._joiner.join(chunks)
            return found if request.local_rows is None else self._own_rows.of(found, request)
        except Exception as error:
            raise_if_a_handlers(error)
            failure = ReadFailure.of(error, what="joining the rows of several workers", index=None, worker=None)
            raise failure.error(request) from None

    def _taken(self) -> tuple[list[Chunk], ChunkRequest]:
        """Return the chunks of the next step, and the last request for them."""
        if self._joiner_of is None:
            chunks = [Chunk(*next(self._core)) for _ in self._joiner.places]
            return chunks, [self._asked.popleft() for _ in chunks][-1]
        chunks = [Chunk(*found) for found in next(self._core)]
        if len(chunks) != len(self._joiner.places):
            self._joiner = self._joiner_of(len(chunks))
        return chunks, self._asked.popleft()

    def at_hand(self, count: int = 1) -> bool:
        """Return whether the next slices are ready, so that `next` need not wait for the workers."""
        return self._core.at_hand(count if self._joiner_of else count * len(self._joiner.places))

    def interrupt(self) -> None:
        """Make a call of `next` that waits in another thread return."""
        self._core.interrupt()

    def let_go(self) -> None:
        """See `Pass`."""
        self._core.let_go()

    def finish(self) -> None:
        """End a pass that is no longer needed; persistent workers stay for the next pass."""
        self._core.finish()

    def close(self) -> None:
        """End the workers of the pass."""
        self._core.close()


def _dispatching(stage: Stage) -> RoundRobin | None:
    """Return the stage at which the main process dispatches samples to its workers; None if there is none."""
    return next((one for one in stage.line() if isinstance(one, RoundRobin)), None)


def _noted(requests: Iterator[list[ChunkRequest]], asked: deque[ChunkRequest]) -> Iterator[ChunkRequest]:
    for step in requests:
        for request in step:
            asked.append(request)
            yield request
