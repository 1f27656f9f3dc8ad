"""What `forget`, `skip`, `diff` and `show` answer: their lines of Python resume the run, and nothing else is lost."""

import json
import platform
import re
import resource
import shlex
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from paddle.io import BatchSampler, DataLoader

from paddle_shard import BucketBatchSampler, Checkpoints, Mixture, Stream
from paddle_shard.cli.main import COMMANDS, main
from paddle_shard.errors import ArgumentError, StateError
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import ONE, Made, mesh, sharded
from tests.record.runs import asked
from tests.sources.http_server import serving

LENGTH = 46


class Run:
    """A run on one rank: its loader, the states that it has saved by their position, and the ids of each step."""

    def __init__(self, path, batch_size=4, at=ONE, dims="dp", kind=True, **options):
        self.path = path
        data = Made(lambda i: np.array([i]), LENGTH)
        given = DataLoader(data, batch_sampler=BatchSampler(data, batch_size=batch_size, shuffle=kind))
        self.loader = sharded(given, at, dims, record=path, **options)
        self.steps, self.states = [], {}

    def go(self, most=None, save_every=3):
        batches = iter(self.loader)
        for batch in batches:
            ids, valid = (one._local_value().numpy().reshape(-1) for one in (batch, batches.valid))
            self.steps.append((batches.epoch, batches.step - 1, ids[valid].tolist()))
            if batches.step % save_every == 0:
                state = json.loads(json.dumps(self.loader.state_dict()))
                self.states[state["epoch"], state["steps"]] = state
            if most is not None and batches.step >= most:
                batches.close()
                return self
        return self

    def resumed_by(self, answer, **how):
        """Another job of the run, resumed by the lines that a command has printed."""
        place, found = answer["resume"], Run(self.path, **how)
        found.states = dict(self.states)
        state = None if place is None else self.states[place["epoch"], place["step"]]
        exec(answer["python"], {"loader": found.loader, "state": state})
        return found


@pytest.fixture
def ids(tmp_path):
    def write(*samples):
        (tmp_path / "ids.txt").write_text("".join(f"{one}\n" for one in samples))
        return tmp_path / "ids.txt"

    return write


def test_the_lines_of_forget_resume_from_before_the_first_of_the_samples(tmp_path, ids):
    run = Run(tmp_path / "run.jsonl").go(8)
    gone = [
        run.steps[4][2][1],
        run.steps[7][2][0],
        next(i for i in range(LENGTH) if not any(i in s[2] for s in run.steps)),
    ]

    answer = asked("forget", run.path, "--samples", ids(*gone, gone[0]), "--json")  # one of them is there twice

    steps = [(one["step"], one["told"]) for one in answer["steps"]]
    assert steps[:2] == [(4, "yes"), (7, "not yet")]
    assert steps[2][0] >= 8
    assert (answer["resume"]["epoch"], answer["resume"]["step"]) == (0, 3)
    again = run.resumed_by(answer)
    again.go()
    seen = Counter(i for _, _, of in [*run.steps[:3], *again.steps] for i in of)
    assert seen == Counter(set(range(LENGTH)) - set(gone))
    assert "skipped by the user) exactly once" in asked("verify", run.path)
    for one in gone:
        assert asked("where", run.path, "--sample", one, "--json")["places"] == []


def test_the_checkpoint_to_load_is_named_by_the_step_that_it_was_saved_under(tmp_path):
    run = Run(tmp_path / "run.jsonl")
    batches, checkpoints = iter(run.loader), Checkpoints(tmp_path / "checkpoints")
    for step in range(104, 108):
        next(batches)
        run.loader.state_dict()
        checkpoints.save(step, data=run.loader)
    answer = asked("skip", run.path, "--step", 2, "--json")
    assert answer["resume"]["saved_as"] == 105
    assert "by Checkpoints.save(105):" in answer["python"]
    assert sum(line["line"] == "checkpoint" for line in map(json.loads, run.path.read_text().splitlines())) == 8


