"""What samples draw is the same on every place and with any workers, and the user's generators stay as they were."""

import random

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.framework import core

import paddle_shard

MESH = dist.ProcessMesh([0], dim_names=["dp"])


class Draws(paddle.io.Dataset):
    """Samples that draw from numpy's, Python's and Paddle's generators."""

    def __getitem__(self, index):
        drawn = paddle.rand([2]) if paddle.io.get_worker_info() is None else paddle.rand([2]).cpu()
        return np.concatenate([[index, np.random.rand(), random.random()], drawn.numpy()])

    def __len__(self):
        return 24


def generators():
    found = [core.default_cpu_generator(), core.default_custom_device_generator(paddle.CustomPlace("standin", 0))]
    seeds = [generator.get_state().current_seed() for generator in found]
    return [seeds, str(np.random.get_state()), random.getstate()]


def rows(device, workers):
    paddle.set_device(device)
    try:
        dataset = Draws()
        dataset.seed_paddle = True
        given = paddle.io.DataLoader(dataset, batch_size=8, num_workers=workers, shuffle=True)
        loader = paddle_shard.shard_dataloader(given, MESH, shard_dims="dp", seed=3)
        before = generators()
        found = [row for _ in range(2) for batch in loader for row in batch._local_value().numpy().tolist()]
        assert generators() == before
        return found
    finally:
        paddle.set_device("standin:0")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", ["cpu", "standin:0"])
def test_samples_draw_the_same_and_leave_the_users_generators_alone(device, workers):
    paddle.seed(5)
    found = rows(device, workers)

    paddle.seed(17)
    assert found == rows("cpu", 0)
    assert len({tuple(row[1:]) for row in found}) == len(found)
