"""`Threads`: threads that read several samples at the same time, in any process that reads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from paddle_shard.core import forks
from paddle_shard.core.checks import check_count

_Request = tuple[Future[Any], Callable[[Any], Any], Any]


@dataclass(frozen=True, slots=True)
class Threads:
    """Threads that read several samples at the same time, for `shard_dataloader(readers=...)`.

    They are for samples whose reads wait, such as those of an object store: while one waits, others are read. Each
    process that reads has as many, the training process or each of the DataLoader's workers. They read the samples of
    the next steps, too, until all of them are busy.

    The data set must allow `dataset[i]` in several threads at the same time: no file that two reads would seek in. Data
    that uses the global random generators is read one sample after the other, since each sample is seeded. The first
    batch of each iterator, which shows whether it does, is read so, too, unless `dataset.uses_rng = False` declares it.

    Attributes:
        num: Number of threads of a process, at least 1.

    Examples:
        >>> loader = shard_dataloader(dataloader, mesh, shard_dims="dp", readers=Threads(16))  # doctest: +SKIP
    """

    num: int

    def __post_init__(self) -> None:
        check_count("Threads: num", self.num, 1)


class SampleThreads:
    """Reads samples in threads of this process, which start with the first sample and end with `close`."""

    def __init__(self, num: int) -> None:
        """Initialize; nothing is started yet.

        Args:
            num: Number of threads.
        """
        self.num = num
        self._requests: SimpleQueue[_Request | None] | None = None

    def read(
        self, get_sample: Callable[[Any], Any], indices: Iterable[Any]
    ) -> list[Future[Any]]:
        """Return the samples of some indices, which are read in their order."""
        if self._requests is None:
            self._requests = SimpleQueue()
            for _ in range(self.num):
                # Not those of `concurrent.futures`: the process would wait at its end for a read that hangs.
                threading.Thread(
                    target=_read_until_closed,
                    args=(self._requests,),
                    name="paddle_shard-sample",
                    daemon=True,
                ).start()
        samples: list[Future[Any]] = []
        for index in indices:
            sample: Future[Any] = Future()
            self._requests.put((sample, get_sample, index))
            samples.append(sample)
        return samples

    def close(self) -> None:
        """End the threads, each after the sample that it reads; safe to call again.

        Another thread that waits for a sample gets it, or a `CancelledError`.
        """
        requests = self._requests
        if requests is None:
            return
        self._requests = None
        with contextlib.suppress(Empty):
            while True:
                request = requests.get_nowait()  # the threads take some, too
                if request is not None:
                    request[0].cancel()
        for _ in range(self.num):
            requests.put(None)


def _read_until_closed(requests: SimpleQueue[_Request | None]) -> None:
    lock = forks.reader_lock()
    while (request := requests.get()) is not None:
        sample, get_sample, index = request
        try:
            with lock:
                sample.set_result(get_sample(index))
        except BaseException as error:
            sample.set_exception(error)
        del sample, request  # else they stay until the next one comes
