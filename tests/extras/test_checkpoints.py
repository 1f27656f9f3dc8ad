"""A checkpoint is whole or not there, whatever ends a save when; damaged ones and runs that were overtaken are seen."""

import json
import os
import random
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
import pytest

import paddle_shard
from paddle_shard import Checkpoints
from paddle_shard.errors import (
    ArgumentError,
    CheckpointError,
    StateError,
    TakenOverError,
)
from paddle_shard.extras import checkpoints as module
from paddle_shard.extras.checkpoint_folder import CheckpointFolder
from paddle_shard.extras.checkpoint_parts import SavedPart, fill
from tests.helpers import ONE, Made, local, sharded
from tests.trials import trials

ROOM = os.path.dirname(module.__file__)


@pytest.fixture
def where(tmp_path):
    return tmp_path / "saved"


class Parts:
    """A model, its optimizer with a schedule, and a loader."""

    def __init__(self, batch_size=4):
        with paddle.utils.unique_name.guard():
            self.model = paddle.nn.Linear(2, 1)
            schedule = paddle.optimizer.lr.StepDecay(0.1, 3)
            self.optimizer = paddle.optimizer.AdamW(
                parameters=self.model.parameters(), learning_rate=schedule
            )
            self.loader = sharded(
                paddle.io.DataLoader(
                    Made(row), batch_size=batch_size, shuffle=True
                ),
                ONE,
                tail="pad",
                seed=3,
            )
            self.extra = {
                "best": 0.5,
                "names": ["a", ("b", 2)],
                "half": paddle.ones([2], "bfloat16"),
            }
            self.steps, self.seen = 0, []

    @property
    def what(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": self.loader,
            "extra": self.extra,
        }

    def train(self, steps):
        with paddle.utils.unique_name.guard():
            batches = iter(self.loader)
            for _ in range(steps):
                rows = next(batches)._local_value()
                F.mse_loss(self.model(rows), rows[:, :1]).backward()
                self.optimizer.step()
                self.optimizer.clear_grad()
                self.optimizer._learning_rate.step()
                self.seen.append(local_rows(rows))
                self.steps += 1
            batches.close()

    def weights(self):
        return [
            value.numpy().tolist() for value in self.model.state_dict().values()
        ]


def row(index):
    return np.array([index, 1], "float32")


def local_rows(rows):
    return rows.numpy()[:, 0].tolist()


def test_checkpoints_resume_as_the_straight_run(where):
    straight, first, second = Parts(), Parts(), Parts()
    start = {
        name: value.numpy()
        for name, value in straight.model.state_dict().items()
    }
    for other in (first, second):
        other.model.set_state_dict(start)
    first.train(2)
    first.extra["best"] = 0.25
    path = Checkpoints(where).save(first.steps, **first.what)
    assert Checkpoints(where).newest() == path
    second.extra["half"] = None

    step = Checkpoints(where).load(**second.what)

    assert step == 2
    assert second.extra["best"] == 0.25
    assert second.extra["names"] == ["a", ("b", 2)]
    assert second.extra["half"].dtype == paddle.bfloat16
    straight_batches = iter(straight.loader)
    expected = [local(next(straight_batches)) for _ in range(4)]
    second.train(2)
    assert [*first.seen, *second.seen] == [
        [value[0] for value in batch] for batch in expected
    ]
    straight = Parts()
    straight.model.set_state_dict(start)
    straight.train(2)
    straight.train(0)
    straight.loader.load_state_dict(straight.loader.state_dict())
    straight.train(2)
    assert second.weights() == straight.weights()
    assert (
        second.optimizer._learning_rate.last_epoch
        == straight.optimizer._learning_rate.last_epoch
    )
    assert second.loader.certificate().exact


def test_checkpoints_load_nothing_from_an_empty_folder(where):
    assert Checkpoints(where).newest() is None
    extra = {"a": 1}
    assert Checkpoints(where).load(extra=extra) is None
    assert extra == {"a": 1}


def test_checkpoints_resume_with_another_batch_size(tmp_path):
    first, second = Parts(), Parts(batch_size=6)
    first.train(1)
    Checkpoints(tmp_path).save(1, data=first.loader)
    Checkpoints(tmp_path).load(data=second.loader)
    second.train(2)
    assert sorted(
        number for batch in first.seen + second.seen for number in batch
    ) == list(range(16))
    assert second.loader.certificate().exact


