"""What is split over devices is saved in parts, and loaded as it is split then."""

from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.device.devices import NAME, needs_two
from tests.jobs import launch_ranks

WORKER = Path(__file__).parent / "checkpoints_worker.py"


@pytest.mark.gpu
@needs_two
def test_checkpoints_load_on_devices_under_another_split(tmp_path):
    ranks = launch_ranks(
        WORKER,
        2,
        tmp_path,
        args=[tmp_path / "saved"],
        env={"ON": NAME},
        timeout=2 * HANG,
    )

    for rank, found in enumerate(ranks):
        place = f"Place({NAME}:{rank})"
        assert found == {
            "split along 1": True,
            "split along 0": True,
            "whole": True,
            "place": place,
        }
    saved = [path.name for path in tmp_path.glob("saved/*/*_parts.pdparams")]
    # each rank its own
    assert sorted(saved) == [
        "0_parts.pdparams",
        "1_parts.pdparams",
    ]
