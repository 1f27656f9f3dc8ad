"""Parquet files as a source, and the samples that rows of Arrow tables become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from paddle_shard.core.checks import check_flag
from paddle_shard.data.files.files import (
    Path,
    Paths,
    for_each,
    is_remote,
    matched,
    needs,
    open_remote,
    redacted,
)
from paddle_shard.data.files.host_cache import check_cache_dir, open_cached
from paddle_shard.data.files.shards import ShardSource
from paddle_shard.data.stages.stage import Samples
from paddle_shard.errors import ArgumentError

BATCH_BYTES = 4 << 20
"""Approximate number of uncompressed bytes that are decoded at a time."""


def parquet_source(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    allow_nulls: bool = False,
    shuffle_shards: bool = True,
    cache_dir: Path | None = None,
) -> ShardSource:
    """Return the source of the rows of Parquet files: dicts by column. Each row group is a shard.

    The footers are read now, so the parts' lengths are known and parts are cut evenly, if necessary in the middle of a
    row group. A resume does not open earlier row groups. In the row group where it begins, the delivered rows are
    decoded and dropped. Only the requested columns are fetched.

    The type of a value depends on its column's type:

    - int, float, bool, date, timestamp (in UTC, without the zone; INT96 in microseconds), duration: a numpy scalar.
    - string, binary: `str` or `bytes`.
    - list of such scalars: an array of its own; of several dims for nested lists of fixed size and tensors.
    - others (struct, dictionary, decimal, time, map, lists of these): what pyarrow's `as_py` returns.

    Args:
        paths: One or more files, all with the same columns: paths, patterns such as `data/*.parquet`, whose files are
            sorted, or URLs that fsspec opens. Settings such as keys and endpoints come from fsspec's configuration or
            the environment.
        columns: Top-level columns to read, in this order; None: all.
        allow_nulls: If True, a null is None in the sample, for a later `map` or `filter`. If False, a null is an error
            that names the column. A null inside a list is always an error, one inside a struct is None.
        shuffle_shards: If True, permute the row groups, in another order each epoch. Rows keep their order within a row
            group: add a `Shuffle` to permute them, too.
        cache_dir: A folder in which copies of remote files are kept, for all processes of the host. Then files are
            downloaded whole. None: nowhere.

    Raises:
        MissingDependencyError: pyarrow, or a package that a URL needs, is not installed.
        ArgumentTypeError: `paths` is not a path or a list of paths.
        ArgumentError: There is no file, a pattern matches no file, or a file lacks a column or has it with
            another type.
        ShardReadError: A footer cannot be read.
    """
    check_flag("allow_nulls", allow_nulls)
    with needs("parquet", "reading Parquet: "):
        import pyarrow.parquet  # type: ignore[import-untyped]  # noqa: F401
    chosen = None if columns is None else list(columns)
    cache_dir = check_cache_dir(cache_dir)
    files = matched(paths)
    footers = for_each(_footer, files, "reading its footer")
    groups = [
        (file, number, size)
        for file, (rows, _, size) in zip(files, footers, strict=True)
        for number in range(len(rows))
    ]
    names = [f"row group {number} of {file}" for file, number, _ in groups]
    counts = [num_rows for rows, _, _ in footers for num_rows in rows]
    reader = _GroupReader(
        groups=dict(zip(names, groups, strict=True)),
        columns=chosen,
        allow_nulls=allow_nulls,
        cache_dir=cache_dir,
    )
    source = ShardSource(
        names,
        reader,
        files=[file for file, _, _ in groups],
        counts=counts,
        shuffle_shards=shuffle_shards,
    )
    _check_columns(files, footers, chosen)
    return source


_Footer = tuple[list[int], dict[str, str], int]
"""(number of rows of each row group, Arrow type of each top-level column, size of the file in bytes)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupReader:
    """Reads the rows of a row group, from a row on."""

    groups: Mapping[str, tuple[str, int, int]]
    """Name of a row group -> (file, number of the row group, size of the file in bytes)."""
    columns: list[str] | None
    allow_nulls: bool
    cache_dir: str | None

    def __call__(self, name: str, skip: int, _ahead: int) -> Samples:
        """Yield the rows after the first `skip`. pyarrow reads ahead by itself."""
        file, number, expected_size = self.groups[name]
        with _opened(file, self.cache_dir) as (parquet, size):
            if size != expected_size:
                raise ValueError(
                    "the file has changed since its footer was read, when the loader was made. Make the loader again"
                )
            group = parquet.metadata.row_group(number)
            num_rows = (
                BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)
            )
            batches = parquet.iter_batches(
                batch_size=int(np.clip(num_rows, 1, 1 << 12)),
                row_groups=[number],
                columns=self.columns,
                use_threads=False,  # readers are parallel already
            )
            for batch in batches:
                rest = batch.slice(min(skip, batch.num_rows))
                skip -= batch.num_rows - rest.num_rows
                if rest.num_rows:
                    yield from self._rows(rest)

    def _rows(self, batch: Any) -> Iterator[dict[str, Any]]:
        names = self.columns or batch.schema.names
        columns = []
        for name in names:
            try:
                columns.append(_column(batch.column(name), self.allow_nulls))
            except ValueError as error:
                raise ValueError(
                    f"column {name!r}: {error} Leave it out (columns=)."
                ) from error
        for row in zip(*columns, strict=True):
            yield dict(zip(names, row, strict=True))


