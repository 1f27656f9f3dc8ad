"""How are the steps of a pass read with the settings of the user's DataLoader, which stays unchanged?"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import paddle.io

from paddle_shard.errors import BatchStructureError
from paddle_shard.plan.partition import Rows
from paddle_shard.plan.step import Content, Step
from paddle_shard.reading.batch import Batch, Even
from paddle_shard.reading.chunk_reader import ChunkReader
from paddle_shard.reading.executor import Executor, InlineExecutor, Tensors, ToTensors, WorkerExecutor, Wrapper
from paddle_shard.reading.held import changed, held_by
from paddle_shard.reading.ray_pool import RayPool, RayReaders
from paddle_shard.reading.reader import HowToRead, IdReader, Reader
from paddle_shard.reading.tensors import arrays_of
from paddle_shard.reading.workers import WorkerPool
from paddle_shard.say_once import say_once
from paddle_shard.sources.external import IterableSource
from paddle_shard.stages.stage import Stage

_END = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReading:
    """How a stream is read."""

    stage: Stage
    """The stage that opens the parts."""
    num_workers: int
    """Number of worker processes; at most as many as parts."""
    places: Sequence[Rows]
    """For each part of a step, the places of its rows in the batch."""
    even: Even | None = None
    """Pads the rows of several parts to one length; None: they must be alike."""


class Reading:
    """The settings of a user's DataLoader, used to read steps instead of its own sampler's batches."""

    def __init__(
        self,
        dataloader: paddle.io.DataLoader,
        how: HowToRead,
        to_tensors: Callable[[], ToTensors],
        worker_timeout: float,
        stream: StreamReading | None = None,
        readers: RayReaders | None = None,
    ) -> None:
        """Copy the settings; the given object is never changed.

        Args:
            dataloader: The user's DataLoader, perhaps of a subclass.
            how: What a reader must know of the loader.
            to_tensors: Returns what makes the tensors of one pass, on the loader's place.
            worker_timeout: Seconds after which a worker that has not answered counts as hung.
            stream: How it is read, if the data is a stream.
            readers: What takes the place of worker processes.
        """
        self._how, self._stream, self._worker_timeout, self._readers = how, stream, worker_timeout, readers
        self._to_tensors = to_tensors
        # Of data with an index, one for all passes: it knows whether reading draws.
        self._id_reader = IdReader(dataloader.dataset, dataloader.collate_fn, how) if stream is None else None
        self._idle: list[WorkerPool] = []
        has_iter = type(dataloader).__iter__ is not paddle.io.DataLoader.__iter__
        self._iterates_itself = has_iter and stream is None
        cls: type = paddle.io.DataLoader
        if self._iterates_itself:
            own: Any = type(dataloader)
            cls = type(own)(own.__name__, (own, _ReadsSteps), {"__module__": own.__module__})
        self.dataloader = shallow_copy(dataloader, cls)
        """A shallow copy of the user's DataLoader; if it has an `__iter__` of its own, of a class that reads steps."""
        self.dataloader._iterator = None
        self.dataloader.pin_memory = False  # Paddle's own shard_dataloader does this, too, but to the user's object
        self.num_workers = dataloader.num_workers if stream is None else stream.num_workers

    def start(
        self,
        more: Callable[[], bool],
        core: Executor,
        look: Callable[[Batch], None] | None,
    ) -> Executor:
        """Return the executor of a new pass, which makes tensors; any number may be open at once.

        Args:
            more: Submits the next step; returns False if there is none.
            core: Reads the steps.
            look: Is shown each batch as the user's code leaves it; None: nothing is.
        """
        if self._iterates_itself:  # it sees tensors, and may yield arrays, or memory that it uses again
            core = UserIterated(Tensors(core, self._to_tensors()), self.dataloader, more)
        return Tensors(core, self._to_tensors(), look)

    def core(self) -> Executor:
        """Start to read a new pass, in this process or in workers."""
        given, stream = self.dataloader, self._stream
        places: Sequence[Rows] = ()
        even, reads_all = None, False
        reader: Reader | None = self._id_reader
        if stream is not None:
            reader = ChunkReader(stream.stage, given.dataset, given.collate_fn, self._how)
            places, even = stream.places, stream.even
            reads_all = isinstance(stream.stage.source, IterableSource)
        assert reader is not None
        if not self.num_workers:
            return InlineExecutor(reader)
        held = held_by(given.dataset, given.collate_fn) if given._persistent_workers else {}
        pool = self._idle.pop() if self._idle else None
        if pool is not None and (what := changed(pool.held, held)):
            say_once(f"{what} was set since the persistent workers were started: they are started anew.")
            pool.shut_down()
            pool = None
        if pool is None:
            timeout, made_of = self._worker_timeout, self._readers
            kind = WorkerPool if made_of is None else partial(RayPool, made_of)
            pool = kind(given, reader, self.num_workers, worker_timeout=timeout, reads_all=reads_all)
            pool.held = held
        return WorkerExecutor(pool, self._idle, places, even)

    def contents(self, step: Step) -> tuple[Content, ...]:
        """Return what a step's `contents` hold, read in this process."""
        return () if self._id_reader is None else self._id_reader.contents(step)

    def close(self) -> None:
        """End persistent workers that wait for another pass."""
        while self._idle:
            self._idle.pop().shut_down()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # else the interpreter has ended the workers already
            self.close()


