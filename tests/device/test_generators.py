"""What samples draw is the same on every place and with any workers, and the user's generators stay as they were."""

import random
import threading
import time

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.framework import core

import paddle_shard
from paddle_shard.errors import DataReadError
from tests.device.devices import DEVICE, OTHER, generator, needs_two

pytestmark = pytest.mark.gpu
MESH = dist.ProcessMesh([0], dim_names=["dp"])


class Draws(paddle.io.Dataset):
    """Samples that draw from numpy's, Python's and Paddle's generators."""

    def __getitem__(self, index):
        return np.concatenate(
            [
                [index, np.random.rand(), random.random()],
                paddle.rand([2]).numpy(),
            ]
        )

    def __len__(self):
        return 24


def generators():
    found = [core.default_cpu_generator(), generator()]
    seeds = [one.get_state().current_seed() for one in found]
    return [seeds, str(np.random.get_state()), random.getstate()]


def loader_of(given):
    return paddle_shard.shard_dataloader(given, MESH, shard_dims="dp", seed=3)


def rows(device, workers):
    paddle.set_device(device)
    try:
        dataset = Draws()
        given = paddle.io.DataLoader(
            dataset, batch_size=8, num_workers=workers, shuffle=True
        )
        loader = loader_of(given)
        before = generators()
        found = [
            row
            for _ in range(2)
            for batch in loader
            for row in batch._local_value().numpy().tolist()
        ]
        assert generators() == before
        return found
    finally:
        paddle.set_device(DEVICE)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_device_samples_draw_alike_and_restore_generators(device, workers):
    paddle.seed(5)
    found = rows(device, workers)

    paddle.seed(17)
    assert found == rows("cpu", 0)
    assert len({tuple(row[1:]) for row in found}) == len(found)


def order(device):
    paddle.set_device(device)
    try:
        sampler = paddle.io.BatchSampler(
            sampler=paddle.io.SubsetRandomSampler(list(range(24))), batch_size=8
        )
        before = generators()
        batches = list(
            loader_of(paddle.io.DataLoader(Draws(), batch_sampler=sampler))
        )
        assert generators() == before
        return [
            int(row[0])
            for batch in batches
            for row in batch._local_value().numpy()
        ]
    finally:
        paddle.set_device(DEVICE)


def test_sampler_draws_the_same_order_on_every_place():
    """Paddle's SubsetRandomSampler calls `paddle.randperm`, which draws from the generator of the current place."""
    found = order(DEVICE)

    assert sorted(found) == list(range(24)) != found
    paddle.seed(17)
    assert found == order("cpu")


class Places(paddle.io.Dataset):
    """Samples that are slow enough for a thread to read them, and note the current place."""

    def __init__(self, tensors=False):
        self.seen, self.tensors = [], tensors

    def __getitem__(self, index):
        time.sleep(0.0005)
        self.seen.append(
            (
                paddle.device.get_device(),
                threading.current_thread() is threading.main_thread(),
            )
        )
        return paddle.to_tensor([float(index)]) if self.tensors else index

    def __len__(self):
        return 64


def test_samples_are_read_on_the_cpu_and_the_users_device_stays():
    data = Places()
    for _ in loader_of(paddle.io.DataLoader(data, batch_size=4)):
        assert paddle.device.get_device() == DEVICE
        time.sleep(2e-3)  # a loop that only takes batches reads them by itself

    places = {
        on_main: {place for place, main in data.seen if main == on_main}
        for on_main in (True, False)
    }
    assert places[True] == {"cpu"}
    # the place of all threads: another would be the training loop's, too
    assert places[False] == {DEVICE}


@needs_two
def test_thread_that_reads_does_not_undo_the_users_set_device():
    batches = iter(loader_of(paddle.io.DataLoader(Places(), batch_size=4)))
    paddle.set_device(OTHER)
    try:
        for _ in batches:
            assert paddle.device.get_device() == OTHER
    finally:
        paddle.set_device(DEVICE)


def test_device_samples_of_host_tensors_are_read_by_the_loop():
    data = Places(tensors=True)
    batches = iter(loader_of(paddle.io.DataLoader(data, batch_size=4)))
    list(batches)

    assert set(data.seen) == {("cpu", True)}


def test_users_device_stays_when_reading_fails():
    class Fails(Draws):
        def __getitem__(self, index):
            raise ValueError(index)

    with pytest.raises(DataReadError):
        next(iter(loader_of(paddle.io.DataLoader(Fails(), batch_size=4))))
    assert paddle.device.get_device() == DEVICE
