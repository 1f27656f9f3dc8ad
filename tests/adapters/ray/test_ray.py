"""Actors of a real Ray cluster read the same as worker processes, also when they are killed."""

import contextlib
import gc
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import ray

from paddle_shard import RayReaders
from paddle_shard.errors import DataReadError
from tests.adapters.ray import readings
from tests.adapters.ray.readings import (
    INDEXED,
    STREAMS,
    actors_alive,
    files,
    loader_of,
    read,
)
from tests.deadlines import HANG

pytestmark = pytest.mark.usefixtures("cluster")

SEED = int(os.environ.get("FAULT_SEED", "4"))
"""Draws when which actor is killed; `make faults` gives others."""


def until(true):
    """Wait for something that takes Ray a moment."""
    deadline = time.monotonic() + HANG
    while not (found := true()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.fixture
def path(tmp_path):
    return files(tmp_path)


class Kills:
    """Kills a random actor after random steps."""

    def __init__(self, seed, steps, count):
        self.random, self.count = random.Random(seed), 0
        self.steps = set(self.random.sample(range(1, steps), count))

    def __call__(self, step):
        if step in self.steps:
            until(self._killed)
            self.count += 1

    def _killed(self):
        """Kill one of them, if there is one by now; what Ray still lists may have ended."""
        with contextlib.suppress(ProcessLookupError):
            if alive := sorted(actors_alive()):
                os.kill(self.random.choice(alive), signal.SIGKILL)
                return True
        return False


@pytest.mark.parametrize("kind", INDEXED)
def test_actors_read_the_same_bytes_as_workers(kind):
    dataset, settings, options = INDEXED[kind]
    expected = read(loader_of(dataset(), None, settings, options), epochs=2)

    found = read(
        loader_of(
            dataset(),
            RayReaders(num=2),
            {**settings, "num_workers": 0},
            options,
        ),
        epochs=2,
    )

    assert found == expected
    until(lambda: not actors_alive())


@pytest.mark.parametrize("kind", STREAMS)
def test_actors_read_the_same_stream_as_workers(kind, path):
    stream, settings, options = STREAMS[kind]
    expected = read(loader_of(stream(path), None, settings, options), epochs=2)

    found = read(
        loader_of(
            stream(path), RayReaders(num=3), settings, options, workers=0
        ),
        epochs=2,
    )

    assert found == expected
    until(lambda: not actors_alive())


@pytest.mark.parametrize("kind", ["draws", "gathers", "skips"])
def test_twenty_random_kills_change_nothing(kind, caplog):
    dataset, settings, options = INDEXED[kind]
    settings = {**settings, "persistent_workers": True}
    expected = read(loader_of(dataset(), None, settings, options), epochs=4)
    kills = Kills(seed=SEED, steps=90, count=20)
    loader = loader_of(dataset(), RayReaders(num=2), settings, options)

    found = read(loader, epochs=4, after_step=kills)

    assert kills.count == 20
    assert found == expected
    said = [
        record.getMessage()
        for record in caplog.records
        if "has died" in record.getMessage()
    ]
    # one that is killed just as it is closed is not missed
    assert 10 <= len(said) <= 20
    assert all("ActorDiedError" in one for one in said)


@pytest.mark.parametrize("kind", STREAMS)
def test_ray_parts_resume_where_they_were_if_their_actor_dies(kind, path):
    stream, settings, options = STREAMS[kind]
    expected = read(loader_of(stream(path), None, settings, options), epochs=2)
    kills = Kills(seed=SEED + len(kind), steps=25, count=3)

    found = read(
        loader_of(stream(path), RayReaders(num=3), settings, options),
        epochs=2,
        after_step=kills,
    )

    assert kills.count == 3
    assert found == expected


def test_actors_read_no_more_than_the_loop_has_asked_for_ahead(tmp_path):
    """So what they, the object store and the rank hold is limited, however slow the loop is."""
    num, ahead = 2, 3
    loader = loader_of(
        readings.Noting(tmp_path),
        RayReaders(num=num),
        {"prefetch_factor": ahead},
        {"prefetch": 0},
    )
    batches = iter(loader)
    next(batches)
    until(lambda: len(readings.actors_alive()) == num)
    time.sleep(3)
    for taken in range(2, 8):
        next(batches)
        until(
            lambda taken=taken: (
                len(list(tmp_path.iterdir())) >= taken + num * ahead - num
            )
        )
        time.sleep(0.5)  # what they read that was not asked for
        assert len(list(tmp_path.iterdir())) <= taken + num * ahead
    batches.close()


def test_ray_failure_names_sample_worker_and_node():
    loader = loader_of(readings.Broken(), RayReaders(num=2), {}, {})

    with pytest.raises(
        DataReadError,
        match=r"reading sample 7 failed in worker \d on node [\d.]+ ",
    ) as caught:
        read(loader)

    assert caught.value.index == 7
    assert "OSError: cannot read 7" in str(caught.value)
    assert "in __getitem__" in str(caught.value)


def test_ray_sample_that_kills_its_readers_is_given_up():
    loader = loader_of(readings.Deadly(), RayReaders(num=2), {}, {})
    steps = []

    with pytest.raises(
        DataReadError,
        match="3 actors in a row died before they could read the next rows: ",
    ) as caught:
        read(loader, after_step=steps.append)

    assert steps[-1] == 100 // readings.BATCH
    assert 100 in caught.value.indices
    until(lambda: not actors_alive())


def test_worker_is_told_what_it_is_told_as_a_process():
    settings = {"worker_init_fn": readings.told, "batch_size": 1}
    loader = loader_of(readings.Tells(), RayReaders(num=2), settings, {})

    rows = np.concatenate([batch._local_value().numpy() for batch in loader])

    assert rows[:, 0].tolist() == list(range(64))
    assert {tuple(row) for row in rows[:, 1:4].tolist()} == {
        (0, 2, 100),
        (1, 2, 101),
    }


@pytest.mark.parametrize("persistent", [True, False])
def test_persistent_actors_stay_until_the_loader_is_dropped(persistent):
    loader = loader_of(
        readings.Tells(),
        RayReaders(num=2),
        {"persistent_workers": persistent},
        {},
    )

    pids = [
        {
            int(row[4])
            for batch in loader
            for row in batch._local_value().numpy()
        }
        for _ in range(2)
    ]

    assert (pids[0] == pids[1]) == persistent
    assert (
        bool(until(lambda: persistent or not actors_alive()) and actors_alive())
        == persistent
    )
    del loader
    until(lambda: not actors_alive())


def test_ray_data_set_that_cannot_be_sent_fails_the_first_step():
    data = readings.Draws()
    data.lock = threading.Lock()

    with pytest.raises(
        DataReadError,
        match="the actors cannot be started: TypeError: .*pickle",
    ):
        read(loader_of(data, RayReaders(num=2), {}, {}))


def test_runtime_environment_that_cannot_be_made_is_an_error():
    readers = RayReaders(num=1, runtime_env={"working_dir": "/nothing/here"})

    with pytest.raises(DataReadError, match="nothing/here"):
        read(loader_of(readings.Draws(), readers, {}, {}))


def test_runtime_environment_reaches_the_actors():
    readers = RayReaders(num=2, runtime_env={"env_vars": {"TOLD": "7"}})
    loader = loader_of(
        readings.Gathers(), readers, {"collate_fn": readings.environment}, {}
    )

    assert {int(batch._local_value().numpy()[0]) for batch in loader} == {7}


def test_ray_object_store_may_be_smaller_than_the_data():
    held = (
        ray._private.worker.global_worker.core_worker.get_all_reference_counts
    )
    before = len(held())

    assert len(
        read(loader_of(readings.Bulky(), RayReaders(num=2), {}, {}), epochs=3)
    ) == 3 * (26 + 1)  # 312 MB of 200

    gc.collect()
    until(lambda: len(held()) <= before)


@pytest.mark.parametrize(
    "kinds",
    [
        (INDEXED, "draws"),
        (STREAMS, "parts of files"),
        (STREAMS, "shuffled, repeated"),
    ],
)
def test_run_is_resumed_by_other_readers(kinds, path):
    data, settings, options = kinds[0][kinds[1]]
    given = data(path) if kinds[0] is STREAMS else data()
    expected = read(loader_of(given, None, settings, options))
    for before, after in ((None, RayReaders(num=2)), (RayReaders(num=2), None)):
        first, second = (
            loader_of(given, before, settings, options),
            loader_of(given, after, settings, options),
        )
        batches = iter(first)
        for _ in range(9):
            next(batches)
        second.load_state_dict(first.state_dict())
        batches.close()
        assert read(second)[:-1] == expected[9:-1]
