"""How are Parquet files a source?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from paddle_shard.errors import ArgumentError, ArgumentTypeError, MissingDependencyError, ShardReadError, described
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.sources.arrow import NullFound, samples_of
from paddle_shard.sources.names import Paths, is_remote, local_path, matched, shown
from paddle_shard.sources.remote import remote_file
from paddle_shard.sources.shards import ShardSource
from paddle_shard.sources.text import SPREAD

BATCH_BYTES = 4 << 20
"""Uncompressed bytes that are decoded at once, about."""
FOOTERS = 16
"""Remote footers that are read at once."""


def parquet_source(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    allow_nulls: bool = False,
    shuffle_shards: bool = True,
    resample: bool = False,
) -> ShardSource:
    """Return the source of the rows of Parquet files: dicts by column. Each row group is a shard.

    The footers are read now, so parts are cut evenly, in the middle of a row group where need be, and their
    lengths are known. Resuming opens no row group before the one where it resumes, of which what was delivered
    is decoded and dropped. Only the columns that are asked for are fetched.

    A row holds, by the column's type: a numpy scalar for ints, floats, bools, dates, timestamps (in UTC, without
    the zone) and durations; `str` and `bytes`; an array of its own for a list of such scalars, of several dims for
    lists of fixed size (and tensors); a Python list for a list of anything else; a dict for a struct; the value
    itself for a dictionary; for the rest (decimals, times, maps) what pyarrow's `as_py` returns.

    Args:
        paths: One or more files, all with the same columns: paths, patterns such as `data/*.parquet`, of which the
            files are sorted, or URLs that fsspec opens (its settings, such as keys and endpoints, are taken from
            fsspec's configuration or the environment).
        columns: Top-level columns to read, in this order; None: all.
        allow_nulls: A null is None in the sample, for a `map` or `filter` after the source. False: it is an
            error that names the column and the row. One inside a list always is.
        shuffle_shards: Permute the row groups, in each epoch in another order. Rows keep their order in one: put a
            `Shuffle` after it.
        resample: Make each part an endless stream of row groups, drawn with replacement.

    Raises:
        MissingDependencyError: pyarrow, or what a URL needs, is not installed.
        ArgumentTypeError: The columns are one string, or what is given is no path.
        ArgumentError: There is no file, none that matches a pattern, or no row, or a column is not in a file, or not of
            the same type in all.
        ShardReadError: A footer cannot be read.
    """
    _import_pyarrow()
    if isinstance(columns, str):
        raise ArgumentTypeError(f"columns must be a list of names, got one string: {columns!r}. Give [{columns!r}].")
    if columns is not None and (not columns or len(set(columns)) < len(columns)):
        raise ArgumentError(f"columns must be one or more names, each once, or None for all, got {columns!r}.")
    chosen = None if columns is None else list(columns)
    files = matched(paths)
    if not files:
        raise ArgumentError("paths names no file. Give at least one.")
    remote = any(map(is_remote, files))
    with ThreadPoolExecutor(FOOTERS if remote else 1) as pool:
        footers = list(pool.map(_footer, files))
    _check_columns(files, footers, chosen)
    groups = {
        f"row group {number} of {file}": _Group(file, number)
        for file, footer in zip(files, footers, strict=True)
        for number in range(len(footer.rows))
    }
    if len(groups) < sum(len(footer.rows) for footer in footers):
        raise ArgumentError("paths holds a file more than once. Give each once; resample=True reads them again.")
    counts = [rows for footer in footers for rows in footer.rows]
    if not sum(counts):
        raise ArgumentError(f"paths: {len(files)} Parquet files have no row: {', '.join(map(shown, files[:3]))}.")
    return ShardSource(
        list(groups),
        _RowGroupReader(groups, chosen, allow_nulls),
        files=[group.file for group in groups.values()],
        counts=counts,
        shuffle_shards=shuffle_shards,
        resample=resample,
        spread=SPREAD if remote else 0.0,
    )


class _Group(NamedTuple):
    file: str
    number: int


class _Footer(NamedTuple):
    rows: list[int]
    """Number of rows of each row group."""
    types: dict[str, Any]
    """Arrow type of each top-level column."""


class _RowGroupReader:
    """Reads a row group from a row on; opens nothing before it is called."""

    def __init__(self, groups: dict[str, _Group], columns: list[str] | None, allow_nulls: bool) -> None:
        self._groups, self._columns, self._allow_nulls = groups, columns, allow_nulls

    def __call__(self, name: str, skip: int) -> Iterator[dict[str, Any]]:
        file, number = self._groups[name]
        row = 0
        with _opened(file) as parquet:
            group = parquet.metadata.row_group(number)
            size = BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)
            batches = parquet.iter_batches(
                batch_size=int(np.clip(size, 1, 1 << 12)),
                row_groups=[number],
                columns=self._columns,
                use_threads=False,  # readers are parallel already
            )
            for batch in batches:
                begin, row = row, row + batch.num_rows
                if row <= skip:
                    continue
                kept = max(0, skip - begin)
                try:
                    yield from samples_of(batch.slice(kept), self._columns, self._allow_nulls)
                except NullFound as null:
                    at = begin + kept + null.row
                    raise ShardReadError.of(
                        f"{shown(name)}: row {at} {null}. Leave the column out (columns=)"
                        + ("" if null.inside else ", or take nulls as None (allow_nulls=True) and map or filter them")
                        + ".",
                        shown(name),
                        at,
                    ) from None


def _check_columns(files: list[str], footers: list[_Footer], columns: list[str] | None) -> None:
    """Compare the columns that are read with the first file's."""
    first = None
    for file, footer in zip(files, footers, strict=True):
        missing = [name for name in columns or () if name not in footer.types]
        if missing:
            raise ArgumentError(
                f"columns: {shown(file)} has no {', '.join(map(repr, missing))}. It has "
                f"{', '.join(map(repr, footer.types))}."
            )
        types = {name: footer.types[name] for name in columns or footer.types}
        first = types if first is None else first
        differ = sorted(name for name in first.keys() | types.keys() if first.get(name) != types.get(name))
        if differ:
            name = differ[0]
            raise ArgumentError(
                f"paths: column {name!r} is {first.get(name, 'missing')} in {shown(files[0])}, but "
                f"{types.get(name, 'missing')} in {shown(file)}. Read only columns that all files have alike "
                "(columns=), or a source for each kind of file."
            )


def _footer(file: str) -> _Footer:
    try:
        with _opened(file) as parquet:
            metadata = parquet.metadata
            rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
            schema = parquet.schema_arrow
            names = schema.names
            if len(set(names)) < len(names):
                raise ValueError(f"a column name stands twice among {names}")
            return _Footer(rows, {name: schema.field(name).type for name in names})
    except MissingDependencyError:
        raise
    except Exception as error:
        raise_if_a_handlers(error)
        raise ShardReadError.of(f"{shown(file)}: reading its footer failed: {described(error)}", shown(file)) from error


@contextmanager
def _opened(file: str) -> Iterator[Any]:
    """Open a file for pyarrow, by bytes that it asks for and no others."""
    parquet = _import_pyarrow().ParquetFile
    if not is_remote(file):
        with parquet(local_path(file)) as opened:
            yield opened
        return
    system, path = remote_file(file, "parquet")
    with system.open(path, "rb", cache_type="none") as stream, parquet(stream, pre_buffer=True) as opened:
        yield opened


def _import_pyarrow() -> Any:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependencyError("reading Parquet needs pyarrow: pip install 'paddle_shard[parquet]'") from error
    return pyarrow.parquet
