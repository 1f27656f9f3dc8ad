"""JSON Lines: what a line is, and what a damaged one says. The laws are those of all sources (`test_laws.py`)."""

import gzip

import pytest

from paddle_shard import Stream
from paddle_shard.errors import ShardReadError


def written(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize(
    ("content", "values"),
    [
        (b"", []),
        (b"\n \n\t\n", []),
        (b'{"a": 1}\n\n[2, null]\r\n"three"', [{"a": 1}, [2, None], "three"]),
        (b"\xef\xbb\xbf1\n2\n", [1, 2]),  # a byte order mark
        ('"\u00fc"\n4.5'.encode(), ["\u00fc", 4.5]),
    ],
)
def test_jsonl_lines_that_are_not_blank_are_values(
    content, values, counts, tmp_path
):
    assert (
        list(
            Stream.jsonl(written(tmp_path / "a.jsonl", content), counts=counts)
        )
        == values
    )


def test_packed_files_are_read(tmp_path):
    assert list(
        Stream.jsonl(written(tmp_path / "a.jsonl.gz", gzip.compress(b"1\n2\n")))
    ) == [1, 2]


@pytest.mark.parametrize("counts", [True, False])
def test_damaged_line_is_named_with_its_file(counts, tmp_path):
    path = written(tmp_path / "a.jsonl", b'{"a": 1}\n\n{"a": \n{"a": 3}\n')
    values = iter(Stream.jsonl(path, counts=counts))

    assert next(values) == {"a": 1}
    with pytest.raises(
        ShardReadError,
        match=r"a\.jsonl.*line at byte \d+: .*Expecting value",
    ):
        next(values)


def test_compressed_file_of_no_bytes_was_cut_off(tmp_path):
    path = written(tmp_path / "a.jsonl.gz", gzip.compress(b"1\n2\n"))
    stream = Stream.jsonl(path)
    assert list(stream) == [1, 2]
    written(path, b"")
    with pytest.raises(
        ShardReadError, match=r"a.jsonl.gz.*the file has 0 bytes"
    ):
        list(stream)
    written(path, gzip.compress(b""))
    assert list(stream) == []
