"""Worker processes: answer requests until the rank closes the channel."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle.io.dataloader import worker as paddle_worker

from paddle_shard.data.worker_info import VisibleWorkerInfo
from paddle_shard.reading.batch import Chunk
from paddle_shard.reading.channel import Channel
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.profile import WORKER, Profiler
from paddle_shard.reading.reader import Reader
from paddle_shard.reading.worker_guards import end_with_the_parent


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings that all workers of a pool share."""

    reader: Reader
    num_workers: int
    init_fn: Callable[[int], None] | None
    """The user's `worker_init_fn`."""
    reads_all: bool
    """True if every worker reads the whole data set; then `init_fn` is told that there is a single worker."""
    num_ahead: int
    """Number of requests that a worker is sent ahead."""


_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


def work(
    number: int, connection: socket.socket, settings: WorkerSettings, seed: int
) -> None:
    """Answer requests until the other side has closed.

    Args:
        number: Number of this worker.
        connection: To the process that asks.
        settings: Of all workers of its pool.
        seed: Seed of the workers' random generators.
    """
    # What the parent process handles, such as Ctrl-C or a scheduler's SIGTERM to all processes, is left to it: it may
    # need more batches. It may begin to handle SIGTERM later, and if it does not, it ends, and this process with it.
    # (A signal that is ignored would be ignored by programs that are started here, too.)
    for signalled in signal.valid_signals():
        if signalled == signal.SIGTERM or callable(signal.getsignal(signalled)):
            signal.signal(
                signalled, signal.SIG_DFL if signalled in _CRASHES else lambda *_: None
            )
    end_with_the_parent()
    gc.freeze()  # the parent's garbage stays the parent's: its finalizers may wait for threads that are not here
    channel = Channel(connection, settings.num_ahead)
    os.register_at_fork(
        after_in_child=channel.close
    )  # a process that the user starts here may outlive this one
    with paddle.base.dygraph.guard(
        place=paddle.CPUPlace()
    ):  # other devices' drivers do not work after a fork
        failure = set_up(number, settings, seed)
        profiler = Profiler()
        profiler.start(role=WORKER)
        lost = partial(ReadFailure.of, what="receiving the request", worker=number)
        while True:
            try:
                asked = channel.receive(lost)
            except EOFError:
                return
            answer: Any = failure
            if answer is None:
                answer = (
                    asked
                    if isinstance(asked, ReadFailure)
                    else settings.reader.read(asked[0], number, asked[1])
                )
            if isinstance(answer, Chunk):
                answer = answer._replace(profile=profiler.snapshot())
            try:
                # At most `num_ahead` requests are here, so the answer that was sent so many turns ago was taken.
                channel.send(answer)
            except ConnectionError:
                return
            except Exception as error:  # nothing was sent
                channel.send(
                    ReadFailure.of(error, what="sending the batch", worker=number)
                )
            del answer  # else it takes memory while the next one is read


def set_up(number: int, settings: WorkerSettings, seed: int) -> ReadFailure | None:
    """Prepare this process as Paddle prepares its workers; return the failure of the user's function, if it failed."""
    random.seed(seed + number)
    paddle.seed(seed + number)
    np.random.seed(paddle_worker._generate_states(seed, number))
    dataset = settings.reader.dataset
    own = paddle_worker.WorkerInfo(
        id=number, num_workers=settings.num_workers, dataset=dataset, seed=seed
    )
    paddle_worker._worker_info = own
    try:
        if settings.init_fn is not None:
            # As Paddle documents, users split a stream here. A stream that is cut later must stay whole.
            alone = paddle_worker.WorkerInfo(
                id=0, num_workers=1, dataset=dataset, seed=seed
            )
            with VisibleWorkerInfo(alone if settings.reads_all else own):
                settings.init_fn(number)
    except (
        BaseException
    ) as error:  # also SystemExit, which would end the worker silently
        return ReadFailure.of(error, what="worker_init_fn", worker=number)
    return None
