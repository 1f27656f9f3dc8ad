"""How are files of text, or of comma-separated values, a source?"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from paddle_shard.errors import ShardReadError, described
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.sources.files import decompressed, open_file
from paddle_shard.sources.names import is_remote, shown
from paddle_shard.sources.shards import ShardSource

_ENCODING = "utf-8-sig"  # UTF-8, with or without a mark at its beginning
SPREAD = 0.1
"""Seconds over which readers spread the first opening of remote files."""

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def lines_source(
    paths: Paths, *, counts: bool = False, shuffle_shards: bool = True, resample: bool = False
) -> ShardSource:
    r"""Return the source of the lines of text files, without their ends ("\n" or "\r\n").

    Args:
        paths: One or more files, in UTF-8, packed by gzip, bzip2, xz or not: paths, or URLs that fsspec opens.
        counts: Count the lines now, which reads all files once. So parts are equal, their lengths known.
        shuffle_shards: Permute the files, in each epoch in another order.
        resample: Make each part an endless stream of files, drawn with replacement.

    Raises:
        ArgumentError: There is no file.
        ShardReadError: A file cannot be read to count it.
    """
    return _source(paths, _read_lines, _count_lines if counts else None, shuffle_shards, resample)


def csv_source(
    paths: Paths, header: bool = True, *, counts: bool = False, shuffle_shards: bool = True, resample: bool = False
) -> ShardSource:
    """Return the source of the rows of CSV files (Python's `csv`, dialect "excel", strict); empty lines are no rows.

    A row with more or fewer fields than the file's first is an error.

    Args:
        paths: As of `lines_source`.
        header: The first row of each file names the fields: samples are dicts. False: samples are lists.
        counts: Count the rows now, which reads all files once. So parts are equal, their lengths known.
        shuffle_shards: Permute the files, in each epoch in another order.
        resample: Make each part an endless stream of files, drawn with replacement.

    Raises:
        ArgumentError: There is no file.
        ShardReadError: A file cannot be read to count it.
    """
    read = _read_dicts if header else _read_rows
    return _source(
        paths, read, (lambda name: sum(1 for _ in read(name, 0))) if counts else None, shuffle_shards, resample
    )


def _source(
    paths: Paths,
    read: Callable[[str, int], Iterator[Any]],
    count: Callable[[str], int] | None,
    shuffle_shards: bool,
    resample: bool,
) -> ShardSource:
    names = [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    return ShardSource(
        names,
        read,
        counts=None if count is None else [_counted(name, count) for name in names],
        shuffle_shards=shuffle_shards,
        resample=resample,
        spread=SPREAD if any(map(is_remote, names)) else 0.0,
    )


def _counted(name: str, count: Callable[[str], int]) -> int:
    try:
        return count(name)
    except Exception as error:
        raise_if_a_handlers(error)
        raise ShardReadError.of(
            f"{shown(name)}: counting its samples failed: {described(error)}", shown(name)
        ) from error


def _count_lines(name: str) -> int:
    opened, _ = open_file(name)
    lines, last = 0, b"\n"
    with opened, decompressed(opened) as file:
        while block := file.read(1 << 20):
            lines, last = lines + block.count(b"\n"), block[-1:]
    return lines + (last != b"\n")  # a last line may lack its end


def _read_lines(name: str, skip: int) -> Iterator[str]:
    opened, _ = open_file(name)
    with opened, decompressed(opened) as file, io.TextIOWrapper(file, _ENCODING, newline="\n") as text:
        for line in islice(text, skip, None):
            yield line.removesuffix("\n").removesuffix("\r")


def _read_rows(name: str, skip: int) -> Iterator[list[str]]:
    yield from islice(_rows(name), skip, None)


def _read_dicts(name: str, skip: int) -> Iterator[dict[str, str]]:
    rows = _rows(name)
    names = next(rows, [])
    if len(set(names)) < len(names):
        raise ValueError(f"the header {names} names a field twice")
    for row in islice(rows, skip, None):
        yield dict(zip(names, row, strict=True))


def _rows(name: str) -> Iterator[list[str]]:
    opened, _ = open_file(name)
    with opened, decompressed(opened) as file, io.TextIOWrapper(file, _ENCODING, newline="") as text:
        reader, width = csv.reader(text, strict=True), None
        for row in reader:
            if not row:
                continue
            width = len(row) if width is None else width
            if len(row) != width:
                raise ValueError(
                    f"the row that ends in line {reader.line_num} has {len(row)} fields, the first {width}"
                )
            yield row
