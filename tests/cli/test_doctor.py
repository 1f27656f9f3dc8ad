"""`paddle-shard doctor` under the launcher: ranks that are missing or fail are named, and nothing hangs."""

import json
import re
import time
from pathlib import Path

import pytest

from paddle_shard.extras.cli.main import COMMANDS, main
from tests.deadlines import HANG
from tests.jobs import run_ranks, start_ranks
from tests.run.record_runs import asked

WORKER = Path(__file__).with_name("doctor_worker.py")
ENV = {"PYTHONPATH": str(WORKER.parents[2])}

pytestmark = pytest.mark.multiprocess


def told(folder, ranks=3, *, all=(), timeout=110, **flags):
    """What each rank is told; all exit with 1 if, and only if, there is a hazard."""
    args = [json.dumps({"all": ["--timeout", str(timeout), *all], **flags})]
    reports = run_ranks(WORKER, ranks, folder, args=args, env=ENV, timeout=HANG)
    for one in reports:
        assert one["code"] == bool(one["hazards"])
    return reports


def the_hazard(reports):
    """The one hazard, the same on all ranks."""
    found = [
        [hazard for hazard in one["hazards"] if "MB" not in hazard["what"]]
        for one in reports
    ]
    assert found == [found[0]] * len(found)
    (one,) = found[0]
    return f"{one['what']}. {one['remedy']}"


def test_ranks_whose_collectives_work_have_no_hazard(tmp_path):
    for one in told(tmp_path, 2, does={"0": "all-reduce", "1": "all-reduce"}):
        assert [hazard for hazard in one["hazards"] if "MB" not in hazard["what"]] == []
        assert re.match(r"2 on 1 hosts: \S+", one["group"]["ranks"])
        assert one["group"]["an all-reduce"].lower() == "works by gloo"


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"does": {"0": "no network", "1": "no network", "2": "no network"}}, "on rank 0: OSError: no network"),
        ({"timeout": 10, "does": {"0": "hangs", "1": "hangs", "2": "hangs"}}, "on rank 0: not in 10 s"),
    ],
)  # fmt: skip
def test_collectives_that_fail_are_told_on_all_ranks(flags, what, tmp_path):
    found = told(tmp_path, **flags)
    assert [len(one["hazards"]) >= 3 for one in found] == [True] * 3
    assert all(re.search(what, str(one["hazards"])) for one in found)


@pytest.mark.parametrize(
    "missing", [0, 2]
)  # rank 0 has the store by which the others meet
def test_a_rank_that_is_missing_is_named_after_the_timeout(missing, tmp_path):
    args, begun = (
        [json.dumps({"all": ["--timeout", "5"], "does": {missing: "killed"}})],
        time.monotonic(),
    )
    with start_ranks(WORKER, 3, tmp_path, args=args, env=ENV, timeout=HANG) as job:
        found = job.reports([rank for rank in range(3) if rank != missing], HANG)
    assert time.monotonic() - begun < HANG / 2
    for one in found:
        assert one["code"] == 1
        assert re.search(rf"ranks? \[?{missing}\b", the_hazard([one]))


def test_a_timeout_that_is_none_exits_with_2():
    assert "argument --timeout: must be an int from 1" in asked(
        "doctor", "--timeout", "0", code=2
    )


def test_what_is_stopped_by_ctrl_c_says_so_in_a_line(monkeypatch, capsys):
    def stopped(options):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "doctor", COMMANDS["doctor"]._replace(answer=stopped))

    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "paddle-shard doctor: stopped\n"
