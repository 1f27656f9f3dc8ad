"""How does the user's DataLoader, or a subclass of it, keep control of reading, and stay unchanged?"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle.io

from paddle_shard.errors import BatchStructureError
from paddle_shard.reading.follower import FollowerPass, Sharing
from paddle_shard.reading.leader import LeaderPass, Sender
from paddle_shard.reading.local_batch import arrays_of
from paddle_shard.reading.parcel import ToTensors
from paddle_shard.reading.passes import DirectPass, Pass, Share, keep, shallow_copy
from paddle_shard.reading.reader import BatchReader
from paddle_shard.reading.request import ReadRequest
from paddle_shard.reading.worker_pass import WorkerPass
from paddle_shard.reading.workers import WorkerPool
from paddle_shard.samplers.randomness import Generator

_END = object()


class _ReadsRequests(paddle.io.DataLoader):
    """A DataLoader that yields the requested batches.

    It is a base class between `paddle.io.DataLoader` and the user's subclass. So the subclass's `__iter__` still calls
    `super().__iter__()` and sees ordinary batches.
    """

    _start_pass: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self._start_pass()


class UserLoader:
    """The settings of a user's DataLoader, used to read requests instead of its own sampler's batches."""

    def __init__(
        self,
        dataloader: paddle.io.DataLoader,
        generators: Sequence[Generator],
        copied: ToTensors,
        zero_copy: ToTensors,
        worker_timeout: float,
        *,
        skip_errors: bool,
    ) -> None:
        """Copy the settings; the given object is never changed.

        Args:
            dataloader: The user's DataLoader, perhaps of a subclass.
            generators: Global generators to seed before each sample.
            copied: Converts arrays to tensors on the loader's place.
            zero_copy: The same for arrays that only the batch holds, perhaps without a copy.
            skip_errors: True if a sample that cannot be read is replaced by another one, and is not a failure.
            worker_timeout: Seconds after which a worker that has not answered counts as hung.
        """
        self._generators = generators
        self._copied, self._zero_copy, self._worker_timeout = copied, zero_copy, worker_timeout
        self._reader = BatchReader(
            dataloader.dataset,
            dataloader.collate_fn,
            generators,
            skip_errors=skip_errors,
            items_are_batches=dataloader.batch_sampler is None,
        )
        self._idle: list[WorkerPool] = []
        self._class = _reading_class(type(dataloader))
        self._has_iter = type(dataloader).__iter__ is not paddle.io.DataLoader.__iter__
        self.dataloader = shallow_copy(dataloader, self._class)
        """A shallow copy of the user's DataLoader, of a class that reads requests."""
        self.dataloader._iterator = None
        self.dataloader.pin_memory = False  # Paddle's own shard_dataloader does this, too, but to the user's object

    def start(self, requests: Iterator[ReadRequest], sharing: Sharing = None) -> Any:
        """Start a new pass; any number may be open at once.

        Args:
            requests: What to read.
            sharing: How the reading is shared with other ranks.
        """
        return UserPass(self, requests, sharing) if self._has_iter else self.core_pass(requests, sharing)

    def core_pass(self, requests: Iterator[Any], sharing: Sharing = None) -> Pass:
        """Start a pass that reads requests, without the `__iter__` of the user's subclass."""
        if sharing is None:
            return self._reading_pass(requests, keep)
        if isinstance(sharing, Sender):
            return LeaderPass(self._reading_pass(requests, sharing), sharing)
        return FollowerPass(requests, sharing, self._zero_copy, self.core_pass)

    def _reading_pass(self, requests: Iterator[ReadRequest], share: Share) -> Pass:
        if self.dataloader.num_workers == 0:
            to_tensors = self._zero_copy if self._reader.makes_arrays else self._copied
            return DirectPass(requests, self._reader, self._generators, to_tensors, share)
        pool = (
            self._idle.pop()
            if self._idle
            else WorkerPool(self.dataloader, self._reader, worker_timeout=self._worker_timeout)
        )
        return WorkerPass(requests, pool, self._idle, self._zero_copy, share)

    def close(self) -> None:
        """End persistent workers that wait for another pass."""
        while self._idle:
            self._idle.pop().shut_down()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # else the interpreter has ended the workers already
            self.close()