def test_samples_from_before_every_checkpoint_need_a_run_from_the_beginning(tmp_path, ids):
    run = Run(tmp_path / "run.jsonl").go(7)
    answer = asked("forget", run.path, "--samples", ids(run.steps[1][2][0]), "--json")
    assert answer["resume"] is None
    assert "begin the run again" in answer["python"]
    again = run.resumed_by(answer).go()
    assert Counter(i for _, _, of in again.steps for i in of) == Counter(set(range(LENGTH)) - {run.steps[1][2][0]})


def test_what_was_delivered_after_the_newest_line_is_told_as_such(tmp_path):
    run = Run(tmp_path / "run.jsonl").go(8)  # a job that has died, perhaps, after a spike of its loss at step 7
    (found,) = asked("batch", run.path, "--step", 7, "--json")["delivered"]
    assert (found["told"], found["samples"]) == ("not yet", run.steps[7][2])
    (place,) = asked("where", run.path, "--sample", run.steps[7][2][1], "--json")["places"]
    assert (place["told"], place["step"], place["row"]) == ("not yet", 7, 1)


def test_samples_that_were_never_delivered_are_left_out_from_the_newest_state_on(tmp_path, ids):
    run = Run(tmp_path / "run.jsonl").go(6)
    rest = next(i for i in range(LENGTH) if not any(i in of for _, _, of in run.steps))
    answer = asked("forget", run.path, "--samples", ids(rest), "--json")
    assert [one["told"] for one in answer["steps"]] == ["not yet"]
    assert answer["resume"]["step"] == 6


def test_forget_goes_back_over_epochs_and_a_branch_that_does_not_count(tmp_path, ids):
    run = Run(tmp_path / "run.jsonl").go()
    run.go(6)
    first = run.steps[0][2][0]
    assert asked("forget", run.path, "--samples", ids(first), "--json")["resume"] is None
    run.loader.load_state_dict(run.states[0, 9])  # epoch 1 does not count any more
    run.go(11)
    late = run.steps[-1][2][0]
    answer = asked("forget", run.path, "--samples", ids(late), "--json")
    assert [(one["job"], one["epoch"], one["step"]) for one in answer["steps"]] == [(1, 0, 10)]
    assert answer["resume"]["step"] == 9


def test_what_was_forgotten_stays_forgotten_when_the_run_goes_back_further(tmp_path, ids):
    """The state of then does not know what was left out after it."""
    run = Run(tmp_path / "run.jsonl").go(9)
    one = run.steps[7][2][1]
    second = run.resumed_by(asked("forget", run.path, "--samples", ids(one), "--json"))  # from step 6 on
    second.go(9)
    step = asked("skip", run.path, "--step", 8, "--json")
    gone = {one, *second.steps[-1][2]}
    third = second.resumed_by(step)
    third.go(10)
    other = run.steps[4][2][0]
    answer = asked("forget", run.path, "--samples", ids(other), "--json")
    assert answer["resume"]["step"] == 3
    assert f"loader.skip(samples=[{one}])" in answer["python"]
    assert "loader.skip(steps=range(8, 9), epoch=0)" in answer["python"]

    again = run.resumed_by(answer).go()

    seen = Counter(i for _, _, of in [*run.steps[:3], *again.steps] for i in of)
    assert seen == Counter(set(range(LENGTH)) - gone - {other})
    assert asked("forget", run.path, "--samples", ids(one, other)).startswith("None of these samples was delivered")
    assert asked("forget", run.path, "--samples", ids()).startswith("None of these samples was delivered")


def loader_of_mixture(path, prefetch):
    made = [Made(lambda i, first=first: np.array([first + i]), 30) for first in (0, 100)]
    mixture = Mixture(dict(zip("ab", made, strict=True)), {"a": 1, "b": 1})
    return sharded(DataLoader(mixture, batch_size=4), ONE, record=path, prefetch=prefetch)


@pytest.mark.parametrize("begun", [0, 1])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_weights_that_were_switched_since_hold_again_from_the_same_sample(prefetch, begun, tmp_path):
    """However far the two jobs have read ahead."""
    loader = partial(loader_of_mixture, tmp_path / "run.jsonl", prefetch)

    def rows(batches, most=None):
        return [
            batch._local_value().numpy().reshape(-1).tolist()
            for _, batch in zip(range(99 if most is None else most), batches, strict=False)
        ]

    first = loader()
    batches = iter(first)
    seen, state = rows(batches, 1) if begun else [], first.state_dict()
    for weights in ({"a": 3, "b": 1}, {"a": 0, "b": 1}):
        first.set_weights(weights)
        seen += rows(batches, 4)
        first.state_dict()
    seen += rows(batches)
    answer = asked("skip", tmp_path / "run.jsonl", "--step", 3, "--json")
    again = loader()
    exec(answer["python"], {"loader": again, "state": state})
    assert seen[:begun] + rows(iter(again)) == [*seen[:3], *seen[4:]]


