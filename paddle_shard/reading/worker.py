"""Worker processes: answer requests until the rank closes the channel."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle.io.dataloader import worker as paddle_worker

from paddle_shard.data.worker_info import visible_worker_info
from paddle_shard.reading.batch import Chunk
from paddle_shard.reading.channel import Channel
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.profile import WORKER, Profiler
from paddle_shard.reading.reader import Reader
from paddle_shard.reading.worker_guards import (
    end_with_the_parent,
    own_file_positions,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings that all workers of a pool share."""

    reader: Reader
    num_workers: int
    init_fn: Callable[[int], None] | None
    """The user's `worker_init_fn`."""
    reads_all: bool
    """True if every worker reads the whole data set; then `init_fn` sees a single worker."""
    num_ahead: int
    """Number of requests that a worker is sent ahead."""


_CRASHES = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
}


def work(
    number: int, connection: socket.socket, settings: WorkerSettings, seed: int
) -> None:
    """Answer requests until the other side has closed.

    Args:
        number: Number of this worker.
        connection: To the process that sends the requests.
        settings: Settings of all workers of its pool.
        seed: Seed of the workers' random generators.
    """
    # The parent's garbage stays the parent's: its finalizers may wait for threads that are not here.
    gc.freeze()
    _leave_signals_to_the_parent()
    end_with_the_parent()
    own_file_positions()
    channel = Channel(connection, settings.num_ahead)
    # A process that the user starts here may outlive this one.
    os.register_at_fork(after_in_child=channel.close)
    # Other devices' drivers do not work after a fork.
    with paddle.base.dygraph.guard(place=paddle.CPUPlace()):
        failure = set_up(number, settings, seed)
        profiler = Profiler()
        profiler.start(role=WORKER)
        messages: deque[Any] = deque()
        while True:
            try:
                # Threads begin to read what was sent ahead.
                while not messages or (
                    settings.reader.num_threads and channel.wait(0.0)
                ):
                    messages.append(channel.receive())
            except EOFError:
                return
            request, is_first = messages.popleft()
            answer: Any = failure
            if failure is None:
                answer = settings.reader.read(
                    request, number, is_first=is_first
                )
                _begin(settings.reader, messages)
            if isinstance(answer, Chunk):
                answer = answer._replace(profile=profiler.snapshot())
            try:
                # At most `num_ahead` requests are here, so the answer that was sent so many turns ago was taken.
                channel.send(answer)
            except ConnectionError:
                return
            except Exception as error:  # nothing was sent
                with contextlib.suppress(ConnectionError):
                    channel.send(
                        ReadFailure.of(
                            error, what="sending the batch", worker=number
                        )
                    )
            del answer  # else it takes memory while the next one is read


def _begin(reader: Reader, messages: Iterable[Any]) -> None:
    """Begin to read the requests of the present epoch iterator."""
    for request, is_first in messages:
        if is_first:
            return
        reader.begin(request)


def set_up(
    number: int, settings: WorkerSettings, seed: int
) -> ReadFailure | None:
    """Prepare this process as Paddle prepares its workers; return the failure of the user's function, if it failed."""
    random.seed(seed + number)
    paddle.seed(seed + number)
    np.random.seed(paddle_worker._generate_states(seed, number))
    make_info = partial(
        paddle_worker.WorkerInfo, dataset=settings.reader.dataset, seed=seed
    )
    info = make_info(id=number, num_workers=settings.num_workers)
    paddle_worker._worker_info = info
    if settings.init_fn is None:
        return None
    if settings.reads_all:
        # As Paddle documents, users split a stream here. A stream that is cut later must stay whole.
        info = make_info(id=0, num_workers=1)
    try:
        with visible_worker_info(info):
            settings.init_fn(number)
    except BaseException as error:
        # Also SystemExit, which would end the worker silently.
        return ReadFailure.of(error, what="worker_init_fn", worker=number)
    return None


def _leave_signals_to_the_parent() -> None:
    # The parent process handles Ctrl-C, or a scheduler's SIGTERM to all processes, and may need more batches. It may
    # begin to handle SIGTERM later. If it does not, it ends, and this process with it.
    # (A signal that is ignored would be ignored by programs that are started here, too.)
    for number_of_signal in signal.valid_signals():
        is_handled = callable(signal.getsignal(number_of_signal))
        if number_of_signal in _CRASHES and is_handled:
            signal.signal(number_of_signal, signal.SIG_DFL)
        elif number_of_signal == signal.SIGTERM or is_handled:
            signal.signal(number_of_signal, lambda *_: None)
