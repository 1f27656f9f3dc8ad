"""What is a pass over a stream of requests, and how are requests read in this process?"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle.io

from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.reading.failure import ReadFailure, log_skipped
from paddle_shard.reading.parcel import ToTensors, map_leaves
from paddle_shard.reading.reader import AGAIN, BatchReader
from paddle_shard.reading.request import Reader, ReadRequest, Request
from paddle_shard.reading.skipping import Patched
from paddle_shard.reading.worker_guards import in_use
from paddle_shard.samplers.randomness import Generator, refresh, restore, snapshot


class Pass(Iterator[Any]):
    """One pass over a stream of requests: it yields their batches in order, then ends or raises.

    The defaults here are for a pass that can only be asked for its next batch.
    """

    skipped: deque[list[tuple[int, str]]]
    """For each batch of indexed data, if errors are skipped: (row, why) of the samples that could not be read."""

    def __next__(self) -> Any:
        """Return the next batch, with its arrays as tensors.

        Raises:
            DataReadError: Reading it failed.
        """
        raise NotImplementedError

    @property
    def num_ahead(self) -> int:
        """Number of requests that may be drawn before their batches are asked for."""
        return 0

    @property
    def runs_free(self) -> bool:
        """True if another thread may read it: reading draws no random numbers in this process."""
        return True

    def marks(self) -> Any:
        """Return a value that changes when the process draws from a global generator that reading may draw from."""
        return None

    def next_free(self) -> Any:
        """Return the next batch, beside the training thread; `AGAIN` if the training thread must read it."""
        return next(self)

    def at_hand(self, count: int = 1) -> bool:
        """True if the next `count` batches are ready, so that `next` need not wait."""
        return True

    def several(self, count: int) -> Sequence[Any]:
        """Return at most `count` batches, read in one go; fewer or none if `next` must handle the rest."""
        return ()

    def interrupt(self) -> None:
        """Make a call of `next` that waits in another thread return, if possible. Then the pass must be closed."""

    def let_go(self) -> None:
        """Tell the ranks that this pass reads for, if there are any, that nothing more will come."""

    def finish(self) -> None:
        """End a pass that is no longer needed, though nothing has failed; persistent workers may stay."""
        self.close()

    def close(self) -> None:
        """End the workers and threads of the pass; safe to call again."""
        raise NotImplementedError


Share = Callable[[Request, Any], Any]
"""Sends what was read for a request to other ranks; returns it, or the failure to send it."""


def keep(request: Request, batch: Any) -> Any:
    """Return the batch: no other rank needs it."""
    return batch


def finished(batch: Any, to_tensors: ToTensors, skipped: deque[list[tuple[int, str]]]) -> Any:
    """Return what was read, with its arrays as tensors, or the failure. Skipped samples are logged and noted."""
    if isinstance(batch, ReadFailure):
        return batch
    try:
        with in_use:
            found = map_leaves(batch, to_tensors)
    except Exception as error:
        raise_if_a_handlers(error)
        return ReadFailure.of(error, what="making tensors of the batch", index=None, worker=None)
    if not isinstance(found, Patched):
        return found
    log_skipped(why for _, why in found.skipped)
    skipped.append(found.skipped)
    return found.batch


class DirectPass(Pass):
    """Reads in this process, on the caller's thread, when asked.

    Without workers, `paddle.io.DataLoader` reads in another thread. There, seeding the global generators for each
    sample would change the random numbers of the training thread.
    """

    def __init__(
        self,
        requests: Iterator[Request],
        reader: Reader,
        generators: Sequence[Generator],
        to_tensors: ToTensors,
        share: Share = keep,
    ) -> None:
        self._requests, self._share = requests, share
        self._reader = reader
        self._snapshot = snapshot(generators)
        self._to_tensors = to_tensors
        self._again: deque[Request] = deque()
        self.skipped: deque[list[tuple[int, str]]] = deque()

    def __next__(self) -> Any:
        again = bool(self._again)
        request = self._again.popleft() if again else next(self._requests)
        if again and isinstance(self._reader, BatchReader) and isinstance(request, ReadRequest):
            self._reader.undo_draws(request)
        refresh(self._snapshot)
        try:
            return self._finished(self._reader.read(request, None), request)
        finally:
            restore(self._snapshot)

    @property
    def runs_free(self) -> bool:
        """True if reading the data set is known to draw no random numbers."""
        return getattr(self._reader, "draws", True) is False

    def marks(self) -> Any:
        """See `Pass`."""
        return self._reader.marks() if isinstance(self._reader, BatchReader) else None

    def next_free(self) -> Any:
        """Return the next batch, or `AGAIN`."""
        request = self._again.popleft() if self._again else next(self._requests)
        reader: Any = self._reader
        batch = reader.read_freely(request)
        if batch is not AGAIN:
            return self._finished(batch, request)
        self._again.append(request)
        return AGAIN

    def several(self, count: int) -> list[Any]:
        """See `Pass`."""
        reader: Any = self._reader
        if self._again or not self.runs_free:
            return []
        requests, found, skipped = self._drawn(count), list[Any](), len(self.skipped)

        def take(batch: Any) -> bool:  # at once: the user's code may write the next batch to the same memory
            found.append(finished(batch, self._to_tensors, self.skipped))
            return not isinstance(found[-1], ReadFailure)

        refresh(self._snapshot)
        try:
            num_good = reader.read_several(requests, take)
        finally:
            restore(self._snapshot)
        self._again.extend(requests[num_good:])
        if self.skipped:
            self.skipped = deque(list(self.skipped)[: skipped + num_good])
        return found[:num_good]

    def _drawn(self, count: int) -> list[Request]:
        """Return at most `count` next requests. If the sampler fails, `next` raises its error."""
        requests: list[Request] = []
        try:
            while len(requests) < count:
                requests.append(next(self._requests))
        except StopIteration:
            pass
        except Exception as error:
            raise_if_a_handlers(error)
            self._requests = _raising(error)
        return requests

    def _finished(self, batch: Any, request: Request) -> Any:
        found = finished(self._share(request, batch), self._to_tensors, self.skipped)
        if not isinstance(found, ReadFailure):
            return found
        self.close()
        raise found.error(request)

    def close(self) -> None:
        """End the pass."""
        self._requests = iter(())
        getattr(self._reader, "close", lambda: None)()


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield


def shallow_copy(dataloader: paddle.io.DataLoader, cls: type) -> Any:
    """Return a DataLoader of another class with the same attributes.

    `copy.copy` looks for methods on an empty instance, on which the `__getattr__` of a subclass may fail.
    """
    other: Any = object.__new__(cls)
    vars(other).update(vars(dataloader))
    return other
