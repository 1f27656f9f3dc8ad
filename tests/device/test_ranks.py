"""Two ranks with a device each, and the device's own backend: the rows and losses of the same job on the CPU."""

from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.device.devices import NAME, needs_two
from tests.jobs import launch_ranks

HERE = Path(__file__).parent
CASES = [
    "plain",
    "workers",
    "padded",
    "verified",
    "stream",
    "leader",
    "resumed",
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    def run(device):
        environment = {"ON": device}
        if device == "cpu":
            environment |= {
                "CUSTOM_DEVICE_ROOT": "",
                "PADDLE_DISTRI_BACKEND": "gloo",
            }
        folder = tmp_path_factory.mktemp(device)
        return launch_ranks(
            HERE / "ranks_worker.py",
            2,
            folder,
            env=environment,
            timeout=2 * HANG,
        )

    return {device: run(device) for device in (NAME, "cpu")}


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize("case", CASES)
def test_rows_and_losses_are_those_of_the_cpu(jobs, case):
    for rank, (on_device, on_cpu) in enumerate(
        zip(jobs[NAME], jobs["cpu"], strict=True)
    ):
        assert on_device[case]["places"] == [f"Place({NAME}:{rank})"]
        assert on_device[case]["rows"] == on_cpu[case]["rows"]
        assert on_device[case]["losses"] == pytest.approx(
            on_cpu[case]["losses"], abs=1e-4
        )


def test_verify_on_a_device_copies_nothing_back(jobs):
    assert [rank["copied back"] for rank in jobs["standin"]] == [0, 0]
