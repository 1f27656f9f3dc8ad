"""What `loader.stats` counts, and where it is documented."""

import re
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from paddle.io import DataLoader

from paddle_shard.loader import step_messages
from paddle_shard.loader.stats import DERIVED, Counts, LoaderStats
from paddle_shard.loader.step_messages import StepMessages
from paddle_shard.reading.batch import Batch
from tests.helpers import ONE, Made, sharded

ROOT = Path(__file__).parents[2]
ALL = [*(field.name for field in fields(Counts)), *DERIVED]


def test_stats_are_scalars_and_rows_of_the_table_in_the_docs():
    loader = sharded(DataLoader(Made(length=10), batch_size=4), ONE)
    rows = re.findall(
        r"^\| (`.*?) \|", (ROOT / "docs/speed.md").read_text(), re.MULTILINE
    )

    found = set(loader.stats.scalars())
    assert found == {f"data/{name}" for name in ALL if name != "imbalance"}
    assert sorted(
        name for row in rows for name in re.findall(r"`(\w+)`", row)
    ) == sorted(ALL)


def test_pass_is_counted_anew_and_the_run_goes_on():
    loader = sharded(
        DataLoader(Made(length=10), batch_size=4), ONE, tail="fill"
    )
    for _ in range(2):
        for _ in loader:
            pass
    epoch, total = loader.stats.epoch, loader.stats.total

    assert (epoch.batches, epoch.samples, epoch.padding, epoch.skipped) == (
        3,
        10,
        2,
        0,
    )
    assert (total.batches, total.samples, total.padding, total.skipped) == (
        6,
        20,
        4,
        0,
    )
    seconds = epoch.wait_seconds + epoch.step_seconds
    assert epoch.samples_per_second == pytest.approx(10 / seconds)
    assert epoch.starved == pytest.approx(epoch.wait_seconds / seconds)


def test_end_of_a_pass_is_waited_for_too():
    """Workers are ended then."""
    loader = sharded(
        DataLoader(Made(length=10), batch_size=4, num_workers=2), ONE
    )
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    booked, began = loader.stats.total.wait_seconds, time.perf_counter()
    assert next(batches, None) is None
    took, booked = (
        time.perf_counter() - began,
        loader.stats.total.wait_seconds - booked,
    )

    assert 0.8 * took - 0.001 < booked <= took + 0.001


def test_stats_of_no_batches_divide_by_nothing():
    assert [getattr(Counts(), name) for name in DERIVED] == [0.0, None, 0.0]


def test_stats_keep_the_counts_of_a_pass_beside_another():
    loader = sharded(DataLoader(Made(np.float32, 40), batch_size=4), ONE)
    for step, _ in enumerate(loader):
        if step == 3:
            next(iter(loader))

    assert loader.stats.total.batches == 11
    assert loader.stats.epoch.batches == 1, "of the newest pass"


def test_stats_text_names_the_function_that_is_waited_for():
    loader = sharded(DataLoader(Made(slow, 400), batch_size=4), ONE, prefetch=0)
    for _ in loader:
        pass
    # Python 3.10 does not know the class of a method.
    owner = "Made." if sys.version_info >= (3, 11) else ""
    assert f"in {owner}__getitem__" in str(loader.stats)


def slow(index):
    time.sleep(0.004)
    return np.array(index)


def test_stats_of_a_rank_are_sent_to_the_others_in_time(monkeypatch):
    clock = SimpleNamespace(perf_counter=lambda: clock.now, now=0.0)
    monkeypatch.setattr(step_messages, "time", clock)
    setups = [
        SimpleNamespace(
            ranks=(0, 1),
            stats=LoaderStats(rank),
            compared_ranks=None,
            source=SimpleNamespace(split=False),
            placer=SimpleNamespace(pad_to=None),
        )
        for rank in range(2)
    ]
    first, second = map(StepMessages, setups)
    counts = setups[1].stats.begin_pass()
    counts.batches, counts.wait_seconds, counts.step_seconds = 2, 0.5, 0.5
    batch = Batch(step=None, value=None, is_padding=None)

    assert second.compose(batch) is None
    clock.now = 1.5
    sent = second.compose(batch)
    assert second.compose(batch) is None
    first.apply(batch, [(1, sent)])

    assert setups[0].stats.of_ranks[1][:3] == [0.25, 0.25, 0.0]
    assert "Rank 1 waits 50%" in str(setups[0].stats)
