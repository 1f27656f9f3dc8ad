"""The record of real runs: what the command answers from it is what the ranks were given."""

import json
from collections import Counter

import numpy as np
import pytest
from paddle.io import DataLoader

from paddle_shard import Checkpoints
from paddle_shard.errors import TakenOverError
from tests.helpers import ONE, local, sharded
from tests.run.record_runs import (
    COUNTED,
    Given,
    asked,
    asked_elsewhere,
    deliveries,
    whole_run,
)
from tests.run.record_worker import SOURCES

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return whole_run(tmp_path_factory.mktemp("run"))


RANKS = {1: [0, 1], 2: [1, 0], 3: [0, 2, 1, 3]}
"""A rank of each data rank."""


def name_of(number):
    return f"{list(SOURCES)[number // 1000]}:{number % 1000}"


def counted(run):
    return [
        (number, *one)
        for number, rows in enumerate(run.rows, 1)
        for one in rows[: COUNTED[number]]
    ]


def test_record_says_where_each_sample_is(run):
    found = deliveries(counted(run), RANKS)
    for sample in [0, 7, 39, 1000, 1003, 2000, 2001, 2002, 5]:
        places = asked(
            "show", run.record, "--sample", name_of(sample), "--json"
        )["delivered"]
        shown = [
            (one["job"], one["epoch"], one["step"], rank, one["row_of_rank"])
            for one in places
            for rank in one["ranks"]
            if rank in RANKS[one["job"]] and one["recorded"] == "yes"
        ]
        assert sorted(shown) == sorted(found[sample])
        assert len(shown) == sum(one["recorded"] == "yes" for one in places)


def test_record_has_the_samples_of_each_rank_at_each_step(run):
    for job, (epoch, step), of_ranks in counted(run):
        for on in asked(
            "show", run.record, "--epoch", epoch, "--step", step, "--json"
        )["delivered"]:
            assert on["job"] == job
            names = [one and ":".join(map(str, one)) for one in on["samples"]]
            for rank in on["ranks"]:
                ids, valid = of_ranks[rank]
                assert [
                    name_of(i) if real else None
                    for i, real in zip(ids, valid, strict=True)
                ] == names


def test_record_proves_the_run_and_says_what_was_lost(run):
    found = asked("verify", run.record, "--json")
    rows = counted(run)
    assert found["damage"] == []
    counts = [one for one in found["delivered"] if one["counts"] == "yes"]
    spans = {
        (one["job"], one["epoch"]): (one["first_step"], one["end_step"])
        for one in counts
    }
    for (job, epoch), (first, end) in spans.items():
        steps = [
            step
            for number, (of, step), _ in rows
            if (number, of) == (job, epoch)
        ]
        assert min(steps) >= first
        assert max(steps) == end - 1
    whole, begun = found["epochs"]
    real = Counter(
        sample
        for sample, places in deliveries(rows, RANKS).items()
        for _, epoch, *_ in places
        if not epoch
    )
    assert whole["problems"] == begun["problems"] == []
    assert whole["num_samples"] == whole["delivered"] == sum(real.values())
    text = asked("verify", run.record)
    assert "are skipped by the user) exactly once" in text
    assert "exactly once, so far: at positions [0, 32), in 2 steps" in text
    (lost,) = [one for one in found["delivered"] if one["counts"] == "no"]
    assert (lost["job"], lost["first_step"], lost["end_step"]) == (2, 11, 12)


@pytest.mark.parametrize("data", ["46", "stream"])
def test_record_of_an_epoch_begun_twice_is_not_exactly_once(data, tmp_path):
    given = Given(tmp_path)
    does = (
        ["take", 3],
        ["leave", None],
        ["take", 99],
        ["take", 2],
        ["save", "a"],
    )
    given.job([0, 1], ["dp"], "dp", 8, *does, data=data)

    found = asked("verify", given.record, "--json", code=1)["epochs"]

    assert found[0]["again"] == [[0, 24]]
    assert found[1]["problems"] == []
    if data == "46":
        real = deliveries([(1, *one) for one in given.rows[0]], {1: [0, 1]})
        assert (
            found[0]["delivered"]
            == sum(
                1 for places in real.values() for one in places if one[1] == 0
            )
            == 70
        )
        twice = sorted(
            sample
            for sample, places in real.items()
            if sum(one[1] == 0 for one in places) == 2
        )
        for sample in (twice[0], twice[-1]):
            assert (
                len(
                    [
                        one
                        for one in asked(
                            "show", given.record, "--sample", sample, "--json"
                        )["delivered"]
                        if not one["epoch"]
                    ]
                )
                == 2
            )


def test_record_of_a_users_own_order_knows_positions(
    tmp_path,
):
    given = Given(tmp_path)
    given.job([0], ["dp"], "dp", 8, ["take", 99], data="46", own_sampler=True)

    text = asked("verify", given.record)
    assert (
        "epoch 0: each of 46 draws of the loader's order exactly once" in text
    )
    assert "the order is that of the loader's own BatchSampler" in text
    assert "the order is that of the loader's own BatchSampler" in asked(
        "show", given.record, "--sample", 3, code=2
    )


@pytest.mark.parametrize("broken", [27, 28])  # on one rank and on the other
def test_record_knows_what_the_certificate_knows(broken, tmp_path):
    """The epoch has ended before the ranks tell each other, and the state that is saved then is of the next one."""
    given = Given(tmp_path)
    how = {
        "broken": [broken],
        "options": {"on_error": "skip"},
        "certificates": True,
    }
    given.job(
        [0, 1], ["dp"], "dp", 8, ["take", 99], ["save", "a"], data="46", **how
    )
    for _, of_ranks in given.rows[0]:
        assert len(of_ranks) == 2
    found = asked("verify", given.record, "--json", code=1)["epochs"]
    assert [
        "1 samples at positions" in one for one in found[0]["problems"]
    ] == [True]
    assert (
        found[0]["delivered"],
        found[0]["missed"],
        found[0]["repeated_positions"],
    ) == (45, 1, 0)