def test_the_lines_of_forget_resume_a_run_that_got_another_source_later(tmp_path, ids):
    def made(*names, record=tmp_path / "run.jsonl"):
        sources = {name: Made(lambda i, at=at: np.array(1000 * at + i), 40) for at, name in enumerate(names)}
        data = Mixture(sources, dict.fromkeys(names, 1), num_samples=48)
        return sharded(DataLoader(data, batch_size=4), ONE, record=record)

    loader = made("web", "code")
    with iter(loader) as batches:
        for _ in range(3):
            next(batches)
        first = loader.state_dict()
        for _ in range(3):
            gone = int(next(batches)._local_value().numpy()[0])
        second = loader.state_dict()
    loader = made("web", "code", "chat")
    loader.load_state_dict(second, override=["mixture"])
    with iter(loader) as batches:
        for _ in range(2):
            late = int(next(batches)._local_value().numpy()[0])
        third = loader.state_dict()
        for _ in range(2):
            last = int(next(batches)._local_value().numpy()[0])
        loader.state_dict()
    named = [f"{('web', 'code', 'chat')[one // 1000]}:{one % 1000}" for one in (gone, late, last)]
    for name, one, state, others in [
        (named[0], gone, first, ", override=['mixture']"),
        (named[1], late, second, ", override=['mixture']"),
        (named[2], last, third, ""),
    ]:
        answer = asked("forget", tmp_path / "run.jsonl", "--samples", ids(name), "--json")
        assert f"loader.load_state_dict(state{others})" in answer["python"]
        assert ("in another order" in answer["python"]) == bool(others)
        again = made("web", "code", "chat", record=None)
        exec(answer["python"], {"loader": again, "state": state})
        rest = [row for batch in again for row in batch._local_value().numpy().tolist()]
        assert rest
        assert one not in rest


def test_a_sample_that_cannot_be_is_told_with_its_line(tmp_path, ids):
    run = Run(tmp_path / "run.jsonl").go(4)
    for text in ("2000", "web:3"):
        said = asked("forget", run.path, "--samples", ids(3, text), code=2)
        assert "ids.txt, line 2: sample must be an int in range(46)" in said
        assert "It has a sample in each line" in said


@pytest.mark.parametrize("text", ["x\n", "web:x\n", "1 2\n"])
def test_a_file_of_something_else_is_refused(text, tmp_path):
    run = Run(tmp_path / "run.jsonl").go(4)
    (tmp_path / "ids.txt").write_text(text)
    assert "It has a sample in each line" in asked("forget", run.path, "--samples", tmp_path / "ids.txt", code=2)
    assert "It has a sample in each line" in asked("forget", run.path, "--samples", tmp_path / "none", code=2)


def test_an_epoch_that_was_not_begun_is_told(tmp_path):
    run = Run(tmp_path / "run.jsonl").go(4)
    assert "--epoch 7 was not begun: the run has the epochs 0" in asked(
        "where", run.path, "--sample", 3, "--epoch", 7, code=2
    )


def test_the_lines_of_skip_leave_out_the_steps_and_nothing_else(tmp_path):
    run = Run(tmp_path / "run.jsonl").go(9)
    answer = asked("skip", run.path, "--step", "4-5", "--json")
    assert answer["resume"]["step"] == 3
    again = run.resumed_by(answer).go()
    gone = {i for _, step, of in run.steps for i in of if step in (4, 5)}
    seen = Counter(i for _, _, of in [*run.steps[:3], *again.steps] for i in of)
    assert seen == Counter(set(range(LENGTH)) - gone)
    assert "# Steps are counted in batches of 4 rows." in asked("skip", run.path, "--step", 7)
    assert "step 4 of epoch 0 was not delivered" not in asked("verify", run.path)


