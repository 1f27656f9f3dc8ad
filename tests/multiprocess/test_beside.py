"""Of several ranks, too, a thread reads data that draws nothing, and only that."""

from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks


@pytest.mark.multiprocess
def test_thread_reads_what_draws_nothing_on_each_of_two_ranks(tmp_path):
    worker = Path(__file__).with_name("beside_worker.py")
    for found in run_ranks(worker, 2, tmp_path, timeout=HANG):
        for name, threads in found.items():
            draws = name.endswith("draws")
            assert threads == [
                "MainThread" if draws else "paddle_shard-ahead"
            ], name
