"""Files of text, CSV or JSON Lines as a source."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from paddle_shard.data.files.counts import FileReader, count_files
from paddle_shard.data.files.files import Path, Paths, matched
from paddle_shard.data.files.host_cache import check_cache_dir
from paddle_shard.data.files.shards import ShardSource
from paddle_shard.errors import ArgumentError

Placed = Iterator[tuple[int, Any]]
"""Samples, each with the byte where it begins. An exception replaces one that cannot be read, if the next one can."""


class TextFormat(NamedTuple):
    """A kind of text files."""

    kind: str
    """Name of what is counted in the files; kept counts belong to it."""
    samples: Callable[[_Text], Placed]
    """Yields the samples of a file's text, each with the byte where it begins."""
    starts: Callable[[_Text], Placed]
    """Finds where samples begin, which may be cheaper than reading them."""


def text_source(
    paths: Paths,
    form: TextFormat,
    *,
    counts: bool | None = None,
    shuffle_shards: bool = True,
    cache_dir: Path | None = None,
) -> ShardSource:
    """Return the source of text files.

    Args:
        paths: One or more UTF-8 files, plain or compressed by gzip, bzip2 or xz: paths, patterns such as `data/*.csv`,
            whose files are sorted, or URLs that fsspec opens.
        form: What a sample is: `LINES`, `JSON_LINES` or a `csv_format`.
        counts: If True, count the samples now, which reads the files once. Then parts are equal and their lengths
            known. None: count if all files are local, none is compressed, and the stream has an end. The counts of
            local files are kept in the user's cache directory (`$XDG_CACHE_HOME`, `~/.cache`) for other ranks and
            later runs.
        shuffle_shards: If True, permute the files, in another order each epoch.
        cache_dir: A folder in which copies of remote files are kept, for all processes of the host; None: none is kept.

    Raises:
        ArgumentTypeError: `paths` is neither a path nor a list of paths.
        ArgumentError: There is no file, or none that matches a pattern.
        ShardReadError: A file cannot be read to count it.
    """
    cache_dir = check_cache_dir(cache_dir)
    names = matched(paths)
    starts = partial(_of_text, form.starts)
    entries = count_files(names, form.kind, starts, counts, cache_dir)
    samples = partial(_of_text, form.samples)
    reader = FileReader(samples=samples, entries=entries, cache_dir=cache_dir)
    return reader.source(names, shuffle_shards=shuffle_shards)


def _of_text(
    find: Callable[[_Text], Placed], file: BinaryIO, _name: str, start: int
) -> Placed:
    return find(_Text(file, start))


class _Text:
    """The lines of an open file, or errors of damaged ones, each with the byte where it begins; iterate it once."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        """Set up the reading.

        Args:
            file: The open file, at position `start`.
            start: A byte where a line begins.
        """
        self._file = file
        self.start = start

    def __iter__(self) -> Placed:
        start = self.start
        for line in self._file:
            if start == 0 and line.startswith(codecs.BOM_UTF8):
                start, line = len(codecs.BOM_UTF8), line.removeprefix(codecs.BOM_UTF8)
                if not line:  # there is nothing else in the file
                    return
            try:
                text: str | Exception = line.decode()
            except UnicodeDecodeError as error:
                error.reason += f" (in the line at byte {start})"
                text = error
            yield start, text
            start += len(line)

    def first_row(self, delimiter: str) -> list[str]:
        """Return the first row of a CSV file; then continue here. A file that is read from a byte on can seek."""
        position = self._file.tell()
        self._file.seek(0)
        row: list[str] = next(_rows(_Text(self._file, 0), delimiter))[1]
        self._file.seek(position)
        return row


def _lines(text: _Text) -> Placed:
    for start, line in text:
        if isinstance(line, str):
            line = line.removesuffix("\n").removesuffix("\r")
        yield start, line


def _not_blank(text: _Text) -> Placed:
    for start, line in text:
        if isinstance(line, Exception) or line.strip():
            yield start, line


def _json_values(text: _Text) -> Placed:
    for start, line in _not_blank(text):
        value = line
        if isinstance(line, str):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                value = ValueError(f"the line at byte {start} is not JSON: {error}")
        yield start, value


def _dicts(text: _Text, delimiter: str) -> Placed:
    rows = _rows(text, delimiter)
    names = text.first_row(delimiter) if text.start else next(rows, (0, []))[1]
    if len(set(names)) < len(names):
        raise ValueError(f"the header {names} names a field twice")
    for start, row in rows:
        yield (
            start,
            row if isinstance(row, Exception) else dict(zip(names, row, strict=True)),
        )


def _rows(text: _Text, delimiter: str) -> Placed:
    width = len(text.first_row(delimiter)) if text.start else None
    begins: list[int] = []  # the byte where each line of the row begins

    def lines() -> Iterator[str]:
        for begin, line in text:
            begins.append(begin)
            if isinstance(line, Exception):
                raise line
            yield line

    reader = csv.reader(lines(), strict=True, delimiter=delimiter)
    while True:
        begins.clear()
        try:
            row = next(reader, None)
        except csv.Error as error:
            # The next row may begin anywhere, so that this one cannot be skipped.
            raise ValueError(f"the row at byte {begins[0]}: {error}") from error
        if row is None:
            return
        if not row:
            continue
        width = width or len(row)
        if len(row) == width:
            yield begins[0], row
        else:
            what = (
                f"the row at byte {begins[0]} has {len(row)} fields, the first {width}"
            )
            yield begins[0], ValueError(what)


LINES = TextFormat("lines", _lines, _lines)
r"""Samples are the lines, without their ends ("\n" or "\r\n")."""
JSON_LINES = TextFormat("JSON lines", _json_values, _not_blank)
"""Samples are JSON values, one per line. Blank lines are skipped. Counting does not parse the lines."""


def csv_format(*, header: bool, delimiter: str) -> TextFormat:
    """Return the format whose samples are rows of CSV files (Python's `csv`, dialect "excel", strict).

    Empty lines are skipped. A row with more or fewer fields than the first row of its file is an error.

    Args:
        header: True: samples are dicts; the first row of each file names the fields. False: lists.
        delimiter: The character between two fields.

    Raises:
        ArgumentError: `delimiter` is not one character.
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise ArgumentError(f"delimiter must be one character, got {delimiter!r}.")
    samples = partial(_dicts if header else _rows, delimiter=delimiter)
    kind = "CSV rows below a header" if header else "CSV rows"
    return TextFormat(f"{kind}, {delimiter!r}", samples, samples)
