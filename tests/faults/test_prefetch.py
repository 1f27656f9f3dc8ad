"""prefetch=: a thread of its own, and every way in which a pass can end; on_error="skip" beside faults."""

import gc
import logging
import sys
import threading
import time
from dataclasses import asdict

import pytest

from paddle_shard.errors import DataReadError, PaddleShardError
from tests.deadlines import HANG
from tests.faults.feeds import loader_of, numbers, read_until, the_rest
from tests.faults.traces import waited_for
from tests.trials import draws

LENGTH = 96
ALL = list(range(LENGTH))
AHEAD = "paddle_shard-ahead"
KINDS = ["map", "stream", "cut"]


class Left(Exception):
    """The user's own."""


def threads():
    return {thread for thread in threading.enumerate() if thread.name == AHEAD}


def end(loader, batches, how, steps):
    """Read some steps and end the pass; return what was read."""
    read, *_ = read_until(batches, steps=steps)
    if how == "exhaust":
        read += numbers(batches)
    elif how == "close":
        batches.close()
        batches.close()
    elif how == "with":
        try:
            with batches:
                raise Left
        except Left:
            pass
    elif how == "loader":
        loader.close()
        batches.close()
    elif how == "cycle":
        batches.itself = batches
    return read


@pytest.mark.parametrize(
    "how", ["exhaust", "close", "with", "loader", "cycle", "drop"]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_prefetch_thread_ends_however_its_pass_ends(how, workers, rng):
    for _ in range(draws(2)):
        kind, depth = rng.choice(KINDS), rng.randint(1, 5)
        loader = loader_of(kind, LENGTH, workers=workers, prefetch=depth)
        batches = iter(loader)
        read = end(loader, batches, how, rng.randrange(12))
        del batches
        gc.collect()
        state = loader.state_dict()
        assert waited_for(threads, HANG) == set(), (kind, how)
        assert read == ALL[: len(read)]
        if how == "exhaust":
            assert (read, state["epoch"]) == (ALL, 1)
        else:
            assert state["steps"] * 8 == len(read), (
                "what is ready but was not taken does not count"
            )
            assert (
                read
                + the_rest(state, kind, LENGTH, prefetch=rng.choice([0, 2]))
                == ALL
            )


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetch_delivers_what_was_ready_before_a_failure(workers, rng):
    for _ in range(3):
        kind, bad = rng.choice(KINDS), rng.randrange(LENGTH)

        def fault(number, bad=bad):
            if number == bad:
                raise OSError("no disk")

        loader = loader_of(
            kind,
            LENGTH,
            workers=workers,
            fault=fault,
            prefetch=rng.randint(1, 5),
        )
        batches = iter(loader)
        read, _, failure, _ = read_until(batches, pause=rng.choice([0.0, 0.01]))
        assert isinstance(failure, DataReadError), (kind, failure)
        assert read == ALL[: bad // 8 * 8]
        with pytest.raises(PaddleShardError, match="has failed before"):
            next(batches)
        assert waited_for(threads, HANG) == set()
        assert read + the_rest(loader.state_dict(), kind, LENGTH) == ALL


def test_prefetch_closes_soon_during_a_slow_read(tmp_path):
    for workers in (0, 2):
        # Files: a worker that is killed while it waits for an event leaves it locked.
        reached, released = (
            tmp_path / f"reached-{workers}",
            tmp_path / f"released-{workers}",
        )

        def fault(number, reached=reached, released=released):
            if number == 40:
                reached.touch()
                waited_for(lambda: not released.exists(), HANG)

        loader = loader_of(
            "map", LENGTH, workers=workers, fault=fault, prefetch=4
        )
        batches = iter(loader)
        read_until(batches, steps=2)
        assert not waited_for(
            lambda reached=reached: not reached.exists(), HANG
        )
        start = time.monotonic()
        batches.close()
        assert time.monotonic() - start < HANG / 2, "it waits for the read"
        released.touch()
        assert waited_for(threads, HANG) == set()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_samples_are_invalid_rows_are_logged_and_counted(
    workers, prefetch, rng, caplog
):
    bad = sorted(rng.sample(range(LENGTH), rng.randint(1, 6)))

    def fault(number):
        if number in bad:
            raise OSError("no disk")

    own = {"prefetch": prefetch} if prefetch else {}
    loader = loader_of(
        "map", LENGTH, workers=workers, fault=fault, on_error="skip", **own
    )
    batches, found, steps = iter(loader), [], 0
    with caplog.at_level(logging.INFO):
        for batch in batches:
            local = batch._local_value().numpy()
            valid = batches.valid._local_value().numpy()
            assert valid.tolist() == [
                8 * steps + row not in bad for row in range(8)
            ]
            found += local[valid][:, 0].tolist()
            steps += 1
    assert found == [number for number in ALL if number not in bad]
    assert len(bad) in [
        value
        for name, value in asdict(loader.stats.total).items()
        if "skip" in name
    ]
    assert all(str(number) in caplog.text for number in bad), caplog.text
    assert loader.state_dict()["epoch"] == 1


def test_many_short_passes_leave_no_thread_and_no_reference(rng):
    loader = loader_of("map", LENGTH, prefetch=2)
    batches = iter(loader)
    next(batches)
    before = sys.getrefcount(loader)
    batches.close()
    for _ in range(20):
        batches = iter(loader)
        read_until(batches, steps=rng.randrange(3))
        del batches
    gc.collect()
    assert waited_for(threads, HANG) == set()
    assert sys.getrefcount(loader) <= before
