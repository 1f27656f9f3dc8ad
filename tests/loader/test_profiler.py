"""Paddle's profiler sees the loader as it sees Paddle's own."""

import gc
import json
import time
import weakref
from collections import Counter

import numpy as np
import paddle.profiler
import pytest
from paddle.io import DataLoader

from tests.helpers import ONE, Made, sharded


def slow(index):
    time.sleep(0.002)
    return np.array(index)


def very_slow(index):
    time.sleep(0.05)
    return np.array(index)


def test_step_info_tells_what_reading_costs():
    with paddle.profiler.Profiler(timer_only=True) as profiler:
        for _ in sharded(DataLoader(Made(slow), batch_size=4), ONE, prefetch=0):
            profiler.step(num_samples=4)
        said = profiler.step_info(unit="rows")

    assert "reader_cost: 0.0" in said
    assert float(said.split("reader_cost: ")[1].split(" ")[0]) >= 0.008


def test_profiler_does_not_count_an_evaluation_as_reading():
    train = sharded(DataLoader(Made(), batch_size=4), ONE)
    with paddle.profiler.Profiler(timer_only=True) as profiler:
        batches = iter(train)
        held = weakref.ref(batches)
        for _ in batches:
            for _ in sharded(
                DataLoader(Made(very_slow, 4), batch_size=4), ONE, prefetch=0
            ):
                pass
            profiler.step(num_samples=4)
        assert (
            float(profiler.step_info().split("reader_cost: ")[1].split(" ")[0])
            < 0.1
        )
        del batches
        gc.collect()
        assert held() is None


@pytest.mark.parametrize("workers", [0, 1])
def test_profile_has_a_span_for_each_batch(workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where Paddle writes a folder of its own
    # Paddle has one profiler at a time, and an earlier one may be in a cycle
    gc.collect()
    loader = sharded(
        DataLoader(Made(slow), batch_size=4, num_workers=workers),
        ONE,
        prefetch=0,
    )
    profiler = paddle.profiler.Profiler(
        targets=[paddle.profiler.ProfilerTarget.CPU]
    )
    profiler.start()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    profiler.stop()
    profiler.export(str(tmp_path / "trace.json"), format="json")
    for _ in batches:
        pass
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [
        event
        for event in events
        if event.get("name", "").startswith("paddle_shard: ")
    ]
    names = Counter(
        event["name"].partition(" ")[2].rpartition("[")[0] for event in spans
    )
    assert names["next batch"] == 3
