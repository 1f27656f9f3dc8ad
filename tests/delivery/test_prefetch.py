"""What is promised of a pass that a thread reads ahead; `tests/faults` ends it in real processes."""

import gc
import os
import random
import sqlite3
import threading
import time
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.delivery import begin, placing
from paddle_shard.delivery.step_pass import Feed, StepPass
from paddle_shard.errors import ArgumentError, DataReadError, PeerLostError
from paddle_shard.plan.step import Step
from paddle_shard.ranks.agreement import AloneAgreement, Coordinator
from paddle_shard.ranks.verdict import Terms
from paddle_shard.reading import prefetcher
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.executor import Executor
from paddle_shard.reading.prefetcher import QUICK, Prefetcher
from paddle_shard.reading.workers import WorkerPool
from tests.deadlines import HANG
from tests.helpers import Made
from tests.ranks.simulated_group import end

ALONE = {"ends_must_agree": True, "facts": {}, "name": "test", "timeout": HANG, "on_lost": "raise"}
ONE = dist.ProcessMesh([0], dim_names=["dp"])


class Rows(paddle.io.Dataset):
    """Notes by which thread each sample was read."""

    def __init__(self, length=64, *, draws=False, fails_at=None, seconds=0.0):
        self.length, self.draws, self.fails_at, self.seconds = length, draws, fails_at, seconds
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
    given = paddle.io.DataLoader(dataset, batch_size=size, num_workers=workers, shuffle=shuffle)
    return paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", **options)


def rows(tensor):
    return tensor._local_value().numpy().tolist()  # in Paddle 3.0 a distributed tensor's own is a collective


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "paddle_shard-prefetch"]


def steps(count):
    """Of four rows each."""
    for number in range(count):
        ids = range(4 * number, 4 * number + 4)
        yield Step(epoch=0, number=number, num_rows=4, micro_size=4, num_real=4, ids=[*ids])


class Numbers(Executor):
    """Gives the number of each step, after a call with it."""

    depth = 8

    def __init__(self, call=lambda number: None):
        self.call, self.submitted, self.threads = call, [], []

    def submit(self, step):
        self.submitted.append(step)

    def take(self, *, beside=False):
        if not self.submitted:
            raise StopIteration
        step = self.submitted.pop(0)
        self.threads.append(threading.current_thread())
        self.call(step.number)
        return Batch(step=step, value=step.number, real=None)

    def ready(self):
        return True

    def close(self, *, ended=False):
        pass


def step_pass(executor, agreement, count, **options):
    """A pass that places nothing."""
    feed = Feed(steps(count))
    feed.executor = executor
    return StepPass(feed, agreement, place=options.pop("place", lambda batch: batch), **options)


