"""What is promised of a pass that a thread reads ahead; `tests/faults` ends it in real processes."""

import functools
import gc
import linecache
import multiprocessing
import os
import pkgutil
import random
import signal
import sqlite3
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard import Stream
from paddle_shard.agree import AloneAgreement, Coordinator
from paddle_shard.delivery.prefetch import Ahead, DrawnAhead
from paddle_shard.delivery.step_pass import StepPass
from paddle_shard.errors import ArgumentError, DataReadError
from paddle_shard.reading import pace
from paddle_shard.reading.pace import QUICK, Pace, steps_ahead
from paddle_shard.reading.passes import Pass
from paddle_shard.reading.request import ReadRequest
from paddle_shard.reading.workers import WorkerPool
from tests.deadlines import HANG
from tests.helpers import Made

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


def sharded(dataset, *, size=4, workers=0, **options):
    given = paddle.io.DataLoader(dataset, batch_size=size, num_workers=workers, shuffle=not isinstance(dataset, Stream))
    return paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", **options)


def rows(tensor):
    return tensor._local_value().numpy().tolist()  # in Paddle 3.0 a distributed tensor's own is a collective


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "paddle_shard-prefetch"]


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

    assert main in quiet.threads  # the first batch is watched
    assert len(set(quiet.threads)) == 2
    assert set(drawing.threads) == {main}


def test_a_training_loop_that_draws_gets_the_same_numbers_and_the_same_batches():
    class Rarely(Rows):
        def __getitem__(self, index):
            self.draws = index > 40
            return super().__getitem__(index)

    def trace(dataset, prefetch):
        np.random.seed(5)
        found = []
        for batch in sharded(dataset, prefetch=prefetch):
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
        monkeypatch.setattr(pace, "QUICK", limit)
        batches = iter(sharded(dataset))
        for _ in range(8):
            next(batches)
        batches.close()
    monkeypatch.setattr(pace, "QUICK", QUICK)
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

    def noted(pool, requests):
        start(pool, requests)
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
    def work(free):
        raise RuntimeError("broken")

    ahead = Ahead(work, lambda: True)
    ahead.start()
    with pytest.raises(RuntimeError, match="broken"):
        ahead.need(1, 3)


def test_steps_read_ahead_for_the_agreement_are_more_where_they_are_quick_and_small_and_never_many_bytes():
    for least in (1, 2, 8):
        for seconds in (1e-5, 2e-4, 0.004, 0.05, 60.0):
            for num_bytes in (0, 1000, 1 << 20, 1 << 30):
                found = steps_ahead(least, seconds, num_bytes)
                assert found >= least
                assert found == least or found * num_bytes <= 8 << 20
                assert found <= 32
    assert steps_ahead(2, 0.05, 1000) == 2
    assert steps_ahead(2, 1e-4, 1000) == 32


class One:
    """A group of one rank, which agrees by the same rules as several."""

    rank, size, names, timeout = 0, 1, (0,), 0.0

    def absent(self):
        return ()

    def minimum(self, values):
        return list(values)

    def gather(self, payload):
        return [payload]

    def close(self):
        pass


def agreement_of_one(prefetch):
    return Coordinator(One(), timeout=HANG).open(prefetch, ends_must_agree=True, name="test")


class Enough(Exception):
    """What a handler raises."""


def enough(*args):
    raise Enough


class Caller:
    def __call__(self, number, frame):
        raise Enough


@pytest.fixture(params=[enough, functools.partial(enough, "more"), Caller()], ids=["function", "partial", "object"])
def handled(request):
    before = signal.signal(signal.SIGUSR1, request.param)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def test_what_a_handler_raises_is_raised_at_once_and_not_at_a_later_step(handled):
    def reading():
        for step in range(50):
            if step == 5:
                signal.raise_signal(handled)
            yield step, SimpleNamespace(num_bytes=1 << 20)

    class Sampler(paddle.io.BatchSampler):
        def __init__(self):
            self.batch_size, self.drop_last = 4, True

        def __iter__(self):
            for step in range(16):
                if step == 5:
                    signal.raise_signal(handled)
                yield list(range(4 * step, 4 * step + 4))

        def __len__(self):
            return 16

    agreement = agreement_of_one(8)
    given = paddle.io.DataLoader(Rows(), batch_sampler=Sampler())
    for batches in (
        StepPass(reading(), agreement),
        paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", prefetch=4),
    ):
        delivered = []
        with pytest.raises(Enough):
            for batch in batches:
                delivered.append(batch)
        assert len(delivered) < 4
    assert soon(lambda: not threads())


