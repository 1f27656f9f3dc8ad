"""`Threads`: samples are read at the same time, and the batches are those of one process."""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.io import DataLoader

from paddle_shard import Stream, Threads
from paddle_shard.errors import ArgumentError, DataReadError
from paddle_shard.reading.sample_threads import SampleThreads
from tests.deadlines import HANG
from tests.helpers import ONE, Made, locals_of, sharded


def waits(seconds):
    def read(index):
        time.sleep(seconds * random.Random(index).random())
        return np.array([index, in_sample_thread()])

    return read


def made(read, length=24, batch_size=4, workers=0, threads=4, **options):
    data = Made(read, length)
    given_loader = DataLoader(data, batch_size=batch_size, num_workers=workers)
    return sharded(given_loader, ONE, readers=Threads(threads), **options)


def in_sample_thread():
    return threading.current_thread().name == "paddle_shard-sample"


def threads_left(name="paddle_shard-sample"):
    """Threads that still read samples, after the time that one needs to end."""
    deadline = time.monotonic() + 10
    while left := [t for t in threading.enumerate() if t.name == name]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.001)
    return []


@settings(max_examples=20)
@given(
    length=st.integers(1, 30),
    batch_size=st.integers(1, 9),
    threads=st.integers(1, 20),
    prefetch=st.integers(0, 3),
    stop=st.integers(0, 5),
)
def test_threads_read_the_batches_of_one_process(
    length, batch_size, threads, prefetch, stop
):
    def loader(**readers):
        data = Made(lambda index: np.array(index), length)
        given_loader = DataLoader(data, batch_size=batch_size, shuffle=True)
        return sharded(given_loader, ONE, prefetch=prefetch, **readers)

    straight = locals_of(loader())
    stop = min(stop, len(straight))
    first = loader(readers=Threads(threads))
    batches = iter(first)
    found = locals_of(
        batch for _, batch in zip(range(stop), batches, strict=False)
    )
    batches.close()
    second = loader(readers=Threads(threads))
    second.load_state_dict(first.state_dict())
    assert found + locals_of(second) == straight
    assert not threads_left()


@pytest.mark.parametrize("workers", [0, 2])
def test_threads_read_at_the_same_time(workers):
    rows = [
        row
        for batch in locals_of(made(waits(0.01), 64, 8, workers))
        for row in batch
    ]
    assert [index for index, _ in rows] == list(range(64))
    assert any(in_thread for _, in_thread in rows[16:])
    # they show who uses the RNG
    assert not any(in_thread for _, in_thread in rows[:8])


def test_threads_read_in_waves():
    """Of reads that wait for each other, all that a batch needs are begun before one ends."""
    barrier = threading.Barrier(8, timeout=20)

    def read(index):
        if in_sample_thread():
            barrier.wait()
        return np.array(index)

    assert locals_of(made(read, 36, 4, threads=8, prefetch=0)) == [
        list(range(at, at + 4)) for at in range(0, 36, 4)
    ]


def draws(index):
    return np.array([index, random.random(), np.random.rand()])


@pytest.mark.parametrize("workers", [0, 2])
def test_threads_leave_data_that_draws_to_one_reader(workers):
    alone = sharded(DataLoader(Made(draws, 24), batch_size=4), ONE)
    assert locals_of(made(draws, workers=workers)) == locals_of(alone)


def bad(index):
    if index in (13, 15):
        raise OSError(f"{index} cannot be read")
    return np.array(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_threads_name_the_sample_that_failed(workers):
    loader = made(bad, workers=workers)
    found = []
    with pytest.raises(
        DataReadError, match="sample 13 failed.*13 cannot be read"
    ):
        found += locals_of(iter(loader))
    skipping = made(bad, workers=workers, on_error="skip")
    batches = iter(skipping)
    valid = [
        (batch._local_value().numpy(), batches.valid._local_value().numpy())
        for batch in batches
    ]
    rows = [
        row for batch, is_valid in valid for row in batch[is_valid].tolist()
    ]
    assert rows == [index for index in range(24) if index not in (13, 15)]
    assert not threads_left()


def test_threads_end_with_their_iterator():
    loader = made(waits(0.001), 12)
    for _ in range(200):
        batches = iter(loader)
        next(batches)
        next(batches)
        del batches
    assert not threads_left()


def test_threads_of_a_killed_worker_are_reported():
    def read(index):
        if index == 17:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.array(index)

    with pytest.raises(DataReadError, match="worker 0 .exit code -9"):
        locals_of(made(read, workers=1))


def test_threads_do_not_keep_a_fork_waiting():
    """Workers of another loader start between two samples, while threads read ahead."""
    batches = iter(made(waits(0.02), 200))
    next(batches)
    next(batches)
    start = time.perf_counter()
    other = sharded(
        DataLoader(Made(length=8), batch_size=4, num_workers=1), ONE
    )
    assert locals_of(other) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert time.perf_counter() - start < 4


@pytest.mark.parametrize("readers", [16, Threads])
def test_threads_argument(readers):
    with pytest.raises(
        ArgumentError, match="readers must be a paddle_shard.Threads"
    ):
        sharded(DataLoader(Made(), batch_size=4), ONE, readers=readers)
    with pytest.raises(ArgumentError, match="num must be .* 1"):
        Threads(0)
    with pytest.raises(
        ArgumentError, match="a stream is read one sample after the"
    ):
        sharded(
            DataLoader(Stream.of(range(8)), batch_size=4),
            ONE,
            readers=Threads(2),
        )


def test_sample_threads_close_while_they_take_the_last_samples():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for trial in range(300):
            threads = SampleThreads(4)
            samples = threads.read(abs, range(trial % 64))
            closing = threading.Thread(target=threads.close, daemon=True)
            closing.start()
            closing.join(HANG)
            assert not closing.is_alive()
            for sample in samples:
                with contextlib.suppress(CancelledError):
                    sample.result(HANG)
    finally:
        sys.setswitchinterval(interval)
    assert not threads_left()


def test_sample_threads_closed_amid_a_read_leave_no_one_waiting():
    """Closing does not wait until a long read has ended, and the samples after it are not read."""

    def read(index):
        time.sleep(1.5 * (index >= 4))
        return np.array(index)

    data = Made(read, 24)
    data.uses_rng = False
    batches = iter(
        sharded(DataLoader(data, batch_size=4), ONE, readers=Threads(1))
    )
    next(batches)
    batches.close()
    assert not threads_left("paddle_shard-ahead")
    assert not threads_left()
