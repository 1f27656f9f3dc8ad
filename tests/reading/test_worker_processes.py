"""What the worker processes of a loader are told, how long they live, and what becomes of the killed."""

import gc
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.io import BatchSampler, DataLoader, Dataset, IterableDataset

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import DataReadError
from paddle_shard.reading.workers import WorkerPool
from tests.deadlines import HANG
from tests.faults import traces
from tests.jobs import run_script

MESH = dist.ProcessMesh([0], dim_names=["dp"])


class Numbers(IterableDataset):
    """The numbers of a range, which a `worker_init_fn` may narrow."""

    def __init__(self, start, end):
        self.start, self.end = start, end

    def __iter__(self):
        return iter(range(self.start, self.end))


class WhoReads(IterableDataset):
    """Numbers, which `sharded` pairs with the process that has read them."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class WhoReadsAt(Dataset):
    """The same with an index."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return np.array([index, os.getpid()])


def sharded(dataset, workers=2, batch_size=8, **settings):
    own = {
        name: settings.pop(name)
        for name in ("num_batches", "tail", "prefetch")
        if name in settings
    }
    # what all workers read is the same; what each makes of it need not be
    if isinstance(dataset, WhoReads):
        dataset = Stream.of(dataset).map(
            lambda number: np.array([number, os.getpid()])
        )
    dataloader = DataLoader(
        dataset, batch_size=batch_size, num_workers=workers, **settings
    )
    return paddle_shard.shard_dataloader(
        dataloader, MESH, shard_dims="dp", **own
    )


def read(loader, steps=None):
    """The local rows of each step."""
    return [
        batch._local_value().numpy()
        for _, batch in zip(range(steps or 10**6), loader, strict=False)
    ]


# What they are told


def narrow(worker):
    """Paddle's documented way to split a stream."""
    info = paddle.io.get_worker_info()
    dataset = info.dataset
    share = (dataset.end - dataset.start) // info.num_workers
    dataset.start += info.id * share
    dataset.end = dataset.start + share


@pytest.mark.parametrize(("workers", "batch_size"), [(2, None), (4, 8)])
def test_stream_that_worker_init_fn_narrows_is_read_once(workers, batch_size):
    class Batches(Numbers):
        def __iter__(self):
            return (
                np.arange(first, first + 8)
                for first in range(self.start, self.end, 8)
            )

    dataset = Batches(0, 32) if batch_size is None else Numbers(0, 32)
    loader = sharded(dataset, workers, batch_size, worker_init_fn=narrow)

    assert np.concatenate(read(loader)).tolist() == list(range(32))


def test_worker_init_fn_has_the_number_of_its_worker():
    class Tells(Numbers):
        told = ()

        def __iter__(self):
            return iter(range(self.start, self.end))

    def init(worker):
        info = paddle.io.get_worker_info()
        info.dataset.told = (worker, info.id, info.num_workers)

    def collate(numbers):
        return np.array(
            [
                [number, *paddle.io.get_worker_info().dataset.told]
                for number in numbers
            ]
        )

    rows = np.concatenate(
        read(sharded(Tells(0, 32), worker_init_fn=init, collate_fn=collate))
    )

    assert rows[:, 0].tolist() == list(range(32))
    assert {tuple(row) for row in rows[:, 1:].tolist()} == {
        (0, 0, 1),
        (1, 0, 1),
    }


def test_worker_info_of_an_indexed_data_set_is_the_truth():
    class Tells(WhoReadsAt):
        def __getitem__(self, index):
            return np.array(self.told)

    def init(worker):
        info = paddle.io.get_worker_info()
        info.dataset.told = (worker, info.id, info.num_workers)

    rows = np.concatenate(read(sharded(Tells(32), worker_init_fn=init)))

    assert {tuple(row) for row in rows.tolist()} == {(0, 0, 2), (1, 1, 2)}


# How long they live


def processes(batches):
    return {pid for batch in batches for pid in batch[:, 1].tolist()}


@pytest.mark.parametrize("end", [{}, {"tail": "drop"}, {"num_batches": 3}])
def test_workers_that_persist_serve_all_epochs_of_a_stream(end):
    loader = sharded(WhoReads(36), persistent_workers=True, **end)
    epochs = [read(loader) for _ in range(3)]
    loader.close()

    assert len(processes(epochs[0])) == 2
    assert [processes(epoch) for epoch in epochs] == [processes(epochs[0])] * 3
    whole = [row[0] for batch in epochs[0] for row in batch.tolist()]
    assert whole[:24] == list(range(24))
    assert all(
        np.array_equal(a, b)
        for epoch in epochs
        for a, b in zip(epoch, epochs[0], strict=True)
    )


def test_workers_persist_after_a_failure_behind_the_end():
    class FailsLater(WhoReads):
        def __iter__(self):
            yield from super().__iter__()
            raise OSError("behind the end")

    loader = sharded(FailsLater(24), persistent_workers=True, num_batches=3)
    epochs = [read(loader) for _ in range(2)]
    loader.close()

    assert [len(epoch) for epoch in epochs] == [3, 3]
    assert processes(epochs[0]) == processes(epochs[1])