def test_steps_of_several_sizes_are_left_out_in_those_of_the_job_that_is_resumed(tmp_path):
    run = Run(tmp_path / "run.jsonl").go(6)
    wide = Run(run.path, batch_size=8)
    wide.loader.load_state_dict(run.states[0, 6])
    wide.go(9)  # 4 rows a step up to step 6, then 8
    first = run.steps[:3]
    gone = {i for _, step, of in [*run.steps, *wide.steps] for i in of if step in (4, 5, 6, 7)}

    said = asked("skip", run.path, "--step", "4-7")
    assert "# Steps are counted in batches of 4 rows." in said
    assert "loader.skip(steps=range(4, 10), epoch=0)" in said
    again = run.resumed_by(asked("skip", run.path, "--step", "4-7", "--json")).go()
    assert Counter(i for _, _, of in [*first, *again.steps] for i in of) == Counter(set(range(LENGTH)) - gone)


def test_the_last_step_ends_where_the_tail_drops(tmp_path):
    """Of 46 samples in batches of 4 and then of 8, two are dropped, and then 6."""
    run = Run(tmp_path / "run.jsonl", tail="drop").go(6)
    wide = Run(run.path, batch_size=8, tail="drop")
    wide.loader.load_state_dict(run.states[0, 6])
    wide.go()
    for steps, size, first in (("5-7", 4, 5), ("7", 8, 7)):
        answer = asked("skip", run.path, "--epoch", 0, "--step", steps, "--json")
        assert answer["batch_size"] == size
        assert f"# Steps are counted in batches of {size} rows." in answer["python"]
        assert f"loader.skip(steps=range({first}, " in answer["python"]
        copy = tmp_path / f"{size}.jsonl"
        copy.write_bytes(run.path.read_bytes())
        again = Run(copy, batch_size=size, tail="drop")
        state = {**run.states, **wide.states}[answer["resume"]["epoch"], answer["resume"]["step"]]
        exec(answer["python"], {"loader": again.loader, "state": state})
        again.go()
        gone = {i for _, step, of in [*run.steps, *wide.steps] for i in of if step in (5, 6, 7) and step >= first}
        assert not gone & {i for _, _, of in again.steps for i in of}


def test_what_was_left_out_in_other_batches_is_left_out_in_those_of_the_job_that_is_resumed(tmp_path, ids):
    """A step of 4 rows is left out in the second job; what is forgotten was in a step of 8, before that."""
    run = Run(tmp_path / "run.jsonl", batch_size=8).go(3)
    small = Run(run.path, batch_size=4)
    small.loader.load_state_dict(run.states[0, 3])
    small.loader.skip(steps=[5])  # positions 32 to 35, behind 24
    small.go()
    order = run.loader.plan.samples(epoch=0, first=0, end=LENGTH).tolist()
    gone = order[9]

    answer = asked("forget", run.path, "--samples", ids(gone), "--json")

    size = answer["batch_size"]
    assert f"# Steps are counted in batches of {size} rows." in answer["python"]
    again = Run(tmp_path / "other.jsonl", batch_size=size)
    state = run.states[answer["resume"]["epoch"], answer["resume"]["step"]] if answer["resume"] else None
    at = 0 if state is None else state["samples"]
    exec(answer["python"], {"loader": again.loader, "state": state})
    again.go()
    seen = Counter(i for _, _, of in again.steps for i in of)
    assert seen == Counter(set(order[at:]) - {gone} - set(order[32:36]))


def test_steps_whose_ends_no_batches_of_one_size_share_are_refused(tmp_path):
    run = Run(tmp_path / "run.jsonl").go(6)
    wide = Run(run.path, batch_size=6)
    wide.loader.load_state_dict(run.states[0, 6])
    wide.go(9)
    said = asked("skip", run.path, "--step", "4-6", code=2)
    assert "batches of one size, from the saved state on, do not end where those end that are left out" in said
    assert "loader.skip(steps=range(4, 9), epoch=0)" in asked("skip", run.path, "--step", "4-7")
    assert "loader.skip(steps=range(6, 8), epoch=0)" in asked("skip", run.path, "--step", "6-7")


