"""Is training starved, if the host runs ahead of the device? What the device hides costs nothing."""

import json
import re
import time

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import paddle_shard
from paddle_shard.delivery.advice import RECENT

MESH = dist.ProcessMesh([0], dim_names=["dp"])
COMPUTE = paddle.device.current_stream("standin:0").stream_base.raw_stream
STEPS = RECENT + 8
WAYS = {"default": ({}, {}), "prefetch 0": ({}, {"prefetch": 0}), "workers": ({"num_workers": 2}, {})}


class Data(paddle.io.Dataset):
    def __init__(self, read):
        self.read = read

    def __getitem__(self, index):
        time.sleep(self.read * (index % 2))
        return np.zeros(16, "float32"), index

    def __len__(self):
        return 2 * STEPS


pytestmark = pytest.mark.flaky(reruns=3)  # of planted milliseconds, on a busy machine


def trained(plugin, way, *, host, device, read, waits_every=STEPS):
    """The loader after a pass in which the loop seldom waits for the device; times are milliseconds a step."""
    given, options = WAYS[way]
    dataloader = paddle.io.DataLoader(Data(read / 1000), batch_size=2, **given)
    loader = paddle_shard.shard_dataloader(dataloader, MESH, shard_dims="dp", **options)
    for number, _ in enumerate(loader):
        for _ in range(5):  # as kernels are queued all along a model's code
            plugin.standin_work(COMPUTE, device * 200)
            time.sleep(host / 5000)
        if number % waits_every == waits_every - 1:
            plugin.standin_wait(COMPUTE)
    plugin.standin_wait(COMPUTE)
    return loader


@pytest.mark.parametrize("read", [0, 8])
@pytest.mark.parametrize("way", WAYS)
def test_where_the_device_is_behind_the_loop_data_is_not_late(way, read, plugin):
    """Also not data that is read on the training thread, in the time of which the device computes earlier steps."""
    stats = trained(plugin, way, host=1, device=25 if read == 0 else 45, read=read).stats

    assert "Data is ready when it is asked for" in str(stats)
    assert stats.epoch.starved < 0.1
    assert stats.epoch.waits["device"] > 0.3 * stats.epoch.wait_seconds
    assert sum(stats.epoch.waits.values()) == pytest.approx(stats.epoch.wait_seconds)
    (summary,) = stats.told().values()
    assert summary.step > 0.9 * summary.whole, "with data at once a step would take as long"
    assert {"data/hidden_seconds", "data/waits/device"} <= set(stats.scalars())


@pytest.mark.parametrize(("way", "read"), [("prefetch 0", 50), ("workers", 150)])
def test_where_the_device_waits_for_data_it_is_told(way, read, plugin):
    stats = trained(plugin, way, host=1, device=2, read=read).stats

    assert "Training waits for data" in str(stats)
    assert "reading `Data`" in str(stats)
    assert stats.epoch.starved > 0.5
    assert stats.epoch.hidden_seconds < 0.3 * stats.epoch.wait_seconds


def test_a_wait_in_which_the_device_is_busy_costs_nothing_also_if_it_is_less_than_two_steps_behind(plugin):
    stats = trained(plugin, "prefetch 0", host=1, device=40, read=6, waits_every=10).stats

    assert "Data is ready when it is asked for" in str(stats)
    assert stats.epoch.starved < 0.1


def test_a_device_that_is_late_is_no_stall_of_the_data(plugin, caplog, monkeypatch):
    """It is done when the wait for it ends, and data was there all the time."""
    monkeypatch.setattr("paddle_shard.delivery.stats._STALL_SECONDS", 0.1)
    dataloader = paddle.io.DataLoader(Data(0.0), batch_size=2)
    loader = paddle_shard.shard_dataloader(dataloader, MESH, shard_dims="dp")
    for number, _ in enumerate(loader):
        plugin.standin_work(COMPUTE, 500_000 if number == 20 else 0)

    assert loader.stats.epoch.waits["device"] > 0.2
    assert not [text for text in caplog.messages if "data came after" in text]


@pytest.mark.parametrize("way", WAYS)
def test_a_device_with_nothing_to_compute_hides_nothing(way, plugin):
    stats = trained(plugin, way, host=5, device=0, read=3).stats

    assert stats.epoch.hidden_seconds < 0.05 * stats.epoch.wait_seconds


@pytest.mark.parametrize("host", [1, 15])
def test_with_data_at_once_a_step_would_take_what_the_device_takes(host, plugin):
    """It is idle when data comes, so that only a look tells when it has ended its step."""
    stats = trained(plugin, "prefetch 0", host=host, device=20, read=30).stats
    (summary,), epoch = stats.told().values(), stats.epoch

    assert 0.018 < summary.step < 0.026
    # On a busy machine reading takes more than 30 ms, and the loop more than `host`; the device takes what it takes.
    hidden, step = epoch.hidden_seconds / epoch.batches, epoch.step_seconds / (epoch.batches - 1)
    assert hidden == pytest.approx(max(0.0, 0.02 - step), abs=0.003)
    (workers,) = re.findall(r"(\d+) workers \(num_workers=\) would hide it", str(stats))
    assert int(workers) == 2 or summary.work > 0.032
    assert summary.step * (int(workers) - 1) < 1.11 * summary.work < 1.11 * summary.step * int(workers)


def test_a_step_that_waited_for_the_device_is_told_in_the_trace(plugin, tmp_path):
    trained(plugin, "default", host=0, device=5, read=0).trace(tmp_path / "steps.json")
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]

    assert "waiting for the device" in {event["name"] for event in events}
