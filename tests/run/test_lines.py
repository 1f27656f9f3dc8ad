"""The file of a record: what is written, what a crash leaves, and what is seen of lines that are gone or changed."""

import contextlib
import io
import json
import logging
import multiprocessing
import os
from pathlib import Path

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paddle.io import DataLoader

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import ArgumentError, ArgumentTypeError, DataReadError
from paddle_shard.extras.cli.main import main
from paddle_shard.run.record_lines import append, digest_of, read_record
from tests.helpers import ONE, Made, places_in, sharded
from tests.run.record_runs import asked


def written(path, count=6):
    for number in range(count):
        append(
            str(path),
            {"line": "pass" if number else "begin", "format": 1, "n": number},
        )
    return path.read_bytes().splitlines(keepends=True)


@given(st.data())
def test_record_line_removed_or_changed_is_found(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("lines") / "run.jsonl"
    lines = written(path)
    assert read_record(str(path))[1] == []
    at = data.draw(st.integers(0, len(lines) - 1))
    kinds = [
        "changed",
        "twice",
        "no JSON",
        "a list",
        *["taken out", "swapped"] * (at < len(lines) - 1),
    ]
    kind = data.draw(st.sampled_from(kinds))
    changed = lines[at].replace(b'"n": ', b'"n": 1')
    with_it = {
        "taken out": [],
        "changed": [changed],
        "twice": [lines[at]] * 2,
        "swapped": [*lines[at + 1 : at + 2], lines[at]],
        "no JSON": [lines[at][:-9] + b"\n"],
        "a list": [b"[1]\n"],
    }[kind]
    path.write_bytes(
        b"".join(
            [*lines[:at], *with_it, *lines[at + 1 + (kind == "swapped") :]]
        )
    )

    try:
        problems = read_record(str(path))[1]
    except ArgumentError:
        # the first line is gone, and with it what the file is
        assert at == 0
        return
    assert problems


@given(cut=st.integers(1, 60))
def test_record_half_line_is_reported_and_replaced(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("lines") / "run.jsonl"
    lines = written(path)
    path.write_bytes(b"".join(lines)[: -min(cut, len(lines[-1]) - 1)])
    assert "line 6 is cut after" in read_record(str(path))[1][0]

    append(str(path), {"line": "end"})

    found, problems = read_record(str(path))
    assert problems == []
    assert [line["line"] for line in found] == ["begin", *["pass"] * 4, "end"]
    assert found[-1]["mended"] == len(lines[-1]) - min(cut, len(lines[-1]) - 1)


def _append_many(path, start):
    start.wait()
    for number in range(40):
        append(path, {"line": "pass", "n": number})


def test_processes_may_append_at_the_same_time(tmp_path):
    path = str(tmp_path / "run.jsonl")
    append(path, {"line": "begin", "format": 1})
    context = multiprocessing.get_context("fork")
    start = context.Event()
    jobs = [
        context.Process(target=_append_many, args=(path, start))
        for _ in range(3)
    ]
    for job in jobs:
        job.start()
    start.set()
    for job in jobs:
        job.join()

    found, problems = read_record(path)
    assert (len(found), problems) == (121, [])


def loader_of(path, mesh=ONE, function=None, **options):
    data = Made(length=46) if function is None else Made(function, 46)
    return sharded(DataLoader(data, batch_size=4), mesh, record=path, **options)


def kinds(path):
    return [
        json.loads(line)["line"] for line in Path(path).read_text().splitlines()
    ]


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        (
            "no/folder/run.jsonl",
            ArgumentError,
            r"record='.*run.jsonl' cannot be written .*Give a file in a folder that",
        ),
        ("", ArgumentError, "cannot be written .*Is a directory"),
        ("a\0b", ArgumentError, "cannot be written .*null"),
        (7, ArgumentTypeError, "record must be the path of a file, got int: 7"),
        ("other.txt", ArgumentError, "other.txt' is a file, but no record"),
    ],
)
def test_file_that_cannot_be_the_record_is_refused_at_once(
    path, error, text, tmp_path
):
    (tmp_path / "other.txt").write_text("hello\n")
    with pytest.raises(error, match=text):
        loader_of(path if path == 7 else tmp_path / path)
    assert (tmp_path / "other.txt").read_text() == "hello\n"