def test_checkpoints_load_does_not_suggest_override(tmp_path):
    in_two, in_four = (
        sharded(
            paddle.io.DataLoader(
                paddle_shard.Stream.of(range(16)).shuffle(4).in_parts(parts),
                batch_size=4,
            ),
            ONE,
        )
        for parts in (2, 4)
    )
    next(iter(in_two))
    Checkpoints(tmp_path).save(1, data=in_two)
    with pytest.raises(
        StateError, match="num_parts cannot be overridden"
    ) as why:
        Checkpoints(tmp_path).load(data=in_four)
    assert "override=" not in str(why.value)


def test_checkpoints_rejected_state_leaves_the_model(tmp_path):
    first, other = (
        Parts(),
        sharded(
            paddle.io.DataLoader(Made(length=12), batch_size=4),
            ONE,
            tail="drop",
        ),
    )
    saved, model = paddle.nn.Linear(2, 1), paddle.nn.Linear(2, 1)
    Checkpoints(tmp_path).save(1, model=saved, data=first.loader)
    before = model.weight.numpy().copy()
    with pytest.raises(StateError, match="state is of another run "):
        Checkpoints(tmp_path).load(model=model, data=other)
    assert (model.weight.numpy() == before).all()
    with pytest.raises(ArgumentError, match=r"load\(data=\)"):
        Checkpoints(tmp_path).load(model=model, data=5)
    assert (model.weight.numpy() == before).all()
    found = {}
    assert Checkpoints(tmp_path).load(model=model, data=found) == 1
    assert (model.weight.numpy() == saved.weight.numpy()).all()
    assert found == first.loader.state_dict()


@pytest.mark.parametrize(
    "steps", [[10, 20, 6, 7], [5, 4, 3, 2, 1], [3, 3, 2, 2, 9]]
)
def test_checkpoints_newest_is_the_last_save_not_the_last_step(steps, tmp_path):
    """In one process, as after a spike of the loss: a later save is newer, whatever its step is."""
    run = Checkpoints(tmp_path)
    for number, step in enumerate(steps):
        path, extra = run.save(step, extra={"number": number}), {}
        assert run.newest() == Checkpoints(tmp_path).newest() == path
        assert run.load(extra=extra) == step
        assert extra == {"number": number}
    assert len([one for one in tmp_path.iterdir() if one.is_dir()]) == 2
    assert Checkpoints(tmp_path).load(extra={}) == steps[-1]


def adam(*, distributed=True):
    """A model and its optimizer; `dist.shard_layer` gives a weight two placements, though the mesh has one axis."""
    model = paddle.nn.Linear(4, 4)
    if distributed:
        dist.shard_layer(model, ONE)
        assert len(model.weight.placements) == 2 > len(ONE.shape)
    return model, paddle.optimizer.Adam(1e-3, parameters=model.parameters())


def trained(model, optimizer):
    model(paddle.ones([4, 4])).mean().backward()
    optimizer.step()
    optimizer.clear_grad()


@pytest.mark.parametrize("steps", [0, 1])
def test_checkpoints_load_sharded_layer_before_its_first_step(steps, tmp_path):
    with paddle.utils.unique_name.guard():
        model, optimizer = adam()
        for _ in range(steps):
            trained(model, optimizer)
        Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer)
        saved = model.weight.numpy().copy()
        trained(model, optimizer)
    with paddle.utils.unique_name.guard():  # as in another process
        again, other = adam()
        Checkpoints(tmp_path).load(model=again, optimizer=other)
        assert (again.weight.numpy() == saved).all()
        trained(again, other)
        assert (again.weight.numpy() == model.weight.numpy()).all()


def test_checkpoints_save_a_stream_without_certificate(tmp_path):
    def loader():
        return sharded(
            paddle.io.DataLoader(
                paddle_shard.Stream.of(range(8)), batch_size=2
            ),
            ONE,
        )

    one, two = loader(), loader()
    batches = iter(one)
    found = [local(next(batches))]
    Checkpoints(tmp_path).save(1, data=one)
    Checkpoints(tmp_path).load(data=two)
    assert found + [local(batch) for batch in two] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


