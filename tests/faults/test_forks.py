"""A loader in a forked process, in whatever state its parent's is."""

import contextlib
import os
import signal
import threading
import time
import weakref
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
from paddle.io import DataLoader

from paddle_shard.errors import PaddleShardError
from paddle_shard.reading import workers
from tests.deadlines import HANG
from tests.faults.feeds import drawn_options, loader_of, numbers, read_until
from tests.faults.traces import in_a_fork
from tests.helpers import ONE, Made, locals_of, sharded

LENGTH = 96
ALL = list(range(LENGTH))


@pytest.mark.parametrize("kind", ["map", "cut"])
def test_loader_serves_in_a_fork_as_in_its_parent(kind, rng):
    for persistent in (False, True):
        workers, steps = rng.choice([0, 1, 2]), rng.randrange(1, 12)
        settings = {"persistent_workers": persistent and workers > 0}
        loader = loader_of(
            kind,
            LENGTH,
            workers=workers,
            settings=settings,
            **drawn_options(rng),
        )
        assert in_a_fork(lambda loader=loader: numbers(iter(loader))) == ALL
        batches = iter(loader)
        read, *_ = read_until(batches, steps=steps)
        state = loader.state_dict()
        assert in_a_fork(lambda loader=loader: numbers(iter(loader))) == ALL
        assert loader.state_dict() == state
        assert read + numbers(batches) == ALL
        loader.close()


# What follows is tried in a child and its own fork, as it may hang both.


def test_loader_with_persistent_workers_serves_in_a_fork():
    def parent():
        loader = loader_of(
            "map", LENGTH, workers=2, settings={"persistent_workers": True}
        )
        found = [
            numbers(iter(loader)),
            in_a_fork(lambda: numbers(iter(loader))),
            numbers(iter(loader)),
        ]
        loader.close()
        return found

    assert in_a_fork(parent, 2 * HANG) == [ALL] * 3


@pytest.mark.parametrize("how", ["close", "delete"])
def test_iterator_outlives_what_a_fork_does_with_it(how):
    def parent():
        held = [iter(loader_of("map", LENGTH, workers=2))]
        read, *_ = read_until(held[0], steps=2)

        def let_go():
            if how == "close":
                held[0].close()
            held.clear()

        in_a_fork(let_go)
        return read + numbers(held[0])

    assert in_a_fork(parent, 2 * HANG) == ALL


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_iterator_of_the_parent_is_an_error_in_a_fork(kind):
    def parent():
        batches = iter(loader_of(kind, LENGTH, workers=2))
        read, *_ = read_until(batches, steps=2)
        found = in_a_fork(lambda: numbers(batches))
        return [read + numbers(batches), isinstance(found, PaddleShardError)]

    assert in_a_fork(parent, 2 * HANG) == [ALL, True]


def test_fork_drops_the_parents_iterator_despite_held_locks():
    def parent():
        batches, lock = (
            iter(loader_of("map", LENGTH, prefetch=0)),
            threading.Lock(),
        )
        next(batches)
        # Several ranks have an agreement, whose thread holds its lock now and then.
        batches._steps._agreement = SimpleNamespace(close=lock.acquire)
        with lock:
            found = in_a_fork(batches.close, HANG / 8)
        batches._steps._agreement = None
        return [found, len(numbers(batches))]

    assert in_a_fork(parent, 2 * HANG) == [None, LENGTH - 8]


@pytest.mark.parametrize("workers", [0, 2])
def test_fork_during_prefetching_serves_and_disturbs_nothing(workers, rng):
    loader = loader_of(
        "map", LENGTH, workers=workers, prefetch=rng.randint(1, 4)
    )
    batches = iter(loader)
    read, *_ = read_until(batches, steps=rng.randrange(1, 10))
    assert in_a_fork(lambda: numbers(iter(loader))) == ALL
    assert read + numbers(batches) == ALL


def test_workers_are_started_while_another_thread_forks_too():
    """Each fork holds locks: of this library, and of others, which came later, or earlier."""

    def parent():
        ended, forked = [], []
        late = threading.RLock()
        os.register_at_fork(
            before=late.acquire,
            after_in_parent=late.release,
            after_in_child=late.release,
        )

        def forks():
            while not ended:
                child = os.fork()
                if child == 0:
                    os._exit(0)
                os.waitpid(child, 0)
                forked.append(child)

        other = threading.Thread(target=forks)
        other.start()
        found = [
            numbers(iter(loader_of("map", 96, workers=2))) for _ in range(6)
        ]
        ended.append(True)
        other.join()
        return found, len(forked) > 6

    assert in_a_fork(parent, 2 * HANG) == ([ALL] * 6, True)


def test_signal_amid_a_start_of_workers_stops_no_other_iterator():
    """A start of workers waits until other iterators are between two batches."""

    def parent():
        batches = iter(
            sharded(DataLoader(Made(length=LENGTH), batch_size=4), ONE)
        )
        read = locals_of(islice(batches, 3))

        def waits(index):
            time.sleep(2 * (index == 0))
            return np.array(index)

        slow = Made(waits, LENGTH)
        slow.uses_rng = False
        thread = threading.Thread(
            target=next,
            args=[iter(sharded(DataLoader(slow, batch_size=4), ONE))],
        )
        thread.start()
        time.sleep(0.3)

        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with contextlib.suppress(KeyboardInterrupt):
            iter(sharded(DataLoader(Made(), batch_size=4, num_workers=1), ONE))
        read += locals_of(batches)
        thread.join()
        return list(chain(*read))

    assert in_a_fork(parent, HANG) == ALL


def test_fork_serves_a_loader_that_its_parent_has_peeked_at():
    def parent():
        loader = loader_of("map", LENGTH)
        loader._first_batch()
        return in_a_fork(lambda: numbers(iter(loader))), numbers(iter(loader))

    assert in_a_fork(parent, 2 * HANG) == (ALL, ALL)


def test_fork_that_collects_its_parents_pool_spares_the_workers(
    monkeypatch,
):
    """The collector may run before the fork's own functions, which go through all pools."""
    monkeypatch.setattr(workers, "_pools", weakref.WeakSet())
    batches = iter(loader_of("map", LENGTH, workers=1))
    [pool] = workers._pools
    monkeypatch.setattr(workers, "_pools", weakref.WeakSet())

    def child():
        pool.__del__()
        return "dropped"

    assert in_a_fork(child) == "dropped"
    assert numbers(batches) == ALL
