"""What is promised of a pass that a thread reads ahead; `tests/faults` ends it in real processes."""

import gc
import os
import random
import threading
import time

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import ArgumentError, DataReadError
from paddle_shard.reading.workers import WorkerPool
from tests.deadlines import HANG
from tests.helpers import Made

ALONE = {
    "ends_must_agree": True,
    "facts": {},
    "name": "test",
    "timeout": HANG,
    "on_lost": "raise",
}
ONE = dist.ProcessMesh([0], dim_names=["dp"])


class Rows(paddle.io.Dataset):
    """Notes by which thread each sample was read."""

    def __init__(self, length=64, *, draws=False, fails_at=None, seconds=0.0):
        self.length, self.draws, self.fails_at, self.seconds = (
            length,
            draws,
            fails_at,
            seconds,
        )
        self.read, self.threads = [], []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        self.threads.append(threading.current_thread())
        time.sleep(self.seconds)
        if index == self.fails_at:
            raise ValueError(f"sample {index} is bad")
        noise = np.random.rand() if self.draws else 0.5
        return np.array([index, noise], "float64")


def sharded(dataset, *, size=4, workers=0, shuffle=True, **options):
    shuffle = shuffle and not isinstance(dataset, Stream)
    given = paddle.io.DataLoader(
        dataset, batch_size=size, num_workers=workers, shuffle=shuffle
    )
    return paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", **options)


def rows(tensor):
    # in Paddle 3.0 a distributed tensor's own is a collective
    return tensor._local_value().numpy().tolist()


def threads():
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "paddle_shard-ahead"
    ]


def soon(condition, seconds=HANG):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize(
    ("kind", "workers", "prefetches"),
    [
        ("index", 0, (1, 3)),
        ("draws", 0, (3,)),
        ("stream", 0, (1, 3)),
        ("draws", 2, (1,)),
        ("stream", 2, (3,)),
    ],
)
def test_prefetch_changes_no_batch_and_no_state(kind, workers, prefetches):
    def make(prefetch):
        dataset = (
            Stream.of(lambda: ({"x": float(i)} for i in range(61)))
            if kind == "stream"
            else Rows(61)
        )
        if kind == "draws":
            dataset.draws = True
        return sharded(dataset, workers=workers, prefetch=prefetch)

    def trace(loader):
        found = []
        batches = iter(loader)
        for batch in batches:
            leaf = batch["x"] if kind == "stream" else batch
            found.append(
                (
                    rows(leaf),
                    rows(batches.valid),
                    loader.state_dict(),
                )
            )
        return found

    def resumed(prefetch, state):
        loader = make(prefetch)
        loader.load_state_dict(state)
        return trace(loader)

    expected = trace(make(0))
    gone_on = resumed(0, expected[6][2])
    for prefetch in prefetches:
        assert trace(make(prefetch)) == expected
        assert resumed(prefetch, expected[6][2]) == gone_on
    assert not threads()


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetch_reads_no_more_ahead_than_asked_for(workers):
    # two of its samples are read twice for the data's identity
    dataset = Rows(400)
    batches = iter(sharded(dataset, workers=workers, prefetch=3))
    for step in range(1, 12):
        next(batches)
        time.sleep(0.02)
        if not workers:
            assert len(dataset.read) - 4 <= 4 * (step + 3)
    if not workers:
        assert soon(lambda: len(dataset.read) - 4 == 4 * (11 + 3))
    batches.close()


def test_prefetch_reads_what_draws_on_the_callers_thread():
    quiet, drawing = Rows(), Rows(draws=True)
    for dataset in (quiet, drawing):
        for _ in sharded(dataset, prefetch=2):
            # a loop that only takes batches reads them by itself
            time.sleep(2e-3)
    main = threading.main_thread()

    # The first batch shows whether samples use the generators; two samples tell ranks what the data holds.
    here = [thread is main for thread in quiet.threads[4:]]
    assert here == [True] * 4 + [False] * 60
    assert len(set(quiet.threads)) == 2
    assert set(drawing.threads) == {main}


class OneMemory(Rows):
    """Gives the same array and the same tensor for every batch."""

    def __init__(self):
        super().__init__()
        self.array, self.tensor = (
            np.zeros(8, "int64"),
            paddle.zeros([8], "int64"),
        )

    def __getitems__(self, indices):
        self.array[:] = indices
        paddle.assign(self.array, self.tensor)
        return self.array, self.tensor

    # a few samples are read again, for ranks to compare them
    def __getitem__(self, index):
        array, tensor = self.__getitems__([index])
        return array[0], tensor[0]


@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 0}, {"prefetch": 2}], ids=str
)
def test_prefetch_copies_memory_that_a_data_set_uses_again(options):
    given = paddle.io.DataLoader(OneMemory(), batch_size=8)
    held = list(
        paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", **options)
    )

    for field in range(2):
        assert [
            row
            for batch in held
            for row in batch[field]._local_value().numpy().tolist()
        ] == list(range(64))


