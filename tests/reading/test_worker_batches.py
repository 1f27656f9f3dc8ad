"""Batches of any kind come from workers as they were made, in order; what cannot come is said."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import weakref
from collections import namedtuple
from itertools import islice

import numpy as np
import paddle
import pytest
from paddle.framework import core
from paddle.io import DataLoader

from paddle_shard.core.trees import leaves, map_leaves
from paddle_shard.data.arrays import ArrayDataset
from paddle_shard.errors import DataReadError
from paddle_shard.placement.local_tensor import TensorMaker
from paddle_shard.plan.step import SamplerStep, Step
from paddle_shard.reading.batch import Chunk
from paddle_shard.reading.executor import WorkerExecutor
from paddle_shard.reading.failure import ReadFailure
from paddle_shard.reading.tensors import becomes_tensor
from paddle_shard.reading.workers import WorkerPool
from tests.deadlines import HANG
from tests.descriptors import open_files
from tests.helpers import ONE, sharded
from tests.jobs import run_script

LARGE = 20_000
"""So many numbers go through shared memory."""
KEYS = [f"sample {number}" for number in range(1000)]
LATE = 301
"""A step before which each worker has answered so often that all of its memory was used again and again."""


class Reader:
    """Reads a step by a function of its number."""

    dataset = None
    draws = True
    owns_arrays = True
    num_threads = 0

    def __init__(self, work):
        self._work = work

    def read(self, asked, worker, *, is_first=False):
        found = self._work(asked.number)
        return found if isinstance(found, ReadFailure) else Chunk(found)

    def begin(self, asked):
        pass


def a_step(number, ids=(0,)):
    return Step(
        epoch=0,
        number=number,
        num_rows=len(ids),
        micro_size=len(ids),
        num_positions=len(ids),
        ids=ids,
    )


def steps_of(count, ids=(0,)):
    return (a_step(number, list(ids)) for number in range(count))


class Batches:
    """The values of the batches of some steps, which are submitted ahead as a pass does; arrays become tensors."""

    def __init__(self, executor, steps):
        self.executor, self._steps, self._waiting = executor, iter(steps), 0
        self._maker = TensorMaker(core.CPUPlace())

    def _with_tensors(self, batch):
        found = [leaf for leaf in leaves(batch.value) if becomes_tensor(leaf)]
        made = iter(
            self._maker(
                found, batch.owned and len(set(map(id, found))) == len(found)
            )()
        )
        return map_leaves(
            batch.value,
            lambda leaf, _: next(made) if becomes_tensor(leaf) else leaf,
        )

    def __iter__(self):
        return self

    def __next__(self):
        for step in islice(
            self._steps, max(0, self.executor.depth - self._waiting)
        ):
            self.executor.submit(step)
            self._waiting += 1
        if not self._waiting:
            self.executor.stop()
            raise StopIteration
        found = self.executor.take()
        self._waiting -= 1
        return self._with_tensors(found)


@contextlib.contextmanager
def reading(work, steps, workers=2, reader=None, **settings):
    """Batches that workers read: that of each step is `work(its number)`, or what another reader returns."""
    dataloader = DataLoader(
        ArrayDataset(np.arange(4)),
        batch_size=1,
        num_workers=workers,
        **settings,
    )
    idle = []
    executor = WorkerExecutor(
        WorkerPool(dataloader, reader or Reader(work)), idle
    )
    try:
        yield Batches(executor, steps)
    finally:
        executor.close()
        for pool in idle:
            pool.shut_down()


def batch_of(make, **settings):
    """What arrives of a batch that a worker makes."""
    with reading(
        lambda step: make(), steps_of(1), workers=1, **settings
    ) as batches:
        (found,) = batches
        return found


# What is in them

Pair = namedtuple("Pair", "first second")

ARRAYS = {
    "empty": lambda: np.zeros((0, 3), "int64"),
    "0-d": lambda: np.array(2.5),
    "in Fortran's order": lambda: np.asfortranarray(
        np.arange(LARGE).reshape(4, -1)
    ),
    "backwards": lambda: np.arange(LARGE)[::-1],
    "every second": lambda: np.arange(2 * LARGE, dtype="float32").reshape(
        -1, 4
    )[:, ::2],
    "a row for all": lambda: np.broadcast_to(np.arange(3), (LARGE, 3)),
    "frozen": lambda: np.frombuffer(bytes(range(256)) * 200, np.uint8),
    "booleans": lambda: np.arange(LARGE) % 3 == 0,
    "halves": lambda: np.arange(100, dtype="float16"),
    "complex": lambda: np.arange(LARGE) * 1j,
    "numbers of numpy's own class": lambda: np.arange(6).view(np.recarray),
}


def test_worker_arrays_come_as_tensors_of_their_values():
    kinds = list(ARRAYS)

    def work(step):
        make = ARRAYS[kinds[step // 2]]
        return [make(), {"x": make()}] if step % 2 else [make()]

    with reading(work, steps_of(2 * len(kinds)), workers=1) as batches:
        for step, batch in enumerate(batches):
            expected = ARRAYS[kinds[step // 2]]()
            for found in [batch[0], *(one["x"] for one in batch[1:])]:
                assert isinstance(found, paddle.Tensor), kinds[step // 2]
                assert found.dtype == paddle.to_tensor(np.array(expected)).dtype
                assert tuple(found.shape) == expected.shape
                assert np.array_equal(found.numpy(), expected)
    assert step == 2 * len(kinds) - 1


NO_TENSORS = [
    lambda: np.array(["a", "bc"] * LARGE),
    lambda: np.array([b"a", b"bc"]),
    lambda: np.array(["2020-01-01", "NaT"], "datetime64[s]"),
    lambda: np.arange(LARGE).astype("timedelta64[ms]"),
    lambda: np.array([1, "a", None, (2, 3)], object),
    lambda: np.array([(1, 2.0), (3, 4.0)], [("a", "i4"), ("b", "f8")]),
    lambda: np.array([(1, "2020")], [("a", "i4"), ("b", "M8[Y]")]),
    lambda: np.array([], object),
    lambda: np.float32(2.5),
    lambda: np.datetime64("2020-01-01"),
]


def test_worker_values_that_no_tensor_can_hold_come_as_they_are():
    with reading(
        lambda step: [NO_TENSORS[step]()], steps_of(len(NO_TENSORS)), workers=1
    ) as batches:
        for (found,), make in zip(batches, NO_TENSORS, strict=True):
            expected = make()
            assert type(found) is type(expected)
            assert found.dtype == expected.dtype
            assert found.shape == expected.shape
            assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [">f4"])
def test_worker_arrays_of_another_byte_order_are_rejected(dtype):
    given = DataLoader(
        ArrayDataset(np.arange(4)),
        batch_size=4,
        num_workers=1,
        collate_fn=lambda _: np.arange(4).astype(dtype),
    )
    with pytest.raises(DataReadError, match="byte order"):
        next(iter(sharded(given, ONE)))


def test_worker_tensors_keep_their_dtype():
    def make():
        ones = paddle.ones([3, 5000])
        return [
            ones.cast(dtype)
            for dtype in ("bfloat16", "float16", "int64", "bool")
        ] + [
            paddle.to_tensor(2.5),
            paddle.zeros([0, 2]),
            paddle.arange(12).reshape([3, 4]).T,
        ]

    for found, expected in zip(batch_of(make), make(), strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(found.numpy(), expected.numpy())


def test_worker_tensor_of_a_dtype_unknown_to_numpy_is_rejected():
    with pytest.raises(
        DataReadError, match=r"float8_e4m3fn cannot leave a worker"
    ) as caught:
        batch_of(lambda: [paddle.ones([2]).cast("float8_e4m3fn")])
    assert caught.value.worker == 0


def test_worker_batch_keeps_its_structure():
    def make():
        return {
            "pair": Pair(np.arange(2), ["a", {"deep": (np.ones(1),)}]),
            3: None,
            "text": "x" * 3 * LARGE,
        }

    found = batch_of(make)

    assert list(found) == ["pair", 3, "text"]
    assert type(found["pair"]) is Pair
    assert found["pair"].first.tolist() == [0, 1]
    assert found["pair"].second[0] == "a"
    assert found["pair"].second[1]["deep"][0].tolist() == [1.0]
    assert (found[3], found["text"]) == (None, "x" * 3 * LARGE)


def test_worker_batch_may_have_very_many_arrays():
    found = batch_of(
        lambda: [np.full(number % 3, number) for number in range(5000)]
    )

    assert [tensor.tolist() for tensor in found] == [
        [number] * (number % 3) for number in range(5000)
    ]


@pytest.mark.parametrize("size", [10, LARGE])
def test_worker_tensors_of_a_batch_share_no_memory(size):
    def make():
        array = np.arange(size)
        return [array, array, array[1:], array[:-1], {"again": array}]

    found = batch_of(make)
    tensors = [*found[:4], found[4]["again"]]
    for at, tensor in enumerate(tensors):
        tensor.fill_(-1 - at)

    assert [set(tensor.tolist()) for tensor in tensors] == [
        {-1 - at} for at in range(5)
    ]


@pytest.mark.parametrize("size", [10, LARGE])
def test_worker_batch_does_not_change_when_later_ones_come(size):
    with reading(
        lambda step: [np.full(size + step, step)], steps_of(20)
    ) as batches:
        found = list(batches)

    assert all(
        (tensor.numpy() == step).all() for step, (tensor,) in enumerate(found)
    )
    assert [tensor.shape[0] for (tensor,) in found] == [
        size + step for step in range(20)
    ]


def test_worker_batches_of_the_same_array_share_no_memory():
    always = np.zeros(10, "int64")
    with reading(lambda step: [always], steps_of(LATE + 30)) as batches:
        found = [tensor for (tensor,) in batches][LATE:]
    for at, tensor in enumerate(found):
        tensor.fill_(at + 1)

    assert [set(tensor.tolist()) for tensor in found] == [
        {at + 1} for at in range(len(found))
    ]


# How they travel


@pytest.mark.parametrize(
    ("size", "seconds"), [(10, 0.0), (LARGE, 0.0), (200_000, 0.0), (10, 0.005)]
)
def test_workers_read_in_turn(size, seconds):
    def work(step):
        time.sleep(seconds)
        return [np.full(size, os.getpid())]

    readers = []
    with reading(work, steps_of(100)) as batches:
        for (tensor,) in batches:
            readers.append(int(tensor[0]))
            # then those that are ready are taken quickly
            if len(readers) % 10 == 0:
                time.sleep(10 * seconds)

    assert len(readers) == 100
    assert len(set(readers)) == 2
    assert all(
        reader == readers[step % 2] for step, reader in enumerate(readers)
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_that_is_killed_loses_no_batch_it_has_read(workers):
    def work(step):
        if step == LATE:
            os.kill(os.getpid(), signal.SIGKILL)
        return [np.full(10, step)]

    found, before = [], set(multiprocessing.active_children())
    with reading(work, steps_of(LATE + 30), workers) as batches:
        with pytest.raises(DataReadError, match=rf"step {LATE}.*exit code -9"):
            found.extend(int(tensor[0]) for (tensor,) in batches)
        assert set(multiprocessing.active_children()) == before
        assert next(batches, None) is None
    assert found == list(range(LATE))


def test_worker_batch_comes_before_the_next_is_read():
    queue = multiprocessing.get_context("fork").Queue()
    for number in range(6):
        queue.put(number)
    found = []
    with reading(
        lambda step: [np.full(10, queue.get(timeout=HANG))],
        steps_of(LATE),
        workers=1,
    ) as batches:
        for (tensor,) in batches:
            found.append(int(tensor[0]))
            queue.put(len(found) + 5)

    assert found == list(range(LATE))


def test_workers_are_asked_for_the_samples_of_each_step():
    class Echo(Reader):
        def read(self, asked, worker, *, is_first=False):
            return Chunk([list(asked.ids)])

    def ids(number):
        one, other = KEYS[number], KEYS[number + 1]
        return [one, other, (one, other)[number % 2], number]

    steps = (a_step(number, ids(number)) for number in range(LATE))
    with reading(None, steps, reader=Echo(None)) as batches:
        assert [found for (found,) in batches] == [
            ids(number) for number in range(LATE)
        ]


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_worker_gets_ids_as_they_are_and_no_state(dtype):
    class Echo(Reader):
        def read(self, asked, worker, *, is_first=False):
            return Chunk([asked.ids, asked.number, *asked.sampler, asked.valid])

    step = a_step(3, np.arange(LARGE).astype(dtype))._replace(
        sampler=SamplerStep([1, 2], lambda: 0),
        valid=np.ones(2, bool),
    )
    with reading(None, [step], reader=Echo(None)) as batches:
        (found,) = batches
    assert found[0].numpy().tolist() == list(range(LARGE))
    assert str(found[0].numpy().dtype) == dtype
    assert (found[1], list(found[2])) == (3, [])
    assert list(found[3:]) == [None, None, None]


def test_workers_end_by_themselves_after_the_last_batch(monkeypatch):
    """So that a pass that ends need not wait for them."""
    joined, join = [], multiprocessing.Process.join
    monkeypatch.setattr(
        multiprocessing.Process,
        "join",
        lambda *args: joined.append(args) or join(*args),
    )
    before = set(multiprocessing.active_children())
    with reading(lambda step: [np.full(10, step)], steps_of(5)) as batches:
        workers = set(multiprocessing.active_children()) - before
        assert [int(tensor[0]) for (tensor,) in batches] == list(range(5))
        assert next(batches, None) is None
        assert not joined
        assert len(workers) == 2
        ended = [
            multiprocessing.connection.wait([worker.sentinel], HANG)
            for worker in workers
        ]
        assert all(ended)
        batches.executor.close()
        assert len(joined) == 2


@pytest.mark.parametrize("bad", [None, LATE + 2])
def test_workers_end_while_batches_are_under_way(bad):
    """Persistent workers have answered all that was asked, or are ended; none is waited for in vain."""

    def work(step):
        return [np.full(10, step), (lambda: 0) if step == bad else None]

    with reading(work, steps_of(10_000), persistent_workers=True) as batches:
        assert [int(next(batches)[0][0]) for _ in range(LATE)] == list(
            range(LATE)
        )
        batches.executor.close(ended=True)
        assert next(batches, None) is None


def test_workers_that_persist_serve_after_a_pass_was_left():
    dataloader = DataLoader(
        ArrayDataset(np.arange(4)),
        batch_size=1,
        num_workers=2,
        persistent_workers=True,
    )
    pool, idle, readers = (
        WorkerPool(dataloader, Reader(lambda step: [step, os.getpid()])),
        [],
        [],
    )
    try:
        for taken in (3, 20, 0, 1):
            executor = WorkerExecutor(pool, idle)
            found = list(islice(Batches(executor, steps_of(20)), taken))
            assert [number for number, _ in found] == list(range(taken))
            readers.extend(reader for _, reader in found)
            executor.close(ended=True)
            assert idle.pop() is pool
        assert len(set(readers)) == 2
    finally:
        pool.shut_down()


# Settings


@pytest.mark.parametrize(
    ("workers", "ahead", "steps", "persistent"),
    [
        (1, 1, 7, True),
        (3, 1, 20, False),
        (5, 2, 3, True),
        (3, 4, 0, False),
        (2, 300, 700, True),
    ],
)
def test_workers_read_all_steps_once_and_in_order(
    workers, ahead, steps, persistent
):
    def work(step):
        return [np.full([1, 10, 3000][step % 3], step)]

    settings = {"prefetch_factor": ahead, "persistent_workers": persistent}
    with reading(
        work, steps_of(steps, range(500)), workers, **settings
    ) as batches:
        found = [int(tensor[0]) for (tensor,) in batches]

    assert found == list(range(steps))


def test_worker_holds_no_batch_that_it_has_sent():
    sent = []

    def work(step):
        batch = np.full(LARGE, sum(one() is not None for one in sent))
        sent.append(weakref.ref(batch))
        return [batch]

    with reading(work, steps_of(6), workers=1) as batches:
        assert [int(held[0]) for (held,) in batches] == [0] * 6


def test_workers_far_ahead_take_few_open_files():
    files, before = [], open_files()
    with reading(
        lambda step: [np.zeros(LARGE)], steps_of(220), prefetch_factor=100
    ) as batches:
        for _ in batches:
            files.append(len(open_files() - before))

    assert max(files) < 30


@pytest.mark.parametrize(
    "method", ["spawn", pytest.param("forkserver", marks=pytest.mark.long)]
)
def test_workers_may_be_spawned(method, tmp_path):
    script = f"""
