"""How do rows that differ in length between ranks become rows of one global batch?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddle_shard.errors import ArgumentError, BatchStructureError
from paddle_shard.place.dtensor import place, place_elsewhere, split_sequence
from paddle_shard.place.field import FieldLayout
from paddle_shard.tree import is_sequence, leaves, mapped, rebuild

LONGEST = "longest"
Row = Sequence[Any]
"""(kind, *shape of a row)."""


class Pad(NamedTuple):
    """How the rows of a field are padded."""

    sizes: tuple[int, ...]
    """Allowed sizes of dim 1, ascending; empty: each dim except the first is padded to its longest size."""
    value: float
    """The number behind the ends of its rows."""


@dataclass(frozen=True)
class Unplaced:
    """This rank's rows of a tensor, kept until it is known how long the other ranks' rows are."""

    local: Any
    layout: FieldLayout
    path: str
    elsewhere: tuple[int, int] | None
    """(rows that were read, rows of the global batch), if the tensor's mesh does not include this process."""
    own_rows: bool
    """True if its rows are not the samples. Then all ranks must have the same number of rows."""
    pad: Pad | None
    """How its rows are padded; None: they must have the same length."""

    @property
    def row(self) -> Row:
        """Kind and shape of a row."""
        kind = str(self.local.dtype).rsplit(".", 1)[-1]
        return [f"{kind}, {self.local.shape[0]} rows of " if self.own_rows else kind, *self.local.shape[1:]]

    def placed(self) -> Any:
        """Return the distributed tensor."""
        if self.elsewhere is not None:
            return place_elsewhere(self.local, *self.elsewhere, self.layout, self.path)
        return place(split_sequence(self.local, self.layout, self.path), self.layout)


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
        if (
            not isinstance(pad_to, Mapping)
            or not pad_to
            or any(not isinstance(one, tuple) or len(one) != 2 for one in pad_to.values())
        ):
            raise ArgumentError(
                "pad_to must say of each field whose rows differ in length, by key or position, to which length they "
                "are padded and with which number, such as {'input_ids': ('longest', 0), 'labels': ('longest', -100)}, "
                f"or {{0: ([128, 256, 512], -100)}}; got {pad_to!r}."
            )
        fields = {}
        for key, (length, value) in pad_to.items():
            sizes = [length] if isinstance(length, int | np.integer) else length
            sizes = sizes.tolist() if isinstance(sizes, np.ndarray) else sizes
            fine = sizes == LONGEST or (
                isinstance(sizes, list | tuple)
                and len(sizes) > 0
                and all(
                    isinstance(size, int | np.integer) and not isinstance(size, bool) and size > 0 for size in sizes
                )
            )
            if not fine:
                raise ArgumentError(
                    f"pad_to: rows of field {key!r} are padded to 'longest', or to the lengths that they may have, "
                    f"such as [128, 256, 512]; got {length!r}."
                )
            if not _is_number(value):
                raise ArgumentError(f"pad_to: the number behind the rows of field {key!r} must be one, got {value!r}.")
            fields[key] = Pad(() if sizes == LONGEST else tuple(sorted({int(size) for size in sizes})), value)
        return cls(fields)

    def check(self, fields: Sequence[Any]) -> None:
        """Refuse fields that the batch does not have.

        Raises:
            BatchStructureError: There is such a field.
        """
        unknown = [key for key in self.fields if key not in fields]
        if unknown:
            raise BatchStructureError(
                f"pad_to names {unknown}, but the fields that are delivered are {list(fields)} (input_keys chooses "
                "them, if it is given)."
            )

    def finished(self, batch: Any, said: Mapping[int, Mapping[str, Row]]) -> Any:
        """Return a batch as distributed tensors, now that all ranks' rows are known.

        Args:
            batch: A batch with `Unplaced` leaves.
            said: Global rank -> result of `rows_of` for that rank's batch.

        Raises:
            BatchStructureError: The rows do not fit together, or are longer than all sizes; raised on all ranks.
        """

        for path in dict.fromkeys(path for of_rank in said.values() for path in of_rank):  # the same on all ranks
            rows = {rank: tuple(of_rank.get(path, ())) for rank, of_rank in said.items()}
            if not all(rows.values()):
                raise _differ(path, rows)

        def placed(leaf: Unplaced) -> Any:
            rows = {rank: tuple(of_rank.get(leaf.path, ())) for rank, of_rank in said.items()}
            local = self._padded(leaf.local, self._common(leaf, rows), leaf.pad.value if leaf.pad else 0)
            return replace(leaf, local=local).placed()

        return mapped(batch, lambda leaf: placed(leaf) if isinstance(leaf, Unplaced) else leaf)

    def even(self, batches: Sequence[Any]) -> list[Any]:
        """Return what several workers have collated for one rank, padded to one length, so that it can be joined.

        Batches that differ in structure or dtype are returned as they are: joining them reports the difference.
        """
        return self._even(list(batches), self.fields.get)

    def _even(self, values: list[Any], pad_of: Callable[[Any], Pad | None]) -> list[Any]:
        first = values[0]
        children: dict[Any, list[Any]] = {}
        if isinstance(first, Mapping) and all(isinstance(v, Mapping) and set(v) == set(first) for v in values):
            children = {key: [value[key] for value in values] for key in first}
        elif _holds_more(first) and all(_holds_more(value) and len(value) == len(first) for value in values):
            children = dict(enumerate(map(list, zip(*values, strict=True))))
        if children:
            columns = {key: self._even(column, partial(_same, pad_of(key))) for key, column in children.items()}
            rows = [{key: column[n] for key, column in columns.items()} for n in range(len(values))]
            return [rebuild(first, row if isinstance(first, Mapping) else list(row.values())) for row in rows]
        pad = pad_of(0)
        kinds = {(value.dtype, len(value.shape)) if hasattr(value, "shape") else None for value in values}
        if pad is None or len(kinds) > 1 or None in kinds:
            return values  # joining them reports what does not fit
        row = tuple(max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True))
        return [self._padded(value, row, pad.value) for value in values]

    def _common(self, leaf: Unplaced, rows: Mapping[int, Row]) -> tuple[int, ...]:
        """Return the shape of a row that is large enough for all ranks' rows of a leaf."""
        known = list(rows.values())
        kinds = {(row[0], len(row)) if row else None for row in known}
        if len(kinds) > 1 or (leaf.pad is None and len(set(known)) > 1):
            why = "" if len(kinds) > 1 else "; pad_to does not name it, so its rows must be of one shape"
            raise _differ(leaf.path, rows, why)
        mesh, of_data_rank = leaf.layout.layout, dict[int, dict[int, Row]]()
        for rank, of_rank in rows.items():
            if rank in mesh.process_ids:
                of_data_rank.setdefault(mesh.data_rank(rank, leaf.layout.data_axes), {})[rank] = of_rank
        for replicas in of_data_rank.values():
            if len(set(replicas.values())) > 1:
                raise _differ(leaf.path, replicas, ", which share a data rank and should have read the same rows")
        row = [max(sizes) for sizes in zip(*(row[1:] for row in known), strict=True)]
        if leaf.pad is not None and leaf.pad.sizes and row:
            size = next((size for size in leaf.pad.sizes if size >= row[0]), None)
            if size is None:
                raise BatchStructureError(
                    f"the longest row of field {leaf.path or 'batch'} has {row[0]}, and the largest size in pad_to "
                    f"is {leaf.pad.sizes[-1]}. Cut long samples in the data set or the "
                    "collate_fn, or give a larger size."
                )
            row[0] = size
        return tuple(row)

    @staticmethod
    def _padded(tensor: Any, row: tuple[int, ...], fill: float) -> Any:
        if tuple(tensor.shape[1:]) == row:
            return tensor
        if isinstance(tensor, np.ndarray):
            padded = np.full([len(tensor), *row], fill, tensor.dtype)
            padded[tuple(slice(0, size) for size in tensor.shape)] = tensor
            return padded
        out = paddle.full([tensor.shape[0], *row], fill, tensor.dtype)
        if out.place != tensor.place:
            out = out.to(tensor.place)
        out[tuple(slice(0, size) for size in tensor.shape)] = tensor
        return out


