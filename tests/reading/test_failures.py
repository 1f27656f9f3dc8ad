"""What breaks while reading comes out as `DataReadError`, soon, with all there is to know."""

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.io import BatchSampler, DataLoader, Dataset

import paddle_shard
from paddle_shard.errors import BatchSizeError, DataReadError, PaddleShardError
from paddle_shard.reading.batch import take_rows
from tests.deadlines import HANG

MESH = dist.ProcessMesh([0], dim_names=["dp"])
WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Fails(Dataset):
    """Fails at sample 5 in a way of choice."""

    def __init__(self, fail, length=12):
        self.fail, self.length = fail, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == 5:
            self.fail()
        return np.array(index)


def bad_sample():
    raise ValueError("bad sample")


def sharded(dataset, workers, **settings):
    return paddle_shard.shard_dataloader(
        DataLoader(dataset, batch_size=2, num_workers=workers, **settings),
        MESH,
        shard_dims="dp",
    )


def failure(loader, within=HANG):
    """The batches before the failure, and the failure, which must come soon."""
    batches, got = iter(loader), []
    while True:
        start = time.monotonic()
        try:
            got.append(next(batches)._local_value().numpy().tolist())
        except Exception as error:
            assert time.monotonic() - start < within
            # is no end
            with pytest.raises(
                PaddleShardError,
                match="has failed before .*, and delivers no more",
            ):
                next(batches)
            return got, error


@WORKERS
def test_data_set_exception_has_index_worker_and_traceback(workers):
    got, error = failure(sharded(Fails(bad_sample), workers))

    assert got == [[0, 1], [2, 3]]
    assert type(error) is DataReadError
    assert (error.index, error.indices, error.epoch, error.step) == (
        5,
        (4, 5),
        0,
        2,
    )
    assert error.worker == (0 if workers else None)
    assert error.cause_type == "ValueError"
    where = "worker 0" if workers else "the main process"
    assert (
        f"reading sample 5 failed in {where} (epoch 0, step 2): ValueError: bad sample"
        in str(error)
    )
    assert 'raise ValueError("bad sample")' in str(error)


@WORKERS
@pytest.mark.parametrize(
    "error", [StopIteration, SystemExit, KeyError, GeneratorExit, MemoryError]
)
def test_exception_of_any_kind_is_raised_amid_an_epoch(workers, error):
    def fail():
        raise error("this one")

    # they leave the loop, as they are
    if not workers and error in (
        SystemExit,
        GeneratorExit,
    ):
        with pytest.raises(error, match="this one"):
            list(sharded(Fails(fail), workers))
        return
    got, caught = failure(sharded(Fails(fail), workers))

    assert len(got) == 2
    assert caught.cause_type == error.__name__
    assert "this one" in str(caught)


@WORKERS
def test_exception_in_collate_has_the_samples(workers):
    def collate(samples):
        if 5 in samples:
            raise ValueError("cannot collate")
        return np.array(samples)

    _, error = failure(
        sharded(Fails(lambda: None), workers, collate_fn=collate)
    )

    assert "collating 2 samples failed" in str(error)
    assert "cannot collate" in str(error)
    assert (error.index, error.indices) == (None, (4, 5))


@WORKERS
def test_ragged_samples_are_named_with_their_field_and_shapes(workers):
    class Ragged(Fails):
        def __getitem__(self, index):
            return {"x": [np.zeros(3 if index == 5 else 2)]}

    _, error = failure_of_dicts(sharded(Ragged(None), workers))

    assert (
        "samples of different shapes cannot be stacked at field ['x'][0]: (2,), (3,)"
        in str(error)
    )


def failure_of_dicts(loader):
    batches = iter(loader)
    with pytest.raises(DataReadError) as caught:
        while True:
            next(batches)
    return None, caught.value


@WORKERS
def test_dtype_that_paddle_does_not_have_is_named(workers):
    class Unsigned(Fails):
        def __getitem__(self, index):
            return np.array(index, "uint32")

    _, error = failure(sharded(Unsigned(None), workers))

    assert "Paddle has no tensors of dtype uint32" in str(error)
    assert ".astype('int64')" in str(error)


def test_exception_in_worker_init_fn_is_not_hidden():
    def init(worker):
        raise OSError(f"no disk for {worker}")

    with pytest.raises(
        DataReadError, match="worker_init_fn failed in worker 0"
    ) as raised:
        iter(sharded(Fails(lambda: None), 2, worker_init_fn=init))

    assert "OSError: no disk for 0" in str(raised.value)


def test_leaf_that_cannot_be_pickled_does_not_hang():
    def collate(samples):
        return [np.array(samples), lambda: None]

    batches = iter(sharded(Fails(lambda: None), 2, collate_fn=collate))
    with pytest.raises(
        DataReadError, match="sending the batch failed in worker 0"
    ):
        next(batches)


def test_killed_worker_is_named():
    class Dies(Fails):
        def __getitem__(self, index):
            if index == 5:
                time.sleep(0.5)  # let the batches before it go out
                os.kill(os.getpid(), signal.SIGKILL)
            return np.array(index)

    # Paddle looks for dead workers when its queue has been empty for 5 s.
    _, error = failure(sharded(Dies(None), 2), within=8.0)

    assert isinstance(error, DataReadError)
    assert "worker 0 (exit code -9)" in str(error)


@WORKERS
def test_exception_in_the_users_sampler_comes_at_its_step(workers):
    class Breaks(BatchSampler):
        def __iter__(self):
            yield [0, 1]
            yield [2, 3]
            raise RuntimeError("sampler broke")

    loader = DataLoader(
        Fails(lambda: None),
        batch_sampler=Breaks(Fails(None), batch_size=2),
        num_workers=workers,
    )
    got, error = failure(
        paddle_shard.shard_dataloader(loader, MESH, shard_dims="dp")
    )

    assert got == [[0, 1], [2, 3]]
    assert str(error) == "sampler broke"