class _ReadsSteps(paddle.io.DataLoader):
    """A DataLoader that yields the batches of a pass.

    It is a base class between `paddle.io.DataLoader` and the user's subclass. So the subclass's `__iter__` still calls
    `super().__iter__()` and sees ordinary batches.
    """

    _start_pass: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self._start_pass()


class UserIterated(Wrapper):
    """Batches that go through the `__iter__` of the user's DataLoader subclass, which may change them and read ahead.

    It must yield one batch for each that it takes, in the same order.
    """

    def __init__(self, inner: Executor, dataloader: Any, more: Callable[[], bool]) -> None:
        """Wrap an executor.

        Args:
            inner: The executor, whose batches hold tensors.
            dataloader: The loader's copy of the user's DataLoader.
            more: Submits the next step; returns False if there is none.
        """
        super().__init__(inner)
        self._name = name = f"{type(dataloader).__name__}.__iter__"
        self._taken = taken = deque[Batch]()  # batches that the user's code has taken and not yielded yet
        self._left = 0  # steps that were submitted and whose batches were not yielded yet
        begun: list[bool] = []

        def batches() -> Iterator[Any]:  # does not refer to self, so that dropping the pass ends its workers at once
            if begun:
                raise BatchStructureError(
                    f"{name} goes through its batches more than once; a sharded pass can read them once only."
                )
            begun.append(True)
            while True:
                try:
                    found = inner.take()
                except StopIteration:  # the user's code reads ahead of what was submitted; or the pass is being closed
                    if not more():
                        return
                    continue
                taken.append(found)
                yield found.value

        # Each pass has its own copy, so that passes that are open at once stay apart.
        mine = shallow_copy(dataloader, type(dataloader))
        mine._start_pass = batches
        self._batches = iter(mine)

    def submit(self, step: Any) -> None:
        """See `Executor`."""
        self._left += 1
        self._inner.submit(step)

    def take(self, *, beside: bool = False) -> Batch:
        """See `Executor`.

        Raises:
            BatchStructureError: The user's `__iter__` adds, drops or reorders batches.
        """
        value = next(self._batches, _END)
        if value is _END:
            if not self._left:
                raise StopIteration
            raise BatchStructureError(
                f"{self._name} ends before super().__iter__() does, and drops the batches that are left. For shorter "
                "epochs give a sampler, or leave the loop with break."
            )
        if not self._taken:
            raise BatchStructureError(
                f"{self._name} yields more batches than it was asked for: it must call super().__iter__() once, "
                "and yield one batch for each of that."
            )
        if len(self._taken) > 1:
            self._check_turn(value)
        self._left -= 1
        found = self._taken.popleft()
        found.value, found.owned = value, False
        return found

    def _check_turn(self, batch: Any) -> None:
        """Refuse a batch that is not the next of those that were taken. It is recognized by its tensors."""
        own = {id(leaf) for leaf in arrays_of(batch)}
        shared = [sum(id(leaf) in own for leaf in arrays_of(other.value)) for other in self._taken]
        if max(shared) == 0 or shared.count(max(shared)) > 1:
            raise BatchStructureError(
                f"{self._name} has taken {len(shared)} batches of super().__iter__(), and it cannot be told which of "
                "them it yields. Yield what is made of each batch before the next is taken. What drops, joins or "
                "reorders batches belongs into a batch_sampler."
            )
        if shared[0] < max(shared):
            raise BatchStructureError(
                f"{self._name} drops or reorders batches: it yields another than the next of super().__iter__(), "
                f"{shared.index(max(shared))} behind it. Which batches there are, and their order, belongs into a "
                "batch_sampler."
            )

    def ready(self) -> bool:
        """See `Executor`."""
        return bool(self._taken) or self._inner.ready()

    def close(self, *, ended: bool = False) -> None:
        """See `Executor`."""
        self._batches = iter(())
        self._taken.clear()
        self._inner.close(ended=ended)


def shallow_copy(dataloader: paddle.io.DataLoader, cls: type) -> Any:
    """Return a DataLoader of another class with the same attributes.

    `copy.copy` looks for methods on an empty instance, on which the `__getattr__` of a subclass may fail.
    """
    other: Any = object.__new__(cls)
    vars(other).update(vars(dataloader))
    return other
