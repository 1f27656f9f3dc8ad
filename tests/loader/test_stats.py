"""What `loader.stats` counts, and where it is documented."""

import re
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from paddle.io import DataLoader

from paddle_shard.loader.stats import DERIVED, Counts
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
