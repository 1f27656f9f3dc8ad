"""PaddleFormers 1.2.0's Trainer in its default mode (local tensors, fleet), unedited, with `patch_paddle()`.

Each flow that loses rows with Paddle's loader loses none here. The `plain` tests show that loss: they fail when the
package is mended. On four CPU ranks of dp x mp, Paddle's own groups do not connect (3.3.1): such ranks are in
tests/multiprocess/test_rank_loaders.py.
"""

import json
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from paddle_shard.testing import RanksFailed
from tests.deadlines import HANG
from tests.jobs import launch_ranks

if os.environ["PADDLE_SHARD_TRAINER"] != "paddleformers":
    pytest.skip("of PaddleFormers 1.2.0", allow_module_level=True)

WORKER = Path(__file__).with_name("fleet_worker.py")
PLAIN = {"patch": False}
SAVED = {"callback": True, "save_steps": 1}


def run(folder, cases, num_ranks=2):
    """[what each rank reports of it] of each case."""
    named = [
        {"out": str(folder / f"out-{number}"), **case}
        for number, case in enumerate(cases)
    ]
    for _ in range(3):
        reports = launch_ranks(
            WORKER,
            num_ranks,
            folder / "run",
            args=[json.dumps(named)],
            timeout=3 * HANG,
        )
        # Paddle's groups, of which the trainer makes a dozen, do not always connect on a busy host.
        if "/gloo/" not in json.dumps(reports):
            break
    return list(zip(*reports, strict=True))


def steps_of(ranks, num_data_ranks=2):
    """The rows of each global micro-batch, after a check that ranks of one data rank have the same."""
    replicas = len(ranks) // num_data_ranks
    for first in range(0, len(ranks), replicas):
        for found in ranks[first : first + replicas]:
            assert "error" not in found, found["error"]
            assert found["steps"] == ranks[first]["steps"]
    steps = [found["steps"] for found in ranks[::replicas]]
    return [
        [row for rows in step for row in rows]
        for step in zip(*steps, strict=True)
    ]


def counts_of(steps):
    return Counter(row for step in steps for row in step)


# Each row once an epoch

FLOWS = {
    "map, 11 rows": {"rows": 11},
    "map, 12 rows, shuffled": {"rows": 12, "shuffle": True},
    "map, 13 rows, workers": {"rows": 13, "workers": 2},
    "stream": {"rows": 12, "data": "stream", "max_steps": 6},
    "stream, workers": {
        "rows": 12,
        "data": "stream",
        "max_steps": 6,
        "workers": 2,
    },
    "leader": {"rows": 12, "patch": {"replicas": "leader"}},
}


@pytest.fixture(scope="module")
def flows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flows")
    return dict(zip(FLOWS, run(folder, FLOWS.values()), strict=True))


