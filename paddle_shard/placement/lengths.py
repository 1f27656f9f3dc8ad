"""Lengths: pad rows that differ in length between ranks to one shape (`pad_to`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddle_shard.core.checks import holds
from paddle_shard.errors import ArgumentError, BatchStructureError

LONGEST = "longest"
Row = Sequence[Any]
"""(kind, *shape of a row): dtype, and where rows are not the samples, how many there are, as all ranks must have."""


class Pad(NamedTuple):
    """Padding of the rows of a field."""

    path: str
    """The field's path, such as "['input_ids']"; "[0]" also of a batch that is a bare tensor."""
    sizes: tuple[int, ...]
    """Allowed sizes of dim 1, ascending; empty: each dim except the first is padded to its longest size."""
    value: Any
    """The number behind the ends of its rows."""

    def fill(self, rows: Any, of_ranks: Iterable[Row]) -> Any:
        """Return a rank's rows, filled up to the size that all ranks' rows get.

        Args:
            rows: A tensor of the rows.
            of_ranks: The row of every rank.

        Raises:
            BatchStructureError: The rows are longer than all sizes; raised on all ranks.
        """
        shape = _longest(row[1:] for row in of_ranks)
        if self.sizes and shape:
            sizes = [size for size in self.sizes if size >= shape[0]]
            if not sizes:
                raise BatchStructureError(
                    f"the longest row of field {self.path} has {shape[0]}, and the largest size in pad_to "
                    f"is {self.sizes[-1]}. Cut long samples in the data set or the "
                    "collate_fn, or give a larger size."
                )
            shape[0] = sizes[0]
        return padded(rows, shape, self.value)


@dataclass(frozen=True)
class PadTo:
    """Pads rows to the longest row of the global batch, or to the smallest of given sizes that holds this row."""

    fields: Mapping[Any, Pad]
    """A field's key or position -> how its rows are padded."""

    @classmethod
    def of(cls, pad_to: Any) -> PadTo | None:
        """Read the argument of `shard_dataloader`.

        Raises:
            ArgumentError: It is not allowed.
        """
        if pad_to is None:
            return None
        fields: dict[Any, Pad] = {}
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            fields = {key: _pad(key, entry) for key, entry in pad_to.items()}
        if not fields:
            raise ArgumentError(
                "pad_to must map a field's key or position to (length, number): 'longest', or the lengths that its "
                "rows may have, and the number that fills them up, such as {'input_ids': ('longest', 0), 'labels': "
                f"('longest', -100)}}, or {{0: ([128, 256, 512], -100)}}; got {pad_to!r}."
            )
        return cls(fields)

    def pad_of(self, path: str) -> Pad | None:
        """Return how the rows of the tensor at a path are padded; None if they are not."""
        # The paths of a field's tensors begin with its own, up to the bracket.
        pads = self.fields.values()
        return next(
            (pad for pad in pads if (path or "[0]").startswith(pad.path)), None
        )

    def even(self, arrays: Sequence[Any], path: str) -> Sequence[Any]:
        """Return what several workers have collated of one array, padded to one length, so that it can be joined.

        Arrays that differ in dtype or in their number of dims are returned as they are: joining them reports that.
        """
        pad = self.pad_of(path)
        if (
            pad is None
            or len({(one.dtype, len(one.shape)) for one in arrays}) > 1
        ):
            return arrays
        row = _longest(array.shape[1:] for array in arrays)
        return [padded(array, row, pad.value) for array in arrays]


def padded(tensor: Any, row: Sequence[int], fill: float) -> Any:
    """Return rows of a tensor or array that are filled up to one shape."""
    if list(tensor.shape[1:]) == list(row):
        return tensor
    shape = [tensor.shape[0], *row]
    result: Any
    if isinstance(tensor, np.ndarray):
        result = np.full(shape, fill, tensor.dtype)
    else:
        result = paddle.full(shape, fill, tensor.dtype).to(tensor.place)
    result[tuple(map(slice, tensor.shape))] = tensor
    return result


def check_fill(fill: float, dtype: str, path: str) -> None:
    """Reject a pad value that tensors of a dtype cannot hold.

    Raises:
        BatchStructureError: The tensors would hold another number.
    """
    if not holds(dtype, fill):
        raise BatchStructureError(
            f"pad_to: tensors of dtype {dtype}, as field {path} has them, cannot hold {fill!r}. Give a "
            "number that they can hold, or make the field of another dtype in the collate_fn."
        )


def _pad(key: Any, entry: Any) -> Pad:
    """Return the padding that an item of the argument asks for.

    Raises:
        TypeError, ValueError: It is not a tuple of a length and a number.
    """
    if not isinstance(entry, tuple):  # a list may be meant as lengths
        raise TypeError
    length, value = entry
    sizes = np.unique(length).tolist()
    if sizes == [LONGEST]:
        sizes = []
    elif not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError
    number = value + 0  # raises unless it is one
    return Pad(f"[{key!r}]", tuple(sizes), number)


def _longest(rows: Iterable[Sequence[int]]) -> list[int]:
    """Return the largest size of each dim."""
    return [max(sizes) for sizes in zip(*rows, strict=True)]