def soon(condition, seconds=HANG):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("kind", ["index", "draws", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_and_states_are_the_same_at_every_step(kind, workers):
    def make(prefetch):
        dataset = Stream.of(lambda: ({"x": float(i)} for i in range(61))) if kind == "stream" else Rows(61)
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
    for prefetch in (1, 3):
        assert trace(make(prefetch)) == expected
        assert resumed(prefetch, expected[6][2]) == gone_on
    assert not threads()


@pytest.mark.parametrize("workers", [0, 2])
def test_no_more_is_read_ahead_than_was_asked_for(workers):
    dataset = Rows(400)
    batches = iter(sharded(dataset, workers=workers, prefetch=3))
    for step in range(1, 12):
        next(batches)
        time.sleep(0.02)
        if not workers:
            assert len(dataset.read) <= 4 * (step + 3)
    if not workers:
        assert soon(lambda: len(dataset.read) == 4 * (11 + 3))
    batches.close()


def test_a_data_set_that_draws_is_read_on_the_callers_thread_and_the_others_beside_it():
    quiet, drawing = Rows(), Rows(draws=True)
    for dataset in (quiet, drawing):
        for _ in sharded(dataset, prefetch=2):
            pass
    main = threading.main_thread()

    assert [thread is main for thread in quiet.threads] == [True] * 4 + [False] * 60  # the first batch is watched
    assert len(set(quiet.threads)) == 2
    assert set(drawing.threads) == {main}


class OneMemory(Rows):
    """Gives the same array and the same tensor for every batch."""

    def __init__(self):
        super().__init__()
        self.array, self.tensor = np.zeros(8, "int64"), paddle.zeros([8], "int64")

    def __getitems__(self, indices):
        self.array[:] = indices
        paddle.assign(self.array, self.tensor)
        return self.array, self.tensor

    def __getitem__(self, index):  # a few samples are read again, for ranks to compare them
        array, tensor = self.__getitems__([index])
        return array[0], tensor[0]


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"prefetch": 2}], ids=str)
def test_a_data_set_may_use_its_memory_again_for_the_next_batch(options):
    given = paddle.io.DataLoader(OneMemory(), batch_size=8)
    held = list(paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", **options))

    for field in range(2):
        assert [row for batch in held for row in batch[field]._local_value().numpy().tolist()] == list(range(64))


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
def test_a_data_set_may_use_the_memory_of_samples_again_also_where_a_run_resumes(workers):
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


def test_a_training_loop_that_draws_gets_the_same_numbers_and_the_same_batches():
    class Rarely(Rows):
        def __getitem__(self, index):
            self.draws = index > 40
            return super().__getitem__(index)

    def trace(dataset, prefetch):
        np.random.seed(5)
        found = []
        for batch in sharded(dataset, prefetch=prefetch, shuffle=False):
            found.append((rows(batch), np.random.rand(100).sum()))
        return found

    assert trace(Rows(), 2) == trace(Rows(), 0)
    assert [batch for batch, _ in trace(Rarely(), 2)] == [batch for batch, _ in trace(Rarely(), 0)]


def test_what_only_the_thread_can_use_that_made_it_is_used_there():
    class Table(Rows):
        connection = None

        def __getitem__(self, index):
            if self.connection is None:
                self.connection = sqlite3.connect(":memory:")
            (found,) = self.connection.execute("select ?", (index,)).fetchone()
            return np.array([found])

    dataset = Table()
    found = np.concatenate([batch._local_value().numpy() for batch in sharded(dataset, prefetch=2)])
    dataset.connection.close()

    assert sorted(found.ravel().tolist()) == list(range(64))


def test_slow_reads_get_a_thread_without_asking_and_quick_ones_do_not(monkeypatch):
    slow, quick = Rows(seconds=0.002), Rows()
    for dataset, limit in ((slow, QUICK), (quick, 60.0)):  # on a busy machine none takes less than a millisecond
        monkeypatch.setattr(prefetcher, "QUICK", limit)
        batches = iter(sharded(dataset))
        for _ in range(8):
            next(batches)
        batches.close()
    monkeypatch.setattr(prefetcher, "QUICK", QUICK)
    given = paddle.io.DataLoader(Rows(seconds=0.002), batch_size=4, use_buffer_reader=False)
    for _ in paddle_shard.shard_dataloader(given, ONE, shard_dims="dp"):
        pass

    assert len(set(slow.threads)) == 2
    assert set(quick.threads) == set(given.dataset.threads) == {threading.main_thread()}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failure_is_raised_at_its_own_step(workers):
    expected, delivered = [], []
    for _ in range(2):
        for prefetch, found in ((0, expected), (3, delivered)):
            loader = sharded(Rows(fails_at=33), workers=workers, prefetch=prefetch)
            with pytest.raises(DataReadError, match="sample 33 is bad") as raised:
                for batch in loader:
                    found.append(rows(batch))
            found.append((raised.value.step, raised.value.index))
    assert delivered == expected
    assert soon(lambda: not threads())


ENDINGS = {
    "exhaustion": lambda loader: list(loader),
    "break": lambda loader: next(iter(loader)),
    "close": lambda loader: [(batches := iter(loader)), next(batches), batches.close()],
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
def test_nothing_is_left_behind(ending, workers, monkeypatch):
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
            if len(self.read) >= 8:
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

    pairs = [(rows(one), rows(two)) for one, two in zip(loader, loader, strict=True)]

    assert [one for one, _ in pairs] == [two for _, two in pairs] == expected


def test_a_loader_of_a_users_own_iteration_is_not_read_by_a_thread():
    class Own(paddle.io.DataLoader):
        def __iter__(self):
            yield from super().__iter__()

    with pytest.raises(ArgumentError, match=r"prefetch=2: the Own has an __iter__ of its own"):
        paddle_shard.shard_dataloader(Own(Rows(), batch_size=4), ONE, shard_dims="dp", prefetch=2)
    for value in (-1, True, 1.5, "2"):
        with pytest.raises(ArgumentError, match="prefetch must be None or an int >= 0"):
            sharded(Rows(), prefetch=value)


def test_a_thread_whose_work_is_broken_does_not_leave_the_caller_waiting():
    def broken(number):
        if number == 3:
            raise RuntimeError("broken")

    ahead = Prefetcher(Numbers(broken), 3, always=True, elsewhere=False)
    for step in steps(6):
        ahead.submit(step)
    assert [ahead.take().value for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="broken"):
        ahead.take()
    ahead.close()
    assert soon(lambda: not threads())


class One:
    """A group of one rank, which agrees by the same rules as several."""

    rank, size, names, timeout, closed = 0, 1, (0,), 0.0, False

    def absent(self):
        return ()

    def minimum(self, values):
        if self.closed:
            raise PeerLostError("This rank has left.")
        return list(values)

    def gather(self, payload):
        return [payload]

    def close(self):
        self.closed = True


MADE = []


@pytest.fixture(autouse=True)
def no_coordinator_left():
    yield
    while MADE:
        end(MADE.pop())


def agreement_of_one(prefetch):
    MADE.append(Coordinator(One(), timeout=HANG, end_process=lambda: None))
    return MADE[-1].open(Terms(ends_must_agree=True, name="test"))


@pytest.mark.parametrize(("seconds", "quick"), [(0.001, QUICK), (0.0, 60.0)])
@pytest.mark.parametrize("alone", [False, True])
def test_slow_reads_get_a_thread_by_default(seconds, quick, alone, monkeypatch):
    monkeypatch.setattr(prefetcher, "QUICK", quick)
    dataset = Rows(400, seconds=seconds)
    reading = sharded(dataset)._shared.setup.reading
    reading = reading.start(lambda: False, reading.core(), lambda batch: None)
    batches = step_pass(
        Prefetcher(reading, 2, always=False, elsewhere=False),
        AloneAgreement() if alone else agreement_of_one(2),
        100,
        num_steps=100,
    )
    delivered = [row for batch in batches for row in batch.value.numpy()[:, 0].tolist()]

    assert delivered == dataset.read == list(range(400))
    others = {thread for thread in dataset.threads if thread is not threading.current_thread()}
    assert len(others) == (1 if seconds else 0)


@pytest.mark.parametrize(
    ("seconds", "first"),
    [
        ([0.0009] * 20, None),
        ([0.0011] * 20, 2),
        ([0.05] + [0.0001] * 19, None),  # the first one, at which more is done
        ([0.0001] * 10 + [0.0021] * 10, 11),
        ([0.0001] * 10 + [0.0015] + [0.0001] * 9, None),  # a single read that is slower
    ],
)
def test_a_thread_starts_once_the_last_reads_took_a_millisecond_on_average(seconds, first, monkeypatch):
    now = 0.0

    def pass_time(number):
        nonlocal now
        now += seconds[number]

    monkeypatch.setattr(prefetcher, "time", SimpleNamespace(perf_counter=lambda: now))
    numbers = Numbers(pass_time)
    batches = step_pass(Prefetcher(numbers, 2, always=False, elsewhere=False), AloneAgreement(), 20)

    assert [batch.value for batch in batches] == list(range(20))
    by_caller = [thread is threading.current_thread() for thread in numbers.threads]
    assert by_caller == [first is None or number < first for number in range(20)]


class Sized(Numbers):
    """Batches of 1000 bytes each."""

    def take(self, *, beside=False):
        found = super().take(beside=beside)
        found.num_bytes = 1000
        return found


@pytest.mark.parametrize(("most", "always", "ahead"), [(2000, False, 2), (1999, False, 1), (1, False, 1), (1, True, 2)])
def test_fewer_batches_are_kept_ready_where_they_are_large_unless_the_user_has_said_how_many(
    most, always, ahead, monkeypatch
):
    monkeypatch.setattr(prefetcher, "MOST_BYTES", most)
    monkeypatch.setattr(prefetcher, "QUICK", 0.0)
    numbers = Sized(lambda number: None)
    batches = step_pass(Prefetcher(numbers, 2, always=always, elsewhere=False), AloneAgreement(), 20)
    for _ in range(5):
        next(batches)
    soon(lambda: len(numbers.threads) == 5 + ahead)
    time.sleep(0.05)

    assert len(numbers.threads) == 5 + ahead
    batches.close()


def test_what_workers_read_is_taken_by_a_thread_once_having_it_here_takes_a_millisecond(monkeypatch):
    """Waiting for them does not count: a thread would wait as well."""
    now = 0.0

    def pass_time(number):
        nonlocal now
        now += 0.0001 if number < 10 else 0.0021

    monkeypatch.setattr(prefetcher, "time", SimpleNamespace(perf_counter=None, thread_time=lambda: now))
    numbers = Numbers(pass_time)
    batches = step_pass(Prefetcher(numbers, 2, always=False, elsewhere=True), AloneAgreement(), 20)

    assert [batch.value for batch in batches] == list(range(20))
    assert [thread is threading.current_thread() for thread in numbers.threads] == [number < 11 for number in range(20)]


@pytest.mark.parametrize("kind", ["index", "stream"])
def test_only_the_callers_thread_places_and_announces(kind, monkeypatch):
    """Else a step could be announced before it is noted what is to be said of it."""
    by, announce, place = [], AloneAgreement.announce, placing.placed

    def noted(agreement, *kind, **what):
        by.append(threading.current_thread())
        announce(agreement, *kind, **what)

    def also_noted(setup, batch):
        by.append(threading.current_thread())
        return place(setup, batch)

    monkeypatch.setattr(AloneAgreement, "announce", noted)
    monkeypatch.setattr(begin, "placed", also_noted)
    monkeypatch.setattr(placing, "placed", also_noted)
    stream = Stream.of(lambda: (np.array([number]) for number in range(256)))
    loader = sharded(stream, workers=1, prefetch=3) if kind == "stream" else sharded(Rows(256), prefetch=3)
    found = []
    for batch in loader:
        found += [int(row[0]) for row in rows(batch)]
        found[0] or time.sleep(0.001)  # in which the thread goes on

    assert sorted(found) == list(range(256))
    assert len(by) >= 2 * 64
    assert set(by) == {threading.main_thread()}


def test_workers_that_pause_are_not_waited_for_while_batches_are_ready():
    class Pausing(Numbers):
        """Whose workers pause after step 20; asking for more would block."""

        paused = False

        def ready(self):
            return not self.paused

        def take(self, *, beside=False):
            assert not self.paused
            return super().take(beside=beside)

    reading, ahead = Pausing(), 8
    batches, delivered = step_pass(reading, agreement_of_one(ahead), 59), []
    for batch in batches:
        delivered.append(batch.value)
        reading.paused = 20 <= batch.value < 20 + ahead // 2 - 1

    assert delivered == list(range(59))


@pytest.mark.parametrize("by_loop", [True, False])
def test_what_drew_while_a_thread_read_is_said_once_and_the_caller_reads_from_there_on(by_loop, monkeypatch, caplog):
    monkeypatch.setattr("paddle_shard.say_once._SAID", set())
    reached, drawn = threading.Event(), threading.Event()

    def sample(index):
        by.setdefault(index // 4, []).append(threading.current_thread() is threading.main_thread())
        if index == 21 and not reached.is_set():
            reached.set()
            assert drawn.wait(HANG)
        return np.array([index, 0.0 if by_loop or index < 21 else np.random.rand()])

    def trace(prefetch):
        np.random.seed(3)
        found, numbers = [], []
        for step, batch in enumerate(sharded(Made(sample, 64), prefetch=prefetch, shuffle=False)):
            found.append(rows(batch))
            if step == 4:
                if prefetch:
                    assert reached.wait(HANG)
                if by_loop:
                    numbers.append(np.random.rand())
                drawn.set()
        return found, numbers, np.random.rand()

    by = {}
    drawn.set()
    expected = trace(0)
    reached.clear()
    drawn.clear()
    by.clear()
    with caplog.at_level("WARNING"):
        assert trace(2) == expected

    assert [by[step] for step in range(5)] == [[True] * 4] + [[False] * 4] * 4
    tried = by[5].index(True)
    assert not any(by[5][:tried])
    assert all(by[5][tried:])
    assert all(by_caller for step in range(6, 16) for by_caller in by[step])
    assert caplog.text.count("while a thread read ahead") == 1
    assert not threads()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_static_program_may_be_built_meanwhile(workers):
    """Paddle's mode is a thread's own, from the one that it is started in."""
    expected = [rows(batch) for batch in sharded(Rows(100))]
    found, batches = [], iter(sharded(Rows(100, seconds=0.001), workers=workers, prefetch=2))
    for step, batch in enumerate(batches):
        found.append(rows(batch))
        if step % 3 == 2:
            paddle.enable_static()
            try:
                time.sleep(0.02)  # in which the thread would go on
            finally:
                paddle.disable_static()
    assert found == expected


@pytest.mark.parametrize("prefetch", [None, 1, 3])
@pytest.mark.parametrize("draw", [np.random.rand, random.random])
@pytest.mark.parametrize("seconds", [0.002, 0.03], ids=["while a thread reads", "while it waits"])
def test_a_loop_that_draws_gets_its_own_numbers_from_beside_samples_that_draw_now_and_then(prefetch, draw, seconds):
    def sample(index):
        time.sleep(0.001)  # so that a thread pays off
        return np.array([index, draw() if index >= 40 else 0.0])

    loader = sharded(Made(sample, 80), prefetch=prefetch, shuffle=False)
    np.random.seed(1)
    random.seed(1)
    found = []
    for _ in loader:
        time.sleep(seconds)
        found.append(draw())
    np.random.seed(1)
    random.seed(1)
    assert found == [draw() for _ in range(20)]


def test_a_thread_that_waits_sees_that_the_loop_has_drawn_before_it_reads_what_draws():
    read, numbers = [], []

    def sample(index):
        read.append(index)
        return np.array([index, np.random.rand() if index >= 24 else 0.0])

    np.random.seed(1)
    for step, _ in enumerate(sharded(Made(sample, 64), prefetch=2, shuffle=False)):
        if step == 3:
            assert soon(lambda: len(read) == 24)
        if step >= 3:
            numbers.append(np.random.rand())
            time.sleep(0.01)  # in which the thread would go on
    np.random.seed(1)
    assert numbers == [np.random.rand() for _ in numbers]


@pytest.mark.parametrize("draw", [np.random.rand, random.random])
def test_a_sampler_that_draws_while_a_thread_reads_does_not_stop_it(draw, monkeypatch, caplog):
    """Its numbers are private: it draws none of the training loop's."""
    monkeypatch.setattr("paddle_shard.say_once._SAID", set())

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
        return [rows(batch) for batch in paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", prefetch=prefetch)]

    dataset = Rows(seconds=0.001)
    with caplog.at_level("WARNING"):
        assert trace(dataset, 2) == trace(Rows(), 0)
    assert dataset.threads.count(threading.main_thread()) == 4
    assert "while a thread read ahead" not in caplog.text


# One look a batch


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("workers", [0, 1])
def test_whenever_samples_and_the_loop_begin_to_draw_each_has_its_own_numbers(seed, workers):
    """Some samples draw, by their number, and the loop does between some batches, from generators of their choice."""
    choose = random.Random(seed)
    draws = [np.random.rand, random.random, lambda: float(paddle.rand([]))]
    by = {i: choose.choice(draws) for i in choose.sample(range(80), choose.choice([0, 0, 3, 40])) if i >= 8}
    loops = {step: choose.choice(draws) for step in choose.sample(range(20), choose.choice([0, 1, 4, 20]))}
    # Both begin between the same two batches: what the loop has drawn there is drawn again.
    first = min((i // 4 for i in by), default=99)
    loops.pop(first - 1, None)

    def sample(index):
        return np.array([index, by[index]() if index in by else 0.5])

    def begin():
        np.random.seed(3), random.seed(3), paddle.seed(3)

    def trace(loops):
        begin()
        found, own = [], []
        for step, batch in enumerate(sharded(Made(sample, 80), workers=workers, prefetch=0, shuffle=False)):
            found.append(rows(batch))
            if step in loops:
                own.append(loops[step]())
        return found, own

    batches, own = trace(loops)

    assert batches == trace({})[0]
    begin()
    assert own == [draw() for draw in loops_in_order(loops)]


def loops_in_order(loops):
    return [loops[step] for step in sorted(loops)]


def test_a_loop_that_draws_costs_one_batch_that_is_read_twice_a_pass():
    dataset = Rows(40)
    loader = sharded(dataset, prefetch=0, shuffle=False)
    for _ in range(2):
        for _ in loader:
            np.random.rand()
    assert len(dataset.read) == 2 * (40 + 4)


def evaluated(training, evaluation, after, prefetch=None):
    """Rows of evaluations between the steps of an open training loop."""
    loader = sharded(training, size=8, prefetch=prefetch, shuffle=False)
    other, found = sharded(evaluation, size=8, prefetch=prefetch, shuffle=False), []
    for step, _ in enumerate(loader):
        time.sleep(0.005)
        if step in after:
            other.set_epoch(step)
            found += [rows(batch) for batch in other]
    return found


def test_an_evaluation_inside_a_training_loop_stops_no_thread(monkeypatch, caplog):
    """Its first batch is seeded, which is not drawing."""
    monkeypatch.setattr("paddle_shard.say_once._SAID", set())

    def sample(index):
        time.sleep(0.002)
        return np.array([index])

    evaluated(Made(sample, 240), Made(sample, 40), [2, 5, 8])

    assert "was drawn from" not in caplog.text


def test_an_evaluation_that_draws_beside_training_data_that_begins_to_draw_has_its_own_numbers():
    def crop(index):
        began, drawn = time.perf_counter(), 0.0
        while time.perf_counter() < began + 0.01:
            drawn = np.random.rand() if index >= 16 else 0.0
            time.sleep(0.0003)
        return np.array([drawn])

    def augment(index):
        first = np.random.rand()
        time.sleep(0.001)
        return np.array([index, first, np.random.rand()])

    training, evaluation = Made(crop, 80), Made(augment, 64)
    assert evaluated(training, evaluation, [0, 1, 2]) == evaluated(training, evaluation, [0, 1, 2], prefetch=0)


def test_samples_that_wait_for_a_thread_of_another_loader_are_read(monkeypatch):
    """The thread waits for those that are seeded, and gives up."""
    monkeypatch.setattr("paddle_shard.randomness._LONGEST", 0.2)

    def slow(index):
        time.sleep(0.002)
        return np.array([index])

    inner = iter(sharded(Made(slow, 160), prefetch=2, shuffle=False))
    next(inner)

    def nested(index):
        np.random.rand()
        return np.array(rows(next(inner))[0])

    loader = sharded(Made(nested, 8), prefetch=0, shuffle=False, verify=None)
    assert [row for batch in loader for row in rows(batch)] == [[number] for number in range(4, 36, 4)]