def rows_of(batch: Any) -> dict[str, Row]:
    """Return path -> kind and shape of a row, for the leaves that are not placed yet."""
    return {leaf.path: leaf.row for leaf in leaves(batch) if isinstance(leaf, Unplaced)}


def _is_number(value: Any) -> bool:
    if not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _differ(path: str, rows: Mapping[int, Row], why: str = "") -> BatchStructureError:
    shown = "; ".join(
        f"global rank {rank}: {f'{row[0]}{list(row[1:])}' if row else 'it has none'}"
        for rank, row in sorted(rows.items())
    )
    return BatchStructureError(f"the rows of field {path or 'batch'} differ between ranks{why}: {shown}.")


@lru_cache(maxsize=256)
def check_fill(fill: float, dtype: Any, path: str) -> None:
    """Refuse a pad value that tensors of a dtype cannot hold.

    Raises:
        BatchStructureError: The tensors would hold another number.
    """
    kind = str(dtype).rsplit(".", 1)[-1]
    number = float(fill)
    if kind == "bool":
        fits = number in (0.0, 1.0)
    elif kind.startswith(("int", "uint")):
        limits = np.iinfo(kind)
        fits = math.isfinite(number) and number.is_integer() and limits.min <= int(fill) <= limits.max
    else:
        largest = _LARGEST.get(kind, math.inf)
        fits = not math.isfinite(number) or abs(number) <= largest
    if not fits:
        raise BatchStructureError(
            f"pad_to: tensors of dtype {kind}, as field {path or 'batch'} has them, cannot hold {fill!r}. Give a "
            "number that they can hold, or make the field of another dtype in the collate_fn."
        )


_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028235e38, "float64": 1.7976931348623157e308}


def _same(pad: Pad | None, _: Any) -> Pad | None:
    return pad


def _holds_more(value: Any) -> bool:
    """True if a sequence holds fields, and not one string or number per sample."""
    return is_sequence(value) and any(
        isinstance(item, Unplaced | paddle.Tensor | Mapping | list | tuple) for item in value
    )
