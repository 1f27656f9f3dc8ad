"""A stream's state names the files that were being read, so that a run is not resumed in the middle of others."""

import json
import os
import threading
from collections import Counter
from importlib.util import find_spec

import paddle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import paddle_shard
from paddle_shard import Stream
from paddle_shard.errors import StateError
from paddle_shard.plan.state import sealed
from paddle_shard.position.run import MOST_FILES
from paddle_shard.sources import files as files_of
from paddle_shard.testing.simulated import on_each_rank
from tests.deadlines import HANG
from tests.helpers import DP2, ONE, local, sharded
from tests.sources.http_server import serving
from tests.sources.laws import FILE_KINDS, text_bytes
from tests.trials import trials

ANEW = 4000
"""What is added to the ids of a file that is written anew: they stay as long."""
WAS = "the data is not what it was when the state was saved"


def write(path, kind, ids):
    """Write a file; if there is one, the new one has its times, and its size if the ids are as long."""
    before = path.stat() if path.exists() else None
    path.write_bytes(kind.content(ids))
    if before is not None:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


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


def flat(steps):
    return [i for step in steps for i in step]


def saved(loader, steps):
    begun = rows_of(loader, steps)
    return begun, json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("name", FILE_KINDS)
@settings(max_examples=trials(25))
@given(
    lengths=st.lists(st.integers(1, 12), min_size=4, max_size=9),
    window=st.sampled_from([1, 5, 40]),
    parts=st.sampled_from([2, 4]),
    cut=st.floats(0, 0.99),
    chosen=st.integers(0, 8),
    ranks=st.sampled_from([1, 2]),
    epoch=st.sampled_from([0, 1]),
)
@example(lengths=[6, 1, 1, 1, 8], window=1, parts=2, cut=0.5, chosen=0, ranks=1, epoch=0)  # two row groups of a file
def test_a_file_written_anew_that_was_being_read_is_refused_by_name_on_any_mesh(
    name, tmp_path_factory, lengths, window, parts, cut, chosen, ranks, epoch
):
    kind, folder, first, ids = FILE_KINDS[name], tmp_path_factory.mktemp("files"), 1000, []
    for length in lengths:
        ids.append(range(first, first + length))
        first += length
    paths = [folder / f"{number}.{kind.ending}" for number in range(len(lengths))]
    for path, of_file in zip(paths, ids, strict=True):
        write(path, kind, of_file)

    def made(mesh=ONE):
        stream = kind.stream([str(path) for path in paths]).map(kind.id_of).shuffle(window).in_parts(parts)
        return loader_of(stream, mesh)

    straight = made()
    epochs = [rows_of(straight) for _ in range(2)]
    steps = int(cut * len(epochs[epoch]))
    begun = made()
    begun.set_epoch(epoch)
    delivered, state = saved(begun, steps) if steps else ([], begun.state_dict())
    number = chosen % len(lengths)

    def resumed(override=()):
        def rest():
            again = made(DP2 if ranks == 2 else ONE)
            again.load_state_dict(state, override=override)
            try:
                return rows_of(again)
            except StateError as error:
                return str(error)

        return on_each_rank(range(ranks), rest)

    write(paths[number], kind, ids[number])
    same = resumed()
    write(paths[number], kind, [i + ANEW for i in ids[number]])
    found, anyway = resumed(), resumed(["contents"])

    def all_rows(of_ranks):
        return sorted(flat(flat(of_ranks.values())))

    assert all_rows(same) == sorted(flat(epochs[epoch][steps:])), "never an alarm"
    mine = set(ids[number])
    after = sorted(i + ANEW * (i in mine) for i in flat(epochs[epoch][steps:]))
    refusals = [rows for rows in found.values() if isinstance(rows, str)]
    assert all(WAS in text and str(paths[number]) in text for text in refusals)
    if mine & set(flat(delivered)) and mine & set(flat(epochs[epoch][steps:])):
        assert refusals
    elif not refusals:
        assert all_rows(found) == after
    assert all_rows(anyway) == after


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["at step 0", "once", "saved again before the next batch", "resumed twice"])
def test_however_often_it_is_resumed_and_whoever_reads(how, workers, tmp_path):
    kind, path = FILE_KINDS["lines"], tmp_path / "0.txt"
    write(path, kind, range(1000, 1040))

    def made(number_of_workers=workers):
        return loader_of(Stream.lines([str(path)]).map(int), workers=number_of_workers)

    begun, state = made(), None
    if how == "at step 0":
        assert begun.state_dict()["contents"] == []
        return
    _, state = saved(begun, 2)
    if how != "once":
        again = made(2 - workers)
        again.load_state_dict(state)
        state = again.state_dict() if "before" in how else saved(again, 1)[1]
    write(path, kind, range(1000 + ANEW, 1040 + ANEW))
    other = made()
    other.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(StateError, match=rf"{WAS}: the file {path} .* override=\['contents'\]"):
            next(iter(other))