def test_checkpoints_keep_the_newest_of_the_last_start(where):
    first = Checkpoints(where, keep=3)
    for step in (1, 2, 30, 31):
        first.save(step, extra={"step": step})
    second = Checkpoints(where, keep=3)
    assert second.newest().endswith("-step31")
    paths = [
        second.save(5, extra={"step": 5}),
        second.save(5, extra={"step": 5.5}),
    ]
    extra = {}

    assert second.newest() == paths[1]
    assert Checkpoints(where).load(extra=extra) == 5
    assert extra == {"step": 5.5}
    names = sorted(
        name for name in os.listdir(where) if "generation" not in name
    )
    assert names == [
        "000001-000004-step31",
        "000002-000001-step5",
        "000002-000002-step5",
    ]


def test_checkpoints_taken_over_run_saves_nothing(where):
    first, second = Checkpoints(where), Checkpoints(where)
    first.save(1, extra={"by": 1})
    assert second.load(extra={}) == 1
    before = sorted(os.listdir(where))

    with pytest.raises(
        TakenOverError,
        match=r"generation 2 of this job .* by process \d+ on host .*Generation 1, of",
    ):
        first.save(2, extra={"by": 1})

    assert sorted(os.listdir(where)) == before
    second.save(2, extra={"by": 2})
    with pytest.raises(TakenOverError):
        first.save(3, extra={"by": 1})


def test_checkpoints_rejected_load_takes_nothing_over(where):
    first, second = Checkpoints(where), Checkpoints(where)
    first.save(1, extra={"by": 1})

    with pytest.raises(StateError):
        second.load(other={})
    first.save(2, extra={"by": 1})
    assert second.load(extra={}) == 2
    with pytest.raises(TakenOverError):
        first.save(3, extra={"by": 1})


def test_checkpoints_taken_over_while_writing(where, monkeypatch):
    first, second = Checkpoints(where), Checkpoints(where)
    first.save(1, extra={"by": 1})
    complete = CheckpointFolder.complete

    def taken_over(self, *args):
        assert second.load(extra={}) == 1
        complete(self, *args)

    monkeypatch.setattr(CheckpointFolder, "complete", taken_over)
    with pytest.raises(TakenOverError):
        first.save(2, extra={"by": 1})
    monkeypatch.undo()

    assert second.newest().endswith("000001-000001-step1")
    assert "000001-000002-step2" in os.listdir(where)
    second.save(2, extra={"by": 2})
    # what is half-written is cleaned up
    assert "000001-000002-step2" not in os.listdir(where)


def test_checkpoints_frozen_run_deletes_nothing_of_a_later_one(
    tmp_path, monkeypatch
):
    first, second = Checkpoints(tmp_path), Checkpoints(tmp_path)
    first.save(1, extra={"by": 1})
    names = CheckpointFolder.names

    def frozen(self):
        if self is first._folder and second._folder.generation is None:
            second._claim("save")
            (tmp_path / "000002-000001-step2").mkdir()  # it has begun to write
        return names(self)

    monkeypatch.setattr(CheckpointFolder, "names", frozen)
    first._folder.clean(2)
    assert (tmp_path / "000002-000001-step2").exists()


class Killed(BaseException):
    """Ends a process at once: nothing that would tidy up may run for it."""


def killed_at(number, work):
    """Run `work`, and stop before the given line of the library's that it comes to; return whether it came to it."""
    lines = 0

    def at_line(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        if event == "line":
            lines += 1
            if lines == number:
                raise Killed
        return at_line

    sys.settrace(at_line)
    try:
        work()
    except Killed:
        return True
    finally:
        sys.settrace(None)
    return False


# what a killed process had open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_checkpoints_survive_a_kill_at_any_line_of_a_save(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    clean = CheckpointFolder.clean
    monkeypatch.setattr(
        CheckpointFolder,
        "clean",
        lambda self, keep: clean(self, keep) if tidy else None,
    )
    base, found, tidy = tmp_path / "base", set(), True
    Checkpoints(base).save(1, extra={"step": 1})
    Checkpoints(base).save(2, extra={"step": 2})
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        shutil.copytree(base, folder)
        run = Checkpoints(folder)
        # a killed process does not reach `finally`; one that raises does
        tidy = number % 2 == 0
        killed = killed_at(
            number, lambda run=run: run.save(3, extra={"step": 3})
        )
        extra, tidy = {}, True
        step = Checkpoints(folder).load(extra=extra)
        assert extra == {"step": step}
        found.add(step)
        if not killed:
            break
        if number > 3:
            shutil.rmtree(folder)
    assert found == {2, 3}
    assert step == 3


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGE = {
    "half a file": (lambda new: cut(values(new)), "another size"),
    "no file": (lambda new: values(new).unlink(), "are missing"),
    "half a manifest": (
        lambda new: cut(new / "manifest.json"),
        "manifest is damaged",
    ),
    "no manifest": (
        lambda new: (new / "manifest.json").unlink(),
        "half-written",
    ),
    "a list for a manifest": (
        lambda new: (new / "manifest.json").write_text("[]"),
        "manifest is damaged",
    ),
    "null for a manifest": (
        lambda new: (new / "manifest.json").write_text("null"),
        "manifest is damaged",
    ),
    "a number for a manifest": (
        lambda new: (new / "manifest.json").write_text("3"),
        "manifest is damaged",
    ),
    "a text for a manifest": (
        lambda new: (new / "manifest.json").write_text('"x"'),
        "manifest is damaged",
    ),
    "bytes for a manifest": (
        lambda new: (new / "manifest.json").write_bytes(b"\xff\xfe"),
        "manifest is damaged",
    ),
    "a link to nowhere": (
        lambda new: (
            values(new).unlink(),
            values(new).symlink_to(new / "none"),
        ),
        "are missing",
    ),
    "another version": (
        lambda new: of_version(new / "manifest.json", 1),
        "its version is 1",
    ),
}


def values(folder):
    return folder / "0_values.pdparams"


def of_version(path, version):
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "version": version})
    )