def gone(pids, seconds):
    deadline = time.monotonic() + seconds
    while (
        any(os.path.exists(f"/proc/{pid}") for pid in pids)
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_workers_that_do_not_persist_are_gone_after_the_epoch():
    assert gone(processes(read(sharded(WhoReads(24)))), seconds=HANG)


# What becomes of the killed


@pytest.mark.parametrize(
    ("kind", "persistent"),
    [(WhoReads, False), (WhoReads, True), (WhoReadsAt, False)],
)
def test_worker_that_is_killed_while_the_loop_works_is_named(kind, persistent):
    batches = iter(sharded(kind(800), persistent_workers=persistent))
    victim = next(batches)._local_value().numpy()[0, 1]
    next(batches)
    os.kill(victim, signal.SIGKILL)
    time.sleep(0.5)  # here Paddle would raise a SystemError

    start = time.monotonic()
    with pytest.raises(
        DataReadError, match=r"worker 0 \(exit code -9\)"
    ) as caught:
        for _ in batches:
            time.sleep(0.01)
    assert time.monotonic() - start < HANG
    assert caught.value.worker == 0
    assert "SIGKILL (-9) comes when memory runs out" in str(caught.value)
    assert len(caught.value.indices) == 8  # what it was reading


@pytest.mark.parametrize("kind", [WhoReads, WhoReadsAt])
def test_workers_killed_between_two_epochs_are_replaced(kind):
    loader = sharded(kind(24), persistent_workers=True)
    first = processes(read(loader))
    os.kill(min(first), signal.SIGKILL)
    assert traces.gone({min(first)}) == set()
    second = read(loader)
    loader.close()

    assert np.concatenate(second)[:, 0].tolist() == list(range(24))
    assert not processes(second) & first


def test_worker_that_dies_at_once_is_named():
    def die(worker):
        if worker == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    # it dies while the machinery is being set up, or right behind
    for _ in range(3):
        batches = iter(sharded(WhoReads(24), worker_init_fn=die))
        with pytest.raises(DataReadError, match=r"worker 0 \(exit code -9\)"):
            next(batches)


def test_worker_that_dies_when_an_epoch_begins_is_named(monkeypatch):
    send = WorkerPool.send

    def dies_first(pool, number, request, **options):
        for worker in pool._workers:  # after the loader has looked
            worker.kill()
            worker.join()
        send(pool, number, request, **options)

    loader = sharded(WhoReads(24), persistent_workers=True)
    read(loader)
    monkeypatch.setattr(WorkerPool, "send", dies_first)
    with pytest.raises(DataReadError, match=r"worker 0 \(exit code -9\)"):
        read(loader)
    monkeypatch.undo()

    assert np.concatenate(read(loader))[:, 0].tolist() == list(range(24))
    loader.close()


def test_workers_leave_the_users_sigchld_handler():
    heard = []
    before = signal.signal(signal.SIGCHLD, lambda *_: heard.append(1))
    try:
        own = signal.getsignal(signal.SIGCHLD)
        read(sharded(WhoReads(24)))
        assert signal.getsignal(signal.SIGCHLD) is own
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert heard, "the workers have ended"


class Ends(WhoReadsAt):
    """Does something at sample 20, the fifth of the third batch, which is worker 0's."""

    def __init__(self, end, length=160):
        super().__init__(length)
        self.end = end

    def __getitem__(self, index):
        if index == 20:
            self.end()
        return super().__getitem__(index)


def failure(loader, within):
    """The numbers that were read, and why no more were, which must be told soon."""
    batches, found = iter(loader), []
    while True:
        start = time.monotonic()
        try:
            found += next(batches)._local_value().numpy()[:, 0].tolist()
        except DataReadError as error:
            assert time.monotonic() - start < within
            return found, error


@pytest.mark.parametrize("code", [0, 3])
def test_worker_that_ends_itself_is_named(code):
    found, error = failure(sharded(Ends(lambda: os._exit(code))), within=HANG)

    assert found == list(range(16))
    assert rf"worker 0 (exit code {code})" in str(error)


@pytest.mark.parametrize("code", [0, -9])
def test_worker_whose_own_child_lives_on_is_missed_at_once(code, tmp_path):
    def end():
        child = os.fork()
        if child == 0:
            time.sleep(60.0)
            os._exit(0)
        (tmp_path / "child").write_text(str(child))
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL) if code else os._exit(0)

    try:
        found, error = failure(sharded(Ends(end)), within=HANG)
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert found == list(range(16))
    assert f"worker 0 (exit code {code})" in str(error)


def test_worker_that_is_stopped_counts_as_hung():
    loader = sharded(
        Ends(lambda: os.kill(os.getpid(), signal.SIGSTOP)), timeout=4
    )
    before = children()
    found, error = failure(loader, within=HANG)

    assert found == list(range(16))
    assert "worker 0 has not answered for 4 s (timeout=)" in str(error)
    assert gone(children() - before, seconds=HANG)