def interrupted_at(line, work, number, room):
    """Do some work, in which a signal comes at the n-th line that is run of a room; return (where, error)."""
    lines, library, process, where, error = 0, os.path.dirname(paddle_shard.__file__), os.getpid(), None, None
    room = os.path.join(library, room)

    def at_line(frame, event, _):
        nonlocal lines, where
        path, caller = frame.f_code.co_filename, frame
        if not path.startswith(room) or os.getpid() != process:
            return None
        while caller is not None and event == "call":
            if caller.f_code.co_name == "__del__":  # out of which nothing comes
                return None
            caller = caller.f_back
        # No handler runs where a `with` block is left, before its lock is.
        if event == "line" and not linecache.getline(path, frame.f_lineno).lstrip().startswith("with "):
            lines += 1
            if lines == line:
                sys.settrace(None)
                where = f"{os.path.relpath(path, library)}:{frame.f_lineno}"
                signal.raise_signal(number)
        return at_line

    sys.settrace(at_line)
    try:
        work()
    except BaseException as raised:  # not kept: its frames hold the iterator, which is to end without a collection
        error = type(raised)
    finally:
        sys.settrace(None)
    return where, error


class Doubled(paddle.io.IterableDataset):
    def __iter__(self):
        return iter([np.array([i, 2 * i]) for i in range(64)])


@pytest.mark.parametrize(
    ("workers", "stream", "room", "every"),
    [(0, False, "", 17), (0, True, "", 61), (2, False, "", 151), (2, True, "", 211), (0, False, "position", 1)],
)
def test_what_a_handler_raises_at_any_line_comes_out_as_itself_and_leaves_all_as_it_should_be(
    workers, stream, room, every
):
    before, handlers = signal.signal(signal.SIGUSR1, enough), None
    try:
        given = paddle.io.DataLoader(Doubled() if stream else Rows(), batch_size=8, num_workers=workers)

        def made():
            return paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", **({} if stream else {"prefetch": 2}))

        def work():
            batches = iter(loader)
            for _ in range(3):
                next(batches)
            batches.close()

        loader = made()
        work()  # what is done once
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        at, where = 1, "the beginning"
        while where is not None:
            loader = made()
            where, error = interrupted_at(at, work, signal.SIGUSR1, room)
            assert error is (None if where is None else Enough), (where, error)
            if threads() or multiprocessing.active_children():
                gc.collect()  # what was cut off before anything held it may be a circle
            assert soon(lambda: not threads() and not multiprocessing.active_children()), where
            assert {number: signal.getsignal(number) for number in handlers} == handlers, where
            assert sorted(row[0] for batch in loader for row in rows(batch)) == list(range(64)), where
            at += every
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("place", ["threading.Thread.start", "paddle_shard.reading.chunk.Joiner.join"])
@pytest.mark.parametrize("first", [True, False])
def test_what_a_handler_raises_while_a_thread_starts_or_rows_are_joined_comes_out(handled, place, first, monkeypatch):
    owner, name = pkgutil.resolve_name(place.rpartition(".")[0]), place.rpartition(".")[2]
    original = getattr(owner, name)

    def interrupted(self, *args):
        if first:
            signal.raise_signal(handled)
        found = original(self, *args)
        signal.raise_signal(handled)
        return found

    data, options = (Rows(), {"prefetch": 2}) if "Thread" in place else (Doubled(), {})
    given = paddle.io.DataLoader(data, batch_size=8, num_workers=0 if "Thread" in place else 2)
    loader = paddle_shard.shard_dataloader(given, ONE, shard_dims="dp", **options)
    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(Enough):
        list(loader)
    monkeypatch.undo()

    assert soon(lambda: not threads() and not multiprocessing.active_children())
    assert len(list(loader)) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_a_description_that_a_handler_has_cut_off_loses_no_batch(handled, workers, monkeypatch):
    from paddle_shard.loader.iteration import describe

    def interrupted(self, chunks):
        signal.raise_signal(handled)

    given = paddle.io.DataLoader(Doubled(), batch_size=8, num_workers=workers)
    loader = paddle_shard.shard_dataloader(given, ONE, shard_dims="dp")
    monkeypatch.setattr("paddle_shard.reading.chunk.Joiner.join", interrupted)
    with pytest.raises(Enough):
        describe(loader._first_batch)
    monkeypatch.undo()

    assert not multiprocessing.active_children()
    assert [row[0] for batch in loader for row in rows(batch)] == list(range(64))


@pytest.mark.parametrize(("in_bursts", "seconds"), [(True, 0.0), (False, 0.0), (True, 0.003)])
def test_quick_steps_are_read_several_at_a_time_and_slow_ones_one_by_one(in_bursts, seconds, monkeypatch):
    steps, ahead, read, now = 200, 8, [], 0.0
    monkeypatch.setattr("paddle_shard.reading.pace.time", SimpleNamespace(perf_counter=lambda: now))

    class Reading(Pass):
        def __next__(self):
            if len(read) == steps:
                raise StopIteration
            read.append(len(read))
            return read[-1], SimpleNamespace(num_bytes=1 << 20)  # of which 8 are held at most

        def close(self):
            pass

    agreement = agreement_of_one(ahead)
    batches, calls, delivered = StepPass(Reading(), agreement, in_bursts=in_bursts), [], []
    for step, _ in batches:
        delivered.append(step)
        calls.append(len(read))
        now += max(seconds, 1e-5)

    assert delivered == list(range(steps))
    assert all(count - step in range(1, ahead + 1) for step, count in enumerate(calls))
    settled = np.diff([count for count in calls[2 * ahead :] if count < steps])
    if in_bursts and not seconds:
        assert max(settled) > ahead // 4
        assert np.count_nonzero(settled) < 0.5 * len(settled)
    else:
        assert set(settled) == {1}