@pytest.mark.parametrize("damage", DAMAGE)
def test_checkpoints_skip_and_keep_what_they_cannot_read(
    damage, tmp_path, caplog
):
    run = Checkpoints(tmp_path)
    old, new = (Path(run.save(step, extra={"step": step})) for step in (1, 2))
    spoil, why = DAMAGE[damage]
    spoil(new)
    extra = {}
    assert Checkpoints(tmp_path).newest() == str(old)

    run = Checkpoints(tmp_path)
    assert run.load(extra=extra) == 1
    assert extra == {"step": 1}
    newer = [run.save(step, extra={"step": step}) for step in (3, 4, 5)]

    [line] = [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING"
    ]
    assert line.startswith(f"{new} is skipped: ")
    assert why in line
    kept = {path for path in tmp_path.iterdir() if path.is_dir()}
    unreadable = set() if damage == "no manifest" else {new}
    assert kept == {*map(Path, newer[1:]), *unreadable}


def test_checkpoints_keep_a_folder_of_the_user(tmp_path):
    folder = tmp_path / "000000-000001-step1"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    run = Checkpoints(tmp_path)
    for step in (1, 2, 3):
        run.save(step, extra={"step": step})
    assert (folder / "notes.txt").read_text() == "mine"


def test_checkpoints_do_not_count_damaged_ones_as_kept(tmp_path):
    run = Checkpoints(tmp_path, keep=2)
    good, bad = (Path(run.save(step, extra={"step": step})) for step in (1, 2))
    cut(values(bad))
    run = Checkpoints(tmp_path, keep=2)
    assert run.load(extra={}) == 1
    newest = Path(run.save(3, extra={"step": 3}))
    cut(values(newest))

    assert Checkpoints(tmp_path).load(extra={}) == 1
    assert good.exists()
    run = Checkpoints(tmp_path, keep=2)
    assert run.newest() == str(good)
    for step in (4, 5):
        run.save(step, extra={"step": step})
    assert not good.exists()
    assert bad.exists()
    assert newest.exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("batch", range(4))
