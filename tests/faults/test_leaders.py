"""Faults on ranks that share a reader (`replicas="leader"`): as if each had read for itself, and nothing is left."""

import json
import time

import pytest

from tests.deadlines import HANG
from tests.faults.test_ranks import (
    ALL,
    KINDS,
    LENGTH,
    WORKER,
    environment,
    ranks,
    rest_of,
)
from tests.jobs import run_ranks
from tests.trials import draws

pytestmark = [pytest.mark.multiprocess, pytest.mark.leaves]


@pytest.fixture(autouse=True)
def in_pairs(monkeypatch):
    monkeypatch.setenv("PAIRS_OF_REPLICAS", "1")


def options(rng):
    return {"prefetch": rng.choice([0, 1, 3]), "replicas": "leader"}


def test_leader_failure_is_raised_on_all_and_loses_nothing(rng, tmp_path):
    cases = []
    for what in (
        ["fails"] * draws(6) + ["loses"] * draws(3) + ["left"] * draws(4)
    ):
        cases.append(
            {
                "what": what,
                "kind": rng.choice(KINDS),
                "workers": rng.choice([0, 1, 2])
                if what != "loses"
                else rng.choice([1, 2]),
                "workers_later": rng.choice([0, 2]),
                "number": rng.randrange(LENGTH - 16),
                "ranks": rng.choice([[0], [1], [0, 1]])
                if what == "fails"
                else [0],
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
        2,
        tmp_path,
        args=["soundly", json.dumps(cases)],
        env=environment(),
        timeout=2 * HANG,
    )

    for number, case in enumerate(cases):
        read, told, waited, rest = zip(
            *(report["found"][number] for report in reports), strict=True
        )
        assert read[0] == read[1], case
        assert rest[0] == rest[1], case
        whole = read[0] == ALL
        assert read[0] + rest[0] == ALL + ALL * whole, case
        if case["what"] == "left":
            assert len(read[0]) == case["steps"] * 8
            assert told == (ALL, ALL)
            continue
        names = {one[0] for one in told}
        if (
            case["what"] == "fails"
            and 0 not in case["ranks"]
            and case["options"]["replicas"] == "leader"
        ):
            assert names == {"NoneType"}, "the other rank reads nothing"
            continue
        if whole:
            assert case["what"] == "loses" or case["ranks"] == [1]
            assert names == {"NoneType"}, (case, told)
            continue
        assert names == {"DataReadError"}, (case, told)
        assert all(
            ("no disk" if case["what"] == "fails" else "exit code -9") in one[5]
            for one in told
        )
        assert len({json.dumps(one[1]) for one in told}) == 1, (
            "the same sample is named"
        )
        assert {one[2] for one in told} == {len(read[0]) // 8}, (
            "the step that is not delivered is named"
        )
        assert max(waited) < HANG
    assert [report["processes"] for report in reports] == [[], []]
    assert [report["threads"] for report in reports] == [[], []]


def test_rank_that_leaves_its_loop_is_named_with_its_step(rng, tmp_path):
    cases = [
        {
            "kind": rng.choice(KINDS),
            "workers": rng.choice([0, 2]),
            "leaves": leaves,
            "steps": steps,
            "options": {
                "prefetch": rng.choice([0, 1, 3]),
                "replicas": replicas,
            },
        }
        for leaves in (0, 1)
        for steps in (0, 0, 1, 7)
        for replicas in ("leader", "each")
    ]
    reports = run_ranks(
        WORKER,
        2,
        tmp_path,
        args=["leaves", json.dumps(cases)],
        env=environment(),
        timeout=2 * HANG,
    )

    for case, *found in zip(cases, *reports, strict=True):
        _, failure, seconds, _ = found[1 - case["leaves"]]
        assert failure[0] == "PeerLostError", (case, failure)
        assert (
            f"The loop was left by global rank {case['leaves']} after {case['steps']} steps"
            in failure[5]
        )
        assert seconds < HANG / 4, "not only when the timeout is over"
        assert [rows for *_, rows in found] == [ALL, ALL]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_leader_or_follower_killed_at_any_moment_is_named(
    num_ranks, rng, tmp_path
):
    victim, kind = rng.randrange(num_ranks), rng.choice(KINDS)
    case = {
        "kind": kind,
        "workers": rng.choice([0, 2]),
        "victim": victim,
        "moment": rng.uniform(0.0, 1.2),
        "timeout": 12.0,
        "options": {**options(rng), "replicas": "leader"},
    }
    others = [rank for rank in range(num_ranks) if rank != victim]
    with ranks(tmp_path, "killed", case, num_ranks) as job:
        found = job.reports(others, HANG)
    # No process is left, and the memory has no name: nothing is left of it.
    for rank, (read, told, seconds, state) in zip(others, found, strict=True):
        assert told[0] == "PeerLostError", (case, told)
        assert told[4] == [victim], (case, told)
        assert seconds < HANG
        rows, steps = 16 // num_ranks, state["steps"]
        assert len(read) == steps * rows
        assert read == [
            row
            for row in ALL[: 8 * steps]
            if num_ranks == 2 or row % 8 // 4 == rank // 2
        ]
        if rank == others[0]:
            assert rest_of(state, kind) == ALL[8 * steps :]


@pytest.mark.only_in_rounds
def test_leader_worker_that_hangs_is_named_on_both_ranks(rng, tmp_path):
    case = {
        "kind": rng.choice(KINDS),
        "number": rng.randrange(8, LENGTH),
        "timeout": 4.0,
        "options": options(rng),
    }
    began = time.monotonic()
    with ranks(tmp_path, "hung", case) as job:
        found = job.reports(range(2), HANG)
    assert time.monotonic() - began < HANG
    assert len({len(read) for read, *_ in found}) == 1
    assert all(
        told[0] in ("DataReadError", "PeerLostError") for _, told, _ in found
    ), found
    assert all(
        "worker" in told[5] or "rank 0" in told[5] for _, told, _ in found
    ), found
