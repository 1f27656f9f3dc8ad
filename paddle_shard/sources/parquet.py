"""How are Parquet files used as a source?"""

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
"""Approximate number of uncompressed bytes that are decoded at a time."""
FOOTERS = 16
"""Number of remote footers that are read in parallel."""


def parquet_source(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    allow_nulls: bool = False,
    shuffle_shards: bool = True,
    resample: bool = False,
) -> ShardSource:
    """Return the source of the rows of Parquet files: dicts by column. Each row group is a shard.

    The footers are read now, so the parts' lengths are known and parts are cut evenly, if necessary in the middle of a
    row group. A resume does not open earlier row groups. In the row group where it begins, the delivered rows are
    decoded and dropped. Only the requested columns are fetched.

    The type of a value depends on its column's type:

    - int, float, bool, date, timestamp (in UTC, without the zone), duration: a numpy scalar.
    - string, binary: `str` or `bytes`.
    - list of such scalars: an array of its own; of several dims for nested lists of fixed size and tensors.
    - list of anything else: a Python list. Struct: a dict. Dictionary: the value itself.
    - others (decimal, time, map): what pyarrow's `as_py` returns.

    Args:
        paths: One or more files, all with the same columns: paths, patterns such as `data/*.parquet`, whose files are
            sorted, or URLs that fsspec opens. Settings such as keys and endpoints come from fsspec's configuration or
            the environment.
        columns: Top-level columns to read, in this order; None: all.
        allow_nulls: If True, a null is None in the sample, for a later `map` or `filter`. If False, a null is an error
            that names the column and the row. A null inside a list is always an error.
        shuffle_shards: If True, permute the row groups, in another order each epoch. Rows keep their order within a row
            group: add a `Shuffle` to permute them, too.
        resample: If True, each part is an endless stream of row groups, sampled with replacement.

    Raises:
        MissingDependencyError: pyarrow, or a package that a URL needs, is not installed.
        ArgumentTypeError: `columns` is one string, or `paths` is not a path or a list of paths.
        ArgumentError: There is no file or no row, a pattern matches no file, or a file lacks a column or has it with
            another type.
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
    """Reads a row group, starting at a given row. It opens nothing before it is called."""

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
    """Check that all files have the columns to read, with the types of the first file."""
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
    """Open a file for pyarrow; only the bytes that pyarrow asks for are read."""
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