@pytest.mark.parametrize("name", FLOWS)
def test_fleet_trainer_reads_each_row_once_an_epoch(name, flows):
    steps = steps_of(flows[name])
    num_rows = FLOWS[name]["rows"]
    epoch = -(-num_rows // 4)
    assert len(steps) == 2 * epoch
    for first in (0, epoch):
        rows = [row for step in steps[first : first + epoch] for row in step]
        assert set(rows) == set(range(num_rows))
        # a row fills up the last batch
        assert len(rows) == num_rows + num_rows % 2


def test_fleet_trainer_shuffles_by_its_own_seed(tmp_path, flows):
    (other,) = run(tmp_path, [{**FLOWS["map, 12 rows, shuffled"], "seed": 7}])
    orders = [steps_of(flows["map, 12 rows, shuffled"]), steps_of(other)]
    assert orders[0] != orders[1]
    assert orders[0][:3] != orders[0][3:]


MODEL_PARALLEL = {"mp": 2, "rows": 11, "batch": 4}


def test_fleet_model_parallel_ranks_read_the_same(tmp_path):
    cases = [MODEL_PARALLEL, {**MODEL_PARALLEL, "distributed": True}]
    for ranks in run(tmp_path, cases):
        epoch = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
        assert steps_of(ranks, num_data_ranks=1) == 2 * epoch


def test_plain_fleet_trainer_loses_rows(tmp_path):
    missed, doubled = run(
        tmp_path, [{"rows": 11, **PLAIN}, {**FLOWS["stream, workers"], **PLAIN}]
    )
    assert 10 not in counts_of(steps_of(missed))
    assert steps_of(doubled)[:2] == [[0, 1, 2, 3], [0, 1, 2, 3]]
    case = {**MODEL_PARALLEL, "distributed": True, "max_steps": 6, **PLAIN}
    (short,) = run(tmp_path / "short", [case])
    assert len(steps_of(short, num_data_ranks=1)) == 3  # of six


# Evaluation


def test_fleet_evaluate_counts_each_row_once(tmp_path):
    padded, ignored, stream, alone = run(
        tmp_path,
        [
            {"rows": 11, "evaluate": True},
            {"rows": 11, "evaluate": True, "label_pad": -100},
            {"rows": 11, "evaluate": True, "label_pad": -100, "data": "stream"},
            {"rows": 11, "evaluate": True, "batch": 1, "label_pad": -100},
        ],
    )
    for ranks in (padded, ignored, stream, alone):
        for found in ranks:
            assert found["evaluated"] == list(range(11))
    # Batches of one row have the loss of each row: the mean over the rows.
    exact = alone[0]["metrics"]["eval_loss"]
    for ranks in (ignored, stream):
        assert np.isclose(ranks[0]["metrics"]["eval_loss"], exact, atol=1e-6)


# A sample that cannot be read


@pytest.mark.parametrize(
    "case", [{}, {"workers": 2}, {"data": "stream", "max_steps": 6}, {"mp": 2}]
)
def test_fleet_trainer_fails_on_all_ranks(case, tmp_path):
    (ranks,) = run(tmp_path, [{"rows": 12, "bad": 6, **case}])
    assert len({len(found["steps"]) for found in ranks}) == 1
    for found in ranks:
        assert found["error"].startswith("DataReadError")
        assert "row 6 cannot be read" in found["error"]


# Resume

RESUMED = {
    "map": {"rows": 13, "shuffle": True, "dropout": 0.3},
    "stream": {"rows": 12, "data": "stream", "max_steps": 6, "dropout": 0.3},
    "accumulation": {"rows": 16, "accumulation": 2, "dropout": 0.3},
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    runs = run(folder, [{**case, **SAVED} for case in RESUMED.values()])
    return folder, dict(zip(RESUMED, runs, strict=True))


@pytest.mark.parametrize("name", RESUMED)
def test_fleet_trainer_resumes_with_the_next_row_and_loss(
    name, straight, tmp_path
):
    folder, whole = straight
    number = [*RESUMED].index(name)
    stops = [1, 2, 3]  # within, and at the end of, an epoch
    rest = run(
        tmp_path,
        [
            {
                **RESUMED[name],
                "callback": True,
                "resume": str(folder / f"out-{number}" / f"checkpoint-{stop}"),
            }
            for stop in stops
        ],
    )
    accumulation = RESUMED[name].get("accumulation", 1)
    for stop, ranks in zip(stops, rest, strict=True):
        for found, before in zip(ranks, whole[name], strict=True):
            assert found["steps"] == before["steps"][stop * accumulation :]
            assert np.allclose(
                found["losses"],
                before["losses"][stop * accumulation :],
                atol=1e-6,
            )


@pytest.mark.parametrize("name", ["map", "stream"])
def test_fleet_trainer_resumes_with_another_batch_and_ranks(name, tmp_path):
    case = {
        "rows": 24,
        "data": name,
        "shuffle": name == "map",
        "max_steps": 12,
        **SAVED,
    }
    (begun,) = run(tmp_path / "begun", [case])
    done = counts_of(steps_of(begun)[:3])
    resume = str(tmp_path / "begun" / "out-0" / "checkpoint-3")
    for num_ranks, batch in ((2, 1), (3, 2)):
        folder = tmp_path / f"{num_ranks}-{batch}"
        (ranks,) = run(
            folder, [{**case, "batch": batch, "resume": resume}], num_ranks
        )
        rest = steps_of(ranks, num_data_ranks=num_ranks)
        num_left = (24 - done.total()) // (num_ranks * batch)
        counts = done + counts_of(rest[:num_left])
        assert max(counts.values()) == 1
        assert counts.total() == done.total() + num_left * num_ranks * batch


def test_plain_fleet_trainer_repeats_rows_with_another_batch(tmp_path):
    (begun,) = run(tmp_path / "begun", [{"rows": 24, "save_steps": 1, **PLAIN}])
    resume = str(tmp_path / "begun" / "out-0" / "checkpoint-3")
    case = {"rows": 24, "batch": 1, "max_steps": 12, "resume": resume, **PLAIN}
    (ranks,) = run(tmp_path / "rest", [case])
    counts = counts_of(steps_of(begun)[:3]) + counts_of(steps_of(ranks)[:6])
    assert max(counts.values()) > 1


def test_fleet_trainer_resumes_after_sigkill(tmp_path):
    case = {"rows": 13, "shuffle": True, "out": str(tmp_path / "out"), **SAVED}
    with pytest.raises(RanksFailed) as why:
        run(tmp_path / "killed", [{**case, "die_at": 3}])
    assert str(-signal.SIGKILL) in str(why.value) or "exitcode" in str(
        why.value
    )
    (whole,) = run(
        tmp_path / "whole", [{**case, "out": str(tmp_path / "other")}]
    )
    resume = str(tmp_path / "out" / "checkpoint-2")
    (rest,) = run(tmp_path / "rest", [{**case, "resume": resume}])
    assert steps_of(rest) == steps_of(whole)[2:]
