"""Lengths: pad rows that differ in length between ranks to one shape (`pad_to`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddle_shard.core.checks import holds
from paddle_shard.core.trees import mapped
from paddle_shard.errors import ArgumentError, BatchStructureError
from paddle_shard.placement.field import FieldLayout

LONGEST = "longest"
Row = Sequence[Any]
"""(kind, *shape of a row): dtype, and where rows are not the samples, how many there are, as all ranks must have."""


class Pad(NamedTuple):
    """How the rows of a field are padded."""

    path: str
    """The field's path, such as "['input_ids']"; "[0]" also of a batch that is a bare tensor."""
    sizes: tuple[int, ...]
    """Allowed sizes of dim 1, ascending; empty: each dim except the first is padded to its longest size."""
    value: Any
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
        pad = self.pad
        known = list(rows.values())
        if len({(row[0], len(row)) for row in known}) > 1 or (
            pad is None and len(set(known)) > 1
        ):
            raise _differ(self.path, rows)
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
        return self.layout.distributed(
            padded(self.local, shape, pad.value if pad else 0), self.path
        )


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
        if not given or not all(
            isinstance(one, tuple) and len(one) == 2 for one in given
        ):
            raise ArgumentError(
                "pad_to must say of each field whose rows differ in length, by key or position, to which length they "
                "are padded and with which number, such as {'input_ids': ('longest', 0), 'labels': ('longest', -100)}, "
                f"or {{0: ([128, 256, 512], -100)}}; got {pad_to!r}."
            )
        fields = {}
        for key, (length, value) in pad_to.items():
            is_longest = isinstance(length, str) and length == LONGEST
            sizes = list(length) if isinstance(length, list | tuple) else [length]
            is_length = is_longest or (
                len(sizes) > 0 and all(type(size) is int and size > 0 for size in sizes)
            )
            if not is_length or not isinstance(
                value, float | int | np.integer | np.floating
            ):
                raise ArgumentError(
                    f"pad_to: field {key!r} is padded to 'longest', or to the lengths that its rows may have, such as "
                    f"[128, 256, 512], and with a number; got {(length, value)!r}."
                )
            fields[key] = Pad(
                f"[{key!r}]", () if is_longest else tuple(sorted(sizes)), value
            )
        return cls(fields)

    def fact(self) -> dict[str, Any]:
        """Return what the ranks compare: the same for all ways to write it."""
        fields = sorted(self.fields.items(), key=str)
        return {
            str(key): (list(pad.sizes) or LONGEST, float(pad.value))
            for key, pad in fields
        }

    def pad_of(self, path: str) -> Pad | None:
        """Return how the rows of the tensor at a path are padded; None if they are not."""
        # The paths of a field's tensors begin with its own, up to the bracket.
        return next(
            (
                pad
                for pad in self.fields.values()
                if (path or "[0]").startswith(pad.path)
            ),
            None,
        )

    def even(self, arrays: Sequence[Any], path: str) -> Sequence[Any]:
        """Return what several workers have collated of one array, padded to one length, so that it can be joined.

        Arrays that differ in dtype or in their number of dims are returned as they are: joining them reports that.
        """
        pad = self.pad_of(path)
        if (
            pad is None
            or len({(array.dtype, len(array.shape)) for array in arrays}) > 1
        ):
            return arrays
        row = [
            max(sizes)
            for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)
        ]
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
    for path in dict.fromkeys(
        path for of_rank in said.values() for path in of_rank
    ):  # the same on all ranks
        rows[path] = {
            rank: tuple(of_rank.get(path, ())) for rank, of_rank in said.items()
        }
        if not all(rows[path].values()):
            raise _differ(path, rows[path])
    return mapped(
        batch,
        lambda leaf, _: (
            leaf.placed(rows[leaf.path]) if isinstance(leaf, Unplaced) else leaf
        ),
    )


def padded(tensor: Any, row: Sequence[int], fill: float) -> Any:
    """Return rows of a tensor or array that are filled up to one shape."""
    if list(tensor.shape[1:]) == list(row):
        return tensor
    shape = [tensor.shape[0], *row]
    filled = tuple(slice(0, size) for size in tensor.shape)
    if isinstance(tensor, np.ndarray):
        padded = np.full(shape, fill, tensor.dtype)
    else:
        padded = paddle.full(shape, fill, tensor.dtype)
        if padded.place != tensor.place:
            padded = padded.to(tensor.place)
    padded[filled] = tensor
    return padded


def _differ(path: str, rows: Mapping[int, Row]) -> BatchStructureError:
    shown = "; ".join(
        f"global rank {rank}: {f'{row[0]}{list(row[1:])}' if row else 'it has none'}"
        for rank, row in sorted(rows.items())
    )
    return BatchStructureError(
        f"the rows of field {path or 'batch'} differ between ranks: {shown}. If it is their length, name it in pad_to."
    )


def check_fill(fill: float, dtype: str, path: str) -> None:
    """Refuse a pad value that tensors of a dtype cannot hold.

    Raises:
        BatchStructureError: The tensors would hold another number.
    """
    if not holds(dtype, fill):
        raise BatchStructureError(
            f"pad_to: tensors of dtype {dtype}, as field {path or 'batch'} has them, cannot hold {fill!r}. Give a "
            "number that they can hold, or make the field of another dtype in the collate_fn."
        )
