"""Paddle's profiler sees the loader as it sees Paddle's own."""

import gc
import time
import weakref

import numpy as np
import paddle.profiler
from paddle.io import DataLoader

from tests.helpers import ONE, Made, sharded


def slow(index):
    time.sleep(0.002)
    return np.array(index)


def test_step_info_tells_what_reading_costs():
    with paddle.profiler.Profiler(timer_only=True) as profiler:
        for _ in sharded(DataLoader(Made(slow), batch_size=4), ONE, prefetch=0):
            profiler.step(num_samples=4)
        said = profiler.step_info(unit="rows")

    assert "reader_cost: 0.0" in said
    assert float(said.split("reader_cost: ")[1].split(" ")[0]) >= 0.008


def test_an_evaluation_in_between_is_not_counted_as_reading_and_no_pass_is_held():
    train = sharded(DataLoader(Made(), batch_size=4), ONE)
    with paddle.profiler.Profiler(timer_only=True) as profiler:
        batches = iter(train)
        held = weakref.ref(batches)
        for _ in batches:
            for _ in sharded(DataLoader(Made(slow), batch_size=4), ONE, prefetch=0):
                pass
            profiler.step(num_samples=4)
        assert float(profiler.step_info().split("reader_cost: ")[1].split(" ")[0]) < 0.008
        del batches
        gc.collect()
        assert held() is None
