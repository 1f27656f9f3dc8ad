"""After a SIGTERM to any rank, all ranks know it at the same step of the same pass; workers live until then."""

import os
import random
import signal
import threading
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_shard.errors import ArgumentError
from paddle_shard.loader import stopping
from paddle_shard.loader.stats import LoaderStats
from paddle_shard.loader.step_messages import StepMessages
from paddle_shard.testing.simulated import simulated_rank
from tests.faults.traces import children
from tests.helpers import ONE, Made, locals_of, mesh, sharded
from tests.trials import trials


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """As in a process that nobody has asked to stop, and that has its own handler again afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    for name, value in (("_installed", []), ("_heard", []), ("_agreed", set())):
        monkeypatch.setattr(stopping, name, value)
    yield
    signal.signal(signal.SIGTERM, before)


def loader(**options):
    return sharded(
        paddle.io.DataLoader(Made(np.array, 16), batch_size=2, **options), ONE
    )


def test_loop_that_asks_learns_of_the_signal_and_goes_on():
    numbers = loader()
    assert not numbers.stop_requested
    found = []
    for step, _ in enumerate(numbers):
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        found.append(numbers.stop_requested)
    assert found == [False] * 3 + [True] * 5
    assert loader().stop_requested, "all loaders of the same ranks know it"


def test_stop_requested_calls_the_handler_that_was_there():
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("first"))
    numbers = loader()
    assert not numbers.stop_requested
    signal.raise_signal(signal.SIGTERM)
    assert numbers.stop_requested
    assert heard == ["first"]
    signal.signal(signal.SIGTERM, lambda *_: heard.append("second"))
    assert numbers.stop_requested
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["first", "second"]


def test_loop_that_does_not_ask_has_the_signals_that_it_had():
    before = signal.getsignal(signal.SIGTERM)
    assert len(list(loader())) == 8
    thread = threading.Thread(target=lambda: loader().stop_requested)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_stop_requested_spares_workers_started_before(
    persistent,
):
    before = children()
    numbers = loader(num_workers=2, persistent_workers=persistent)
    batches = iter(numbers)
    # one of each worker, which has begun then
    first = [next(batches), next(batches)]
    workers = children() - before
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGTERM)
    assert locals_of([*first, *batches]) == [
        [2 * step, 2 * step + 1] for step in range(8)
    ]
    numbers.close()


def test_rank_that_nobody_tells_is_told_so():
    given = paddle.io.DataLoader(Made(np.array, 16), batch_size=2)
    with (
        simulated_rank(2, 3),
        pytest.raises(
            ArgumentError,
            match="global rank 2 is on none of the loader's meshes",
        ),
    ):
        _ = sharded(given, mesh([0, 1])).stop_requested


class Rank:
    """A simulated rank: what it knows of the signal is its own."""

    def __init__(self, ranks):
        self.heard, self.agreed = [], set()
        self.setups = [
            SimpleNamespace(ranks=ranks, stats=LoaderStats()) for _ in range(2)
        ]
        for setup in self.setups:
            setup.compared_ranks, setup.source = (
                None,
                SimpleNamespace(split=False),
            )
            setup.placer, setup.row_layout = (
                SimpleNamespace(pad_to=None),
                SimpleNamespace(on_mesh=True, global_rank=0),
            )

    def doing(self, work, *args):
        stopping._heard, stopping._agreed = self.heard, self.agreed
        return work(*args)


@pytest.mark.parametrize("batch", range(4))
def test_stop_requested_is_true_at_one_step_on_simulated_ranks(
    batch,
):
    for seed in range(1000 * batch, 1000 * batch + trials(200)):
        rng = random.Random(seed)
        names = tuple(range(rng.randint(2, 5)))
        ranks = [Rank(names) for _ in names]
        nothing = SimpleNamespace(placed=None, step=SimpleNamespace(number=0))
        moments = {
            rank: rng.randint(0, 40)
            for rank in rng.sample(names, rng.randint(1, len(names)))
        }
        clock, heard_at, known_at = 0, None, [None] * len(names)
        # passes of two loaders, some of which are left before their end
        for number in range(12):
            length, leaves = rng.randint(0, 6), rng.choice([None, None, 2])
            notes = [StepMessages(rank.setups[number % 2]) for rank in ranks]
            said = [[] for _ in names]
            for step in range(
                length if leaves is None else min(leaves, length)
            ):
                for me, rank in enumerate(ranks):
                    # at least this step is announced
                    ahead = min(length, step + rng.randint(1, 4))
                    while len(said[me]) < ahead:
                        clock += 1
                        if moments.get(me, clock) < clock and not rank.heard:
                            rank.heard.append(15)
                            heard_at = heard_at or (number, step)
                        said[me].append(rank.doing(notes[me].compose, nothing))
                for me in rng.sample(names, len(names)):
                    of_all = [
                        (one, said[one][step])
                        for one in names
                        if said[one][step] is not None
                    ]
                    ranks[me].doing(notes[me].apply, nothing, of_all)
                    if known_at[me] is None and ranks[me].doing(
                        stopping.is_requested, names
                    ):
                        known_at[me] = (number, step)
                assert len(set(known_at)) == 1, f"seed {seed}: {known_at}"
        if heard_at is not None and heard_at[0] < 6:
            assert known_at[0] is not None, f"seed {seed}: heard at {heard_at}"