def test_what_the_loader_would_refuse_of_orders_of_your_own_is_refused(tmp_path):
    class Batches:
        def __iter__(self):
            yield from (list(range(at, at + 4)) for at in range(0, 40, 4))

        def __len__(self):
            return 10

    data = Made(length=40)
    reverse = BatchSampler(sampler=list(range(40))[::-1], batch_size=4)
    loaders = {
        "split": ({"batch_size": 4}, {"is_dataset_splitted": True}),
        "buckets": ({"batch_sampler": BucketBatchSampler(lengths=list(range(1, 41)), batch_size=4)}, {}),
        "own": ({"batch_sampler": Batches()}, {}),
        "reverse": ({"batch_sampler": reverse}, {}),
        "schedule": ({"batch_size": 4}, {"batch_size": [(0, 5), (10, 2)]}),
    }
    for name, (how, options) in loaders.items():
        path = tmp_path / f"{name}.jsonl"
        loader = sharded(DataLoader(data, **how), ONE, record=path, **options)
        with iter(loader) as batches:
            for _ in range(3):
                next(batches)
            loader.state_dict()
        if name in ("split", "own"):
            assert "the steps of this run cannot be left out" in asked("skip", path, "--step", 2, code=2)
        else:
            assert "loader.skip(steps=range(2, 3), epoch=0)" in asked("skip", path, "--step", 2)
        if name in ("buckets", "own"):
            assert "whose batches are its own" in asked("diff", path, "--batch-size", 8, code=2)
        else:
            assert "rows of a step" in asked("diff", path, "--batch-size", 8)
        if name == "split":
            assert "on a mesh with as many data ranks as before, 1" in asked("diff", path, "--mesh", "dp=2", code=2)
    assert "# Steps are counted in batches of the run's schedule." in asked("skip", path, "--step", 2)


def test_diff_without_a_mesh_keeps_it(tmp_path):
    Run(tmp_path / "run.jsonl").go(6)
    found = asked("diff", tmp_path / "run.jsonl", "--batch-size", 8, "--json")
    assert found["ranks"] == [{"rank": 0, "before": "data rank 0, 4 rows", "after": "data rank 0, 8 rows"}]
    said = asked("diff", tmp_path / "run.jsonl", "--data-axes", "dp", code=2)
    assert "--data-axes are those of a --mesh, which is missing" in said


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--step", "99"], "step 99 of epoch 0 was not delivered, says the record; of this epoch it has [0, 9)"),
        (["--step", "12"], "step 12 of epoch 0 was not delivered"),
        (["--step", "3-"], "must be a step or a stretch of them"),
        (["--step", "3", "--epoch", "4"], "--epoch 4 was not begun: the run has the epochs 0. Give one of them"),
    ],
)
def test_steps_that_were_not_delivered_cannot_be_skipped(flags, text, tmp_path):
    run = Run(tmp_path / "run.jsonl").go(9)
    assert text in asked("skip", run.path, *flags, code=2)


def test_steps_of_whole_batches_can_be_skipped_and_those_of_a_stream_not(tmp_path):
    whole = sharded(DataLoader(Made(lambda i: np.full(4, i), 6), batch_size=None), ONE, record=tmp_path / "a.jsonl")
    batches = iter(whole)
    next(batches), next(batches)
    whole.state_dict()
    assert "loader.skip(steps=range(1, 2), epoch=0)" in asked("skip", tmp_path / "a.jsonl", "--step", 1)
    stream = Stream.of(range(64)).sharding_filter().in_parts(2)
    batches = iter(sharded(DataLoader(stream, batch_size=4), ONE, record=tmp_path / "b.jsonl"))
    next(batches)
    assert "the steps of this run cannot be left out: the order is that of a stream" in asked(
        "skip", tmp_path / "b.jsonl", "--epoch", 0, "--step", 0, code=2
    )


# diff