def test_worker_error_does_not_swallow_the_batches_before():
    class Odd(BatchSampler):
        def __iter__(self):
            yield from ([0, 1], [2, 3, 4], [6, 7])

    mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])
    loader = DataLoader(
        Fails(lambda: None),
        batch_sampler=Odd(Fails(None), batch_size=2),
        num_workers=2,
    )
    batches = iter(paddle_shard.shard_dataloader(loader, mesh, shard_dims="dp"))
    assert next(batches)._local_value().numpy().tolist() == [0]
    with pytest.raises(BatchSizeError):
        next(batches)


# What passes leave behind


def children():
    pids = []
    for task in Path("/proc/self/task").iterdir():
        # the thread has just ended
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pids += (task / "children").read_text().split()
    return {int(pid) for pid in pids}


def left_over(before, seconds=HANG):
    deadline = time.monotonic() + seconds
    while (more := children() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return more


@pytest.mark.parametrize(
    "how", ["exhaust", "break", "close", "with", "error", "delete"]
)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_their_pass(how, persistent):
    before = children()
    fail = bad_sample if how == "error" else lambda: None
    loader = sharded(Fails(fail), 2, persistent_workers=persistent)
    if how == "exhaust":
        assert len(list(loader)) == 6
    elif how == "break":
        for _ in loader:
            break
    elif how == "close":
        batches = iter(loader)
        next(batches)
        batches.close()
    elif how == "with":
        with iter(loader) as batches:
            next(batches)
    elif how == "error":
        failure(loader)
    else:
        batches = iter(loader)
        next(batches)
        del batches
    loader.close()

    assert left_over(before) == set()


def test_persistent_workers_serve_several_epochs_and_iterators():
    class WhoRead(Fails):
        def __getitem__(self, index):
            return np.array([index, os.getpid()])

    loader = sharded(WhoRead(None), 2, persistent_workers=True)
    epochs = [
        np.concatenate([batch._local_value().numpy() for batch in loader])
        for _ in range(3)
    ]
    pairs = [
        (
            a._local_value().numpy()[:, 0].tolist(),
            b._local_value().numpy()[:, 0].tolist(),
        )
        for a, b in zip(loader, loader, strict=True)
    ]

    assert all(epoch[:, 0].tolist() == list(range(12)) for epoch in epochs)
    assert len({pid for epoch in epochs for pid in epoch[:, 1]}) == 2
    assert all(a == b for a, b in pairs)
    loader.close()


def test_worker_functions_find_their_own_data_set():
    def init(worker):
        paddle.io.get_worker_info().dataset.opened = worker

    class Opens(Fails):
        def __getitem__(self, index):
            return np.array(self.opened)

    got = [
        batch._local_value().numpy().tolist()
        for batch in sharded(Opens(None), 2, worker_init_fn=init)
    ]

    assert got == [[0, 0], [1, 1]] * 3


@pytest.mark.parametrize(
    ("first", "workers", "prefetch"),
    [
        *((first, 0, None) for first in (0, 3, 9, 17)),
        *((first, 0, 2) for first in (3, 17)),
        *((first, 2, None) for first in (0, 9)),
    ],
)
def test_data_set_that_draws_for_some_samples_repeats_exactly(
    first, workers, prefetch
):
    class Sometimes(Dataset):
        uses_rng = True  # the first batch may not show it

        def __len__(self):
            return 24

        def __getitem__(self, index):
            return index, np.random.randn() if index >= first else 0.0

    def numbers(batch_size, workers, prefetch=0):
        loader = paddle.io.DataLoader(
            Sometimes(), batch_size=batch_size, num_workers=workers
        )
        sharded = paddle_shard.shard_dataloader(
            loader, dist.ProcessMesh([0]), shard_dims=0, prefetch=prefetch
        )
        return np.concatenate(
            [noise._local_value().numpy() for _, noise in sharded]
        ).tolist()

    np.random.seed(2)
    np.random.randn()
    expected = np.random.get_state()
    found = numbers(4, workers, prefetch)

    assert found == numbers(6, 0)
    assert sum(noise != 0 for noise in found) == 24 - first
    assert all(
        np.array_equal(a, b)
        for a, b in zip(np.random.get_state(), expected, strict=True)
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda i: paddle.ones([2 + i % 2], "bfloat16"),
            r"different shapes cannot be stacked at field \['x'\]",
        ),
        (
            lambda i: paddle.ones([2], ["bfloat16", "float32"][i % 2]),
            r"dtype at field \['x'\]: bfloat16, float32",
        ),
        (lambda i: slice(i), r"cannot stack slice at field \['x'\]"),
    ],
)
def test_collate_error_names_the_field_that_cannot_be_stacked(
    make, text, workers
):
    class Fields(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"x": make(index)}

    loader = paddle_shard.shard_dataloader(
        DataLoader(Fields(), batch_size=4, num_workers=workers),
        dist.ProcessMesh([0], dim_names=["dp"]),
    )
    with pytest.raises(DataReadError, match=text):
        next(iter(loader))


def test_rows_of_workers_that_differ_in_dtype_name_bfloat16():
    rows = [paddle.ones([2, 1], kind) for kind in ("bfloat16", "float32")]

    with pytest.raises(
        ValueError,
        match=r"row shape and dtype: \(\[1\], 'bfloat16'\), \(\[1\], 'float32'\)",
    ):
        take_rows([rows[0].numpy(), rows[1].numpy()], [2, 2], np.arange(4))
