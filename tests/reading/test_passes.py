"""Reading ahead gives the same as reading each batch when it is asked for."""

import random
import threading
import time
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings
from paddle.io import DataLoader

from paddle_shard import ArrayDataset
from paddle_shard.data.generators import generators_of
from paddle_shard.errors import DataReadError
from paddle_shard.loader import step_pass
from paddle_shard.loader.step_pass import Feed, StepPass
from paddle_shard.plan.step import Step
from paddle_shard.reading.executor import InlineExecutor
from paddle_shard.reading.profile import Profiler
from paddle_shard.reading.reader import HowToRead, IdReader
from tests.deadlines import HANG
from tests.helpers import ONE, sharded
from tests.trials import trials

STEPS = 12


class Rows:
    """Rows that say which they are; from some on, they use global generators, or cannot be read."""

    def __init__(self, draws_from, fails_at):
        self._draws_from, self._fails_at = draws_from, fails_at
        self.uses_rng = draws_from < 3 * STEPS

    def __len__(self):
        return 3 * STEPS

    def __getitem__(self, index):
        if index == self._fails_at:
            raise ValueError("this one")
        if index >= self._draws_from:
            return np.array(
                [index, random.getrandbits(30), np.random.randint(1 << 30)]
            )
        return np.array([index, 0, 0])


def step_of(number, ids=()):
    return Step(
        epoch=0,
        number=number,
        num_rows=3,
        micro_size=3,
        num_positions=3,
        ids=ids,
    )


def reading(dataset, sampler_fails_at, skip, collate_fn=None, ahead=0):
    """A pass of which a thread reads at most `ahead` batches ahead; 0: each is read when it is asked for."""

    def steps():
        for number in range(STEPS):
            if number == sampler_fails_at:
                raise RuntimeError("the sampler's")
            yield step_of(number, [3 * number, 3 * number + 1, 3 * number + 2])

    how = HowToRead(generators=generators_of(), seed=7, skip_errors=skip)
    executor = InlineExecutor(IdReader(dataset, collate_fn, how))
    feed = Feed(steps(), executor, None, on_training_thread=False)
    return StepPass(
        feed,
        None,
        place=copied,
        messages=SimpleNamespace(finish_alone=lambda batch: None),
        num_ahead=ahead,
        profiler=Profiler(),
    )


def copied(batch):
    """The batch with memory of its own, as placing makes it."""
    batch.value = np.array(batch.value)
    return batch


def states():
    return (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        np.random.get_state()[2:],
    )


def what_comes(batches, *, beside):
    """(rows, how it ended, what was skipped); the generators are as they were, after each batch if none is `beside`."""
    found, skipped, before = [], [], states()
    try:
        while True:
            batch = next(batches)
            assert beside or states() == before
            found.append(batch.value.tolist())
            skipped.append(
                [] if batch.is_skipped is None else batch.is_skipped.tolist()
            )
    except (StopIteration, DataReadError, RuntimeError) as end:
        assert states() == before
        return (
            found,
            type(end),
            str(end).split("Original traceback")[0],
            skipped,
        )
    finally:
        batches.close()


NOWHERE = st.just(10**6)
INDICES = NOWHERE | st.integers(0, 3 * STEPS)