def test_record_removed_in_a_job_is_not_begun_in_the_middle(tmp_path, caplog):
    loader = loader_of(tmp_path / "run.jsonl")
    next(iter(loader))
    (tmp_path / "run.jsonl").unlink()

    list(loader)

    assert "cannot be written any more ([Errno 2] No such file" in caplog.text
    assert not (tmp_path / "run.jsonl").exists()


def test_record_on_a_full_disk_is_an_error_then_one_warning(
    tmp_path, caplog, monkeypatch
):
    with pytest.raises(ArgumentError, match="on a disk with space"):
        loader_of("/dev/full")

    loader = loader_of(tmp_path / "run.jsonl")
    whole = (tmp_path / "run.jsonl").read_bytes()

    def full(path, line):
        with open(path, "ab") as file:
            file.write(b'{"after": "half')
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paddle_shard.run.recorder.append", full)
    caplog.set_level(logging.WARNING)
    for _ in loader:
        loader.state_dict()
    said = [
        record.getMessage()
        for record in caplog.records
        if "cannot be written any more" in record.getMessage()
    ]
    assert len(said) == 1
    assert "The run continues" in said[0]
    monkeypatch.undo()
    caplog.clear()
    loader_of(tmp_path / "run.jsonl")
    assert "The 15 bytes were taken off" in caplog.text
    assert (tmp_path / "run.jsonl").read_bytes().startswith(whole)
    assert kinds(tmp_path / "run.jsonl") == ["begin", "begin"]


def test_record_survives_a_handler_that_saves_amid_a_line(
    tmp_path, monkeypatch
):
    from paddle_shard.run import recorder

    loader, original = loader_of(tmp_path / "run.jsonl"), recorder.append
    batches, inside = iter(loader), []

    def interrupted(path, line):
        if not inside:
            inside.append(True)
            next(batches)
            loader.state_dict()
        return original(path, line)

    monkeypatch.setattr(recorder, "append", interrupted)
    next(batches)
    loader.state_dict()

    found, problems = read_record(str(tmp_path / "run.jsonl"))
    assert problems == []
    steps = [
        line["state"]["steps"] for line in found if line["line"] == "checkpoint"
    ]
    assert steps == [1, 2]


def test_states_at_one_position_are_one_line_and_an_error_is_one(tmp_path):
    def broken(index):
        if index == 13:
            raise ValueError("broken")
        return index

    path = tmp_path / "run.jsonl"
    loader = loader_of(path, function=broken)
    batches = iter(loader)
    next(batches)
    for _ in range(3):
        loader.state_dict()
    with pytest.raises(DataReadError):
        list(batches)

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["line"] for line in lines] == [
        "begin",
        "pass",
        "checkpoint",
        "error",
    ]
    assert "DataReadError" in lines[-1]["error"]
    assert [steps for _, steps, _ in lines[-1]["passes"]] == [3]


def test_record_follows_no_change_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loader = loader_of("run.jsonl")
    (tmp_path / "other").mkdir()
    os.chdir("other")
    list(loader)
    assert kinds(tmp_path / "run.jsonl") == ["begin", "pass", "end"]
    assert not os.listdir(".")


