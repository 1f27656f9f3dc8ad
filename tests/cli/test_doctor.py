"""`paddle-shard doctor` under the launcher: ranks that are missing are named, and nothing hangs."""

import json
import re
import time
from pathlib import Path

import pytest

from paddle_shard.extras.cli.main import COMMANDS, main
from tests.deadlines import HANG
from tests.jobs import run_ranks, start_ranks

WORKER = Path(__file__).with_name("doctor_worker.py")
ENV = {"PYTHONPATH": str(WORKER.parents[2])}

pytestmark = pytest.mark.multiprocess


def the_hazard(reports):
    """The one hazard, the same on all ranks."""
    found = [
        [hazard for hazard in one["hazards"] if "MB" not in hazard["what"]]
        for one in reports
    ]
    assert found == [found[0]] * len(found)
    (one,) = found[0]
    return f"{one['what']}. {one['fix']}"


def test_doctor_names_the_hosts_of_the_ranks(tmp_path):
    args = [json.dumps({"all": ["--timeout", "110"]})]
    for one in run_ranks(WORKER, 2, tmp_path, args=args, env=ENV, timeout=HANG):
        assert [
            hazard for hazard in one["hazards"] if "MB" not in hazard["what"]
        ] == []
        assert one["code"] == bool(one["hazards"])
        assert re.match(r"2 on 1 hosts: \S+", one["group"]["ranks"])


# rank 0 has the store by which the others meet
@pytest.mark.parametrize("missing", [0, 2])
def test_doctor_names_a_missing_rank_after_the_timeout(missing, tmp_path):
    args, begun = (
        [json.dumps({"all": ["--timeout", "5"], "does": {missing: "killed"}})],
        time.monotonic(),
    )
    with start_ranks(
        WORKER, 3, tmp_path, args=args, env=ENV, timeout=HANG
    ) as job:
        found = job.reports(
            [rank for rank in range(3) if rank != missing], HANG
        )
    assert time.monotonic() - begun < HANG / 2
    for one in found:
        assert one["code"] == 1
        assert re.search(rf"ranks? \[?{missing}\b", the_hazard([one]))


def test_main_reports_an_interrupt_in_a_line(monkeypatch, capsys):
    def stopped(options):
        raise KeyboardInterrupt

    monkeypatch.setitem(
        COMMANDS, "doctor", COMMANDS["doctor"]._replace(answer=stopped)
    )

    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "paddle-shard doctor: stopped\n"