@settings(max_examples=trials(60), deadline=None)
@example(draws_from=3, fails_at=4, sampler_fails_at=10**6, skip=False, ahead=1)
@given(
    draws_from=INDICES,
    fails_at=INDICES,
    sampler_fails_at=NOWHERE | st.integers(0, STEPS),
    skip=st.booleans(),
    ahead=st.integers(1, 7),
)
def test_step_pass_reads_ahead_what_it_would_read_on_demand(
    draws_from, fails_at, sampler_fails_at, skip, ahead
):
    def come(ahead):
        batches = reading(
            Rows(draws_from, fails_at), sampler_fails_at, skip, ahead=ahead
        )
        return what_comes(batches, beside=ahead > 0)

    found, end, _, skipped = expected = come(0)
    assert come(ahead) == expected
    num_steps = min(sampler_fails_at, STEPS)
    if not skip and fails_at < 3 * num_steps:
        assert (end, len(found)) == (DataReadError, fails_at // 3)
    else:
        assert (end, len(found)) == (
            RuntimeError if sampler_fails_at < STEPS else StopIteration,
            num_steps,
        )
        lost = [
            3 * step + row
            for step, rows in enumerate(skipped)
            for row, out in enumerate(rows)
            if out
        ]
        assert lost == ([fails_at] if fails_at < 3 * num_steps else [])


@given(draws_from=INDICES, first=st.integers(0, STEPS - 1))
@settings(max_examples=trials(30), deadline=None)
def test_step_pass_batch_does_not_depend_on_earlier_ones(draws_from, first):
    """So that a run that is resumed goes on with the same bytes, though its reader has not seen the first samples."""

    def come(first):
        how = HowToRead(generators=generators_of(), seed=7)
        executor = InlineExecutor(IdReader(Rows(draws_from, 10**6), None, how))
        for number in range(first, STEPS):
            executor.submit(
                step_of(number, [3 * number, 3 * number + 1, 3 * number + 2])
            )
        return [executor.take().value.tolist() for _ in range(first, STEPS)]

    assert come(first) == come(0)[first:]


class FailsBySeed(Rows):
    """Rows of which the first draw nothing; the others draw, and half of them fail by what they have drawn."""

    def __init__(self):
        super().__init__(6, 10**6)

    def __getitem__(self, index):
        row = super().__getitem__(index)
        if row[1] % 2:
            raise ValueError(f"drew {row[1]}")
        return row


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("ahead", [0, 3])
def test_step_pass_failure_by_draw_is_independent_of_the_loop(ahead, skip):
    outcomes = []
    for seed in range(8):
        random.seed(seed)
        outcomes.append(
            what_comes(
                reading(FailsBySeed(), None, skip, ahead=ahead),
                beside=ahead > 0,
            )
        )

    assert all(one == outcomes[0] for one in outcomes)


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_collate_fn_may_reuse_the_memory_of_its_batches(ahead):
    memory = np.zeros((3, 3), "int64")

    def collate(samples):
        return np.stack(samples, out=memory)

    batches = reading(Rows(10**6, 10**6), None, False, collate, ahead)
    found = [next(batches).value for _ in range(STEPS)]
    batches.close()

    assert [batch.tolist() for batch in found] == [
        [[3 * step + row, 0, 0] for row in range(3)] for step in range(STEPS)
    ]


class SwitchingQueue:
    """A queue that lets another thread work between its change and its return, as the interpreter may."""

    def __init__(self):
        self._items = SimpleQueue()

    def put(self, item):
        self._items.put(item)
        time.sleep(0.0005)

    def get(self):
        return self._items.get()


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_step_pass_serves_steps_that_become_shorter_and_longer(
    ahead, monkeypatch
):
    monkeypatch.setattr(step_pass, "SimpleQueue", SwitchingQueue)
    found = []

    def train(rng):
        batches = reading(Rows(10**6, 10**6), None, False, ahead=ahead)
        for batch in iter(partial(next, batches, None), None):
            found.append(int(batch.value[0, 0]))
            time.sleep(rng.choice([0.0, 0.0, 0.001]))

    for seed in range(20):
        found.clear()
        loop = threading.Thread(
            target=train, args=[random.Random(seed)], daemon=True
        )
        loop.start()
        loop.join(HANG)
        assert found == list(range(0, 3 * STEPS, 3)), seed


def test_step_pass_close_ends_a_next_that_waits(monkeypatch):
    class SlowQueue(SimpleQueue):
        """The thread that reads learns late that it has room, and that it is over."""

        def get(self):
            item = super().get()
            time.sleep(0.3 * (item is None))
            return item

    monkeypatch.setattr(step_pass, "SimpleQueue", SlowQueue)
    batches = reading(Rows(10**6, 10**6), None, False, ahead=1)
    next(batches)
    results = []

    def train():
        results.extend(iter(partial(next, batches, None), None))
        results.append("end")

    loop = threading.Thread(target=train, daemon=True)
    loop.start()
    time.sleep(0.1)
    batches.close()
    loop.join(HANG)
    assert results[-1:] == ["end"]


@pytest.mark.parametrize("collates", [False, True])
def test_array_dataset_is_read_without_saving_generators(collates, monkeypatch):
    looks = []
    monkeypatch.setattr(
        np.random,
        "get_state",
        lambda get=np.random.get_state: looks.append(1) or get(),
    )
    collate_fn = np.stack if collates else None
    given = DataLoader(
        ArrayDataset(np.arange(24)), batch_size=4, collate_fn=collate_fn
    )
    for _ in sharded(given, ONE, prefetch=0):
        pass
    assert bool(looks) == collates