class Locked(Dataset):
    """Samples that are read under a lock, as from a file that several threads share."""

    def __init__(self):
        self.lock = threading.Lock()

    def __len__(self):
        return 80

    def __getitem__(self, index):
        with self.lock:
            time.sleep(0.002)
            return np.array([index, os.getpid()])


def test_workers_that_start_while_a_thread_reads_do_not_hang():
    data = Locked()
    ahead = iter(sharded(data, workers=0, prefetch=2))
    next(ahead)
    for _ in range(5):
        next(ahead)
        assert len(processes(read(sharded(data, timeout=HANG)))) == 2


def children():
    return {child.pid for child in multiprocessing.active_children()}


def test_workers_of_a_pass_in_a_cycle_are_collected():
    before, cycle = children(), [iter(sharded(WhoReadsAt(160)))]
    next(cycle[0])
    own = children() - before
    assert len(own) == 2
    cycle.append(cycle)
    del cycle
    gc.collect()

    assert gone(own, seconds=HANG)


# What goes wrong in this process


class Stopped(Exception):
    """What a handler raises."""


@pytest.mark.parametrize(
    ("error", "after"), [(Stopped, 0.15), (KeyboardInterrupt, 0.02)]
)
def test_workers_that_persist_serve_after_a_handler_raised(error, after):
    class Slow(WhoReadsAt):
        def __getitem__(self, index):
            time.sleep(0.002)
            return super().__getitem__(index)

    def stop(*_):
        raise error("stop")

    gc.collect()  # what is raised while an iterator is dropped is lost
    loader = sharded(Slow(400), persistent_workers=True, prefetch=0)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        batches = iter(loader)
        # an exception counts as the read's that it meets
        with pytest.raises((error, DataReadError), match="stop"):
            signal.setitimer(signal.ITIMER_REAL, after)
            for _ in batches:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert np.concatenate(read(loader))[:, 0].tolist() == list(range(400))
    loader.close()


def test_workers_that_persist_serve_after_a_sampler_failed():
    class BreaksOnce(BatchSampler):
        broken = False

        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number == 5 and not self.broken:
                    self.broken = True
                    raise Stopped("this one")
                yield batch

    dataset = WhoReadsAt(96)
    sampler = BreaksOnce(dataset, batch_size=8)
    dataloader = DataLoader(
        dataset, batch_sampler=sampler, num_workers=2, persistent_workers=True
    )
    loader = paddle_shard.shard_dataloader(dataloader, MESH, shard_dims="dp")
    with pytest.raises(Stopped, match="this one"):
        read(loader)
    sampler.broken = True
    assert np.concatenate(read(loader))[:, 0].tolist() == list(range(96))
    loader.close()


ENDINGS = {
    "at its last line": "",
    "ignoring SIGTERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
}


@pytest.mark.parametrize(
    ("how", "persistent"),
    [("at its last line", False), ("ignoring SIGTERM", True)],
)
def test_workers_of_an_open_pass_end_with_the_process(
    how, persistent, tmp_path
):
    script = tmp_path / "trains.py"
    script.write_text(f"""
import signal
import numpy as np
import paddle.distributed as dist
from paddle.io import DataLoader
import paddle_shard
from paddle_shard import Stream

data = paddle_shard.ArrayDataset(np.zeros((400, 3000)))
dataloader = DataLoader(data, batch_size=4, num_workers=2, persistent_workers={persistent})
loader = paddle_shard.shard_dataloader(dataloader, dist.ProcessMesh([0], dim_names=["dp"]), shard_dims="dp")
assert sum(1 for _ in loader) == 100
batches = iter(loader)
next(batches)
{ENDINGS[how]}
raise SystemExit
""")
    code, output, left = run_script(script, tmp_path / "run")
    assert (code, left) == (0, set()), output[-2000:]


def test_workers_of_open_passes_end_without_a_word(tmp_path):
    """Python 3.13 takes a module's names away before what they name: a `__del__` may use none of them."""
    script = tmp_path / "trains.py"
    script.write_text("""
import numpy as np
import paddle.distributed as dist
from paddle.io import DataLoader
import paddle_shard
from paddle_shard import Stream

mesh, kept = dist.ProcessMesh([0], dim_names=["dp"]), []
for workers in (0, 2):
    for prefetch in (None, 2):
        for data in (paddle_shard.ArrayDataset(np.zeros((64, 3))), Stream.of(range(64)).map(np.array)):
            given = DataLoader(data, batch_size=4, num_workers=workers, persistent_workers=workers > 0)
            loader = paddle_shard.shard_dataloader(given, mesh, shard_dims="dp", prefetch=prefetch)
            batches = iter(loader)
            next(batches)
            kept.append((loader, batches))
print("end")
raise SystemExit
""")
    code, output, left = run_script(script, tmp_path / "run")
    assert (code, left) == (0, set()), output[-2000:]
    assert output.endswith("end\n"), output[-2000:]
    assert "ignored" not in output, output[-2000:]
    assert "Traceback" not in output, output[-2000:]


def test_worker_pool_interrupted_in_init_is_dropped_silently():
    WorkerPool.__new__(WorkerPool).__del__()