def test_without_verify_nobody_looks(tmp_path):
    path = tmp_path / "0.txt"
    write(path, FILE_KINDS["lines"], range(1000, 1040))
    assert saved(loader_of(Stream.lines([str(path)]).map(int), verify=None), 2)[1]["contents"] == []


@pytest.mark.parametrize("name", FILE_KINDS)
def test_files_that_were_all_written_anew_between_two_epochs_are_refused_in_the_next(name, tmp_path):
    kind = FILE_KINDS[name]
    paths = [tmp_path / f"{number}.{kind.ending}" for number in range(20)]

    def written(anew):
        for number, path in enumerate(paths):
            write(path, kind, range(1000 + 10 * number + anew, 1004 + 10 * number + anew))

    written(0)

    def made():
        return loader_of(kind.stream([str(path) for path in paths]).map(kind.id_of).in_parts(4))

    begun = made()
    rows = [rows_of(begun)]
    state = json.loads(json.dumps(begun.state_dict()))
    rows.append(rows_of(begun))
    written(0)
    same = made()
    same.load_state_dict(state)
    assert rows_of(same) == rows[1]
    written(ANEW)
    other = made()
    other.load_state_dict(state)
    with pytest.raises(StateError, match=WAS):
        rows_of(other)


def test_two_sources_of_a_mixture_with_files_of_the_same_names_are_told_apart(tmp_path):
    kind = FILE_KINDS["lines"]
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "0.txt", kind, range(1000 + 500 * number, 1100 + 500 * number))

    def made():
        streams = {name: Stream.lines([str(tmp_path / name / "0.txt")]).map(int) for name in "ab"}
        return loader_of(Stream.mixture(streams, {"a": 50, "b": 1}).in_parts(1))

    _, state = saved(made(), 4)
    for name in "ab":
        first = 1000 + 500 * (name == "b")
        same = made()
        same.load_state_dict(state)
        rows_of(same)
        write(tmp_path / name / "0.txt", kind, range(first + ANEW, first + 100 + ANEW))
        other = made()
        other.load_state_dict(state)
        with pytest.raises(StateError, match=f"{WAS}: the file {tmp_path / name / '0.txt'}"):
            rows_of(other)  # a source that is drawn rarely is opened some steps later
        write(tmp_path / name / "0.txt", kind, range(first, first + 100))


def test_of_ten_thousand_files_only_those_that_are_read_and_two_are_opened(tmp_path, monkeypatch):
    paths = [tmp_path / f"{number}.txt" for number in range(10_000)]
    for number, path in enumerate(paths):
        path.write_bytes(text_bytes(range(10_000 + 2 * number, 10_002 + 2 * number)))
    stream = Stream.lines([str(path) for path in paths], counts=False).map(int).in_parts(8)
    loader = loader_of(stream, size=16, tail="drop")
    opened = Counter()

    def counted(path, *how, **more):
        opened[path] += 1
        return open(path, *how, **more)

    monkeypatch.setattr(files_of, "open", counted, raising=False)
    batches = iter(loader)
    for _ in range(100):  # two samples of each part a step, and so one file
        next(batches)
    batches.close()

    assert sum(opened.values()) <= 8 * 101 + 2
    state = loader.state_dict()
    assert len(state["contents"]) == MOST_FILES
    assert len(json.dumps(state)) < 3072
    paddle_shard.state_to_tensor(state)  # it fits


def test_a_large_file_is_named_while_another_part_reads_many_small_ones(tmp_path):
    kind, paths = FILE_KINDS["lines"], [tmp_path / f"{number:03}.txt" for number in range(100)]
    for number, path in enumerate(paths):
        write(path, kind, range(1000, 1400 if number == 0 else 1001))
    stream = Stream.lines([str(path) for path in paths], counts=False, shuffle_shards=False).in_parts(2)
    _, state = saved(loader_of(stream.map(int), size=2, tail="drop"), 49)
    assert len(state["contents"]) <= MOST_FILES
    write(paths[0], kind, range(1000 + ANEW, 1400 + ANEW))
    other = loader_of(stream.map(int), size=2, tail="drop")
    other.load_state_dict(state)
    with pytest.raises(StateError, match=str(paths[0])):
        rows_of(other)


