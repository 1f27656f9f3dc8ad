import bz2
import csv
import gzip
import os
import traceback
from functools import partial

import numpy as np
import pytest
from paddle.io import DataLoader

from paddle_shard import Stream
from paddle_shard.data.files.counts import file_source
from paddle_shard.data.files.text import LINES, csv_format
from paddle_shard.data.stages.stage import Opening
from paddle_shard.errors import ArgumentError, DataReadError, ShardReadError
from tests.data.http_server import serving
from tests.helpers import ONE, sharded

lines_source = partial(file_source, form=LINES)


def csv_source(paths, header=True, **options):
    return file_source(
        paths, csv_format(header=header, delimiter=","), **options
    )


def opening(num_parts=1, **what):
    return Opening(parts=tuple(range(num_parts)), num_parts=num_parts, **what)


def read_all(source, num_parts=1, **what):
    return [list(items) for items in source.open(opening(num_parts, **what))]


@pytest.fixture
def texts(tmp_path):
    lines, paths = [], []
    for number, length in enumerate([4, 0, 9, 1, 22]):
        mine = [f"{number}:{i} ünï  " for i in range(length)]
        content = "\n".join(mine).encode() + (
            b"\n" if number % 2 == 0 and mine else b""
        )
        path = tmp_path / f"{number}.txt"
        path.write_bytes(
            {2: gzip.compress, 4: bz2.compress}.get(number, bytes)(content)
        )
        lines += mine
        paths.append(path)
    return paths, lines


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_parts_together_are_every_line_once(texts, counts, num_parts):
    paths, lines = texts
    source = lines_source(paths, counts=counts)

    parts = read_all(source, num_parts)

    assert sorted(line for part in parts for line in part) == sorted(lines)
    assert source.lengths(opening(num_parts)) == (
        [len(part) for part in parts] if counts else None
    )


