from pathlib import Path

import numpy as np
import pytest

from paddle_shard.plan.weights import Chairman
from paddle_shard.testing.simulated import on_each_rank
from tests.deadlines import HANG
from tests.helpers import DP2, ONE
from tests.jobs import run_ranks
from tests.multiprocess.mixture_worker import LENGTHS, loader_of, rows

pytestmark = pytest.mark.multiprocess


def joined(reports, name, data_ranks):
    """The rows of all data ranks, given as a representative of each, in the order of the global batch."""
    return [
        row
        for steps in zip(*(reports[rank][name] for rank in data_ranks), strict=True)
        for part in steps
        for row in part
    ]


def test_real_ranks_switch_weights_together_and_resume_on_another_mesh(tmp_path):
    reports = run_ranks(Path(__file__).with_name("mixture_worker.py"), 4, tmp_path, timeout=2 * HANG)

    for name in ("steps", "rest"):
        assert reports[0][name] == reports[2][name], "replicas agree"
        assert reports[1][name] == reports[3][name], "replicas agree"
    before, after = joined(reports, "steps", (0, 1)), joined(reports, "rest", (0, 1))
    (switch,) = {tuple(report["switches"]) for report in reports}
    (first,) = switch
    assert 24 <= first < 144
    sources = [int(row[0]) // 1000 for row in before + after]
    assert sources[:first] == Chairman((5, 3, 1)).at(np.arange(first))[0].tolist()
    assert sources[first:] == [[0, 2][at] for at in Chairman((1, 1)).at(np.arange(144 - first))[0].tolist()]
    assert after == joined(reports, "resumed", (3, 1, 2, 0)), "another mesh and batch size"
    drawn = {name: sources[:72].count(place) for place, name in enumerate(LENGTHS)}
    assert all(report["drawn"] == drawn and report["exact"] for report in reports)
    for rank, report in enumerate(reports):
        assert "must be the same on all ranks" in report["other weights"]
        assert "on global rank 2" in report["other weights"]
        assert "before step 7 of epoch 0 on global rank 0, and before step 6 of epoch 0 on" in report["at other steps"]
        whose = "" if rank == 1 else "global rank 1: its set_weights() failed: "
        assert report["wrong on one"].startswith(f"{whose}weights must name each source")


def test_simulated_ranks_get_what_one_process_gets():
    alone = [row for batch in loader_of(ONE) for row in rows(batch)]
    mesh = DP2
    per_rank = on_each_rank([0, 1], lambda: [rows(batch) for batch in loader_of(mesh, workers=0)])

    assert [row for steps in zip(*per_rank.values(), strict=True) for part in steps for row in part] == alone
