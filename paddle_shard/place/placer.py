"""How is a batch that a rank has read cut and placed, field by field?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddle_shard.errors import BatchStructureError
from paddle_shard.place.field import Assignment, FieldLayout
from paddle_shard.place.lengths import PadTo, Unplaced, check_fill
from paddle_shard.plan.partition import Rows, slice_rows
from paddle_shard.tree import is_sequence, leaves, mapped, rebuild


class BatchRows:
    """The rows of one global batch that a rank has read, and the rows that each field takes from them."""

    def __init__(
        self, num_rows: int, micro_size: int | None, layouts: Sequence[FieldLayout], *, whole: bool = False
    ) -> None:
        """Compute the rows.

        Args:
            num_rows: Rows of the global batch.
            micro_size: Rows of each micro-batch; None: the batch is a single micro-batch.
            layouts: Layouts of all fields.
            whole: True if every rank has read the whole global batch.
        """
        self.num_rows = num_rows
        self.apart = False
        """True if each data rank has read only rows of its own, so its batch may hold fields that are not per row."""
        self._micro_size = micro_size
        self._positions: dict[int, Rows] = {}
        mine = [self._rows_of(layout) for layout in layouts if layout.on_mesh]
        self.read: Rows
        if whole:
            self.read = np.arange(num_rows)
        else:  # A rank on none of the meshes reads one row, for the dtypes and the other dims.
            self.read = np.unique(np.concatenate(mine)) if mine else np.zeros(1, np.int64)
        first, last = (int(self.read[0]), int(self.read[-1])) if len(self.read) else (0, -1)
        self.asked: Rows | range = range(first, last + 1) if last - first == len(self.read) - 1 else self.read
        """The rows that are read; a range if they are consecutive."""

    def _rows_of(self, layout: FieldLayout) -> Rows:
        return slice_rows(self.num_rows, layout.num_data_ranks, layout.data_rank, self._micro_size)

    def positions(self, layout: FieldLayout) -> Rows:
        """Return the positions of a field's rows on this rank among the rows that were read."""
        # This is called for each leaf of each batch. The cache is keyed by id(layout), since layouts live as long.
        found = self._positions.get(id(layout))
        if found is None:
            found = self._positions[id(layout)] = np.searchsorted(self.read, self._rows_of(layout))
        return found

    def valid(self, mask: np.ndarray[Any, Any], layout: FieldLayout) -> Any:
        """Return one bool per row of a field, True if the row is real, placed like the rows.

        Args:
            mask: bool[len(read)], for the rows that were read.
            layout: The layout of the field.
        """
        mine = mask[self.positions(layout)] if layout.on_mesh else np.ones(self.num_rows // layout.num_data_ranks, bool)
        return layout.rows_only.distributed(paddle.to_tensor(mine), "valid")


class Placed(NamedTuple):
    """A batch of distributed tensors."""

    batch: Any
    last: FieldLayout
    """The layout of its last field."""
    shapes: tuple[tuple[Any, ...], ...]
    """(dtype, *shape) of each tensor that was delivered, as it was read."""
    apart: tuple[tuple[Any, ...], ...]
    """(field, *shape) of each distributed tensor over several data ranks whose rows are not the samples."""


@dataclass(frozen=True)
class BatchPlacer:
    """Turns the tensors of a batch into distributed tensors; its structure and its other leaves stay as they are."""

    assignment: Assignment
    dense_tensor_idx: Sequence[Sequence[int]] | None
    pad_to: PadTo | None
    """What rows are padded to. If given, tensors stay `Unplaced` until all ranks' lengths are known."""

    def with_keys(self, keys: Sequence[Any] | None) -> BatchPlacer:
        """Return a placer that delivers the fields with these keys."""
        return replace(self, assignment=replace(self.assignment, keys=keys))

    def place(self, batch: Any, rows: BatchRows) -> Placed:
        """Return the batch as distributed tensors.

        Args:
            batch: A batch with the rows `rows.read`.
            rows: The rows of the batch.

        Raises:
            BatchStructureError: A field does not fit its mesh or cannot be split.
        """
        placing = _Placing(rows, self.pad_to)
        placed, last = self._mapped(batch, placing.leaf)
        for path in placing.local - placing.padded:
            raise BatchStructureError(
                f"pad_to names field {path}, but dense_tensor_idx leaves it local, and what is local is "
                "not padded. Leave one of them out; or pad to a fixed length in the collate_fn."
            )
        return Placed(placed, last, tuple(placing.shapes), tuple(placing.apart))

    def num_rows(self, batch: Any) -> int | None:
        """Return the number of rows of a global batch that was read whole; None if no field is split by rows."""
        found: list[int] = []

        def count(leaf: Any, path: str, layout: FieldLayout, dense: bool) -> None:
            rows = not dense and not layout.own_rows and (layout.data_axes or not path)
            if rows and isinstance(leaf, paddle.Tensor) and leaf.shape:
                found.append(int(leaf.shape[0]))

        self._mapped(batch, count)
        return found[0] if found else None

    def _mapped(self, batch: Any, function: Callable[[Any, str, FieldLayout, bool], Any]) -> tuple[Any, FieldLayout]:
        """Return a batch with a function applied to each leaf, and the layout of the last field.

        Args:
            batch: It is not changed.
            function: A function of (leaf, its path, its layout, whether it stays local).
        """
        layout = self.assignment.layouts[0]
        has_fields = is_sequence(batch) or isinstance(batch, Mapping)
        fields = self.assignment.fields(batch) if has_fields else [(0, layout)]
        if self.pad_to is not None:
            self.pad_to.check([key for key, _ in fields])
        if not has_fields:
            return function(batch, "", layout, False), layout

        def value_of(value: Any, path: str, layout: FieldLayout, dense: bool) -> Any:
            return mapped(value, lambda leaf, at: function(leaf, at, layout, dense), path, _is_row_like)

        found: dict[Any, Any] = {}
        for number, (key, entry) in enumerate(fields):
            value, path, dense = batch[key], f"[{key!r}]", self._dense_items(number)
            layout = entry[-1] if isinstance(entry, list) else entry
            if is_sequence(value) and not _is_row_like(value):
                entries = entry if isinstance(entry, list) else [entry] * len(value)
                if len(entries) != len(value):
                    raise BatchStructureError(
                        f"field {path} is a list of {len(value)} items, but its entry in meshes or shard_dims has "
                        f"{len(entries)}."
                    )
                items = enumerate(zip(value, entries, strict=True))
                found[key] = rebuild(value, [value_of(v, f"{path}[{i}]", one, i in dense) for i, (v, one) in items])
            elif isinstance(entry, list) and isinstance(value, paddle.Tensor | Mapping):
                raise BatchStructureError(
                    f"field {path} is a {type(value).__name__}, but its entry in meshes is a list of "
                    f"{len(entry)}: give it one mesh, or make it a list of as many items."
                )
            else:
                found[key] = value_of(value, path, entry[0] if isinstance(entry, list) else entry, len(dense) > 0)
        return rebuild(batch, found if isinstance(batch, Mapping) else list(found.values())), layout

    def _dense_items(self, number: int) -> Sequence[int]:
        if self.dense_tensor_idx is None:
            return ()
        if number >= len(self.dense_tensor_idx):
            raise BatchStructureError(
                f"dense_tensor_idx has {len(self.dense_tensor_idx)} entries, but the batch has a field {number}; "
                "give an entry, which may be empty, for each field."
            )
        return self.dense_tensor_idx[number]


class _Placing:
    """Places the leaves of one batch."""

    __slots__ = ("_pad_to", "_rows", "apart", "local", "padded", "shapes")

    def __init__(self, rows: BatchRows, pad_to: PadTo | None) -> None:
        self._rows, self._pad_to = rows, pad_to
        self.local, self.padded = set[str](), set[str]()
        """Fields that `pad_to` names, and some of whose tensors stay local, or are padded."""
        self.shapes: list[tuple[Any, ...]] = []
        self.apart: list[tuple[Any, ...]] = []

    def leaf(self, value: Any, path: str, layout: FieldLayout, dense: bool) -> Any:
        """Return a leaf of the batch as a distributed tensor, if it is a tensor."""
        rows = self._rows
        if not isinstance(value, paddle.Tensor):
            if layout.on_mesh and _is_row_like(value) and len(value) == len(rows.read):
                positions = rows.positions(layout)
                return value[positions] if isinstance(value, np.ndarray) else [value[p] for p in positions.tolist()]
            return value
        shape, dtype = list(value.shape), value.dtype
        self.shapes.append((dtype, *shape))
        has_row_each = shape[:1] == [len(rows.read)]
        by_rows = len(layout.data_axes) > 0 and not layout.own_rows and has_row_each
        own_rows = False
        if layout.data_axes and not by_rows:
            _check_own_rows(shape, layout, path, rows, dense=dense)
            own_rows = layout.num_data_ranks > 1
        if by_rows and layout.on_mesh:
            value = _take_rows(value, rows.positions(layout))
        pad = None if self._pad_to is None else self._pad_to.pad_of(path)
        if pad is not None:
            (self.local if dense else self.padded).add(pad.path)
        if dense:
            return value
        if not layout.on_mesh:  # no data is here, so only the metadata matters
            first = [rows.num_rows // layout.num_data_ranks] if has_row_each else shape[:1]
            value = paddle.empty([*first, *shape[1:]], dtype)
        if self._pad_to is None or not shape:
            if own_rows:
                self.apart.append((f"field {path or 'batch'}", *shape))
            return layout.distributed(value, path)
        if pad is not None:
            check_fill(pad.value, dtype, path)
        return Unplaced(value, layout, path, own_rows, pad)


def _take_rows(tensor: Any, positions: Rows) -> Any:
    """Return the rows of a tensor at ascending positions; the tensor itself if these are all its rows."""
    if len(positions) == tensor.shape[0]:
        return tensor
    first, last = int(positions[0]), int(positions[-1])
    if last - first == len(positions) - 1:
        return tensor[first : last + 1]
    return paddle.gather(tensor, paddle.to_tensor(positions, place=tensor.place))


def _check_own_rows(shape: list[int], layout: FieldLayout, path: str, rows: BatchRows, *, dense: bool) -> None:
    """Refuse a field whose rows are not the samples, if it would have to be cut or cannot be a distributed tensor."""
    name = f"field {path or 'batch'}"
    if not shape and not dense:
        raise BatchStructureError(
            f"{name} is a 0-d tensor, which has no rows to split over the data axes. "
            "Give it a first dim, or a mesh of its own with shard_dims None (the same on every rank)."
        )
    what = f"{name} has {shape[0]} rows (shape {shape})" if shape else f"{name} is a 0-d tensor"
    what += f" for {len(rows.read)} samples"
    if layout.on_mesh and len(rows.positions(layout)) < len(rows.read):
        raise BatchStructureError(
            f"{what}: this rank has read other samples, too, and it cannot be told which of its rows are whose. Split "
            "all fields alike (shard_dims), so that each rank reads its own samples only, or make one row a sample."
        )
    if dense or layout.own_rows or rows.apart or layout.num_data_ranks == 1:
        return
    raise BatchStructureError(
        f"{what}: it cannot be split by rows. A collate_fn must make one row a sample. What is the same for all "
        "samples needs a mesh of its own with shard_dims None. Where each rank is to have what the collate_fn has made "
        "of its own samples: dense_tensor_idx gives it as a local tensor, placements={field: 'as read'} as a "
        "distributed one, of which all data ranks must have as many rows."
    )


def _is_row_like(value: Any) -> bool:
    """True if a leaf other than a tensor may have one item per row, as collated strings have; not a list of numbers."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    if not isinstance(value, list) or not value or any(isinstance(leaf, paddle.Tensor) for leaf in leaves(value)):
        return False
    return not any(isinstance(item, int | float | complex | np.generic) for item in value)