class UserPass(Pass):
    """One pass through the `__iter__` of the user's DataLoader subclass, which may change batches and read ahead.

    What is known about a batch (its rows, which of them are valid, the position of the run) is found by its number. So
    a batch that is not yielded in its turn is refused.
    """

    def __init__(self, loader: UserLoader, requests: Iterator[ReadRequest], sharing: Sharing = None) -> None:
        self._cores: list[Pass] = []
        cores = self._cores
        self._name = name = f"{type(loader.dataloader).__name__}.__iter__"
        self._taken = taken = deque[Any]()  # batches that the user's code has taken and not yielded yet
        self._over = False

        def start_pass() -> Iterator[Any]:  # does not refer to self, so that dropping the pass ends its workers at once
            if cores:
                raise BatchStructureError(
                    f"{name} goes through its batches more than once; a sharded pass can read them once only."
                )
            cores.append(loader.core_pass(requests, sharing))
            return _noted(cores[0], taken)

        self._start = start_pass
        # Each pass has its own copy, so that passes that are open at once stay apart.
        dataloader = shallow_copy(loader.dataloader, loader._class)
        dataloader._start_pass = start_pass
        self._batches = iter(dataloader)

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._check_end()
            raise
        if not self._taken:
            raise BatchStructureError(
                f"{self._name} yields more batches than it was asked for: it must call super().__iter__() once, "
                "and yield one batch for each of that."
            )
        if len(self._taken) > 1:
            self._check_turn(batch)
        self._taken.popleft()
        return batch

    def _check_turn(self, batch: Any) -> None:
        """Refuse a batch that is not the next of those that were taken. It is recognized by its tensors."""
        own = {id(leaf) for leaf in arrays_of(batch)}
        shared = [sum(id(leaf) in own for leaf in arrays_of(other)) for other in self._taken]
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

    def _check_end(self) -> None:
        """Refuse an end before all batches were yielded."""
        if self._over:
            return
        self._over = True
        if not self._cores:
            self._start()
        if self._taken or next(self._cores[0], _END) is not _END:
            raise BatchStructureError(
                f"{self._name} ends before super().__iter__() does, and drops the batches that are left. For shorter "
                "epochs give a sampler, or leave the loop with break."
            )

    @property
    def runs_free(self) -> bool:
        """See `Pass`."""
        return self._cores[0].runs_free

    @property
    def skipped(self) -> deque[list[tuple[int, str]]]:  # type: ignore[override]
        """See `Pass`."""
        return self._cores[0].skipped

    def at_hand(self, count: int = 1) -> bool:
        """Return whether the next batches are ready, unless the user's code itself waits or reads ahead."""
        return not self._cores or self._cores[0].at_hand(max(0, count - len(self._taken)))

    def next_free(self) -> Any:
        """See `Pass`. It bypasses the user's `__iter__`, but is not called: such a DataLoader is not prefetched."""
        return self._cores[0].next_free()

    def interrupt(self) -> None:
        """See `Pass`."""
        self._cores[0].interrupt()

    def let_go(self) -> None:
        """See `Pass`."""
        for core in self._cores:
            core.let_go()

    def close(self) -> None:
        """End the workers of the pass."""
        for core in self._cores:
            core.close()
        self._batches, self._over = iter(()), True
        self._taken.clear()


def _noted(core: Pass, taken: deque[Any]) -> Iterator[Any]:
    for batch in core:
        taken.append(batch)
        yield batch


def _reading_class(cls: type) -> type:
    if cls is paddle.io.DataLoader:
        return _ReadsRequests
    return type(cls)(cls.__name__, (cls, _ReadsRequests), {"__module__": cls.__module__})