def _check_columns(
    files: list[str], footers: list[_Footer], columns: list[str] | None
) -> None:
    """Check that all files have the columns to read, with the types of the first file."""
    _, first, _ = footers[0]
    wanted = {name: first.get(name) for name in columns or first}
    for file, (_, types, _) in zip(files, footers, strict=True):
        to_read = {name: types.get(name) for name in columns or types}
        if to_read != wanted or None in to_read.values():
            raise ArgumentError(
                f"columns: {redacted(file)} has the columns {types}, but those to read are {wanted} as in "
                f"{redacted(files[0])}. Read only columns that all files have alike (columns=), or a source for each "
                "kind of file."
            )


def _footer(file: str) -> _Footer:
    with _opened(file) as (parquet, size):
        metadata, schema = parquet.metadata, parquet.schema_arrow
        rows = [
            metadata.row_group(number).num_rows
            for number in range(metadata.num_row_groups)
        ]
        types = {name: str(schema.field(name).type) for name in schema.names}
        return rows, types, size


@contextmanager
def _opened(
    file: str, cache_dir: str | None = None
) -> Iterator[tuple[Any, int]]:
    """Open a file by pyarrow; yield it with its size in bytes.

    Only what pyarrow requests is read of a remote file without a copy.

    Args:
        file: Path or URL.
        cache_dir: Where copies of remote files are kept; None: nowhere.
    """
    from pyarrow.parquet import ParquetFile

    opened: Any
    if cache_dir is None and is_remote(file):
        opened, size = open_remote(file, cache_type="none")
    else:
        opened, size = open_cached(cache_dir, file)
        opened = opened.detach()  # a buffer would read more than pyarrow needs
    with (
        opened,
        ParquetFile(
            opened,
            pre_buffer=is_remote(file),
            # In nanoseconds, pyarrow's default for the INT96 of Spark, only the years 1678 to 2261 have a number.
            coerce_int96_timestamp_unit="us",
        ) as parquet,
    ):
        yield parquet, size


def _column(array: Any, allow_nulls: bool) -> Any:
    """Return the values of some rows of a column.

    Args:
        array: A `pyarrow.Array`.
        allow_nulls: If True, a null becomes None.

    Raises:
        ValueError: There is a null that is not allowed.
    """
    if not array.null_count:
        return _items(_values(array))
    if not allow_nulls:
        raise ValueError(
            "a value is null. Take nulls as None (allow_nulls=True) and map or filter them."
        )
    present = iter(_items(_values(array.drop_null())))
    return [
        next(present) if is_valid else None
        for is_valid in array.is_valid().to_pylist()
    ]


def _items(values: Any) -> Any:
    """Return values that can be changed one by one, and kept without keeping the others in memory."""
    if isinstance(values, np.ndarray) and values.ndim > 1:
        return [row.copy() for row in values]
    return values


_LISTS = ("list<", "large_list<", "list_view<", "large_list_view<")
"""How the names of Arrow's types of lists begin; older versions of pyarrow have no views."""


def _values(array: Any) -> Any:
    """Return the values of an Arrow array: a numpy array if all have the same dtype and shape, else a list.

    Raises:
        ValueError: There is a null inside a list.
    """
    import pyarrow as pa

    kind = array.type
    types = pa.types
    if array.null_count:
        raise ValueError("a list has a null inside.")
    if isinstance(kind, pa.FixedShapeTensorType):
        return array.to_numpy_ndarray()
    is_fixed = types.is_fixed_size_list(kind)
    if is_fixed or str(kind).startswith(_LISTS):
        inner = _values(array.flatten())
        if not isinstance(inner, np.ndarray):
            return array.to_pylist()
        if is_fixed:
            return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
        ends = np.cumsum([0, *array.value_lengths().to_numpy()]).tolist()
        return [np.array(inner[start:stop]) for start, stop in pairwise(ends)]
    if types.is_primitive(kind) and not types.is_time(kind):
        return array.to_numpy(zero_copy_only=False)
    return array.to_pylist()
