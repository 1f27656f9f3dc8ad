"""`on_ray.py` says at once that no cluster is there. What it does on one is in tests/adapters/ray."""

import socket
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).parents[2] / "launch" / "on_ray.py"


def test_on_ray_names_a_cluster_that_does_not_answer(commands):
    with socket.socket() as unused:  # bound, so that nobody else listens there
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"

        commands.start(
            "run",
            [sys.executable, SCRIPT, "--processes", 1, __file__],
            RAY_ADDRESS=address,
        )

        assert commands.wait() == {"run": 2}
    assert f"no Ray cluster answers at RAY_ADDRESS={address} (" in commands.err(
        "run"
    )
