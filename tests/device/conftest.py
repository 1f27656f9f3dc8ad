"""Tests on the stand-in device of this folder (`make test-device`) and, some, on a GPU (`make test-gpu`); else none."""

import ctypes
import json
import os
from pathlib import Path

import pytest

ROOT = os.environ.get("CUSTOM_DEVICE_ROOT")
collect_ignore_glob = [] if ROOT or "PADDLE_SHARD_GPU" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def plugin():
    found = ctypes.CDLL(str(Path(ROOT) / "libstandin.so"))
    found.standin_work.argtypes = [ctypes.c_void_p, ctypes.c_long]
    found.standin_wait.argtypes = found.standin_close.argtypes = [ctypes.c_void_p]
    found.standin_counters.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return found


@pytest.fixture
def counters(plugin):
    """Returns what was counted since the last call: name -> (calls, bytes, calls on the main thread)."""

    def counted():
        text = ctypes.create_string_buffer(4096)
        plugin.standin_counters(text, len(text))
        return {
            name: tuple(found)
            for name, found in json.loads(text.value).items()
            if found[0]
        }

    counted()
    return counted
