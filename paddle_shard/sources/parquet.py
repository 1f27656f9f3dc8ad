"""How are Parquet files used as a source, and what does a row of an Arrow table look like as a sample?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_shard.errors import ArgumentError, ArgumentTypeError, MissingDependencyError, ShardReadError, described
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.sources.files import Paths, is_remote, local_path, matched, remote_file, shown
from paddle_shard.sources.shards import ShardSource

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
    with ThreadPoolExecutor(FOOTERS if any(map(is_remote, files)) else 1) as pool:
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


class NullFound(Exception):
    """There is a null, but nulls are not allowed."""

    def __init__(self, column: str, row: int, *, inside: bool) -> None:
        super().__init__(f"of column {column!r} {'holds a list with a null inside' if inside else 'is null'}")
        self.row, self.inside = row, inside


def samples_of(batch: Any, columns: Sequence[str] | None, allow_nulls: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `pyarrow.RecordBatch` as dicts; `sources.parquet` lists the types of the values.

    Args:
        batch: A batch whose column names are distinct.
        columns: The keys of the dicts, in order; None: all columns.
        allow_nulls: If True, a null becomes None; otherwise it is an error.

    Raises:
        NullFound: A row has a null that is not allowed; raised before the first row.
    """
    names = list(batch.schema.names if columns is None else columns)
    rows = np.arange(batch.num_rows)
    values = [_rows(_values(batch.column(name), allow_nulls, name, rows, inside=False)) for name in names]
    for row in zip(*values, strict=True):
        yield dict(zip(names, row, strict=True))


def _rows(values: Sequence[Any] | npt.NDArray[Any]) -> Sequence[Any] | npt.NDArray[Any]:
    """Return values that can be changed one by one, and kept without keeping the others in memory."""
    if isinstance(values, np.ndarray) and values.ndim > 1:
        return [row.copy() for row in values]
    return values


def _values(array: Any, allow_nulls: bool, column: str, rows: npt.NDArray[np.int64], *, inside: bool) -> Any:
    """Return the values of an Arrow array: a numpy array if all have the same dtype and shape, else a list.

    Args:
        array: A `pyarrow.Array`.
        allow_nulls: If True, a null becomes None.
        column: The top-level column that the array comes from.
        rows: For each value, the row of the batch that it comes from.
        inside: True if the values are items of lists.
    """
    import pyarrow as pa

    if array.null_count:
        valid = array.is_valid().to_pylist()
        if not allow_nulls:
            raise NullFound(column, int(rows[valid.index(False)]), inside=inside)
        present = iter(_rows(_values(array.drop_null(), True, column, rows[np.array(valid)], inside=inside)))
        return [next(present) if is_valid else None for is_valid in valid]
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return array.to_numpy_ndarray()
    if isinstance(kind, pa.BaseExtensionType):
        return _values(array.storage, allow_nulls, column, rows, inside=inside)
    if pa.types.is_dictionary(kind):
        return _values(array.dictionary_decode(), allow_nulls, column, rows, inside=inside)
    if pa.types.is_struct(kind):
        names = [kind.field(number).name for number in range(kind.num_fields)]
        fields = [_rows(_values(child, allow_nulls, column, rows, inside=inside)) for child in array.flatten()]
        return [{name: field[row] for name, field in zip(names, fields, strict=True)} for row in range(len(array))]
    if pa.types.is_fixed_size_list(kind):
        inner = _values(array.flatten(), False, column, np.repeat(rows, kind.list_size), inside=True)
        if isinstance(inner, np.ndarray):
            return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
        return _pieces(inner, np.full(len(array), kind.list_size))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = array.value_lengths().to_numpy()
        return _pieces(_values(array.flatten(), False, column, np.repeat(rows, lengths), inside=True), lengths)
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if numeric or pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return array.to_numpy(zero_copy_only=False)
    return array.to_pylist()


def _pieces(values: Any, lengths: npt.NDArray[np.integer[Any]]) -> list[Any]:
    ends = np.cumsum([0, *lengths]).tolist()
    own = np.array if isinstance(values, np.ndarray) else list
    return [own(values[start:stop]) for start, stop in pairwise(ends)]
