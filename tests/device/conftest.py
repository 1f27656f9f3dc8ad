"""Tests on the stand-in device of this folder (`make test-device`) and, some, on a GPU (`make test-gpu`); else none."""

import os

import pytest

ROOT = os.environ.get("CUSTOM_DEVICE_ROOT")
collect_ignore_glob = (
    [] if ROOT or "PADDLE_SHARD_GPU" in os.environ else ["test_*.py"]
)


@pytest.fixture(scope="session")
def plugin():
    from tests.device import on_standin

    return on_standin.plugin


@pytest.fixture
def counters(plugin):
    """Returns what was counted since the last call: name -> (calls, bytes, calls on the main thread)."""

    from tests.device import on_standin

    def counted():
        found = on_standin.read_json(plugin.standin_counters)
        return {
            name: tuple(counts) for name, counts in found.items() if counts[0]
        }

    counted()
    return counted