import multiprocessing
import numpy as np
import paddle.distributed as dist
from paddle.io import DataLoader
import paddle_shard
from paddle_shard.data.arrays import ArrayDataset
from paddle_shard.core.trees import leaves, map_leaves

if __name__ == "__main__":
    multiprocessing.set_start_method("{method}")
    rows = np.arange(12 * 3000).reshape(12, 3000)
    dataloader = DataLoader(ArrayDataset(rows), batch_size=4, num_workers=1, persistent_workers=True)
    loader = paddle_shard.shard_dataloader(dataloader, dist.ProcessMesh([0], dim_names=["dp"]), shard_dims="dp")
    for _ in range(2):
        assert np.array_equal(np.concatenate([batch._local_value().numpy() for batch in loader]), rows)
"""
    path = tmp_path / "trains.py"
    path.write_text(script)
    code, output, left = run_script(path, tmp_path / "run")
    assert (code, left) == (0, set()), output[-2000:]


# What cannot come


class BreaksWhenRead:
    """Its pickle names no number."""

    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.parametrize(("size", "bad"), [(1, LATE), (LARGE, 5)])
def test_worker_batch_that_cannot_be_received_fails_at_its_step(size, bad):
    def work(step):
        return [np.full(size, step), BreaksWhenRead() if step == bad else None]

    found = []
    with reading(work, steps_of(bad + 30)) as batches:
        with pytest.raises(
            DataReadError,
            match=rf"receiving the batch failed in worker 1 .*step {bad}.*no number",
        ):
            found.extend(int(batch[0][0]) for batch in batches)
        assert next(batches, None) is None
    assert found == list(range(bad))


def test_worker_that_cannot_read_a_request_prints_a_traceback(capfd):
    ids = {step: [0] for step in range(6)} | {3: [BreaksWhenRead()]}
    steps = (a_step(number, ids[number]) for number in ids)
    found = []
    with reading(lambda step: [np.array([step])], steps) as batches:
        with pytest.raises(
            DataReadError,
            match=r"step 3.*a worker process ended: worker 1 \(exit co",
        ):
            found.extend(int(batch[0][0]) for batch in batches)
        assert next(batches, None) is None
    assert found == [0, 1, 2]
    assert "no number" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("what", "bad"), [("reading", 5), ("sending the batch", LATE)]
)
def test_worker_batch_that_cannot_be_sent_fails_at_its_step(what, bad):
    def work(step):
        if step < bad:
            return [np.full(10, step)]
        if what == "reading":
            return ReadFailure.of(
                ValueError("this one"), what=what, worker=step % 2
            )
        return [lambda: "this one"]

    found = []
    with reading(work, steps_of(bad + 30)) as batches:
        with pytest.raises(
            DataReadError,
            match=rf"(?s){what} failed in worker 1 .*step {bad}.*(this one|pickle)",
        ):
            found.extend(int(tensor[0]) for (tensor,) in batches)
        assert next(batches, None) is None
    assert found == list(range(bad))


@pytest.mark.parametrize("error", [ValueError, SystemExit, StopIteration])
def test_worker_init_fn_hides_no_kind_of_exception(error):
    def init(worker):
        raise error("this one")

    says = pytest.raises(
        DataReadError,
        match=rf"worker_init_fn failed in worker 0 .*{error.__name__}: this one",
    )
    with (
        reading(
            lambda step: [np.zeros(1)], steps_of(3), worker_init_fn=init
        ) as batches,
        says,
    ):
        next(batches)