def test_options_of_any_type_are_in_the_record(tmp_path):
    options = {
        "balance": np.arange(46),
        "pad_to": {0: ([128, 256], -1)},
        "seed": 0,
        "batch_size": [(0, 4), (16, 8)],
    }
    loader = sharded(
        DataLoader(Made(length=46), batch_size=4),
        ONE,
        record=tmp_path / "run.jsonl",
        **options,
    )
    assert len(list(loader)) == 8
    (line,) = (
        json.loads(one)
        for one in (tmp_path / "run.jsonl").read_text().splitlines()[:1]
    )
    assert line["options"]["seed"] == "0"
    assert line["options"]["pad_to"] == "{0: ([128, 256], -1)}"
    assert (line["sizes"], line["dealt"]) == ([[0, 4], [16, 8]], True)
    (found,) = asked("show", tmp_path / "run.jsonl", "--step", 5, "--json")[
        "delivered"
    ]
    assert (found["ranks"], found["samples"]) == (None, list(range(24, 32)))
    assert "exactly once" in asked("verify", tmp_path / "run.jsonl")


def test_step_writes_nothing(tmp_path):
    loader = loader_of(tmp_path / "run.jsonl")
    batches = iter(loader)
    before = (tmp_path / "run.jsonl").stat().st_size
    for _ in range(8):
        next(batches)
    assert (tmp_path / "run.jsonl").stat().st_size == before


def test_damage_fails_the_verification(tmp_path):
    path = tmp_path / "run.jsonl"
    loader = loader_of(path)
    list(loader), list(loader)
    assert "epoch 1: each of 46 samples exactly once" in asked("verify", path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))  # the end of epoch 0
    assert "line 2 was changed or taken out" in asked("verify", path, code=1)
    path.write_bytes(b"".join(lines)[:-5])
    assert "is cut after" in asked("verify", path, code=1)
    path.write_text("hello\n")
    assert "is no record of a run" in asked("verify", path, code=2)
    assert "cannot be read" in asked("verify", tmp_path / "none", code=2)


