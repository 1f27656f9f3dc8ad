"""Reading: read steps with the settings of the user's DataLoader, which stays unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import paddle.io

from paddle_shard.data.iterable import IterableSource
from paddle_shard.reading.batch import Even
from paddle_shard.reading.chunk_reader import ChunkReader
from paddle_shard.reading.executor import (
    Executor,
    InlineExecutor,
    WorkerExecutor,
    on_cpu,
)
from paddle_shard.reading.reader import HowToRead, IdReader, Reader
from paddle_shard.reading.stream_order import StreamOrder
from paddle_shard.reading.workers import WorkerPool


class Readers(Protocol):
    """Reads in place of worker processes, such as `RayReaders`."""

    num: int
    """Number of readers."""

    def pool(
        self,
        settings: paddle.io.DataLoader,
        reader: Reader,
        num_workers: int,
        **options: Any,
    ) -> WorkerPool:
        """Return a pool with the methods of `WorkerPool`; the arguments are those of its constructor."""


class Reading:
    """The settings of a user's DataLoader, used to read steps instead of its own sampler's batches."""

    def __init__(
        self,
        dataloader: paddle.io.DataLoader,
        how: HowToRead,
        *,
        worker_timeout: float,
        stream: StreamOrder | None,
        even: Even | None,
        readers: Readers | None,
    ) -> None:
        """Copy the settings; the user's object is never changed.

        Args:
            dataloader: The user's DataLoader, perhaps of a subclass.
            how: What a reader must know of the loader.
            worker_timeout: Seconds after which a worker that has not answered counts as hung.
            stream: The order of a stream; None: the data has an index.
            even: Pads the rows of several parts of a stream to one length; None: they must be alike.
            readers: What takes the place of worker processes; None: nothing.
        """
        self._how = how
        self._stream = stream
        self._places = [] if stream is None else stream.places()
        self._even = even
        self._worker_timeout = worker_timeout
        self._make_pool: Callable[..., WorkerPool] = (
            WorkerPool if readers is None else readers.pool
        )
        self._idle: list[WorkerPool] = []
        self.dataloader = shallow_copy(dataloader, paddle.io.DataLoader)
        """A shallow copy of the user's DataLoader."""
        self.dataloader._iterator = None
        # Paddle's own shard_dataloader does this, too, but to the user's object.
        self.dataloader.pin_memory = False
        # A stream may have no length, and so no truth value.
        self.num_workers = (
            dataloader if stream is None else stream
        ).num_workers

    def start(self) -> Executor:
        """Start to read a new epoch iterator, in this process or in workers; any number may be open at once."""
        dataloader = self.dataloader
        stream = self._stream
        reads_all = False
        if stream is None:
            reader = self._id_reader()
        else:
            reader = ChunkReader(
                stream.stage,
                dataloader.dataset,
                dataloader.collate_fn,
                self._how,
            )
            reads_all = isinstance(stream.stage.source, IterableSource)
        if not self.num_workers:
            return InlineExecutor(reader)
        if self._idle:
            pool = self._idle.pop()
        else:
            pool = self._make_pool(
                dataloader,
                reader,
                self.num_workers,
                worker_timeout=self._worker_timeout,
                reads_all=reads_all,
                num_shares=max(1, len(self._places)),
            )
        return WorkerExecutor(pool, self._idle, self._places, self._even)

    def _id_reader(self) -> Reader:
        dataloader = self.dataloader
        return IdReader(dataloader.dataset, dataloader.collate_fn, self._how)

    def digests(self, samples: Sequence[Any]) -> list[int]:
        """Return a digest of each of some samples, read in this process; see `IdReader.digests`."""
        with on_cpu():
            return self._id_reader().digests(samples)

    def close(self) -> None:
        """End persistent workers that wait for another pass."""
        while self._idle:
            self._idle.pop().shut_down()


def shallow_copy(dataloader: paddle.io.DataLoader, cls: type) -> Any:
    """Return a DataLoader of another class with the same attributes.

    `copy.copy` looks for methods on an empty instance, on which the `__getattr__` of a subclass may fail.
    """
    other: Any = object.__new__(cls)
    vars(other).update(vars(dataloader))
    return other
