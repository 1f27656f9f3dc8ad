from pathlib import Path

import numpy as np
import pytest

from paddle_shard.plan.weights import WeightedInterleave
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
        for steps in zip(
            *(reports[rank][name] for rank in data_ranks), strict=True
        )
        for part in steps
        for row in part
    ]


def test_mixture_schedule_on_real_ranks_resumes_and_is_extended(tmp_path):
    reports = run_ranks(
        Path(__file__).with_name("mixture_worker.py"),
        4,
        tmp_path,
        timeout=2 * HANG,
    )

    for name in ("steps", "rest"):
        assert reports[0][name] == reports[2][name], "replicas agree"
        assert reports[1][name] == reports[3][name], "replicas agree"
    before, after = (
        joined(reports, "steps", (0, 1)),
        joined(reports, "rest", (0, 1)),
    )
    sources = [int(row[0]) // 1000 for row in before + after]
    assert (
        sources[:48]
        == WeightedInterleave((5, 3, 1)).sources_at(np.arange(48))[0].tolist()
    )
    assert sources[48:] == [
        [0, 2][at]
        for at in WeightedInterleave((1, 1))
        .sources_at(np.arange(96))[0]
        .tolist()
    ]
    resumed = joined(reports, "resumed", (3, 1, 2, 0))
    assert resumed[:40] == after[:40], "another mesh and batch size"
    assert [int(row[0]) // 1000 for row in resumed[40:]] == [1] * 32
    drawn = {
        name: sources[:72].count(place) for place, name in enumerate(LENGTHS)
    }
    assert all(
        report["drawn"] == drawn and report["exact"] for report in reports
    )


def test_simulated_ranks_get_what_one_process_gets():
    alone = [row for batch in loader_of(ONE) for row in rows(batch)]
    mesh = DP2
    per_rank = on_each_rank(
        [0, 1], lambda: [rows(batch) for batch in loader_of(mesh, workers=0)]
    )

    assert [
        row
        for steps in zip(*per_rank.values(), strict=True)
        for part in steps
        for row in part
    ] == alone