def test_diff_tells_what_each_rank_has_after_the_change(tmp_path):
    run = Run(tmp_path / "run.jsonl", batch_size=8).go(3)
    answer = asked("diff", run.path, "--mesh", "mp=2,dp=2", "--batch-size", "4", "--json")

    at = mesh([[0, 1], [2, 3]], "mp", "dp")

    def rest():
        data = Made(lambda i: np.array([i]), LENGTH)
        loader = sharded(DataLoader(data, batch_sampler=BatchSampler(data, batch_size=4, shuffle=True)), at)
        loader.load_state_dict(run.states[0, 3])
        return [batch._local_value().shape[0] for batch in loader]

    per_rank = on_each_rank(range(4), rest)
    whole = {one["what"]: one["after"] for one in answer["run"]}
    assert answer["position"] == 24
    assert whole["steps left in the epoch"] == len(per_rank[0])
    assert whole["rows of the last step"] == 2 * per_rank[0][-1]
    assert [one["after"] for one in answer["ranks"]] == [
        f"data rank {rank % 2}, {per_rank[rank][0]} rows" for rank in range(4)
    ]
    assert [one["before"] for one in answer["ranks"]] == ["data rank 0, 8 rows", None, None, None]


def test_steps_that_are_left_out_are_none_of_the_steps_that_diff_and_plan_count(tmp_path):
    run = Run(tmp_path / "run.jsonl")
    run.loader.skip(steps=[1, 4, 5, 6])
    run.go(4)
    left = {one["what"]: one["before"] for one in asked("diff", run.path, "--json")["run"]}["steps left in the epoch"]
    counts = asked("plan", run.path, "--json")["plan"]
    assert counts["steps of an epoch"] - counts["steps left out of an epoch"] == len(run.loader)
    other = Run(tmp_path / "other.jsonl")
    other.loader.load_state_dict(run.states[0, 3])
    assert left == len(other.go().steps)


@pytest.mark.parametrize("steps", ["3-1", "-1", "1-", "x"])
def test_steps_that_are_none_are_refused_before_the_record_is_read(steps, tmp_path):
    said = asked("skip", tmp_path / "none.jsonl", f"--step={steps}", code=2)
    assert "must be a step or a stretch of them such as 3 or 3-6" in said


def test_diff_of_a_schedule_tells_the_rows_of_the_next_step(tmp_path):
    loader = sharded(
        DataLoader(Made(lambda i: np.array([i]), 100), batch_size=4),
        ONE,
        record=tmp_path / "run.jsonl",
        batch_size=[(0, 4), (12, 8)],
    )
    batches = iter(loader)
    for rows in (4, 4, 4, 8):
        answer = (
            asked("diff", tmp_path / "run.jsonl", "--mesh", "dp=2", "--json") if loader.stats.total.batches else None
        )
        assert len(next(batches)._local_value()) == rows
        loader.state_dict()
        if answer:
            assert {one["what"]: one["after"] for one in answer["run"]}["rows of a step"] == rows
            assert [one["after"] for one in answer["ranks"]] == [f"data rank {at}, {rows // 2} rows" for at in (0, 1)]


@pytest.mark.parametrize(
    ("how", "flags", "ranks"),
    [
        ({}, ["--mesh", "dp=3"], [0, 1, 2]),
        ({"shuffle": "paddle"}, ["--mesh", "dp=2"], [0, 1]),
    ],
)
def test_diff_refuses_what_the_loader_would_refuse_in_the_same_words(how, flags, ranks, tmp_path):
    run = Run(tmp_path / "run.jsonl", batch_size=8, **how).go(3)
    said = asked("diff", run.path, *flags, code=2).removeprefix("paddle-shard diff: ").strip()

    def refused():
        try:
            data = Made(lambda i: np.array([i]), LENGTH)
            given = DataLoader(data, batch_sampler=BatchSampler(data, batch_size=8, shuffle=True))
            sharded(given, mesh(ranks), **how).load_state_dict(run.states[0, 3])
        except (ArgumentError, StateError) as error:
            return str(error)
        return None

    [refusal] = set(on_each_rank(ranks, refused).values())
    # Where a loader could be of data that is split already, it says how to say so, too.
    assert refusal == said or refusal.startswith(f"{said} If each rank has its own data, ")


# show

MODULE = """
from paddle_shard import Mixture
dataset = [{"text": f"text of {i}", "ids": [i] * 40} for i in range(46)]
def made():
    return dataset
def text(sample):
    return sample["text"]
short = ["a", "b", "c"]


def broken(sample):
    raise ValueError("cannot be decoded")
"""


