"""An error that was caught keeps nothing: the variables of those who called, such as batches on a device, are free."""

import gc
import weakref

import numpy as np
import paddle
import pytest

from paddle_shard.errors import DataReadError
from tests.helpers import ONE, sharded


class Bad(paddle.io.Dataset):
    def __getitem__(self, index):
        if index == 20:
            raise ValueError("bad")
        return np.full([4], index)

    def __len__(self):
        return 40


class Mark:
    pass


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"prefetch": 2}], ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_that_was_caught_lets_go_of_its_callers_variables(workers, options, held, no_collector):
    def failing():
        mark = Mark()
        given = paddle.io.DataLoader(Bad(), batch_size=8, num_workers=workers)
        batches = iter(sharded(given, ONE, **options))
        try:
            for _ in batches:
                pass
        except DataReadError:
            kept.extend([batches] * held)
        return weakref.ref(mark)

    kept = []
    assert failing()() is None
