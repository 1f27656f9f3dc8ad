"""Arrays that are read one batch at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from paddle_shard.core.checks import length_or_none
from paddle_shard.errors import ArgumentError, ArgumentTypeError

NO_REPEAT = "Leave repeat() out (each pass over the loader is an epoch), or give it a number."
"""The fix for a data set that is repeated without an end, and has a length all the same."""


class IndexedData(Protocol):
    """A data set with an index: a list, an array, a `paddle.io.Dataset`, or another library's."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ArrayDataset:
    """Arrays whose rows are the samples: numpy arrays, memory maps, or arrays indexed like them (Zarr, HDF5, Arrow).

    A batch is read by indexing each array once, in the main process or in a worker, so it needs no collating.
    Consecutive rows are read as one slice. Give the data set to a `paddle.io.DataLoader`.

    Examples:
        >>> dataset = ArrayDataset(images=np.zeros((10, 2)), labels=np.arange(10))
        >>> dataset[3]["images"]
        array([0., 0.])
        >>> dataset.__getitems__([7, 2])["labels"]
        array([7, 2])
    """

    def __init__(
        self, *arrays: Any, block_size: int | None = None, **named: Any
    ) -> None:
        """Keep the arrays; nothing is read.

        Args:
            arrays: At least one array; all must have the same length. The samples of one array are its rows, those of
                several arrays are tuples of rows.
            block_size: Number of rows that are stored together on disk, for `shuffle="blocks"`. None: the first array's
                `chunks` tell, if it has them.
            named: Arrays by name, instead of `arrays`. Then samples are dicts.

        Raises:
            ArgumentError: No array is given, or both kinds, or the lengths differ.
            ArgumentTypeError: An array has no length or cannot be indexed.
        """
        if bool(arrays) == bool(named):
            raise ArgumentError(
                "ArrayDataset takes arrays, by position or by name, and at least one."
            )
        columns: dict[Any, Any] = dict(named or enumerate(arrays))
        lengths = {}
        for name, array in columns.items():
            lengths[name] = check_indexed(
                f"array {name!r}",
                array,
                "Give arrays that are indexed by rows.",
            )
            if isinstance(array, list | tuple):
                columns[name] = np.asarray(array)
        if len(set(lengths.values())) > 1:
            raise ArgumentError(
                f"arrays must have as many rows each, got {lengths}."
            )
        self._columns = columns
        self._is_named = bool(named)
        self.gathers = all(
            isinstance(array, np.ndarray) for array in columns.values()
        )
        """True if a batch's arrays are copies that nothing else uses; slices of other kinds of arrays may be views."""
        first = next(iter(columns.values()))
        self._length = len(first)
        chunks = getattr(first, "chunks", None)
        if block_size is None and chunks:
            block_size = chunks[0]
        if block_size is not None:
            self.block_size = int(block_size)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        return self._shaped(
            {name: array[index] for name, array in self._columns.items()}
        )

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return a batch: some rows of each array, in the structure of a sample."""
        return self._shaped(self._read(indices))

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Return some samples, read at once.

        Args:
            indices: The samples.
        """
        columns = self._read(indices)
        return [
            self._shaped(dict(zip(columns, row, strict=True)))
            for row in zip(*columns.values(), strict=True)
        ]

    def _read(self, indices: Sequence[int]) -> dict[Any, Any]:
        rows = as_rows(indices)
        return {
            name: _taken(array, rows) for name, array in self._columns.items()
        }

    def _shaped(self, columns: dict[Any, Any]) -> Any:
        if self._is_named:
            return columns
        values = tuple(columns.values())
        return values if len(values) > 1 else values[0]


def check_indexed(what: str, data: Any, way_out: str) -> int:
    """Return the length of a data set with an index.

    Args:
        what: Name of the argument, for the message.
        data: The argument.
        way_out: What to do with other data.

    Raises:
        ArgumentTypeError: It lacks `__len__` or `__getitem__`, or its length raises, or it is text or a dict.
    """
    length = length_or_none(data)
    is_text_or_dict = isinstance(data, str | Mapping)
    if length is None or not hasattr(data, "__getitem__") or is_text_or_dict:
        raise ArgumentTypeError(
            f"{what} must have a length and an index (__len__, __getitem__), got {type(data).__name__}. {way_out}"
        )
    return length


def as_rows(indices: Sequence[int]) -> slice | np.ndarray[Any, Any]:
    """Return a slice if the indices are consecutive, else an array.

    Examples:
        >>> as_rows([4, 5, 6]), as_rows([4, 6])
        (slice(4, 7, None), array([4, 6]))
    """
    rows = np.asarray(indices, np.int64)
    num_rows = len(rows)
    # Most orders fail the first test, which costs less.
    if (
        num_rows
        and rows[-1] - rows[0] == num_rows - 1
        and (np.diff(rows) == 1).all()
    ):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _taken(array: Any, rows: slice | np.ndarray[Any, Any]) -> Any:
    if isinstance(rows, slice):
        # A copy, so that a memory map is read now, not at the first access.
        is_numpy = isinstance(array, np.ndarray)
        return np.array(array[rows]) if is_numpy else np.asarray(array[rows])
    if isinstance(array, np.ndarray):
        return np.asarray(array.take(rows, axis=0))
    if hasattr(array, "take"):  # Arrow
        return np.asarray(array.take(rows))
    if hasattr(array, "oindex"):  # Zarr
        return np.asarray(array.oindex[rows])
    # HDF5 takes ascending rows only.
    ascending, places = np.unique(rows, return_inverse=True)
    return np.asarray(array[ascending])[places]
