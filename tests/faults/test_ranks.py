"""Faults on one of several real ranks: all raise at the same step, soon, and go on from the same place."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.deadlines import HANG
from tests.faults.feeds import loader_of, numbers
from tests.faults.traces import children
from tests.jobs import processes_left, run_ranks, start_ranks
from tests.trials import draws

pytestmark = [pytest.mark.multiprocess, pytest.mark.leaves]
WORKER = Path(__file__).parent / "ranks_worker.py"
ROOT = str(WORKER.parents[2])
LENGTH, RANKS = 400, 2
"""More numbers than 2 workers may be asked for behind the 2 steps of a case that loses one: 4 messages of 8 batches."""
ALL = list(range(LENGTH))
KINDS = ["map", "stream", "cut"]


def environment():
    paths = [ROOT, os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def options(rng):
    return {"prefetch": rng.choice([0, 1, 3])}


def joined(found):
    """The global batches of what each rank has read: its rows of each are contiguous."""
    size = 8 // RANKS
    assert len({len(rows) for rows in found}) == 1
    return [
        row
        for at in range(0, len(found[0]), size)
        for rows in found
        for row in rows[at : at + size]
    ]


def test_ranks_fail_together_at_one_step_and_lose_nothing(rng, tmp_path):
    cases = []
    for what in (
        ["fails"] * draws(6) + ["loses"] * draws(3) + ["left"] * draws(3)
    ):
        cases.append(
            {
                "what": what,
                "kind": rng.choice(KINDS),
                "workers": rng.choice([0, 1, 2])
                if what != "loses"
                else rng.choice([1, 2]),
                "workers_later": rng.choice([0, 2]),
                # behind it no reader need look
                "number": rng.randrange(LENGTH - 16),
                "ranks": rng.choice([[0], [1], [0, 1]])
                if what == "fails"
                else [rng.randrange(RANKS)],
                "pause": rng.choice([0.0, 0.0, 0.01]),
                "steps": 2
                if what == "loses" and cases[-1]["what"] != "loses"
                else rng.randrange(25),
                "moment": rng.uniform(0.0, 0.1),
                "together": rng.random() < 0.5,
                "options": options(rng),
            }
        )
    reports = run_ranks(
        WORKER,
        RANKS,
        tmp_path,
        args=["soundly", json.dumps(cases)],
        env=environment(),
        timeout=2 * HANG,
    )

    for number, case in enumerate(cases):
        read, told, waited, rest = zip(
            *(report["found"][number] for report in reports), strict=True
        )
        whole = joined(read) == ALL  # then the next epoch follows
        assert joined(read) + joined(rest) == ALL + ALL * whole, case
        if case["what"] == "left":
            assert len(read[0]) == case["steps"] * 4
            assert joined(told) == ALL
            continue
        step = len(read[0]) * RANKS // 8
        if case["what"] == "fails":
            # who reads it, where data are read in parts
            reader = case["number"] % 8 // 4
            happens = case["kind"] == "stream" or reader in case["ranks"]
            if not happens:
                assert {one[0] for one in told} == {"NoneType"}
                continue
            assert {one[0] for one in told} == {"DataReadError"}, (case, told)
            assert all("no disk" in one[5] for one in told)
            # else its first step of those that it reads ahead
            if case["kind"] != "stream" or case["ranks"] == [
                0,
                1,
            ]:
                assert step == case["number"] // 8
            assert len({json.dumps(one[1]) for one in told}) == 1, (
                "the same sample is named"
            )
            assert max(waited) < HANG
        elif whole and case["steps"] >= 4:
            # quick steps are read up to 32 ahead: all had been read when it was killed
            assert {one[0] for one in told} == {"NoneType"}, (case, told)
            continue
        else:
            assert {one[0] for one in told} == {"DataReadError"}, (case, told)
            assert all("exit code -9" in one[5] for one in told)
            assert max(waited) < HANG
        assert {one[2] for one in told} == {step}, (
            "the step that is not delivered is named"
        )
    assert [report["processes"] for report in reports] == [[], []]
    assert [report["threads"] for report in reports] == [[], []]


# Ranks that are ended.


@contextlib.contextmanager
def ranks(directory, role, case, count=RANKS):
    """Start the ranks; what they have started and left is an error."""
    with start_ranks(
        WORKER,
        count,
        directory,
        args=[role, json.dumps(case)],
        env=environment(),
        timeout=HANG,
    ) as job:
        yield job
        assert processes_left(job, 8.0) == set(), "processes are left"


def rest_of(state, kind):
    loader = loader_of(kind, LENGTH)
    loader.load_state_dict(state)
    return numbers(iter(loader))


def test_rank_killed_at_any_moment_is_named_and_loses_nothing(rng, tmp_path):
    victim, kind = rng.randrange(RANKS), rng.choice(KINDS)
    case = {
        "kind": kind,
        "workers": rng.choice([0, 2]),
        "victim": victim,
        "moment": rng.uniform(0.0, 1.2),
        "timeout": 12.0,
        "options": options(rng),
    }
    with ranks(tmp_path, "killed", case) as job:
        [(read, told, seconds, state)] = job.reports([1 - victim], HANG)
    assert told[0] == "PeerLostError", (case, told)
    assert told[4] == [victim]
    assert seconds < HANG
    # On one rank, from where the other stands: what it has read and what is read now are every sample once.
    steps = len(read) // 4
    assert state["steps"] == steps
    assert rest_of(state, kind) == ALL[8 * steps :]
    assert read == [
        row for row in ALL[: 8 * steps] if row % 8 // 4 == 1 - victim
    ]


def test_sigterm_handler_saves_what_its_rank_was_given(rng, tmp_path):
    kind = rng.choice(KINDS)
    case = {
        "kind": kind,
        "workers": rng.choice([0, 2]),
        "options": options(rng),
    }
    with ranks(tmp_path, "told", case) as job:
        deadline = time.monotonic() + HANG
        while not all(
            (tmp_path / f"started-{rank}").exists() for rank in range(RANKS)
        ):
            assert time.monotonic() < deadline, job.logs()
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.8))
        for rank in range(RANKS):
            job.send(rank, signal.SIGTERM)
        found = job.reports(range(RANKS), HANG)
    for rank, (read, why, state) in enumerate(found):
        steps = state["steps"] if state["epoch"] == 0 else LENGTH // 8
        assert (why, len(read)) == (why, 4 * steps)
        assert read == [row for row in ALL[: 8 * steps] if row % 8 // 4 == rank]
        if state["epoch"] == 0:
            assert rest_of(state, kind) == ALL[8 * steps :]
    assert abs(len(found[0][0]) - len(found[1][0])) <= 4 * 12, (
        "no rank runs away"
    )


@pytest.mark.parametrize("evaluates", [False, True])
def test_sigterm_to_any_rank_stops_all_at_the_same_step(
    evaluates, rng, tmp_path
):
    kind, to = (
        rng.choice(KINDS),
        rng.choice(
            ["one", "all", "one and its workers", "all and their workers"]
        ),
    )
    case = {
        "kind": kind,
        "workers": rng.choice([0, 2, 2]),
        "options": options(rng),
        "evaluates": evaluates,
    }
    # passes so short that the signal often comes between two
    case["length"] = rng.choice([16, 64, LENGTH])
    with ranks(tmp_path, "stop", case) as job:
        deadline = time.monotonic() + HANG
        while not all(
            (tmp_path / f"started-{rank}").exists() for rank in range(RANKS)
        ):
            assert time.monotonic() < deadline, job.logs()
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.8))
        chosen = (
            [rng.randrange(RANKS)] if to.startswith("one") else range(RANKS)
        )
        for rank in chosen:
            for child in children(job.pids[rank]) if "workers" in to else ():
                # its epoch has just ended
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGTERM)
            job.send(rank, signal.SIGTERM)
        one, two = job.reports(range(RANKS), HANG)
    assert one == two, (case, to)
    assert one[1] == [True, True]
    assert one[3][1] == case["length"] // 8


@pytest.mark.only_in_rounds
def test_worker_that_hangs_is_named_on_all_ranks_at_the_timeout(rng, tmp_path):
    timeout = 4.0
    case = {
        "kind": rng.choice(["map", "cut"]),
        "number": rng.randrange(8, LENGTH),
        "timeout": timeout,
    }
    case["options"] = options(rng)
    with ranks(tmp_path, "hung", case) as job:
        found = job.reports(range(RANKS), HANG)
    assert len({len(read) for read, *_ in found}) == 1
    assert all(
        told[0] in ("DataReadError", "PeerLostError") for _, told, _ in found
    ), found
    reader = case["number"] % 8 // 4
    assert re.search(r"worker \d", found[reader][1][5]), found[reader]
    assert re.search(rf"worker \d|rank {reader}", found[1 - reader][1][5]), (
        found[1 - reader]
    )
    assert all(seconds < HANG for *_, seconds in found)


@pytest.mark.only_in_rounds
def test_rank_stuck_when_another_dies_is_ended_after_a_report(rng, tmp_path):
    victim = rng.randrange(RANKS)
    case = {
        "kind": rng.choice(KINDS),
        "victim": victim,
        "steps": rng.randrange(1, 10),
        "on_lost": "exit",
    }
    with ranks(tmp_path, "stuck", case) as job:
        codes = job.wait([1 - victim], HANG)
        assert 1 - victim in codes, f"it is not ended\n{job.logs()}"
        seconds = time.time() - float((tmp_path / "killed").read_text())
    assert codes[1 - victim] != 0
    assert seconds < HANG
    assert re.search(
        rf"[Gg]lobal rank {victim} has ended or was killed",
        (tmp_path / f"workerlog.{1 - victim}").read_text(),
    )
