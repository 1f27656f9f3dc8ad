"""One seed draws every fault; what a test leaves behind is an error of that test."""

import multiprocessing.process
import os
import random

import pytest

from tests.faults.traces import Traces

SEED = int(os.environ.get("FAULT_SEED", "0"))

collect_ignore_glob = ["*_worker.py", "rounds.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if "only_in_rounds" in item.keywords and "FAULT_SEED" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="takes long: make faults, or FAULT_SEED=0"))


def pytest_report_header():
    return f"faults: FAULT_SEED={SEED}"


@pytest.fixture
def rng(request):
    """What draws a test's faults; the same for the same FAULT_SEED."""
    print(f"FAULT_SEED={SEED}")
    return random.Random(f"{SEED} {request.node.nodeid}")


@pytest.fixture(scope="session", autouse=True)
def started():
    """The pids of all processes that multiprocessing has started here; shared memory is named after them."""
    pids, start = set(), multiprocessing.process.BaseProcess.start

    def noted(process):
        start(process)
        pids.add(process.pid)

    multiprocessing.process.BaseProcess.start = noted
    yield pids
    multiprocessing.process.BaseProcess.start = start


@pytest.fixture(autouse=True)
def nothing_is_left(request, started):
    """After each test: no process, thread, socket, pipe or shared memory that was not there before."""
    before = Traces(started)
    yield
    if "leaves" not in request.keywords:
        assert before.left() == {}


@pytest.fixture(scope="package", autouse=True)
def no_thread_is_left(started):
    """After all of these tests: no thread of Paddle's either, nor a pipe."""
    before = Traces(started, lingering=True)
    yield
    assert before.left() == {}


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr("paddle_shard.sources.files.BACKOFF", 0.01)
    monkeypatch.setattr("paddle_shard.sources.webdataset.SPREAD", 0.0)
    monkeypatch.setenv("no_proxy", "*")
