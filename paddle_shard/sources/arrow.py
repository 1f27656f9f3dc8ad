"""What does a row of an Arrow table look like as a sample?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt


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
    import pyarrow as pa  # type: ignore[import-untyped]

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
