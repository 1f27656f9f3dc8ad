"""The formats of text, CSV and JSON Lines."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, BinaryIO

from paddle_shard.core.checks import check_flag
from paddle_shard.data.files.counts import Format, Placed
from paddle_shard.errors import ArgumentError, described


def _lines(file: Any, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield (byte where it begins, content) of each line of a file that stands at byte `start`."""
    begin = start
    if start == 0 and file.peek(3).startswith(codecs.BOM_UTF8):
        begin = len(file.read(3))
    for line in file:
        yield begin, line
        begin += len(line)


def _parsed(
    file: BinaryIO,
    _name: str,
    start: int,
    *,
    parse: Callable[[bytes], Any],
    skip_blank: bool = False,
) -> Placed:
    """Yield what a function returns for each line; an error replaces the value of a line for which it fails."""
    for begin, line in _lines(file, start):
        if skip_blank and not line.strip():
            continue
        try:
            value = parse(line)
        except (ValueError, RecursionError) as error:
            value = ValueError(f"the line at byte {begin}: {described(error)}")
        yield begin, value


def _without_end(line: bytes) -> str:
    return line.decode().removesuffix("\n").removesuffix("\r")


def _json_value(line: bytes) -> Any:
    return json.loads(line.decode())  # from bytes, it takes longer


def _csv_rows(
    file: BinaryIO, start: int, delimiter: str
) -> Iterator[tuple[int, list[str]]]:
    """Yield (byte where it begins, fields) of each row that is not empty."""
    begins: list[int] = []  # of the lines of the row

    def lines() -> Iterator[str]:
        for begin, line in _lines(file, start):
            begins.append(begin)
            yield line.decode()

    try:
        for row in csv.reader(lines(), strict=True, delimiter=delimiter):
            if row:
                yield begins[0], row
            begins.clear()
    except (csv.Error, UnicodeDecodeError) as error:
        # The next row may begin anywhere, so that this one cannot be skipped.
        raise ValueError(
            f"the row at byte {begins[0]}: {described(error)}"
        ) from error


def _table(
    file: BinaryIO, _name: str, start: int, *, delimiter: str, header: bool
) -> Placed:
    """Yield the rows of a CSV file, as dicts if it has a header; an error replaces one with more or fewer fields."""
    if start:  # such a file can seek
        file.seek(0)
    rows = _csv_rows(file, 0, delimiter)
    first = next(rows, None)
    if first is None:
        return
    names = first[-1]
    if header and len(set(names)) < len(names):
        raise ValueError(f"the header {names} names a field twice")
    if start:
        file.seek(start)
        rows = _csv_rows(file, start, delimiter)
    elif not header:
        rows = chain([first], rows)
    for begin, row in rows:
        value: Any = row
        if len(row) != len(names):
            value = ValueError(
                f"the row at byte {begin} has {len(row)} fields, but the first row has {len(names)}"
            )
        elif header:
            value = dict(zip(names, row, strict=True))
        yield begin, value


LINES = Format(
    "lines",
    samples=partial(_parsed, parse=_without_end),
    starts=partial(_parsed, parse=bytes),
)
r"""Samples are the lines, without their ends ("\n" or "\r\n")."""
JSON_LINES = Format(
    "JSON lines",
    samples=partial(_parsed, parse=_json_value, skip_blank=True),
    starts=partial(_parsed, parse=bytes, skip_blank=True),
)
"""Samples are JSON values, one per line. Blank lines are skipped. Counting does not parse the lines."""


def csv_format(*, header: bool, delimiter: str) -> Format:
    """Return the format whose samples are rows of CSV files (Python's `csv`, dialect "excel", strict).

    Empty lines are skipped. A row with more or fewer fields than the first row of its file is an error.

    Args:
        header: True: samples are dicts; the first row of each file names the fields. False: lists.
        delimiter: The character between two fields.

    Raises:
        ArgumentError: `header` is not a bool, or `delimiter` is not one character.
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise ArgumentError(
            f"delimiter must be one character, got {delimiter!r}."
        )
    check_flag("header", header)
    samples = partial(_table, delimiter=delimiter, header=header)
    kind = "CSV rows below a header" if header else "CSV rows"
    return Format(f"{kind}, {delimiter!r}", samples, samples, needs_begin=True)
