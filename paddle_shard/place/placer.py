"""How is a batch that a rank has read cut and placed, field by field?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddle_shard.errors import BatchStructureError
from paddle_shard.place.dtensor import place, place_elsewhere, place_mask, split_sequence, take_rows
from paddle_shard.place.field import Assignment, Entry, FieldLayout
from paddle_shard.place.lengths import PadTo, Unplaced, check_fill
from paddle_shard.plan.partition import Rows
from paddle_shard.tree import is_sequence, leaves, mapped_at, rebuild


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
        mine = [layout.rows(num_rows, micro_size) for layout in layouts if layout.on_mesh]
        self.read: Rows
        if whole:
            self.read = np.arange(num_rows)
        else:  # A rank on none of the meshes reads one row, for the dtypes and the other dims.
            self.read = np.unique(np.concatenate(mine)) if mine else np.zeros(1, np.int64)
        first, last = (int(self.read[0]), int(self.read[-1])) if len(self.read) else (0, -1)
        self.asked: Rows | range = range(first, last + 1) if last - first == len(self.read) - 1 else self.read
        """The rows that are read; a range if they are consecutive."""

    def positions(self, layout: FieldLayout) -> Rows:
        """Return the positions of a field's rows on this rank among the rows that were read."""
        # This is called for each leaf of each batch. The cache is keyed by id(layout), since layouts live as long.
        found = self._positions.get(id(layout))
        if found is None:
            found = np.searchsorted(self.read, layout.rows(self.num_rows, self._micro_size))
            self._positions[id(layout)] = found
        return found

    def cuts(self, layout: FieldLayout) -> bool:
        """True if a field takes only some of the rows that were read."""
        return len(self.positions(layout)) < len(self.read)


class Placed(NamedTuple):
    """A batch of distributed tensors."""

    batch: Any
    last: FieldLayout
    """The layout of its last field."""
    apart: tuple[tuple[Any, ...], ...]
    """(field, *shape) of each distributed tensor over several data ranks whose rows are not the samples."""