@pytest.mark.parametrize(("seconds", "quick"), [(0.001, QUICK), (0.0, 60.0)])
@pytest.mark.parametrize("alone", [False, True])
def test_slow_reads_get_a_thread_by_default(seconds, quick, alone, monkeypatch):
    monkeypatch.setattr("paddle_shard.reading.pace.QUICK", quick)
    dataset = Rows(400, seconds=seconds)
    reading_of = sharded(dataset)._reading
    drawn = DrawnAhead(ReadRequest(0, step, [*range(4 * step, 4 * step + 4)], False, 0, True) for step in range(100))
    batches = StepPass(
        reading_of.start(drawn),
        AloneAgreement() if alone else agreement_of_one(2),
        prepare=lambda batch: (batch.numpy()[:, 0].tolist(), SimpleNamespace(num_bytes=64)),
        in_bursts=True,
        prefetch=2,
        if_worth_it=True,
        draw=drawn.draw,
    )
    delivered = [row for rows_of_batch, _ in batches for row in rows_of_batch]

    assert delivered == dataset.read == list(range(400))
    others = {thread for thread in dataset.threads if thread is not threading.current_thread()}
    assert len(others) == (1 if seconds else 0)


def test_a_thread_stays_whose_caller_has_done_a_quick_step(monkeypatch):
    """Where the caller has to do one of its steps, and that is quick."""
    done, free = [], True

    def work(beside):
        time.sleep(0.0 if len(done) >= 3 else 0.4)
        done.append(beside)
        return True

    of_caller = Pace()
    monkeypatch.setattr("paddle_shard.reading.pace.QUICK", 0.2)
    ahead = Ahead(work, lambda: free, of_caller)
    try:
        for count in range(1, 4):
            assert not ahead.start()
            ahead.need(count, count)
        assert ahead.start()
        ahead.need(4, 4)
        free = False
        ahead.need(5, 5)
        free = True
        assert done == [False, False, False, True, False]
        assert of_caller.reads_quickly
        assert ahead.start()
    finally:
        ahead.stop()


def test_one_thread_announces(monkeypatch):
    """Else the other could announce between a thread's noting that a step is ready and its saying so."""
    by, announce = set(), AloneAgreement.announce_ok

    def noted(agreement, *steps):
        by.add(threading.current_thread().name)
        announce(agreement, *steps)

    def slowly(self):
        time.sleep(0.0005)
        say(self)

    say = StepPass._say
    monkeypatch.setattr(StepPass, "_say", slowly)
    monkeypatch.setattr(AloneAgreement, "announce_ok", noted)
    stream = Stream.of(lambda: (np.array([number]) for number in range(256)))
    found = [row for batch in sharded(stream, workers=1, prefetch=3) for (row,) in rows(batch)]

    assert found == list(range(256))
    assert by == {"paddle_shard-prefetch"}


def test_workers_that_pause_are_not_waited_for_while_batches_are_ready():
    class Reading(Pass):
        """Whose workers pause after step 20; asking for more would block."""

        step, paused = 0, False

        def at_hand(self, count=1):
            return not self.paused

        def __next__(self):
            assert not self.paused
            self.step += 1
            if self.step == 60:
                raise StopIteration
            return self.step - 1, SimpleNamespace(num_bytes=1 << 30)

        def close(self):
            pass

    reading, ahead = Reading(), 8
    agreement = agreement_of_one(ahead)
    batches, delivered = StepPass(reading, agreement), []
    for step, _ in batches:
        delivered.append(step)
        reading.paused = 20 <= step < 20 + ahead // 2 - 1

    assert delivered == list(range(59))


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
def test_a_loop_that_draws_gets_its_own_numbers_from_beside_samples_that_draw_now_and_then(prefetch, draw):
    def sample(index):
        time.sleep(0.001)  # so that a thread pays off
        return np.array([index, draw() if index >= 40 else 0.0])

    loader = sharded(Made(sample, 80), prefetch=prefetch)
    np.random.seed(1)
    random.seed(1)
    found = []
    for _ in loader:
        time.sleep(0.002)
        found.append(draw())
    np.random.seed(1)
    random.seed(1)
    assert found == [draw() for _ in range(20)]
