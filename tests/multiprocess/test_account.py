import itertools
import re
from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.jobs import run_ranks

WORKER = Path(__file__).parent / "account_worker.py"


pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("account")
    given = {"args": [folder / "trace.json"], "env": {"PYTHONPATH": str(WORKER.parents[2])}}
    return run_ranks(WORKER, 2, folder / "job", timeout=2 * HANG, **given)


def test_all_ranks_name_the_one_that_is_late_and_why(reports):
    one, two = reports

    # Their data is ready at once, as the loop's own watch says where no other process takes the machine's time.
    ready = {"nothing": 0.3, "a slow follower": 0.02, "a slow rank": 0.02}
    for case in one:
        assert one[case][0] == two[case][0], case
        for _, closes, *_ in (one[case], two[case]) if case not in ready else ():
            assert 0.95 <= closes <= 1.001, case
    told = {case: found[0] for case, found in one.items()}
    quiet = {case for case, step in ready.items() if max(one[case][4], two[case][4]) < 0.03 * step}
    assert "Data is ready when it is asked for" in told["nothing"] or "nothing" not in quiet, told["nothing"]
    for case in ("slow rows of rank 1", "slow rows of rank 1, workers"):
        assert re.search(r"on global rank 1, reading `Rows`, [\d.]+ ms a sample", told[case]), told[case]
    assert "workers instead of 1 (num_workers=) would hide it" in told["slow rows of rank 1, workers"]
    assert one["slow rows of rank 1"][2]["other ranks"] > 0.3, "rank 0 waits for rank 1"
    assert "on global rank 0, reading `Rows`" in told["a leader"]
    assert two["a leader"][2]["leader"] > 0.3
    assert "workers (num_workers=) would hide it." in told["each"]
    assert re.search(r"on global rank 1, reading `Rows`, [\d.]+ ms a sample", told["slow later"]), told["slow later"]
    for case in quiet:
        assert "reading `Rows`" not in told[case], told[case]


def test_a_worker_that_has_nothing_to_do_is_not_shown_as_busy(reports):
    """Rank 0 reads at once, and its worker waits for requests while rank 1 reads."""
    events = [event for event in reports[0]["slow rows of rank 1, workers"][3] if event["ph"] == "X"]

    def made(rank):
        spans = [one for one in events if one["pid"] == rank and one["name"] == "making a batch"]
        return sum(one["dur"] for one in spans) / (max(one["ts"] + one["dur"] for one in spans) - spans[0]["ts"])

    assert made(0) < 0.5 < made(1)


def test_a_trace_shows_all_ranks_workers_and_steps_in_their_time(reports):
    events = reports[0]["slow rows of rank 1, workers"][3]
    assert events == reports[1]["slow rows of rank 1, workers"][3]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]

    for rank in (0, 1):
        assert {name for (pid, _), name in names.items() if pid == rank} == {"training thread", "worker 0"}
        steps = [e for e in spans if e["pid"] == rank and e["name"] == "step"]
        waits = [e for e in spans if e["pid"] == rank and e["name"] == "waiting for data"]
        assert len(steps) == len(waits) == 31
        for step, wait in zip(steps, waits, strict=True):
            assert step["ts"] + step["dur"] == pytest.approx(wait["ts"], abs=100)  # microseconds
        assert all(e["dur"] >= 4000 for e in steps)
        made = [e for e in spans if e["pid"] == rank and e["name"] == "making a batch"]
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1 for one, other in itertools.pairwise(made))
        for row in {e["tid"] for e in spans if e["pid"] == rank}:  # viewers drop what is only partly in another event
            open_until = []
            for event in (e for e in spans if (e["pid"], e["tid"]) == (rank, row)):
                first = int(event["ts"] * 1000.0)  # as Perfetto reads it
                last = first + int(event["dur"] * 1000.0)
                while open_until and open_until[-1] <= first:
                    open_until.pop()
                assert not open_until or last <= open_until[-1], event
                open_until.append(last)
        reading = [
            e["dur"]
            for e in spans
            if e["pid"] == rank and e["name"] == "reading `Rows`" and names[rank, e["tid"]] == "worker 0"
        ]
        assert (min(reading) >= 32_000) == (rank == 1), "eight rows of 4 ms"
