"""Patterns stand for the files that match them, in order; nothing is read under a name that was not meant."""

from importlib.util import find_spec

import pytest

from paddle_shard import Stream
from paddle_shard.data.files.files import matched
from paddle_shard.data.stream import stage_of
from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.main import main
from tests.data.source_laws import files, names

KINDS = {
    "csv": Stream.csv,
    "txt": Stream.lines,
    "tar": Stream.webdataset,
    "parquet": Stream.parquet,
}
NEEDS = {"tar": "webdataset", "parquet": "pyarrow"}


@pytest.fixture(
    params=[kind for kind in KINDS if find_spec(NEEDS.get(kind, "os"))]
)
def kind(request):
    return request.param


@pytest.fixture
def folder(tmp_path):
    found = files()
    for name, content in {
        **found,
        **{n.replace("txt", "csv"): c for n, c in found.items() if "txt" in n},
    }.items():
        (tmp_path / name).write_bytes(content)
    for kind in KINDS:
        (tmp_path / f"{kind}.{kind}").mkdir()  # no file
    return tmp_path


def order(stream):
    return stage_of(stream).fingerprint(), list(map(str, stream))


def test_pattern_is_the_sorted_list_of_what_matches_it(
    kind, folder, monkeypatch
):
    monkeypatch.chdir(folder.parent)
    expected = order(KINDS[kind](names(folder, kind), shuffle_shards=False))

    for pattern in (
        f"{folder}/*.{kind}",
        folder / f"?.{kind}",
        [f"{folder}/[0-3].{kind}", f"{folder}/[!0-3].{kind}"],
    ):
        assert order(KINDS[kind](pattern, shuffle_shards=False)) == expected
    fingerprint, _ = order(
        KINDS[kind](f"{folder.name}/**/*.{kind}", shuffle_shards=False)
    )
    assert fingerprint == expected[0]


def test_pattern_without_a_match_is_an_error_that_names_it(kind, folder):
    with pytest.raises(
        ArgumentError, match=rf"{folder}/x\*\.{kind}.*matches no file"
    ):
        KINDS[kind]([str(folder / f"0.{kind}"), f"{folder}/x*.{kind}"])


@pytest.mark.parametrize("base", ["http://host", "s3://bucket"])
def test_pattern_of_remote_files_is_refused_with_the_fix(kind, base):
    with pytest.raises(
        ArgumentError, match=rf"{base}/\*\.{kind}.*[Gg]ive the list"
    ):
        KINDS[kind](f"{base}/*.{kind}?key=*")


def test_names_that_look_like_patterns_may_be_files(tmp_path):
    (tmp_path / "[1].txt").write_text("one\n")
    (tmp_path / "1.txt").write_text("other\n")

    assert list(Stream.lines(tmp_path / "[1].txt")) == ["one"]
    assert matched(["http://host/a?key=*", "~/a.csv", "file:///b.csv"]) == [
        "http://host/a?key=*",
        "~/a.csv",
        "file:///b.csv",
    ]


@pytest.mark.skipif(not find_spec("webdataset"), reason="needs webdataset")
def test_index_command_takes_patterns(folder, capsys):
    assert main(["index", f"{folder}/*.tar", "-o", f"{folder}/index.json"]) == 0
    assert "in 8 shards" in capsys.readouterr().out
    assert (
        main(["index", f"{folder}/x*.tar", "-o", f"{folder}/index.json"]) == 2
    )
    assert "matches no file" in capsys.readouterr().err
