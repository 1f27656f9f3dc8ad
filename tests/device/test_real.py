"""The checks for a real GPU run on the stand-in, too, so that they are ready for one."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.deadlines import HANG

CHECKS = Path(__file__).parent / "real" / "check_real_device.py"
NAMES = ["bytes", "numbers", "numbers, broken: must fail", "statistics"]


def test_checks_for_a_gpu_pass_on_the_stand_in(tmp_path):
    built = os.environ["CUSTOM_DEVICE_ROOT"]
    command = [sys.executable, str(CHECKS), "--built", built, "--small"]

    done = subprocess.run(
        [*command, "--only", *NAMES],
        env=os.environ | {"OUT": str(tmp_path), "STANDIN_ALL_PINNED": "0"},
        capture_output=True,
        text=True,
        timeout=4 * HANG,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-3000:]
    checks = json.loads((tmp_path / "real.json").read_text())["checks"]
    assert list(checks) == NAMES
    assert checks["bytes"]["rows"][0]["copies"] > 100
