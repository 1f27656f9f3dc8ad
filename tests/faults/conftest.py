"""One seed draws every fault; what a test leaves behind is an error of that test."""

import contextlib
import os
import random

import pytest

from tests.faults.traces import Traces

SEED = int(os.environ.get("FAULT_SEED", "0"))

collect_ignore_glob = ["*_worker.py", "rounds.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if "only_in_rounds" in item.keywords and "FAULT_SEED" not in os.environ:
            item.add_marker(
                pytest.mark.skip(
                    reason="takes long: make faults, or FAULT_SEED=0"
                )
            )


def pytest_report_header():
    return f"faults: FAULT_SEED={SEED}"


@pytest.fixture
def rng(request):
    """What draws a test's faults; the same for the same FAULT_SEED."""
    print(f"FAULT_SEED={SEED}")
    return random.Random(f"{SEED} {request.node.nodeid}")


@pytest.fixture(autouse=True, scope="session")
def thread_of_fsspec():
    """Start fsspec's thread, which lives as long as the process, before traces are compared."""
    with contextlib.suppress(ImportError):
        from fsspec.asyn import get_loop

        get_loop()


@pytest.fixture(autouse=True)
def nothing_is_left(request, thread_of_fsspec):
    """After each test: no process, thread, socket, pipe or shared memory that was not there before."""
    before = Traces()
    yield
    if "leaves" not in request.keywords:
        assert before.left() == {}


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(
        "paddle_shard.data.files.files.PAUSES", (0.01, 0.02, 0.04)
    )
    monkeypatch.setenv("no_proxy", "*")
