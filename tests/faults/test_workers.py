"""Worker processes that are killed, or fail, at any moment."""

import os
import re
import time
from pathlib import Path

import numpy as np
import paddle.distributed as dist
import pytest
from paddle.io import DataLoader, Dataset

import paddle_shard
from paddle_shard.errors import DataReadError
from tests.deadlines import HANG
from tests.faults.feeds import (
    drawn_options,
    loader_of,
    numbers,
    read_until,
    rows,
    the_rest,
)
from tests.faults.traces import children, gone, kill, shared_memory
from tests.jobs import processes_left, start_ranks

LENGTH = 400
TOO_MANY = 1600
"""Numbers that are never all read ahead: a worker is asked for 5 messages of 8 batches ahead, and a pass holds 32."""
KINDS = ["map", "stream", "cut"]


def drawn_settings(rng):
    return {
        "persistent_workers": rng.random() < 0.3,
        "use_shared_memory": rng.random() < 0.7,
        "prefetch_factor": rng.choice([2, 2, 5]),
    }


def test_worker_killed_at_any_moment_is_named_and_loses_nothing(rng):
    trials = []  # together, as each waits for Paddle to look
    for kind in [*KINDS, rng.choice(KINDS)]:
        workers = rng.randint(1, 3)
        loader = loader_of(
            kind,
            TOO_MANY,
            workers=workers,
            fault=lambda number: time.sleep(0.0005),
            settings=drawn_settings(rng),
            **drawn_options(rng),
        )
        before = children()
        batches = iter(loader)
        own = sorted(children() - before)
        assert len(own) == workers
        read, _, failure, _ = read_until(batches, steps=rng.randrange(25))
        assert failure is None
        trials.append(
            (
                kind,
                loader,
                batches,
                read,
                own.index(victim := rng.choice(own)),
                victim,
            )
        )
    time.sleep(rng.uniform(0, 0.05))
    for trial in trials:
        kill(trial[-1])
    killed = time.monotonic()

    for kind, loader, batches, read, worker, _ in trials:
        more, _, failure, _ = read_until(batches)
        assert time.monotonic() - killed < HANG
        assert isinstance(failure, DataReadError), (
            f"{kind}: {len(read + more)} of {TOO_MANY} numbers, then {failure!r}"
        )
        assert f"worker {worker} (exit code -9)" in str(failure)
        assert failure.worker == worker
        size = rng.choice([8, 16]) if kind == "map" else 8
        assert read + more + the_rest(
            loader.state_dict(), kind, TOO_MANY, batch_size=size
        ) == list(range(TOO_MANY))
        loader.close()


def test_worker_killed_while_it_writes_a_long_message_is_named(rng):
    class Long(Dataset):
        def __len__(self):
            return LENGTH

        def __getitem__(self, index):
            return np.array([index, os.getpid()]), "x" * 60_000

    def together(samples):
        return [
            np.stack([pair for pair, _ in samples]),
            [text for _, text in samples],
        ]

    dataloader = DataLoader(
        Long(),
        batch_size=8,
        num_workers=2,
        collate_fn=together,
        use_shared_memory=rng.random() < 0.5,
    )
    mesh = dist.ProcessMesh([0], dim_names=["dp"])
    batches = iter(
        paddle_shard.shard_dataloader(dataloader, mesh, shard_dims="dp")
    )
    victim = int(rows(next(batches)[0])[0, 1])
    # the queue is full, and the worker in the middle of its next message
    time.sleep(rng.uniform(0.05, 0.4))
    kill(victim)
    start = time.monotonic()
    with pytest.raises(DataReadError, match=r"exit code -9"):
        for _ in batches:
            pass
    assert time.monotonic() - start < HANG


def test_shared_memory_ends_with_the_workers(rng):
    for _ in range(5):
        before, kind, steps = (
            shared_memory(),
            rng.choice(KINDS),
            rng.choice([1, 5, None]),
        )
        batches = iter(loader_of(kind, LENGTH, workers=3, **drawn_options(rng)))
        _, pids, *_ = read_until(batches, steps=steps)
        if steps is not None:
            assert shared_memory() > before, kind
            if rng.random() < 0.3:
                kill(rng.choice(sorted(pids)))
            batches.close()
        assert shared_memory() == before