def test_record_survives_a_change_of_the_batch_size(
    tmp_path,
):
    record = tmp_path / "run.jsonl"
    given = DataLoader([np.int64(number) for number in range(7)], batch_size=2)
    batches = iter(
        loader := sharded(
            given, ONE, batch_size=[(0, 2), (3, 3)], record=record
        )
    )
    next(batches)
    assert not loader.certificate().exact
    assert [len(batch) for batch in batches] == [2, 3]

    assert "epoch 0: each of 7 samples exactly once" in asked("verify", record)
    assert [
        one["step"]
        for one in asked("show", record, "--sample", 4, "--json")["delivered"]
    ] == [2]


def numbers(length=20, rows=4, **options):
    given = DataLoader(
        [np.int64(number) for number in range(length)],
        batch_size=rows,
        shuffle=True,
    )
    return sharded(given, ONE, **options)


def taken(batches, steps):
    return [local(next(batches)) for _ in range(steps)]


def test_record_does_not_count_what_came_before_it(tmp_path):
    record = tmp_path / "run.jsonl"
    before = taken(batches := iter(loader := numbers()), 2)
    state = loader.state_dict()
    rest = [local(batch) for batch in batches]
    loader = numbers(record=record)
    loader.load_state_dict(state)
    batches = iter(loader)
    assert taken(batches, 1) == rest[:1]
    loader.state_dict()

    says = "The run was resumed at step 2 of epoch 0, and no line shows how it came there"
    assert says in asked("verify", record)
    for command in (
        ("show", record, "--sample", before[0][0]),
        ("show", record, "--step", 1),
    ):
        assert says in asked(*command, code=2)
    found = asked("show", record, "--sample", rest[0][0], "--json")
    assert [one["step"] for one in found["delivered"]] == [2]
    assert says in found["notes"][0]


def test_record_compares_samples_of_steps_delivered_twice(
    tmp_path,
):
    record = tmp_path / "run.jsonl"
    taken(iter(loader := numbers(record=record)), 1)
    state = loader.state_dict()
    loader = numbers(rows=2, record=record)
    loader.load_state_dict(state)
    first = [local(batch) for batch in loader]
    loader.set_epoch(0)
    again = [local(batch) for batch in loader]
    assert first == again[2:]

    found = asked("show", record, "--epoch", 0, "--step", 3, "--json")[
        "delivered"
    ]
    assert [one["samples"] for one in found] == [first[2], again[3]]


def test_record_leaves_out_a_job_that_was_overtaken(tmp_path):
    record = tmp_path / "run.jsonl"
    first, second = (
        Checkpoints(tmp_path / "saved"),
        Checkpoints(tmp_path / "saved"),
    )
    old = numbers(record=record)
    batches = iter(old)
    taken(batches, 1)
    first.save(1, data=old)
    taken(batches, 1)
    new = numbers(record=record)
    assert second.load(data=new) == 1
    rest = [local(batch) for batch in iter(new)]
    second.save(5, data=new)
    taken(batches, 1)
    with pytest.raises(TakenOverError):
        first.save(3, data=old)

    found = asked("verify", record, "--json")
    assert [(one["job"], one["counts"]) for one in found["delivered"]] == [
        (1, "yes"),
        (2, "yes"),
        (1, "no"),
    ]
    delivered = asked("show", record, "--step", 2, "--json")["delivered"]
    assert [(one["job"], one["samples"]) for one in delivered] == [(2, rest[1])]


def test_verify_lists_the_job_of_a_loader_of_other_data(tmp_path):
    record = tmp_path / "run.jsonl"
    assert len([local(batch) for batch in numbers(record=record)]) == 5
    evaluated = [local(batch) for batch in numbers(length=6, record=record)]

    found = asked("verify", record, "--json")
    assert [(one["job"], one["counts"]) for one in found["delivered"]] == [
        (2, "yes"),
        (1, "other run"),
    ]
    assert "Give each run a record of its own" in asked("verify", record)
    assert sum(map(len, evaluated)) == 6


def test_record_says_who_wrote_it_with_what(run):
    first = json.loads(run.record.read_text().splitlines()[0])
    assert first["line"] == "begin"
    assert first["meshes"] == [
        {
            "axes": {"mp": 2, "dp": 2},
            "process_ids": [0, 1, 2, 3],
            "data_axes": ["dp"],
            "other_dims": {},
            "balanced": [],
        }
    ]
    assert first["plan"]["batch_size"] == 8
    assert first["versions"].keys() == {"paddle_shard", "paddle", "numpy"}
    assert first["options"]["seed"] == "5"
    assert first["data"] == {"class": "Mixture", "length": 96}


def test_record_has_no_line_for_a_step(run):
    lines = [json.loads(line) for line in run.record.read_text().splitlines()]
    counts = Counter(line["line"] for line in lines)
    events = {"begin": 3, "pass": 4, "checkpoint": 4, "resume": 2, "end": 1}
    assert counts == {**events, "certificate": 4}


def test_command_answers_on_a_machine_without_paddle(run):
    found = asked_elsewhere("verify", run.record)
    assert [proof["problems"] for proof in found["epochs"]] == [[], []]
    assert asked_elsewhere("show", run.record, "--sample", "chat:2")[
        "delivered"
    ]
    assert asked_elsewhere(
        "plan", "--samples", 8, "--batch-size", 4, "--mesh", "dp=2", "--step", 0
    )["step"]
