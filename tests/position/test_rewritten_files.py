"""A stream's state names the files that were being read, so that a run is not resumed in the middle of others."""

import json
import os

import paddle
import pytest

from paddle_shard import Stream
from paddle_shard.errors import StateError
from paddle_shard.plan.state import sealed
from paddle_shard.testing.simulated import on_each_rank
from tests.helpers import DP2, ONE, local, sharded
from tests.sources.http_server import serving
from tests.sources.laws import FILE_KINDS, text_bytes

"""What is added to the ids of a file that is written anew: they stay as long."""
WAS = "the data is not what it was when the state was saved"


def loader_of(stream, mesh=ONE, *, workers=0, size=8, **options):
    given = paddle.io.DataLoader(stream, batch_size=size, num_workers=workers)
    return sharded(given, mesh, seed=3, **options)


def rows_of(loader, steps=None):
    """The rows of each step that are real."""
    batches, found = iter(loader), []
    for batch in batches:
        found.append([i for i, real in zip(local(batch), local(batches.valid), strict=True) if real])
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


@pytest.mark.parametrize("name", FILE_KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_files_that_are_not_those_of_the_state_are_refused_on_any_mesh(name, ranks, tmp_path):
    kind, paths = FILE_KINDS[name], [tmp_path / f"{number}.{FILE_KINDS[name].ending}" for number in range(6)]
    for number, path in enumerate(paths):
        write(path, kind, range(1000 + 10 * number, 1010 + 10 * number))

    def made(mesh=ONE):
        return loader_of(kind.stream([str(path) for path in paths]).map(kind.id_of).in_parts(2), mesh, size=4)

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
    assert all(f"{WAS}: 3.{kind.ending} (" in text for text in resumed())
    anew = [row + 4000 if 1030 <= row < 1040 else row for row in flat(straight[4:])]
    assert sorted(flat(flat(resumed("data")))) == sorted(anew)


def test_without_verify_nobody_looks(tmp_path):
    path = tmp_path / "0.txt"
    write(path, FILE_KINDS["lines"], range(1000, 1040))
    assert saved(loader_of(Stream.lines([str(path)]).map(int), verify=None), 2)[1]["data"] is None


def test_a_state_that_is_saved_again_before_the_first_batch_still_knows_the_files(tmp_path):
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
        with pytest.raises(StateError, match=rf"{WAS}: {path.name} .* override=\['data'\]"):
            next(iter(other))


def test_a_remote_file_is_known_by_what_its_server_tells(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    content = {f"{number}.txt": text_bytes(range(1000 + 100 * number, 1100 + 100 * number)) for number in range(4)}
    with serving(dict(content)) as server:

        def made():
            stream = Stream.lines([f"{server.url}/{name}" for name in content], shuffle_shards=False)
            return loader_of(stream.map(int).in_parts(2))

        straight = rows_of(made())
        _, state = saved(made(), 3)
        same, other = made(), made()
        same.load_state_dict(state)
        assert rows_of(same) == straight[3:]
        server.files["1.txt"] = text_bytes(range(5100, 5200))
        other.load_state_dict(state)
        with pytest.raises(StateError, match=f"{WAS}: 1.txt"):
            rows_of(other)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("counts", [None, False])
def test_a_list_of_files_that_has_changed_is_told_in_words(counts, mixed, tmp_path):
    kind, paths = FILE_KINDS["lines"], [tmp_path / f"{number}.txt" for number in range(64)]
    for number, path in enumerate(paths):
        write(path, kind, range(1000 + 10 * number, 1010 + 10 * number))

    def made(order):
        stream = Stream.lines([str(path) for path in order], counts=counts).map(int)
        return loader_of((Stream.mixture({"a": stream}, {"a": 1}) if mixed else stream).in_parts(4))

    _, state = saved(made(paths), 2)

    def refused(order):
        with pytest.raises(StateError) as found:
            made(order).load_state_dict(state)
        return str(found.value)

    what = "size" if counts is False else "number of samples"
    assert "the same, but given in another order" in refused([paths[1], paths[0], *paths[2:]])
    assert "it had 64 files and has 63 now" in refused(paths[1:])
    for number in (0, 40, 63):
        before = paths[number].read_bytes()
        write(paths[number], kind, range(1000 + 10 * number, 1009 + 10 * number))
        assert f"the file {paths[number]} has another {what}" in refused(paths)
        paths[number].write_bytes(before)
    made(paths).load_state_dict(state)
    for number in (3, 4):
        write(paths[number], kind, range(1000, 1009))
    assert f"several of its 64 files have another {what}" in refused(paths)
    state["fingerprint"]["stream"][0][2] = "damaged"
    state = sealed(state)
    assert "saved" in refused(paths) or mixed


def test_an_override_in_the_middle_of_an_epoch_says_that_positions_mean_other_samples(tmp_path, caplog):
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
        found = [line for line in caplog.messages if "override=['stream']" in line]
        assert len(found) == lines
    assert f"the file {path} has another number of samples" in found[0]
    assert "Epoch 0 was begun" in found[0]
    assert "16 samples" in found[0]


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        ({}, {"weights": (1, 3)}, "its weights were {'a': 1, 'b': 1}, and are {'a': 1, 'b': 3} now"),
        ({}, {"names": "ba"}, "its sources were in the order ['a', 'b'], and are in the order ['b', 'a'] now"),
        ({}, {"names": "ac"}, "its weights were {'a': 1, 'b': 1}, and are {'a': 1, 'c': 1} now"),
        ({}, {"stop": "all"}, "stop was 'first', and is 'all' now"),
        ({}, {"window": 9}, "source 'a': its stages were .shuffle(4), and are .shuffle(9) now"),
        ({}, {"files": {"shuffle_shards": False}}, "source 'a': shuffle_shards was True, and is False now"),
        ({}, {"files": {"resample": True}}, "source 'a': resample was False, and is True now"),
        ({}, {"after": 2}, "its stages were none, and are .batch(2).unbatch() now"),
        ({}, {"names": None}, "its source was of the kind 'mixture', and is of the kind 'shards' now"),
        (
            {"names": None},
            {"names": None, "items": 9},
            "its source was of the kind 'shards', and is of the kind 'list' now",
        ),
        (
            {"names": None, "items": 7},
            {"names": None, "items": 9},
            "its source was ('list', 7), and is ('list', 9) now",
        ),
    ],
)
def test_settings_of_a_stream_that_have_changed_are_told_in_words(then, now, told, tmp_path):
    paths = [tmp_path / f"{number}.txt" for number in range(8)]
    for path in paths:
        path.write_text("".join(f"{number}\n" for number in range(9)))

    def made(names="ab", weights=(1, 1), stop="first", window=4, files=None, after=0, items=0):
        stream = (
            Stream.of([*range(items)]) if items else Stream.lines([str(path) for path in paths], **files or {}).map(int)
        )
        stream = stream if items else stream.shuffle(window)
        if names:
            sources = dict.fromkeys(names, stream)
            stream = Stream.mixture(sources, dict(zip(names, weights, strict=True)), stop=stop)
        stream = stream.batch(after).unbatch() if after else stream
        endless = {"num_batches": 4} if files and "resample" in files else {}
        return loader_of(stream.in_parts(4), **endless)

    with pytest.raises(StateError) as found:
        made(**now).load_state_dict(made(**then).state_dict())

    assert f"stream: {told}" in str(found.value)
    assert "override=[" in str(found.value)