def test_record_json_reports_only_the_damage(tmp_path):
    path = tmp_path / "run.jsonl"
    list(loader_of(path))
    path.write_bytes(path.read_bytes()[:-5])
    _, damage = read_record(str(path))
    assert asked("verify", path, "--json", code=1)["damage"] == damage
    assert len(damage) == 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a record with two jobs, a skip and two epochs."""
    path = tmp_path_factory.mktemp("whole") / "run.jsonl"
    loader = loader_of(path)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    loader = loader_of(path, skip_steps=[(5, 6)])
    loader.load_state_dict(state)
    list(loader), list(loader)
    return path.read_bytes()


@given(st.data())
def test_record_byte_changed_is_found(whole, tmp_path_factory, data):
    at, path = (
        data.draw(st.integers(0, len(whole) - 1)),
        tmp_path_factory.getbasetemp() / "changed.jsonl",
    )
    new = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[at]))
    path.write_bytes(whole[:at] + bytes([new]) + whole[at + 1 :])

    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        assert main(["verify", str(path)]) in (1, 2)


JUNK = [
    None,
    True,
    -1,
    0,
    3,
    10**6,
    2**63,
    10**40,
    1.5,
    float("nan"),
    "",
    "x",
    [],
    [1],
    [[0]],
    {},
    {"x": 1},
]


@given(st.data())
def test_record_commands_survive_lines_of_any_content(
    whole, tmp_path_factory, data
):
    path, out = tmp_path_factory.getbasetemp() / "junk.jsonl", io.StringIO()
    lines = [json.loads(line) for line in whole.splitlines()]
    line = data.draw(st.sampled_from(lines))
    way = data.draw(st.sampled_from(list(places_in(line))))
    inside = line
    for key in way[:-1]:
        inside = inside[key]
    inside[way[-1]] = data.draw(st.sampled_from(JUNK))
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    step = ["--step", "1"]
    ways = [
        ["verify"],
        ["show", "--sample", "3"],
        ["show", *step],
    ]
    for command, *flags in ways:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            assert main([command, str(path), *flags]) in (0, 1, 2)


def test_record_that_tells_nothing_yet_says_so(tmp_path):
    path = tmp_path / "run.jsonl"
    loader = loader_of(path)
    assert "the record has no pass yet" in asked("verify", path, code=2)
    batches = iter(loader)
    next(batches)
    assert "1 lines" not in asked("verify", path)
    (found,) = asked("show", path, "--step", 0, "--epoch", 0, "--json")[
        "delivered"
    ]
    assert (found["recorded"], found["samples"]) == ("not yet", [0, 1, 2, 3])


def test_trainer_that_nobody_edits_writes_a_record_too(tmp_path):
    with paddle_shard.patch_paddle(record=tmp_path / "run.jsonl"):
        loader = paddle.distributed.shard_dataloader(
            DataLoader(Made(length=8), batch_size=4), ONE, shard_dims="dp"
        )
        list(loader), list(loader)
    assert kinds(tmp_path / "run.jsonl") == [
        "begin",
        "pass",
        "end",
        "pass",
        "end",
    ]
    assert "epoch 1: each of 8 samples exactly once" in asked(
        "verify", tmp_path / "run.jsonl"
    )


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("kind", ["index", "stream", "sampler"])
def test_record_epoch_ended_by_the_resumed_job_is_whole(
    kind, at_the_end, tmp_path
):
    """The state is saved behind the last step of an epoch, before or after the loop has seen that there is no more."""

    class Batches:
        def __iter__(self):
            yield from (list(range(at, at + 4)) for at in range(0, 16, 4))

    def made():
        if kind == "stream":
            given = DataLoader(
                Stream.of(lambda: iter(range(16)))
                .sharding_filter()
                .in_parts(4),
                batch_size=4,
            )
        else:
            how = (
                {"batch_size": 4}
                if kind == "index"
                else {"batch_sampler": Batches()}
            )
            given = DataLoader(Made(length=16), **how)
        return sharded(given, ONE, record=tmp_path / "run.jsonl")

    loader = made()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    if at_the_end:
        assert next(batches, None) is None
    state = loader.state_dict()
    loader = made()
    loader.load_state_dict(state)
    assert [len(list(loader)) for _ in range(2)] == (
        [4, 4] if at_the_end else [0, 4]
    )
    loader.state_dict()
    said = asked("verify", tmp_path / "run.jsonl")
    assert "NOT" not in said
    noun = {
        "index": "samples",
        "stream": "positions of the stream",
        "sampler": "draws",
    }
    assert f"epoch 0: each of 16 {noun[kind]}" in said


def test_sample_that_could_not_be_read_fails_the_verification(tmp_path):
    def broken(index):
        if index == 13:
            raise ValueError("broken")
        return index

    list(loader_of(tmp_path / "run.jsonl", function=broken, on_error="skip"))
    assert "1 samples at positions [0, 46) could not be read" in asked(
        "verify", tmp_path / "run.jsonl", code=1
    )


def written_anew(whole, path, change):
    """Write a record with changed lines as if they had been written like that."""
    digests = {}
    for line in map(json.loads, whole.splitlines()):
        before = line.pop("after")
        del line["own"]
        if "job" in line:
            line["job"] = digests[line["job"]]
        change(line)
        digests[read_digest(whole, before)] = append(str(path), line)[0]
    return path


def test_record_is_compared_with_the_order(whole, tmp_path):
    def with_other_sums(line):
        for entry in line.get("state", {}).get("certificate", ()):
            entry[5][2] ^= 1

    path = written_anew(whole, tmp_path / "run.jsonl", with_other_sums)
    assert "is not what the order has there" in asked("verify", path, code=1)


def test_position_that_no_epoch_has_is_told_at_once(whole, tmp_path):
    def far_away(line):
        if line["line"] == "end":
            line["passes"] = [
                [number, 10**12, 10**13] for number, *_ in line["passes"]
            ]

    path = written_anew(whole, tmp_path / "run.jsonl", far_away)
    assert (
        "the record is damaged: epoch 0 has 46 positions, and a line has 10000000000000"
        in asked("verify", path, code=2)
    )


def read_digest(whole, before):
    """The digest of the line that follows on a line with this one."""
    lines = whole.splitlines()
    return next(
        digest_of(line) for line in lines if json.loads(line)["after"] == before
    )
