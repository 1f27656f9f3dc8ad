"""Actors of a real Ray cluster that are killed at random while they read: bytes and certificates are a local run's."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.deadlines import HANG

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.leaves,
    pytest.mark.only_in_rounds,
]

ROOT = Path(__file__).parents[2]
# of `make test-adapters ADAPTERS=ray`
ENVIRONMENT = ROOT / ".venv-ray" / "bin" / "python"


def test_ray_actors_killed_at_random_change_no_byte(rng, tmp_path):
    python = sys.executable if find_spec("ray") else ENVIRONMENT
    if not Path(python).exists():
        pytest.skip("Ray is not installed: make .venv-ray/.ready")
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'ray'}",
    ]
    kind = rng.choice(["draws", "gathers", "skips"])  # a round has few minutes
    command += [
        f"tests/adapters/ray/test_ray.py::test_twenty_random_kills_change_nothing[{kind}]"
    ]
    environment = {
        **os.environ,
        "FAULT_SEED": str(rng.randrange(10**6)),
        "PYTHONPATH": str(ROOT),
    }
    log = tmp_path / "log.txt"  # a pipe would be kept open by what is left
    with open(log, "w") as output:
        run = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        code = run.wait(4 * HANG)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGTERM)
            run.wait()

    assert code == 0, log.read_text(errors="replace")[-8000:]
