"""How do rows that differ in length between ranks become rows of one global batch?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddle_shard.checks import holds
from paddle_shard.errors import ArgumentError, BatchStructureError
from paddle_shard.place.field import FieldLayout
from paddle_shard.tree import mapped

LONGEST = "longest"
Row = Sequence[Any]
"""(kind, *shape of a row): dtype, and where rows are not the samples, how many there are, as all ranks must have."""


class Pad(NamedTuple):
    """How the rows of a field are padded."""

    path: str
    """The field's path, such as "['input_ids']"; "[0]" also of a batch that is a bare tensor."""
    sizes: tuple[int, ...]
    """Allowed sizes of dim 1, ascending; empty: each dim except the first is padded to its longest size."""
    value: float
    """The number behind the ends of its rows."""


@dataclass(frozen=True)
class Unplaced:
    """This rank's rows of a tensor, kept until it is known how long the other ranks' rows are."""

    local: Any
    """The rows; if the tensor's mesh does not include this process, rows of their shape."""
    layout: FieldLayout
    path: str
    pad: Pad | None
    """How its rows are padded; None: they must have the same length."""

    def placed(self, rows: Mapping[int, Row]) -> Any:
        """Return the distributed tensor, given the row of every rank.

        Raises:
            BatchStructureError: The rows do not fit together, or are longer than all sizes.
        """
        pad, known = self.pad, list(rows.values())
        kinds = {(row[0], len(row)) for row in known}
        if len(kinds) > 1 or (pad is None and len(set(known)) > 1):
            why = "" if len(kinds) > 1 else "; pad_to does not name it, so its rows must be of one shape"
            raise _differ(self.path, rows, why)
        of_data_rank = dict[tuple[int, int], dict[int, Row]]()
        for rank, row in rows.items():
            if (place := self.layout.slice_of(rank)) is not None:
                of_data_rank.setdefault(place, {})[rank] = row
        for replicas in of_data_rank.values():
            if len(set(replicas.values())) > 1:
                raise _differ(self.path, replicas, ", which share a data rank and should have read the same rows")
        shape = [max(sizes) for sizes in zip(*(row[1:] for row in known), strict=True)]
        if pad is not None and pad.sizes and shape:
            size = next((size for size in pad.sizes if size >= shape[0]), None)
            if size is None:
                raise BatchStructureError(
                    f"the longest row of field {self.path or 'batch'} has {shape[0]}, and the largest size in pad_to "
                    f"is {pad.sizes[-1]}. Cut long samples in the data set or the "
                    "collate_fn, or give a larger size."
                )
            shape[0] = size
        return self.layout.distributed(padded(self.local, shape, pad.value if pad else 0), self.path)


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
        given = list(pad_to.values()) if isinstance(pad_to, Mapping) else []
        if not given or not all(isinstance(one, tuple) and len(one) == 2 for one in given):
            raise ArgumentError(
                "pad_to must say of each field whose rows differ in length, by key or position, to which length they "
                "are padded and with which number, such as {'input_ids': ('longest', 0), 'labels': ('longest', -100)}, "
                f"or {{0: ([128, 256, 512], -100)}}; got {pad_to!r}."
            )
        fields = {}
        for key, (length, value) in pad_to.items():
            sizes = [length] if isinstance(length, int | np.integer) else length
            sizes = sizes.tolist() if isinstance(sizes, np.ndarray) else sizes
            found = list(sizes) if isinstance(sizes, list | tuple) else []
            ints = all(isinstance(size, int | np.integer) and not isinstance(size, bool) for size in found)
            if sizes != LONGEST and not (found and ints and min(found) > 0):
                raise ArgumentError(
                    f"pad_to: rows of field {key!r} are padded to 'longest', or to the lengths that they may have, "
                    f"such as [128, 256, 512]; got {length!r}."
                )
            try:
                number = float(value) if isinstance(value, Real) else None
            except OverflowError:
                number = None
            if number is None:
                raise ArgumentError(f"pad_to: the number behind the rows of field {key!r} must be one, got {value!r}.")
            fields[key] = Pad(f"[{key!r}]", tuple(sorted({int(size) for size in found})), value)
        return cls(fields)

    def fact(self) -> dict[str, Any]:
        """Return what the ranks compare: the same for all ways to write it."""
        fields = sorted(self.fields.items(), key=str)
        return {str(key): (list(pad.sizes) or LONGEST, float(pad.value)) for key, pad in fields}

    def check(self, fields: Sequence[Any]) -> None:
        """Refuse fields that the batch does not have.

        Raises:
            BatchStructureError: There is such a field.
        """
        paths = {f"[{key!r}]" for key in fields}  # by which a tensor's field is known
        unknown = [key for key, pad in self.fields.items() if pad.path not in paths]
        if unknown:
            raise BatchStructureError(
                f"pad_to names {unknown}, but the fields that are delivered are {list(fields)} (input_keys chooses "
                "them, if it is given)."
            )

    def pad_of(self, path: str) -> Pad | None:
        """Return how the rows of the tensor at a path are padded; None if they are not."""
        # The paths of a field's tensors begin with its own, up to the bracket.
        return next((pad for pad in self.fields.values() if (path or "[0]").startswith(pad.path)), None)

    def even(self, arrays: Sequence[Any], path: str) -> Sequence[Any]:
        """Return what several workers have collated of one array, padded to one length, so that it can be joined.

        Arrays that differ in dtype or in their number of dims are returned as they are: joining them reports that.
        """
        pad = self.pad_of(path)
        if pad is None or len({(array.dtype, len(array.shape)) for array in arrays}) > 1:
            return arrays
        row = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)]
        return [padded(array, row, pad.value) for array in arrays]


