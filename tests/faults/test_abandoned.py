"""Epochs that are left at any step, and several loaders at once."""

import gc
import signal
import threading
import time
from itertools import islice

import numpy as np
import pytest
from paddle.io import DataLoader

from paddle_shard.errors import DataReadError, PeerLostError
from tests.deadlines import HANG
from tests.faults.feeds import (
    drawn_options,
    loader_of,
    numbers,
    read_until,
    the_rest,
)
from tests.faults.traces import children, kill, waited_for
from tests.helpers import ONE, Made, locals_of, sharded
from tests.trials import draws

LENGTH, STEPS = 88, 11
ALL = list(range(LENGTH))
KINDS = ["map", "stream", "cut"]


class Left(Exception):
    """The user's own."""


def leave(loader, steps, how):
    """Read some steps and leave in a way of choice; return what was read."""
    read = []
    if how == "break":
        for batch in loader:
            if len(read) == 8 * steps:
                break
            read += batch._local_value().numpy()[:, 0].tolist()
        return read[: 8 * steps]
    batches = iter(loader)
    if how == "raise":
        try:
            with batches:
                read, *_ = read_until(batches, steps=steps)
                raise Left
        except Left:
            return read
    read, *_ = read_until(batches, steps=steps)
    if how == "close":
        batches.close()
        batches.close()
    elif how == "cycle":
        batches.itself = batches
        del batches
        gc.collect()
    return read


@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_left_at_any_step_resumes_there(workers, rng):
    before = children()
    for steps in sorted(
        {0, 1, STEPS, *rng.sample(range(2, STEPS), draws(STEPS - 2))}
    ):
        kind, how = (
            rng.choice(KINDS),
            rng.choice(["break", "raise", "close", "cycle", "drop"]),
        )
        options = drawn_options(rng)
        loader = loader_of(kind, LENGTH, workers=workers, **options)
        read = leave(loader, steps, how)
        state = loader.state_dict()
        assert read == ALL[: 8 * steps], (kind, how)
        assert waited_for(lambda: children() - before, HANG) == set(), (
            f"{how} leaves workers"
        )
        # a loop that is left has been given one more than it counted
        if how != "break":
            assert state["steps"] == steps
        elif steps == STEPS:  # it has come to its end
            assert (state["epoch"], state["steps"]) == (1, 0)
        rest = the_rest(state, kind, LENGTH, workers=rng.choice([0, 0, 2]))
        assert rest == ALL[8 * state["steps"] :]
        if state["epoch"] == 0:
            assert numbers(iter(loader)) == ALL, "a new loop repeats the epoch"


def test_loaders_that_are_read_by_turns_do_not_meet(rng):
    found = [[] for _ in range(3)]
    passes = [
        iter(
            loader_of(
                rng.choice(KINDS),
                LENGTH,
                workers=rng.randrange(3),
                **drawn_options(rng),
            )
        )
        for _ in found
    ]
    running = list(range(len(passes)))
    while running:
        number = rng.choice(running)
        read, *_ = read_until(passes[number], steps=1)
        if not read:
            running.remove(number)
        found[number] += read
    assert found == [ALL] * 3


def test_loaders_do_not_share_failures(rng):
    bad = rng.randrange(LENGTH)

    def fault(number):
        if number == bad:
            raise ValueError("this one")

    own = loader_of(
        rng.choice(KINDS),
        LENGTH,
        workers=rng.randint(1, 2),
        **drawn_options(rng),
    )
    other = iter(own)
    before = children()
    failing = iter(
        loader_of(
            rng.choice(KINDS), LENGTH, workers=rng.randrange(3), fault=fault
        )
    )
    killed = iter(
        loader_of(
            rng.choice(KINDS),
            LENGTH,
            workers=1,
            settings={"prefetch_factor": 2},
        )
    )
    victim = max(children() - before)
    read, *_ = read_until(other, steps=rng.randrange(6))
    _, _, failure, _ = read_until(failing)
    assert isinstance(failure, DataReadError)
    kill(victim)
    more, *_ = read_until(other, steps=rng.randrange(6))
    read += more
    state = own.state_dict()
    _, _, failure, _ = read_until(killed)
    assert isinstance(failure, DataReadError)
    assert "exit code -9" in str(failure)

    assert state["steps"] == len(read) // 8
    assert read + numbers(other) == ALL


def test_two_passes_are_whole_and_the_state_is_the_newer_ones(rng):
    loader = loader_of(
        rng.choice(KINDS),
        LENGTH,
        workers=rng.randrange(3),
        **drawn_options(rng),
    )
    older, newer = iter(loader), iter(loader)
    first, *_ = read_until(older, steps=rng.randrange(1, 11))
    second, *_ = read_until(newer, steps=(steps := rng.randrange(1, 11)))
    assert loader.state_dict()["steps"] == steps
    older.close()
    assert second + numbers(newer) == ALL
    assert first == ALL[: len(first)]


@pytest.mark.parametrize("how", ["handler", "thread"])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_closing_an_iterator_that_waits_does_not_end_the_epoch(
    workers, prefetch, how
):
    def read(index):
        time.sleep(0.1 * (index >= 8))
        return np.array(index)

    data = Made(read, 40)
    data.uses_rng = False
    given = DataLoader(data, batch_size=4, num_workers=workers)
    loader = sharded(given, ONE, prefetch=prefetch)
    batches = iter(loader)
    found = locals_of(islice(batches, 2))
    if how == "handler":
        before = signal.signal(signal.SIGALRM, lambda *_: batches.close())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        closing = threading.Timer(0.2, batches.close)
        closing.start()

    found += locals_of(batches)

    if how == "handler":
        signal.signal(signal.SIGALRM, before)
    else:
        closing.join()
    assert len(found) < 10
    resumed = sharded(given, ONE, prefetch=prefetch)
    resumed.load_state_dict(loader.state_dict())
    found += locals_of(resumed)
    assert found == [list(range(at, at + 4)) for at in range(0, 40, 4)]


def test_error_of_an_iterator_closed_meanwhile_is_not_raised():
    loader = sharded(DataLoader(Made(length=8), batch_size=4), ONE)
    batches = iter(loader)
    next(batches)

    class Steps:
        close = batches._steps.close

        def __next__(self):
            batches.close()  # in a signal's handler, while it waits
            raise PeerLostError(
                "The loop was left by global rank 0 after 1 steps"
            )

    batches._steps = Steps()
    assert list(batches) == list(batches) == []
    assert loader.epoch == 0
    assert locals_of(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("how", ["exhaust", "break", "raise"])
def test_loader_dropped_without_collection_leaves_no_workers(how, rng):
    before = children()
    gc.disable()
    try:
        for kind in KINDS:
            loader = loader_of(
                kind, LENGTH, workers=2, settings={"persistent_workers": True}
            )
            leave(loader, 2 * STEPS if how == "exhaust" else 2, how)
            del loader
            assert waited_for(lambda: children() - before, HANG) == set()
    finally:
        gc.enable()