class Ring(Rows):
    """Reads each sample of a batch into memory of its own, which the next batch uses again."""

    def __init__(self):
        super().__init__()
        self.ring, self.at = np.zeros((8, 2), "int64"), 0

    def __getitem__(self, index):
        self.at = (self.at + 1) % 8
        self.ring[self.at] = index
        return self.ring[self.at]


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetch_copies_such_memory_also_after_a_resume(
    workers,
):
    """Samples that the state knows, and others that ranks compare, are read beside those of the first batch."""
    data = Ring()
    loader = sharded(data, size=8, workers=workers, shuffle=False)
    batches = iter(loader)
    found = [rows(next(batches)) for _ in range(2)]
    state = loader.state_dict()
    batches.close()
    loader = sharded(data, size=8, workers=workers, shuffle=False)
    loader.load_state_dict(state)
    found += [rows(batch) for batch in loader]

    assert [first for batch in found for first, _ in batch] == list(range(64))


def test_prefetch_leaves_the_loops_random_numbers():
    class Rarely(Rows):
        uses_rng = True

        def __getitem__(self, index):
            self.draws = index > 40
            return super().__getitem__(index)

    def trace(dataset, prefetch):
        np.random.seed(5)
        found = []
        for batch in sharded(dataset, prefetch=prefetch, shuffle=False):
            found.append((rows(batch), np.random.rand(100).sum()))
        return found

    for kind in (Rows, Rarely):
        assert trace(kind(), 2) == trace(kind(), 0)


def test_prefetch_is_two_unless_the_dataloader_has_no_buffer():
    buffered, unbuffered = Rows(), Rows()
    for dataset, buffer in ((buffered, True), (unbuffered, False)):
        given = paddle.io.DataLoader(
            dataset, batch_size=4, use_buffer_reader=buffer
        )
        for _ in paddle_shard.shard_dataloader(given, ONE, shard_dims="dp"):
            pass

    assert len(set(buffered.threads)) == 2
    assert set(unbuffered.threads) == {threading.main_thread()}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_prefetch_delivers_alike_however_long_each_step_takes(seed, workers):
    """Short steps let the training thread read, long ones the other thread, in any turns."""
    chance = random.Random(seed)
    expected = [rows(batch) for batch in sharded(Rows(400), prefetch=0)]
    found = []
    loader = sharded(Rows(400, fails_at=390), workers=workers, shuffle=False)
    in_order = [
        rows(batch) for batch in sharded(Rows(388), shuffle=False, prefetch=0)
    ]
    with pytest.raises(DataReadError, match="sample 390 is bad"):
        for batch in loader:
            found.append(rows(batch))
            time.sleep(chance.choice([0, 0, 0, 0, 0, 3e-4, 1e-3]))
    assert found == in_order
    found = []
    for batch in sharded(Rows(400), workers=workers):
        found.append(rows(batch))
        time.sleep(chance.choice([0, 0, 0, 0, 0, 3e-4, 1e-3]))
    assert found == expected
    assert soon(lambda: not threads())


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetch_raises_a_failure_at_its_own_step(workers):
    expected, delivered = [], []
    for _ in range(2):
        for prefetch, found in ((0, expected), (3, delivered)):
            loader = sharded(
                Rows(fails_at=33), workers=workers, prefetch=prefetch
            )
            with pytest.raises(
                DataReadError, match="sample 33 is bad"
            ) as raised:
                for batch in loader:
                    found.append(rows(batch))
            found.append((raised.value.step, raised.value.index))
    assert delivered == expected
    assert soon(lambda: not threads())


ENDINGS = {
    "exhaustion": lambda loader: list(loader),
    "break": lambda loader: next(iter(loader)),
    "close": lambda loader: [
        (batches := iter(loader)),
        next(batches),
        batches.close(),
    ],
    "with": lambda loader: with_block(loader),
    "exception": lambda loader: failing_loop(loader),
    "a cycle of garbage": lambda loader: cycle(loader),
}


def with_block(loader):
    with iter(loader) as batches:
        next(batches)


def failing_loop(loader):
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            _ = 1 / 0


def cycle(loader):
    class Holder:
        pass

    holder = Holder()
    holder.me, holder.batches = holder, iter(loader)
    next(holder.batches)
    del holder
    gc.collect()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ending", ENDINGS)
