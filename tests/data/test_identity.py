"""`Stage.files_identity`: by which files a changed data set is recognized."""

import os
import shutil

import pytest

from paddle_shard import Stream
from paddle_shard.data.stream import last_stage


def identity(stream):
    return last_stage(stream)[0].source.files_identity()


def lines_of(folder):
    return (
        Stream.lines(sorted(folder.iterdir()), counts=False).map(int).shuffle(4)
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    for number in range(3):
        (tmp_path / f"data/{number}.txt").write_text(f"{number}\n" * 5)
    return tmp_path / "data"


def test_files_identity_has_name_size_and_time_of_each_file(folder):
    found = identity(lines_of(folder))

    assert [(name, size) for name, size, _ in found] == [
        ("0.txt", 10),
        ("1.txt", 10),
        ("2.txt", 10),
    ]
    assert [tag for *_, tag in found] == [
        str(path.stat().st_mtime_ns) for path in sorted(folder.iterdir())
    ]


def test_files_identity_changes_with_a_file_of_the_same_size(folder):
    stream = lines_of(folder)
    before = identity(stream)
    (folder / "1.txt").write_text("7\n" * 5)
    os.utime(folder / "1.txt", ns=(1, 1))

    after = identity(stream)

    assert [now == then for now, then in zip(after, before, strict=True)] == [
        True,
        False,
        True,
    ]


def test_files_identity_stays_when_the_folder_is_moved(folder, tmp_path):
    before = identity(lines_of(folder))
    shutil.move(folder, tmp_path / "elsewhere")

    assert identity(lines_of(tmp_path / "elsewhere")) == before


def test_files_identity_of_a_mixture_names_the_sources(folder):
    mixture = Stream.mixture({"a": lines_of(folder), "b": Stream.of(range(9))})

    assert [name for name, *_ in identity(mixture)] == [
        "a: 0.txt",
        "a: 1.txt",
        "a: 2.txt",
        "b: a list from 0 to 8",
    ]


def test_files_identity_of_row_groups_has_each_file_once(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pa.table({"x": list(range(20))}),
        tmp_path / "a.parquet",
        row_group_size=5,
    )

    assert [
        name for name, *_ in identity(Stream.parquet(tmp_path / "a.parquet"))
    ] == ["a.parquet"]


def test_files_identity_takes_names_that_are_no_files(folder):
    stream = lines_of(folder)
    (folder / "2.txt").unlink()

    assert [known for name, *known in identity(stream) if name == "2.txt"] == [
        [0, ""]
    ]


def test_files_identity_is_empty_without_files():
    assert identity(Stream.of(lambda: iter(range(4))).map(str)) == []