@pytest.mark.parametrize("counts", [True, False])
def test_opening_after_s_lines_equals_dropping_s(texts, counts):
    source = lines_source(texts[0], counts=counts)
    straight = read_all(source, 2)

    for skip in range(25):
        assert read_all(source, 2, skip=skip) == [
            part[skip:] for part in straight
        ]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        # only \n ends a line, in counting as in reading
        (
            b"a\rb\x0c\xe2\x80\xa8c\n",
            ["a\rb\x0c\u2028c"],
        ),
        (b"\xef\xbb\xbfa\n", ["a"]),
        (b"\xef\xbb\xbf", []),
        (b"\xef\xbb\xbf\n", [""]),
    ],
)
def test_lines_are_counted_as_they_are_read(content, lines, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(content)

    for counts in (True, False):
        assert read_all(lines_source(path, counts=counts)) == [lines]
        if not lines:
            assert read_all(csv_source(path, counts=counts)) == [[]]


@pytest.fixture
def tables(tmp_path):
    rows = [
        {"name": f"n{i}", "text": f'a "quoted", {i}\nand a second line'}
        for i in range(12)
    ]
    paths = []
    for number, (start, stop) in enumerate([(0, 5), (5, 6), (6, 6), (6, 12)]):
        path = tmp_path / f"{number}.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["name", "text"])
            writer.writeheader()
            writer.writerows(rows[start:stop])
            file.write("\r\n")  # an empty line is no row
        paths.append(str(path))
    return paths, rows


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("num_parts", [1, 3, 4])
def test_parts_together_are_every_row_once(tables, counts, num_parts):
    paths, rows = tables

    parts = read_all(csv_source(paths, counts=counts), num_parts)

    assert (
        sorted(
            (row for part in parts for row in part),
            key=lambda row: int(row["name"][1:]),
        )
        == rows
    )


def test_csv_without_a_header_yields_lists(tables):
    [rows] = read_all(csv_source(tables[0][1], header=False, counts=True))

    assert rows == [["name", "text"], list(tables[1][5].values())]


@pytest.mark.parametrize(
    ("text", "match", "offset"),
    [
        (
            "a,b\n1,2\n3\n",
            r"row at byte 8 has 1 fields, but the first row has 2",
            1,
        ),
        ("a,b\n1,2,3\n", r"row at byte 4 has 3 fields", 0),
        ("a,a\n1,2\n", "names a field twice", 0),
        (
            'a,b\n1,2\n1,"2\n',
            r"row at byte 8: .*unexpected end of data",
            1,
        ),
        (
            'a,b\n1,2\n1,"2\n\n2,3\n',
            r"row at byte 8: .*unexpected end of data",
            1,
        ),
        (
            'a\n"1"1\n',
            r"row at byte 2: .*',' expected after '\"'",
            0,
        ),
        ("a\n\xff\n", r"row at byte 2: UnicodeDecodeError", 0),
        (
            "a\n" + 900 * "1\n" + "\xff\n",
            r"row at byte 1802: UnicodeDecodeError",
            900,
        ),
        ('a\n\n\n"1\n\n"\n1,2\n', r"row at byte 10 has 2 fields", 1),
        (
            f"a\n{'1' * (1 << 18)}\n",
            r"row at byte 2: .*field larger",
            0,
        ),
    ],
)
def test_damaged_table_is_an_error_that_names_file_and_row(
    text, match, offset, tmp_path
):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(ShardReadError, match=match) as caught:
        read_all(csv_source(path, counts=False))
    assert (caught.value.shard, caught.value.offset) == (str(path), offset)
    # a row that may be skipped counts
    when = "reading" if "fields" in match else "counting its samples"
    with pytest.raises(ShardReadError, match=rf"{when}.* failed: .*{match}"):
        read_all(csv_source(path, counts=True))


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
@pytest.mark.parametrize("at", [0, 1, 700, 1999])
def test_text_line_that_is_not_utf8_is_named_at_its_place(at, ending, tmp_path):
    path = tmp_path / "a.txt"
    lines = [b"\xff" if n == at else b"%d" % n for n in range(2000)]
    path.write_bytes(ending.join(lines))
    byte = len(ending.join([*lines[:at], b""]))
    for counts in (False, True):
        source = lines_source(path, counts=counts)
        with pytest.raises(
            ShardReadError,
            match=rf"reading sample {at} failed: .*line at byte {byte}[ :].*UnicodeDecodeError",
        ):
            list(source.open(opening())[0])


@pytest.mark.parametrize("skip", [0, 500, 999])
def test_error_names_the_line_wherever_reading_began(skip, tmp_path):
    path = tmp_path / "a.csv"
    good = "n\n" + "".join(f'"{n}\n"\n' for n in range(1000))
    path.write_text(good)
    source = csv_source(path)
    path.write_text(good[:-7] + '"1"2\n\n\n')  # as many bytes

    with pytest.raises(
        ShardReadError,
        match=r"reading sample 999 failed: .*row at byte \d+.*: ',' expected",
    ):
        read_all(source, skip=skip)


def test_longer_field_is_read_where_it_is_allowed(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"a\n{'1' * (1 << 18)}\n")
    before = csv.field_size_limit(1 << 20)
    try:
        [[row]] = read_all(csv_source(path))
    finally:
        csv.field_size_limit(before)

    assert len(row["a"]) == 1 << 18


def test_packed_file_that_is_cut_off_is_an_error(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(
        gzip.compress("\n".join(map(str, range(10_000))).encode())[:-20]
    )

    with pytest.raises(ShardReadError, match="EOFError"):
        read_all(lines_source(path))


def test_remote_files_are_read_and_the_connection_may_drop(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("paddle_shard.data.files.files.PAUSES", (0.001,) * 3)
    content = "\n".join(map(str, range(5000))).encode()
    with serving(
        {"a.txt": content, "b.txt.gz": gzip.compress(content)},
        drops=[100, 5000],
    ) as server:
        source = lines_source(
            [f"{server.url}/a.txt", f"{server.url}/b.txt.gz"],
            shuffle_shards=False,
            counts=True,
        )

        assert read_all(source) == [[str(i) for i in range(5000)] * 2]


def test_remote_file_that_shrinks_while_it_is_read_is_an_error(monkeypatch):
    """It would end at a line that is not its last one."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("paddle_shard.data.files.files.PAUSES", (0.001,) * 3)
    line = b"x" * 99 + b"\n"
    with serving(
        {"a.txt": 80_000 * line}, rewrites={"a.txt": 70_000 * line}
    ) as server:
        source = lines_source(f"{server.url}/a.txt", counts=False)

        with pytest.raises(
            ShardReadError, match="at byte .* of 8000000: .* replaced"
        ):
            read_all(source)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_error_of_server_has_its_code_and_no_query_of_the_url(
    status, monkeypatch
):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("paddle_shard.data.files.files.PAUSES", (0.001,) * 3)
    with serving({} if status == 404 else {"a.txt": b"1"}) as server:
        server.statuses += [status] * 9
        source = lines_source(f"{server.url}/a.txt?key=secret", counts=False)

        with pytest.raises(ShardReadError) as caught:
            read_all(source)

    text = "".join(traceback.format_exception(caught.value))
    assert "secret" not in text
    assert f"{server.url}/a.txt" in str(caught.value)
    assert (str(status) if status != 404 else "FileNotFoundError") in str(
        caught.value
    )


def test_remote_file_is_requested_once(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    content = 160_000 * (b"x" * 99 + b"\n")
    with serving({"a.txt": content}) as server:
        read_all(lines_source(f"{server.url}/a.txt", counts=False))

    spans = [span.removeprefix("bytes=").split("-") for _, span in server.asked]
    assert sum(int(last) + 1 - int(first) for first, last in spans) == len(
        content
    )


def test_text_of_no_files_is_refused():
    with pytest.raises(ArgumentError, match="at least one file"):
        lines_source([])


@pytest.mark.parametrize(  # each pair of settings
    ("kind", "counts", "workers"),
    [
        ("jsonl", True, 0),
        ("jsonl", False, 2),
        ("csv", True, 2),
        ("csv", False, 0),
    ],
)
def test_damaged_line_that_is_skipped_costs_its_own_row_only(
    kind, counts, workers, tmp_path, caplog
):
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        lines = [b'{"n": %d}' % i for i in range(16)]
        bad = {3: b'{"n": 3,,', 4: b"\xff", 11: b"1" * 5000, 12: b"[" * 10**5}
    else:
        lines = [b"%d,%d" % (i, i) for i in range(16)]
        bad = {3: b"3,3,3", 4: b"4", 11: b"11,11,11"}
    for number, line in bad.items():
        lines[number] = line
    if kind == "csv":
        lines.insert(0, b"n,m")
    path.write_bytes(b"\n".join(lines) + b"\n")
    stream = getattr(Stream, kind)(path, counts=counts).map(
        lambda row: np.array(int(row["n"]))
    )
    loader = sharded(
        DataLoader(stream, batch_size=4, num_workers=workers),
        ONE,
        on_error="skip",
    )
    found, batches = [], iter(loader)
    for batch in batches:
        found += (
            batch._local_value()
            .numpy()[batches.valid._local_value().numpy()]
            .tolist()
        )

    assert sorted(found) == [i for i in range(16) if i not in bad]
    assert loader.stats.epoch.skipped == len(bad)
    assert "skipped sample" in caplog.text
    assert "a." + kind in caplog.text
    with pytest.raises(DataReadError, match=r"(line|row) at byte \d+"):
        list(
            sharded(DataLoader(stream, batch_size=4, num_workers=workers), ONE)
        )


def test_csv_lines_ending_in_a_lone_carriage_return_are_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\r1,2\r3,4\r")
    for counts in (True, False):
        with pytest.raises(
            ShardReadError, match=r"a\.csv.*row at byte 0: .*new-line character"
        ):
            list(Stream.csv(path, counts=counts))


def test_csv_takes_another_delimiter(tmp_path):
    (tmp_path / "a.tsv").write_text('a\tb\n1,5\t"x\ty"\n2,5\tz\n')
    stream = Stream.csv(tmp_path / "a.tsv", delimiter="\t")

    assert list(stream) == [{"a": "1,5", "b": "x\ty"}, {"a": "2,5", "b": "z"}]
    with pytest.raises(ArgumentError, match="delimiter .* got '::'"):
        Stream.csv(tmp_path / "a.tsv", delimiter="::")


def test_lines_reject_folders_and_pipes(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ArgumentError, match="is not a file"):
            Stream.lines(path)


@pytest.mark.parametrize(
    ("kind", "first_bytes"),
    [
        ("zstd", b"\x28\xb5\x2f\xfd"),
        ("lz4", b"\x04\x22\x4d\x18"),
        ("zip", b"PK\x03\x04"),
        ("lzma", b"\x5d\x00\x00\x80"),
    ],
)
def test_lines_name_a_compression_that_is_not_read(kind, first_bytes, tmp_path):
    (tmp_path / "a").write_bytes(first_bytes + bytes(20))
    with pytest.raises(ShardReadError, match=f"a: .* compressed by {kind}"):
        list(Stream.lines(tmp_path / "a"))