def test_checkpoints_random_histories(batch, tmp_path, monkeypatch):
    """An oracle in a list: what was saved whole, in order; every start loads the newest of it that is undamaged."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for seed in range(100 * batch, 100 * batch + trials(12)):
        rng, folder = random.Random(seed), tmp_path / str(seed)
        run, late, whole, keep = None, [], [], rng.choice([2, 3])
        for number in range(1, 25):
            action = rng.choice(
                ["start", "save", "save", "save", "kill", "damage", "late"]
            )
            if action == "start" or run is None:
                late += [run] if run is not None else []
                run, extra = Checkpoints(folder, keep=keep), {}
                loaded = run.load(extra=extra)
                # of `keep`, damaged ones may be some
                whole = sorted(one for one in whole if Path(one[0]).exists())
                assert (loaded, extra) == (
                    whole[-1][1:] if whole else (None, {})
                ), f"seed {seed}, action {number}"
            elif action == "save":
                step = number + rng.choice([0, 100])
                whole.append(
                    (
                        run.save(step, extra={"number": number}),
                        step,
                        {"number": number},
                    )
                )
            elif action == "kill":
                before = set(os.listdir(folder))
                with monkeypatch.context() as patch:
                    patch.setattr(run._folder, "clean", lambda keep: None)
                    killed_at(
                        rng.randint(1, 150),
                        partial(run.save, number, extra={"number": number}),
                    )
                new = (
                    folder / name for name in set(os.listdir(folder)) - before
                )
                whole += [
                    (str(one), number, {"number": number})
                    for one in new
                    if (one / "manifest.json").exists()
                ]
                run = None
            elif (
                action == "damage"
                and len(
                    whole := sorted(
                        one for one in whole if Path(one[0]).exists()
                    )
                )
                > 1
            ):
                cut(values(Path(whole.pop()[0])))
            elif action == "late" and late:
                with pytest.raises(TakenOverError):
                    rng.choice(late).save(number + 1000, extra={})


def test_checkpoints_ignore_a_file_with_the_name_of_one(tmp_path):
    run = Checkpoints(tmp_path)
    old, new = (Path(run.save(step, extra={"step": step})) for step in (1, 2))
    shutil.rmtree(new)
    new.write_text("")
    extra = {}
    assert Checkpoints(tmp_path).newest() == str(old)
    again = Checkpoints(tmp_path)
    assert again.load(extra=extra) == 1
    again.save(3, extra={"step": 3})


def test_checkpoints_ignore_names_that_are_not_theirs(tmp_path):
    (tmp_path / "generation-\u0663").write_text("")
    (tmp_path / "000009-000009-step\u0660").mkdir()
    run = Checkpoints(tmp_path)
    run.save(1, extra={"step": 1})
    assert Checkpoints(tmp_path).load(extra={}) == 1


def test_checkpoints_arguments_are_checked_by_name(tmp_path):
    with pytest.raises(ArgumentError, match="keep"):
        Checkpoints(tmp_path, keep=1)
    run = Checkpoints(tmp_path)
    with pytest.raises(ArgumentError, match="step"):
        run.save(-1, extra={})
    with pytest.raises(ArgumentError, match="there is nothing to save"):
        run.save(9)
    assert run.newest() is None
    model = paddle.nn.Linear(2, 1)
    with pytest.raises(ArgumentError, match=r"save\(number=\).* got int: 4"):
        run.save(1, model=model, number=4)
    run.save(1, model=model, extra={"number": 4})
    with pytest.raises(
        StateError, match=r"holds \['extra', 'model'\], and not \['ema'\]"
    ):
        run.load(ema={})
    with pytest.raises(ArgumentError, match=r"load\(extra=\)"):
        run.load(extra=5)
    with pytest.raises(
        StateError, match=r"holds .*2, 1.*weight.*, and not .*3, 1"
    ):
        run.load(model=paddle.nn.Linear(3, 1))
    with pytest.raises(
        StateError, match=r'holds .*"weight".*, and this model .*"0.weight"'
    ):
        run.load(model=paddle.nn.Sequential(model))


def test_checkpoints_save_works_after_a_failed_one(tmp_path, monkeypatch):
    run = Checkpoints(tmp_path)
    run.save(1, extra={"step": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(paddle, "save", full)
        with pytest.raises(
            CheckpointError,
            match=r"save\(\) in .* failed on global rank 0: OSError: .*No space left",
        ):
            run.save(2, extra={"step": 2})
    assert sorted(os.listdir(tmp_path)) == [
        "000001-000001-step1",
        "generation-000001",
    ]
    run.save(2, extra={"step": 2})
    assert run.newest().endswith("step2")


def test_checkpoints_folder_is_no_url():
    with pytest.raises(ArgumentError, match="folder is a URL"):
        Checkpoints("s3://bucket/x")


def test_fill_needs_all_of_a_tensor(tmp_path):
    held = paddle.arange(12, dtype="float32").reshape([4, 3])
    kind = [[4, 3], "float32"]
    paddle.save({"w": held[:3]}, str(tmp_path / "some"))
    paddle.save({"w": held}, str(tmp_path / "all"))
    with pytest.raises(StateError, match=r"does not hold all of \['w'\]"):
        part = SavedPart("w", tmp_path / "some", kind, [0, 0], [3, 3])
        fill({"w": paddle.zeros([4, 3])}, [part])

    filled = paddle.zeros([4, 3])
    fill(
        {"w": filled}, [SavedPart("w", tmp_path / "all", kind, [0, 0], [4, 3])]
    )
    assert (filled == held).all()