def finished(batch: Any, said: Mapping[int, Mapping[str, Row]]) -> Any:
    """Return a batch as distributed tensors, now that all ranks' rows are known.

    Args:
        batch: A batch with `Unplaced` leaves.
        said: Global rank -> `row_shapes` of that rank's batch.

    Raises:
        BatchStructureError: The rows do not fit together, or are longer than all sizes; raised on all ranks.
    """
    rows = {}
    for path in dict.fromkeys(path for of_rank in said.values() for path in of_rank):  # the same on all ranks
        rows[path] = {rank: tuple(of_rank.get(path, ())) for rank, of_rank in said.items()}
        if not all(rows[path].values()):
            raise _differ(path, rows[path])
    return mapped(batch, lambda leaf, _: leaf.placed(rows[leaf.path]) if isinstance(leaf, Unplaced) else leaf)


def padded(tensor: Any, row: Sequence[int], fill: float) -> Any:
    """Return rows of a tensor or array that are filled up to one shape."""
    if list(tensor.shape[1:]) == list(row):
        return tensor
    shape, filled = [tensor.shape[0], *row], tuple(slice(0, size) for size in tensor.shape)
    if isinstance(tensor, np.ndarray):
        padded = np.full(shape, fill, tensor.dtype)
    else:
        padded = paddle.full(shape, fill, tensor.dtype)
        if padded.place != tensor.place:
            padded = padded.to(tensor.place)
    padded[filled] = tensor
    return padded


def _differ(path: str, rows: Mapping[int, Row], why: str = "") -> BatchStructureError:
    shown = "; ".join(
        f"global rank {rank}: {f'{row[0]}{list(row[1:])}' if row else 'it has none'}"
        for rank, row in sorted(rows.items())
    )
    return BatchStructureError(f"the rows of field {path or 'batch'} differ between ranks{why}: {shown}.")


@cache
def kind_of(dtype: Any) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).rsplit(".", 1)[-1]


@lru_cache(maxsize=256)
def check_fill(fill: float, dtype: Any, path: str) -> None:
    """Refuse a pad value that tensors of a dtype cannot hold.

    Raises:
        BatchStructureError: The tensors would hold another number.
    """
    kind = kind_of(dtype)
    if not holds(kind, fill):
        raise BatchStructureError(
            f"pad_to: tensors of dtype {kind}, as field {path or 'batch'} has them, cannot hold {fill!r}. Give a "
            "number that they can hold, or make the field of another dtype in the collate_fn."
        )