def test_show_opens_the_samples_of_a_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_data_of_show.py").write_text(MODULE)
    run = Run(tmp_path / "run.jsonl").go(3)
    wanted = run.steps[2][2]
    for name in ("dataset", "made"):
        answer = asked("show", run.path, "--step", 2, "--open", f"my_data_of_show:{name}", "--json")
        assert [one["sample"] for one in answer["samples"]] == wanted
        assert all(f"text of {i}" in one["text"] for i, one in zip(wanted, answer["samples"], strict=True))
    flags = "--open", "my_data_of_show:dataset", "--decode", "my_data_of_show:text"
    assert asked("show", run.path, "--sample", 7, *flags) == "7: text of 7\n"
    broken = *flags[:2], "--decode", "my_data_of_show:broken"
    assert (
        asked("show", run.path, "--sample", 7, *broken, code=1) == "7: cannot be read: ValueError: cannot be decoded\n"
    )
    said = asked("show", run.path, "--sample", 7, "--open", "my_data_of_show:short", code=2)
    assert f"--open my_data_of_show:short has 3 samples, and the data of the run {LENGTH}" in said
    assert "sample must be an int in range(46), got 99" in asked("show", run.path, "--sample", 99, *flags, code=2)
    assert "Give module:name" in asked("show", run.path, "--sample", 7, "--open", "my_data_of_show:none", code=2)
    assert "give --step, or --sample" in asked("show", run.path, "--open", "my_data_of_show:dataset", code=2)


def test_show_opens_a_sample_also_of_a_run_whose_order_only_the_loader_knows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_data_of_a_sampler.py").write_text("dataset = [f'text {i}' for i in range(40)]\n")
    sampler = BatchSampler(sampler=list(range(40))[::-1], batch_size=4)
    loader = sharded(DataLoader(Made(length=40), batch_sampler=sampler), ONE, record=tmp_path / "run.jsonl")
    next(iter(loader))
    loader.state_dict()
    flags = "--sample", 7, "--open", "my_data_of_a_sampler:dataset"
    assert asked("show", tmp_path / "run.jsonl", *flags) == "7: text 7\n"


def test_what_the_machine_has_is_told():
    found = asked("doctor", "--json", code=main(["doctor"]))
    assert found["machine"]["paddle"].startswith("paddlepaddle")
    assert found["machine"]["python"] == platform.python_version()
    assert found["machine"]["open files"] == f"at most {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"


def commands_of_the_page():
    page = (Path(__file__).parents[2] / "docs/record.md").read_text()
    return [shlex.split(line, comments=True)[1:] for line in re.findall(r"^paddle-shard .*", page, re.MULTILINE)]


def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loader = sharded(DataLoader(Made(length=50_000), batch_size=16, shuffle=True), ONE, record="run.jsonl")
    batches = iter(loader)
    for _ in range(1300):
        next(batches)
    loader.state_dict()
    (tmp_path / "ids.txt").write_text("17\n4711\n")
    (tmp_path / "my_module.py").write_text("dataset = range(50_000)\n")
    for number in range(4):
        (tmp_path / f"train-{number}.tar").write_bytes(b"x" * 1000)

    asked_for = set()
    with serving({f"{number}.tar": b"x" * 1000 for number in range(10)}) as server:
        for command in commands_of_the_page():
            asked_for.add(command[0])
            assert main([one.replace("https://host", server.url) for one in command]) in (0, 1), command
        assert server.asked  # for the sizes
    assert asked_for == set(COMMANDS) - {"doctor", "index", "lint", "lengths"}


def test_a_switch_that_was_taken_back_since_a_state_was_saved_is_taken_back_again(tmp_path):
    loader = partial(loader_of_mixture, tmp_path / "run.jsonl", 0)
    first = loader()
    first.set_weights({"a": 3, "b": 1}, at=20)
    first.set_weights({"a": 0, "b": 1}, at=24)
    state = first.state_dict()
    first.set_weights({"a": 3, "b": 1}, at=20)
    seen = [batch._local_value().numpy().reshape(-1).tolist() for batch in first]
    answer = asked("skip", tmp_path / "run.jsonl", "--step", 8, "--json")
    again = loader()
    exec(answer["python"], {"loader": again, "state": state})
    assert [batch._local_value().numpy().reshape(-1).tolist() for batch in again] == [*seen[:8], *seen[9:]]