def test_prefetch_leaves_nothing_behind(ending, workers, monkeypatch):
    pids = []
    start = WorkerPool.start

    def noted(pool):
        start(pool)
        pids.extend(worker.pid for worker in pool._workers)

    monkeypatch.setattr(WorkerPool, "start", noted)
    loader = sharded(Rows(400), workers=workers, prefetch=2)
    ENDINGS[ending](loader)

    assert soon(lambda: not threads())
    assert len(pids) == workers
    assert soon(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_closing_during_a_long_read_does_not_wait_for_it():
    reached, released = threading.Event(), threading.Event()

    class Hangs(Rows):
        def __getitem__(self, index):
            # two samples are read twice for the data's identity
            if len(self.read) >= 12:
                reached.set()
                released.wait(HANG)
            return super().__getitem__(index)

    batches = iter(sharded(Hangs(), prefetch=2))
    next(batches), next(batches)
    assert reached.wait(HANG)
    batches.close()

    assert not released.is_set()
    assert len(threads()) == 1, "it is in the read still"
    released.set()
    assert soon(lambda: not threads())


@pytest.mark.parametrize("workers", [0, 2])
def test_passes_beside_each_other_are_independent(workers):
    loader = sharded(Rows(), workers=workers, prefetch=2)
    expected = [rows(batch) for batch in sharded(Rows())]

    pairs = [
        (rows(one), rows(two)) for one, two in zip(loader, loader, strict=True)
    ]

    assert [one for one, _ in pairs] == [two for _, two in pairs] == expected


def test_prefetch_refuses_what_is_no_number_of_batches():
    for value in (-1, True, 1.5, "2"):
        with pytest.raises(
            ArgumentError, match="prefetch must be None or an int >= 0"
        ):
            sharded(Rows(), prefetch=value)


def test_prefetch_rejects_a_dataloader_with_its_own_iter():
    class Own(paddle.io.DataLoader):
        def __iter__(self):
            yield from super().__iter__()

    with pytest.raises(
        ArgumentError, match=r"dataloader: Own has an __iter__ of its own"
    ):
        paddle_shard.shard_dataloader(
            Own(Rows(), batch_size=4), ONE, shard_dims="dp"
        )


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_prefetch_thread_that_breaks_leaves_nobody_waiting(error):
    class Broken(Rows):
        def __getitem__(self, index):
            if (
                index == 12
                and threading.current_thread() is not threading.main_thread()
            ):
                raise error("broken")
            return super().__getitem__(index)

    delivered = []
    with pytest.raises(
        (DataReadError, SystemExit, KeyboardInterrupt), match="broken"
    ):
        for batch in sharded(Broken(), shuffle=False):
            delivered.append(rows(batch))
            # a loop that only takes batches reads them by itself
            time.sleep(2e-3)
    assert len(delivered) == 3
    assert soon(lambda: not threads())


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetch_lets_a_static_program_be_built_meanwhile(workers):
    """Paddle's mode is a thread's own, from the one that it is started in."""
    expected = [rows(batch) for batch in sharded(Rows(100))]
    found, batches = (
        [],
        iter(sharded(Rows(100, seconds=0.001), workers=workers, prefetch=2)),
    )
    for step, batch in enumerate(batches):
        found.append(rows(batch))
        if step % 3 == 2:
            paddle.enable_static()
            try:
                time.sleep(0.02)  # in which the thread would go on
            finally:
                paddle.disable_static()
    assert found == expected


@pytest.mark.parametrize("draw", [np.random.rand, random.random])
def test_prefetch_goes_on_while_a_sampler_draws(draw):
    """Its numbers are private: it draws none of the training loop's."""

    class Sampler(paddle.io.BatchSampler):
        def __init__(self):
            self.batch_size, self.drop_last = 4, True

        def __iter__(self):
            for _ in range(40):
                first = int(draw() * 60)
                time.sleep(0.002)
                yield list(range(first, first + 4))

        def __len__(self):
            return 40

    def trace(dataset, prefetch):
        given = paddle.io.DataLoader(dataset, batch_sampler=Sampler())
        return [
            rows(batch)
            for batch in paddle_shard.shard_dataloader(
                given, ONE, shard_dims="dp", prefetch=prefetch
            )
        ]

    dataset = Rows(seconds=0.001)
    assert trace(dataset, 2) == trace(Rows(), 0)
    assert len(set(dataset.threads)) == 2


def evaluated(training, evaluation, after, prefetch=None):
    """Rows of evaluations between the steps of an open training loop."""
    loader = sharded(training, size=8, prefetch=prefetch, shuffle=False)
    other, found = (
        sharded(evaluation, size=8, prefetch=prefetch, shuffle=False),
        [],
    )
    for step, _ in enumerate(loader):
        time.sleep(0.005)
        if step in after:
            other.set_epoch(step)
            found += [rows(batch) for batch in other]
    return found


def test_prefetch_gives_an_evaluation_its_own_numbers():
    def augment(index):
        first = np.random.rand()
        time.sleep(0.001)
        return np.array([index, first, np.random.rand()])

    def slow(index):
        time.sleep(0.002)
        return np.array([index])

    training, evaluation = Made(slow, 80), Made(augment, 64)
    assert evaluated(training, evaluation, [0, 1, 2]) == evaluated(
        training, evaluation, [0, 1, 2], prefetch=0
    )
