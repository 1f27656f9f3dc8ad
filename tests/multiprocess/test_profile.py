from pathlib import Path

import pytest

from paddle_shard.reading.profile import OTHER_RANKS
from tests.deadlines import HANG
from tests.jobs import run_ranks
from tests.reading.test_profile import named

WORKER = Path(__file__).parent / "profile_worker.py"

pytestmark = pytest.mark.multiprocess


def test_profiler_names_the_slow_rank_and_its_cause(tmp_path):
    waiting, slow = run_ranks(
        WORKER,
        2,
        tmp_path,
        timeout=HANG,
        env={"PYTHONPATH": str(WORKER.parents[2])},
    )
    assert max(slow, key=slow.get).startswith(named("Digits.__getitem__"))
    assert max(waiting, key=waiting.get) == OTHER_RANKS