def test_worker_that_is_slow_to_leave_leaves_nothing():
    def slow(number):
        if number == 40:  # the first of worker 1's third batch
            time.sleep(30)

    before, memory = children(), shared_memory()
    batches = iter(
        loader_of(
            "map",
            LENGTH,
            workers=2,
            fault=slow,
            settings={"prefetch_factor": 4},
        )
    )
    next(batches)
    time.sleep(0.3)
    own = children() - before
    batches.close()

    assert gone(own) == set()
    assert shared_memory() == memory


def test_worker_exception_names_its_sample_and_loses_nothing(rng):
    for _ in range(8):
        kind, workers, bad = (
            rng.choice(KINDS),
            rng.choice([0, 1, 2, 3]),
            rng.randrange(96),
        )
        error = rng.choice(
            [
                ValueError,
                KeyError,
                StopIteration,
                SystemExit,
                MemoryError,
                OSError,
            ]
        )
        # it ends the process, as everywhere
        if error is SystemExit and not workers:
            error = ValueError

        def fault(number, bad=bad, error=error):
            if number == bad:
                raise error("this one")

        loader = loader_of(
            kind, 96, workers=workers, fault=fault, **drawn_options(rng)
        )
        read, _, failure, waited = read_until(iter(loader))

        assert isinstance(failure, DataReadError), (kind, workers, bad, failure)
        # Python makes it a RuntimeError
        in_generator = kind != "map" and error is StopIteration
        assert failure.cause_type == (
            "RuntimeError" if in_generator else error.__name__
        )
        assert "this one" in str(failure)
        assert failure.index == bad if kind == "map" else failure.index[1] >= 0
        assert waited < HANG
        assert read == list(range(bad // 8 * 8))
        assert read + the_rest(
            loader.state_dict(), kind, 96, workers=rng.choice([0, 2])
        ) == list(range(96))


def test_collate_exception_names_its_samples_and_loses_nothing(rng):
    for workers in (0, rng.randint(1, 3)):
        bad = rng.randrange(96)

        def collate(samples, bad=bad):
            if any(sample[0] == bad for sample in samples):
                raise ValueError("cannot collate")
            return np.stack(samples)

        loader = loader_of(
            "map",
            96,
            workers=workers,
            settings={"collate_fn": collate},
            **drawn_options(rng),
        )
        read, _, failure, _ = read_until(iter(loader))

        assert isinstance(failure, DataReadError)
        assert "cannot collate" in str(failure)
        assert failure.indices == tuple(range(bad // 8 * 8, bad // 8 * 8 + 8))
        assert read + the_rest(loader.state_dict(), "map", 96) == list(
            range(96)
        )


@pytest.mark.leaves  # the process that forks
def test_worker_that_hangs_is_named_when_the_timeout_is_over(tmp_path):
    script = Path(__file__).parent / "hung_worker.py"
    environment = {
        "PYTHONPATH": os.pathsep.join(
            [str(script.parents[2]), os.environ.get("PYTHONPATH", "")]
        )
    }
    with start_ranks(
        script, 1, tmp_path, args=["1.5"], env=environment, timeout=HANG
    ) as job:
        assert job.wait([0], HANG), "it hangs"
        assert processes_left(job) == set()
    text = (tmp_path / "workerlog.0").read_text()
    assert "DataReadError" in text, text
    assert re.search(r"worker 1 has not answered for 1\.\d+ s", text), text


def test_workers_killed_between_epochs_or_together_cost_nothing(rng):
    loader = loader_of(
        "map", 96, workers=2, settings={"persistent_workers": True}
    )
    before = children()
    for _ in range(3):
        assert numbers(iter(loader)) == list(range(96))
        own = sorted(children() - before)
        victims = rng.sample(own, rng.randint(1, len(own)))
        for victim in victims:
            kill(victim)
        assert not gone(victims)
    assert numbers(iter(loader)) == list(range(96))
    loader.close()
