"""How are files of text, CSV or JSON Lines used as a source?"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, BinaryIO

from paddle_shard.sources.counts import MOST, ShardEntry, count_files, entry_of
from paddle_shard.sources.files import BUFFER, Paths, decompressed, matched, open_file
from paddle_shard.sources.shards import RECOUNT, ShardSource


def lines_source(
    paths: Paths, *, counts: bool | None = None, shuffle_shards: bool = True, resample: bool = False
) -> ShardSource:
    r"""Return the source of the lines of text files, without their ends ("\n" or "\r\n").

    Args:
        paths: One or more UTF-8 files, plain or compressed by gzip, bzip2 or xz: paths, patterns such as `data/*.csv`,
            whose files are sorted, or URLs that fsspec opens.
        counts: If True, count the lines now, which reads the files once. Then parts are equal and their lengths known.
            None: count if all files are local, none is compressed, and the stream has an end. The counts of local files
            are kept in the user's cache directory (`$XDG_CACHE_HOME`, `~/.cache`) for other ranks and later runs.
        shuffle_shards: If True, permute the files, in another order each epoch.
        resample: If True, each part is an endless stream of files, sampled with replacement.

    Raises:
        ArgumentTypeError: `paths` is neither a path nor a list of paths.
        ArgumentError: There is no file, or none that matches a pattern.
        ShardReadError: A file cannot be read to count it.
    """
    return _source(paths, "lines", _lines, counts, shuffle_shards, resample)


def csv_source(
    paths: Paths,
    header: bool = True,
    *,
    counts: bool | None = None,
    shuffle_shards: bool = True,
    resample: bool = False,
) -> ShardSource:
    """Return the source of the rows of CSV files (Python's `csv`, dialect "excel", strict). Empty lines are skipped.

    A row with more or fewer fields than the first row of its file is an error.

    Args:
        paths: The same as for `lines_source`.
        header: If True, the first row of each file names the fields, and samples are dicts. If False, samples are
            lists.
        counts: The same as for `lines_source`.
        shuffle_shards: The same as for `lines_source`.
        resample: The same as for `lines_source`.

    Raises:
        ArgumentTypeError: `paths` is neither a path nor a list of paths.
        ArgumentError: There is no file, or none that matches a pattern.
        ShardReadError: A file cannot be read to count it.
    """
    kind, samples = ("CSV rows below a header", _dicts) if header else ("CSV rows", _rows)
    return _source(paths, kind, samples, counts, shuffle_shards, resample)


def jsonl_source(
    paths: Paths, *, counts: bool | None = None, shuffle_shards: bool = True, resample: bool = False
) -> ShardSource:
    """Return the source of the values of JSON Lines files: one JSON value per line. Blank lines are skipped.

    Args:
        paths: The same as for `lines_source`.
        counts: The same as for `lines_source`. Counting does not parse the lines.
        shuffle_shards: The same as for `lines_source`.
        resample: The same as for `lines_source`.

    Raises:
        ArgumentTypeError: `paths` is neither a path nor a list of paths.
        ArgumentError: There is no file, or none that matches a pattern.
        ShardReadError: A file cannot be read to count it.
    """
    return _source(paths, "JSON lines", _values, counts, shuffle_shards, resample, starts=_not_blank)


def _source(
    paths: Paths,
    kind: str,
    samples: _SamplesOf,
    counts: bool | None,
    shuffle_shards: bool,
    resample: bool,
    starts: _SamplesOf | None = None,
) -> ShardSource:
    """Return the source of text files; `starts` finds where samples begin, if that is cheaper than reading them."""
    names = matched(paths)
    if resample and counts is None:
        counts = False
    entries = count_files(names, kind, lambda name: _count(name, starts or samples), counts)
    return ShardSource(
        names,
        partial(_read, samples=samples, entries=entries),
        counts=None if entries is None else [entries[name].samples for name in names],
        shuffle_shards=shuffle_shards,
        resample=resample,
    )


def _count(name: str, samples: _SamplesOf) -> ShardEntry:
    opened, size = open_file(name)
    with opened, decompressed(opened) as file:
        starts = (start for start, _ in samples(_Text(file, name, 0)))
        return entry_of(starts, lambda: opened.tell() if size is None else size, packed=file is not opened, most=MOST)


def _read(name: str, skip: int, *, samples: _SamplesOf, entries: Mapping[str, ShardEntry] | None) -> Iterator[Any]:
    """Read a file, starting at a given sample."""
    start = 0
    if entries is not None:
        start, skip = entries[name].before(skip)
    opened, size = open_file(name, start)
    with opened, opened if start else decompressed(opened) as file:
        if entries is not None and size not in (None, entries[name].size):
            raise ValueError(f"the file has {size} bytes, and had {entries[name].size} when it was counted: {RECOUNT}")
        for _, sample in islice(samples(_Text(file, name, start)), skip, None):
            yield sample


class _Text:
    """The lines of an open file, each with the byte where it begins; iterate it once."""

    def __init__(self, file: BinaryIO, name: str, start: int) -> None:
        """Set up the reading.

        Args:
            file: The open file, at position `start`.
            name: Path or URL of the file.
            start: A byte where a line begins.
        """
        self._file, self._name, self.start = file, name, start
        self._number = 0

    def __iter__(self) -> Iterator[tuple[int, str]]:
        at = self.start
        for line in self._file:
            if at == 0 and line.startswith(codecs.BOM_UTF8):
                at, line = len(codecs.BOM_UTF8), line.removeprefix(codecs.BOM_UTF8)
                if not line:  # there is nothing else in the file
                    return
            self._number += 1
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                error.reason += f" (line {self.number()})"
                raise
            yield at, text
            at += len(line)

    def number(self) -> int:
        """Return the number of the line that was read last, counted from 1."""
        left, before = self.start, 0
        if left:  # only error messages need this, so only now read what comes before `start`
            opened, _ = open_file(self._name)
            with opened:
                while left and (block := opened.read(min(left, BUFFER))):
                    before, left = before + block.count(b"\n"), left - len(block)
        return before + self._number

    def first_row(self) -> list[str]:
        """Open the same file again, and return the first row of a CSV file."""
        opened, _ = open_file(self._name)
        with opened:
            return next(_rows(_Text(opened, self._name, 0)))[1]


_SamplesOf = Callable[[_Text], Iterator[tuple[int, Any]]]
"""Yields the samples of a file's text, each with the byte where it begins."""


def _lines(text: _Text) -> Iterator[tuple[int, str]]:
    for at, line in text:
        yield at, line.removesuffix("\n").removesuffix("\r")


def _not_blank(text: _Text) -> Iterator[tuple[int, str]]:
    return ((at, line) for at, line in text if line.strip())


def _values(text: _Text) -> Iterator[tuple[int, Any]]:
    for at, line in _not_blank(text):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {text.number()} is not JSON: {error.msg} at column {error.colno}") from error
        yield at, value


def _dicts(text: _Text) -> Iterator[tuple[int, dict[str, str]]]:
    rows = _rows(text)
    names = text.first_row() if text.start else next(rows, (0, []))[1]
    if len(set(names)) < len(names):
        raise ValueError(f"the header {names}, which ends in line {text.number()}, names a field twice")
    for at, row in rows:
        yield at, dict(zip(names, row, strict=True))


def _rows(text: _Text) -> Iterator[tuple[int, list[str]]]:
    width = len(text.first_row()) if text.start else None
    begins: list[int] = []  # [line of the row]: the byte where it begins
    reader = csv.reader(_lines_of_csv(text, begins), strict=True)
    while True:
        begins.clear()
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            line, num_lines = text.number(), len(begins)
            where = f"line {line}" if num_lines < 2 else f"the row in lines {line - num_lines + 1} to {line}"
            way_out = ". To allow longer fields, call csv.field_size_limit(bytes) before the loader is made"
            raise ValueError(f"{where}: {error}{way_out if 'field limit' in str(error) else ''}") from error
        if not row:
            continue
        width = len(row) if width is None else width
        if len(row) != width:
            raise ValueError(f"the row that ends in line {text.number()} has {len(row)} fields, the first {width}")
        yield begins[0], row


def _lines_of_csv(text: _Text, begins: list[int]) -> Iterator[str]:
    """Yield lines, and append to `begins` where each begins. A carriage return alone also ends a line."""
    for at, line in text:
        if line.count("\r") == line.endswith("\r\n"):
            begins.append(at)
            yield line
            continue
        for piece in io.StringIO(line, newline=""):
            begins.append(at)
            yield piece
            at += len(piece.encode())
