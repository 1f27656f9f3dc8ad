"""A stream's state names the files that were being read, so that a run is not resumed in the middle of others."""

import json
import os

import paddle
import pytest

from paddle_shard import Stream
from paddle_shard.errors import StateError
from paddle_shard.testing.simulated import on_each_rank
from tests.data.http_server import serving
from tests.data.source_laws import FILE_KINDS, text_bytes
from tests.helpers import DP2, ONE, local, sharded

"""What is added to the ids of a file that is written anew: they stay as long."""
WAS = "the data is not what it was when the state was saved"


def loader_of(stream, mesh=ONE, *, workers=0, size=8, **options):
    given = paddle.io.DataLoader(stream, batch_size=size, num_workers=workers)
    return sharded(given, mesh, seed=3, **options)


def rows_of(loader, steps=None):
    """The rows of each step that are real."""
    batches, found = iter(loader), []
    for batch in batches:
        found.append(
            [
                i
                for i, real in zip(
                    local(batch), local(batches.valid), strict=True
                )
                if real
            ]
        )
        if len(found) == steps:
            break
    return found


def saved(loader, steps):
    begun = rows_of(loader, steps)
    return begun, json.loads(json.dumps(loader.state_dict()))


def write(path, kind, ids, *, seconds=0):
    """Write a file that is as old as the others, or younger by some seconds."""
    path.write_bytes(kind.content(ids))
    os.utime(path, (1e9 + seconds, 1e9 + seconds))


def flat(steps):
    return [i for step in steps for i in step]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(1 + at % 2, name) for at, name in enumerate(FILE_KINDS)],
)
def test_rewritten_files_are_not_read_from_the_state(ranks, name, tmp_path):
    kind, paths = (
        FILE_KINDS[name],
        [
            tmp_path / f"{number}.{FILE_KINDS[name].ending}"
            for number in range(6)
        ],
    )
    for number, path in enumerate(paths):
        write(path, kind, range(1000 + 10 * number, 1010 + 10 * number))

    def made(mesh=ONE):
        return loader_of(
            kind.stream([str(path) for path in paths])
            .map(kind.id_of)
            .in_parts(2),
            mesh,
            size=4,
        )

    straight = rows_of(made())
    begun, state = saved(made(), 4)
    assert begun == straight[:4]

    def resumed(*override):
        def rest():
            again = made(DP2 if ranks == 2 else ONE)
            again.load_state_dict(state, override=override)
            try:
                return rows_of(again)
            except StateError as error:
                return str(error)

        return on_each_rank(range(ranks), rest).values()

    assert sorted(flat(flat(resumed()))) == sorted(flat(straight[4:]))
    write(paths[3], kind, range(5030, 5040), seconds=10)
    assert all(
        f"{WAS}: version of file 3.{kind.ending} was " in text
        for text in resumed()
    )
    anew = [
        row + 4000 if 1030 <= row < 1040 else row for row in flat(straight[4:])
    ]
    assert sorted(flat(flat(resumed("data")))) == sorted(anew)


def test_rewritten_files_are_not_looked_for_without_verify(tmp_path):
    path = tmp_path / "0.txt"
    write(path, FILE_KINDS["lines"], range(1000, 1040))
    assert (
        saved(loader_of(Stream.lines([str(path)]).map(int), verify=None), 2)[1][
            "data"
        ]
        is None
    )


def test_state_saved_before_a_batch_still_knows_the_files(
    tmp_path,
):
    kind, path = FILE_KINDS["lines"], tmp_path / "0.txt"
    write(path, kind, range(1000, 1040))

    def made():
        return loader_of(Stream.lines([str(path)]).map(int))

    again = made()
    again.load_state_dict(saved(made(), 2)[1])
    state = again.state_dict()
    write(path, kind, range(2000, 2040), seconds=1)
    other = made()
    other.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(
            StateError,
            match=rf"{WAS}: version of file {path.name} .* override=\['data'\]",
        ):
            next(iter(other))


def test_rewritten_remote_file_is_known_by_what_its_server_tells(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    content = {
        f"{number}.txt": text_bytes(
            range(1000 + 100 * number, 1100 + 100 * number)
        )
        for number in range(4)
    }
    with serving(dict(content)) as server:

        def made():
            stream = Stream.lines(
                [f"{server.url}/{name}" for name in content],
                shuffle_shards=False,
            )
            return loader_of(stream.map(int).in_parts(2))

        straight = rows_of(made())
        _, state = saved(made(), 3)
        same, other = made(), made()
        same.load_state_dict(state)
        assert rows_of(same) == straight[3:]
        server.files["1.txt"] = text_bytes(range(5100, 5200))
        other.load_state_dict(state)
        with pytest.raises(StateError, match=f"{WAS}: version of file 1.txt"):
            rows_of(other)


def test_override_in_mid_epoch_warns_of_other_samples(tmp_path, caplog):
    kind, path = FILE_KINDS["lines"], tmp_path / "0.txt"
    write(path, kind, range(1000, 1040))

    def made():
        return loader_of(Stream.lines([str(path)]).map(int).in_parts(1))

    whole = made()
    _, state = saved(whole, 2)
    rows_of(whole)
    ended = whole.state_dict()
    write(path, kind, range(1001, 1040))
    for at, lines in ((ended, 0), (state, 1)):
        caplog.clear()
        made().load_state_dict(at, override=["stream"])
        found = [
            line for line in caplog.messages if "override=['stream']" in line
        ]
        assert len(found) == lines
    assert "Epoch 0 was begun" in found[0]
    assert "16 samples" in found[0]


@pytest.mark.parametrize(
    "change",
    [
        {"weights": {"a": 3, "b": 1}},
        {"stop": "all"},
        {"window": 9},
        {"fewer": 1},
    ],
)
def test_state_of_a_stream_names_other_settings_or_files(change, tmp_path):
    paths = [tmp_path / f"{number}.txt" for number in range(8)]
    for path in paths:
        path.write_text("".join(f"{number}\n" for number in range(9)))

    def made(window=4, fewer=0, weights=None, stop="first"):
        stream = (
            Stream.lines([str(path) for path in paths[fewer:]])
            .map(int)
            .shuffle(window)
        )
        return loader_of(
            Stream.mixture(
                dict.fromkeys("ab", stream), weights, stop=stop
            ).in_parts(4)
        )

    with pytest.raises(
        StateError,
        match=r"stream: saved .*override=\[",
    ):
        made(**change).load_state_dict(made().state_dict())