class BatchPlacer:
    """Turns the tensors of a batch into distributed tensors; its structure and its other leaves stay as they are."""

    def __init__(self, assignment: Assignment, dense_tensor_idx: Sequence[Sequence[int]] | None) -> None:
        self.assignment = assignment
        self.layouts = list(assignment.layouts())
        self._dense = dense_tensor_idx

    def place(
        self, batch: Any, rows: BatchRows, keys: Sequence[Any] | None = None, pad_to: PadTo | None = None
    ) -> Placed:
        """Return the batch as distributed tensors.

        Args:
            batch: A batch with the rows `rows.read`.
            rows: The rows of the batch.
            keys: The current `input_keys`.
            pad_to: What rows are padded to. If given, tensors stay `Unplaced` until all ranks' lengths are known.

        Raises:
            BatchStructureError: A field does not fit its mesh or cannot be split.
        """
        if _is_tensor(batch) or not (is_sequence(batch) or isinstance(batch, Mapping)):
            if pad_to is not None:
                pad_to.check([0])
            placing = _Placing(rows, pad_to, 0)
            return Placed(placing.leaf(batch, self.layouts[0], "", dense=False), self.layouts[0], tuple(placing.apart))
        fields = self.assignment.fields(batch, keys)
        if pad_to is not None:
            pad_to.check([key for key, _ in fields])
        last = fields[-1][1] if fields else self.layouts[0]
        placed, apart = {}, list[tuple[Any, ...]]()
        for number, (key, entry) in enumerate(fields):
            placing = _Placing(rows, pad_to, key)
            placed[key] = placing.field(batch[key], entry, f"[{key!r}]", self._dense_items(number))
            placing.check_padded(f"[{key!r}]")
            apart += placing.apart
        whole = rebuild(batch, placed if isinstance(batch, Mapping) else list(placed.values()))
        return Placed(whole, last[-1] if isinstance(last, list) else last, tuple(apart))

    @staticmethod
    def valid(mask: np.ndarray[Any, Any], rows: BatchRows, layout: FieldLayout) -> Any:
        """Return one bool per row of a field, True if the row is real, placed like the rows.

        Args:
            mask: bool[len(rows.read)], for the rows that were read.
            rows: The rows of the batch.
            layout: The layout of the field.
        """
        if layout.on_mesh:
            return place_mask(mask[rows.positions(layout)], layout)
        return place_mask(np.ones(rows.num_rows // layout.num_data_ranks, bool), layout)

    def num_rows(self, batch: Any, keys: Sequence[Any] | None = None) -> int | None:
        """Return the number of rows of a global batch that was read whole; None if no field is split by rows."""
        if is_sequence(batch) or isinstance(batch, Mapping):
            for number, (key, entry) in enumerate(self.assignment.fields(batch, keys)):
                layouts = entry if isinstance(entry, list) else [entry]
                own = self._dense_items(number) or any(layout.own_rows for layout in layouts)
                if not own and any(layout.data_axes for layout in layouts):
                    for tensor in tensors(batch[key]):
                        if tensor.shape:
                            return int(tensor.shape[0])
            return None
        found = next((tensor for tensor in tensors(batch) if tensor.shape), None)
        return None if found is None else int(found.shape[0])

    def _dense_items(self, number: int) -> Sequence[int]:
        if self._dense is None:
            return ()
        if number >= len(self._dense):
            raise BatchStructureError(
                f"dense_tensor_idx has {len(self._dense)} entries, but the batch has a field {number}; "
                "give an entry, which may be empty, for each field."
            )
        return self._dense[number]


class _Placing:
    """Places one field of a batch."""

    __slots__ = ("_local", "_pad", "_padded", "_rows", "_waits", "apart")

    def __init__(self, rows: BatchRows, pad_to: PadTo | None, key: Any) -> None:
        self._rows, self._waits = rows, pad_to is not None
        self._pad = None if pad_to is None else pad_to.fields.get(key)
        self._local = self._padded = False
        self.apart: list[tuple[Any, ...]] = []

    def check_padded(self, path: str) -> None:
        """Refuse to pad a field whose tensors all stay local."""
        if self._pad is not None and self._local and not self._padded:
            raise BatchStructureError(
                f"pad_to names field {path}, but dense_tensor_idx leaves it local, and what is local is "
                "not padded. Leave one of them out; or pad to a fixed length in the collate_fn."
            )

    def field(self, value: Any, entry: Entry, path: str, dense: Sequence[int]) -> Any:
        if not is_sequence(value) or _is_row_like(value):
            if isinstance(entry, list):
                if _is_tensor(value) or isinstance(value, Mapping):
                    raise BatchStructureError(
                        f"field {path} is a {type(value).__name__}, but its entry in meshes is a list of "
                        f"{len(entry)}: give it one mesh, or make it a list of as many items."
                    )
                entry = entry[0]
            return self._value(value, entry, path, dense=len(dense) > 0)
        entries = entry if isinstance(entry, list) else [entry] * len(value)
        if len(entries) != len(value):
            raise BatchStructureError(
                f"field {path} is a list of {len(value)} items, but its entry in meshes or shard_dims has "
                f"{len(entries)}."
            )
        items = [
            self._value(item, layout, f"{path}[{i}]", dense=i in dense)
            for i, (item, layout) in enumerate(zip(value, entries, strict=True))
        ]
        return rebuild(value, items)

    def _value(self, value: Any, layout: FieldLayout, path: str, *, dense: bool) -> Any:
        if _is_tensor(value):
            return self.leaf(value, layout, path, dense=dense)
        return mapped_at(value, lambda leaf, at: self.leaf(leaf, layout, at, dense=dense), path, _is_row_like)

    def leaf(self, value: Any, layout: FieldLayout, path: str, *, dense: bool) -> Any:
        rows = self._rows
        if not _is_tensor(value):
            if layout.on_mesh and _is_row_like(value) and len(value) == len(rows.read):
                positions = rows.positions(layout)
                return value[positions] if isinstance(value, np.ndarray) else [value[p] for p in positions.tolist()]
            return value
        by_rows = len(layout.data_axes) > 0
        own_rows = False
        if by_rows and (layout.own_rows or not value.shape or value.shape[0] != len(rows.read)):
            _check_own_rows(value, layout, path, rows, dense=dense)
            by_rows, own_rows = False, layout.num_data_ranks > 1
            if own_rows and not dense and not self._waits:
                self.apart.append((f"field {path or 'batch'}", *value.shape))
        if by_rows and layout.on_mesh:
            value = take_rows(value, rows.positions(layout))
        if dense:
            self._local = True
            return value
        self._padded = True
        elsewhere = None if layout.on_mesh else (len(rows.read), rows.num_rows)
        if self._waits and value.shape:
            if self._pad is not None:
                check_fill(self._pad.value, value.dtype, path)
            return Unplaced(value, layout, path, elsewhere, own_rows, self._pad)
        if elsewhere is not None:
            return place_elsewhere(value, *elsewhere, layout, path)
        return place(split_sequence(value, layout, path), layout)


def _check_own_rows(tensor: Any, layout: FieldLayout, path: str, rows: BatchRows, *, dense: bool) -> None:
    """Refuse a field whose rows are not the samples, if it would have to be cut or cannot be a distributed tensor."""
    name, shape = f"field {path or 'batch'}", list(tensor.shape)
    if not shape and not dense:
        raise BatchStructureError(
            f"{name} is a 0-d tensor, which has no rows to split over the data axes. "
            "Give it a first dim, or a mesh of its own with shard_dims None (the same on every rank)."
        )
    what = f"{name} has {shape[0]} rows (shape {shape})" if shape else f"{name} is a 0-d tensor"
    what += f" for {len(rows.read)} samples"
    if layout.on_mesh and rows.cuts(layout):
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


def _is_tensor(value: Any) -> bool:
    return isinstance(value, paddle.Tensor)


def tensors(value: Any) -> Iterator[Any]:
    """Yield every tensor of a batch."""
    return (leaf for leaf in leaves(value) if _is_tensor(leaf))


def named_tensors(value: Any) -> list[tuple[str, Any]]:
    """Return (path, tensor) of every tensor of a batch."""
    found: list[tuple[str, Any]] = []
    mapped_at(value, lambda leaf, path: found.append((path, leaf)) if _is_tensor(leaf) else None)
    return found


def _is_row_like(value: Any) -> bool:
    """True if a leaf other than a tensor may have one item per row, as collated strings have; not a list of numbers."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    if not isinstance(value, list) or not value or any(True for _ in tensors(value)):
        return False
    return not any(isinstance(item, int | float | complex | np.generic) for item in value)
