import gc
import os
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def cluster():
    """A small cluster on this machine; its actors find the tests' modules as these processes do."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    started = ray.init(
        address="local",
        num_cpus=3,
        object_store_memory=200_000_000,
        include_dashboard=False,
        log_to_driver=False,
        # else what else this machine does comes first
        _system_config={"worker_niceness": 0},
    )
    yield started.address_info["address"]
    ray.shutdown()


@pytest.fixture(autouse=True)
def loaders_are_dropped():
    """Persistent actors live as long as their loader, which is in a cycle and waits for the garbage collector."""
    yield
    gc.collect()