def test_a_remote_file_is_known_by_what_its_server_tells_and_costs_no_request_more(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    content = {f"{number}.txt": text_bytes(range(1000 + 100 * number, 1100 + 100 * number)) for number in range(4)}
    with serving(dict(content)) as server:

        def made(url=server.url):
            stream = Stream.lines([f"{url}/{name}" for name in content], shuffle_shards=False)
            return loader_of(stream.map(int).in_parts(2), size=8)

        straight = rows_of(made())
        assert Counter(name for name, _ in server.asked) == dict.fromkeys(content, 1)
        _, state = saved(made(), 3)
        same = made()
        same.load_state_dict(state)
        assert rows_of(same) == straight[3:]
        server.files["1.txt"] = text_bytes(range(1100 + ANEW, 1200 + ANEW))
        other = made()
        other.load_state_dict(state)
        with pytest.raises(StateError, match=rf"{WAS}: the file {server.url}/1.txt \(now \d+ bytes\)"):
            rows_of(other)
        elsewhere = made(server.url.replace("127.0.0.1", "localhost"))  # whose tags are its own, and tell nothing
        elsewhere.load_state_dict(state)
        assert len(rows_of(elsewhere)) == len(straight) - 3


def test_bytes_in_the_middle_of_a_large_file_are_not_looked_at(tmp_path):
    path = tmp_path / "0.txt"
    lines = [b"1" * 9] * 1000
    path.write_bytes(b"\n".join(lines))
    before = files_of.version_of(None, str(path))
    for at, seen in ((0, True), (300, True), (500, False), (999, True)):
        path.write_bytes(b"\n".join([*lines[:at], b"2" * 9, *lines[at + 1 :]]))
        assert (files_of.version_of(None, str(path)) != before) == seen


class Streamed(paddle.io.IterableDataset):
    def __init__(self, first):
        self.first = first

    def __iter__(self):
        info = paddle.io.get_worker_info()
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(self.first + part, self.first + 40, parts))


def of_huggingface(first):
    import datasets

    return datasets.Dataset.from_dict({"id": list(range(first, first + 40))}).to_iterable_dataset(num_shards=4)


STREAMS = {
    "function": lambda first: Stream.of(lambda: iter(range(first, first + 40))).shuffle(5),
    "data set": lambda first: Stream.of(Streamed(first)),
    "splits itself": lambda first: Stream.of(Streamed(first), splits_itself=True),
    "mixture": lambda first: Stream.mixture({name: STREAMS["function"](first) for name in "ab"}),
}
if find_spec("datasets"):
    STREAMS["huggingface"] = lambda first: Stream.huggingface(of_huggingface(first)).map(lambda row: row["id"])


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_files_that_begins_otherwise_is_a_line_in_the_log(kind, workers, caplog, monkeypatch):
    """It may be made anew each time that it is opened, which cannot be known without opening it once more."""
    monkeypatch.setattr("paddle_shard.say_once._SAID", set())

    def made(first):
        return loader_of(STREAMS[kind](first).in_parts(4), workers=workers)

    straight = rows_of(made(1000))
    begun, state = saved(made(1000), 2)
    same, other, anyway = made(1000), made(5000), made(5000)
    same.load_state_dict(state)
    assert begun + rows_of(same) == straight
    anyway.load_state_dict(state, override=["contents"])
    assert len(rows_of(anyway)) == len(straight) - 2
    assert WAS not in caplog.text
    other.load_state_dict(state)
    assert len(rows_of(other)) == len(straight) - 2
    shown = "{'id'} 5000" if kind == "huggingface" else "5000"  # as the source gives it
    assert f"{WAS}, in epoch 0: the first sample of part 0 (now {shown}) holds something else" in caplog.text


def test_a_streams_state_does_not_grow_with_its_epochs():
    loader = loader_of(Stream.of(lambda: iter(range(8))).repeat(3))
    sizes = []
    for _ in range(5):
        rows_of(loader)
        sizes.append(len(loader.state_dict()["contents"]))
    assert sizes == [1] * 5


@pytest.mark.parametrize("splits", [True, False])
def test_a_stream_that_does_not_split_itself_is_a_line_in_the_log_if_each_reader_has_one_part(
    splits, caplog, monkeypatch
):
    """A reader of several parts refuses it; so does any, if it does not even ask."""
    monkeypatch.setattr("paddle_shard.say_once._SAID", set())
    data = Streamed(0) if splits else lambda: iter(range(40 if paddle.io.get_worker_info().id < 2 else 0))
    rows = rows_of(loader_of(Stream.of(data, splits_itself=True).shuffle(7).in_parts(2), workers=2))

    assert len(flat(rows)) == (40 if splits else 80)
    assert ("begin with the same sample" in caplog.text) == (not splits)


def test_a_pipe_is_opened_once_and_known_by_nothing(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=[text_bytes(range(16))])
    writer.start()
    loader = loader_of(Stream.lines([str(path)], counts=False).map(int))
    assert flat(rows_of(loader, 2)) == list(range(16))
    assert loader.state_dict()["contents"] == []
    writer.join(HANG)


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
