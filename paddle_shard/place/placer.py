"""How is a batch that a rank has read cut and placed, field by field?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import paddle

from paddle_shard.errors import BatchStructureError
from paddle_shard.place.field import Entry, FieldLayout, layouts_of_fields
from paddle_shard.place.lengths import PadTo, Row, Unplaced, check_fill, kind_of
from paddle_shard.place.local_tensor import TensorMaker
from paddle_shard.plan.partition import Rows, slice_rows
from paddle_shard.tree import is_sequence, leaves, mapped, named_leaves, rebuild


class BatchRows:
    """The rows of one global batch that a rank has read, and the rows that each field takes from them."""

    def __init__(
        self,
        num_rows: int,
        micro_size: int | None,
        layouts: Sequence[FieldLayout],
        *,
        read: Rows | None = None,
        apart: bool = False,
    ) -> None:
        """Compute the rows.

        Args:
            num_rows: Rows of the global batch.
            micro_size: Rows of each micro-batch; None: the batch is a single micro-batch.
            layouts: Layouts of all fields.
            read: Rows that this rank has read, ascending; None: those that its fields take.
            apart: True if each data rank has read only rows of its own, so its batch may hold fields that are not per
                row.
        """
        self.num_rows, self.apart, self._micro_size = num_rows, apart, micro_size
        self._positions: dict[int, Rows] = {}
        if read is None:  # A rank on none of the meshes reads one row, for the dtypes and the other dims.
            mine = [self._rows_of(layout) for layout in layouts if layout.on_mesh]
            read = np.unique(np.concatenate(mine)) if mine else np.zeros(1, np.int64)
        self.read = read
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

    def valid(self, mask: np.ndarray[Any, Any], layout: FieldLayout, make: TensorMaker) -> Any:
        """Return one bool per row of a field, True if the row is real, placed like the rows.

        Args:
            mask: bool[len(read)], for the rows that were read.
            layout: The layout of the field.
            make: Makes tensors where the batch is.
        """
        mine = mask[self.positions(layout)] if layout.on_mesh else np.ones(self.num_rows // layout.num_data_ranks, bool)
        return layout.rows_only.distributed(make([mine], True)()[0], "valid")


SAMPLES_LEFT_OUT = (
    "If it leaves samples out, such as None: have __getitem__ raise instead of returning None, and give "
    "on_error='skip', by which their rows are marked in `valid`."
)


class Placed:
    """What is known of a batch of distributed tensors, whose leaves it places one by one."""

    __slots__ = ("_pad_to", "last", "local", "num_bytes", "num_rows", "padded", "row_shapes", "rows")

    last: FieldLayout
    """The layout of its last field."""

    def __init__(self, rows: BatchRows, pad_to: PadTo | None) -> None:
        self.rows, self._pad_to = rows, pad_to
        self.local, self.padded = set[str](), set[str]()
        """Fields that `pad_to` names, and some of whose tensors stay local, or are padded."""
        self.row_shapes: dict[str, Row] = {}
        """Path -> kind and shape of a row, of each tensor; with `pad_to`, of each that is `Unplaced`."""
        self.num_rows = set[int]()
        """Numbers of rows that its fields have, but for those that need not have one for each sample."""
        self.num_bytes = 0
        """Size in bytes of what was read of the fields."""

    def leaf(self, value: Any, path: str, *, layout: FieldLayout, dense: bool) -> Any:
        """Return a leaf of the batch as a distributed tensor, if it is a tensor."""
        rows = self.rows
        if not isinstance(value, paddle.Tensor):
            if layout.on_mesh and _is_row_like(value) and len(value) == len(rows.read):
                positions = rows.positions(layout)
                return value[positions] if isinstance(value, np.ndarray) else [value[p] for p in positions.tolist()]
            return value
        shape, dtype = list(value.shape), value.dtype
        self.num_bytes += math.prod(shape) * value.element_size()
        if not (dense or layout.own_rows):
            self.num_rows.update(shape[:1])
        has_row_each = shape[:1] == [len(rows.read)]
        by_rows = len(layout.data_axes) > 0 and not layout.own_rows and has_row_each
        own_rows = len(layout.data_axes) > 0 and not by_rows
        if own_rows:
            _check_own_rows(shape, layout, path, rows, dense=dense)
        if by_rows and layout.on_mesh:
            value = _take_rows(value, rows.positions(layout))
        if layout.row_index and layout.on_mesh and not (dense or layout.replicated_in_name):
            value = _places_in_global_batch(value, path, rows)
        pad = None if self._pad_to is None else self._pad_to.pad_of(path)
        if pad is not None:
            (self.local if dense else self.padded).add(pad.path)
        waits = self._pad_to is not None and not dense and len(shape) > 0
        if waits or (self._pad_to is None and not (dense or layout.replicated_in_name)):
            kind = kind_of(dtype)
            if own_rows and layout.num_data_ranks > 1:  # of these, all data ranks must have as many
                kind += f", {shape[0]} rows of "
            self.row_shapes[path] = [kind, *shape[1:]]
        if dense:
            return value
        if not layout.on_mesh:  # no data is here, so only the metadata matters
            first = [rows.num_rows // layout.num_data_ranks] if has_row_each else shape[:1]
            value = paddle.empty([*first, *shape[1:]], dtype)
        if not waits:
            return layout.distributed(value, path)
        if pad is not None:
            check_fill(pad.value, dtype, path)
        return Unplaced(value, layout, path, pad)


@dataclass(frozen=True, kw_only=True)
class BatchPlacer:
    """Turns the tensors of a batch into distributed tensors; its structure and its other leaves stay as they are."""

    entries: list[Entry]
    """One entry for each given mesh; a single entry is used for every field."""
    overrides: Mapping[Any, Entry]
    """Layouts of single fields, by key or position."""
    input_keys: Sequence[Any] | None
    """The keys that the entries belong to, if the batch is a dict. None: all that it has."""
    dense_tensor_idx: Sequence[Sequence[int]] | None
    pad_to: PadTo | None
    """What rows are padded to. If given, tensors stay `Unplaced` until all ranks' lengths are known."""

    @classmethod
    def of(cls, options: Any, global_rank: int, **others: bool) -> BatchPlacer:
        """Read the arguments of `shard_dataloader` that say what becomes of fields; see `layouts_of_fields`."""
        entries, overrides = layouts_of_fields(options, global_rank, **others)
        given = {"input_keys": options.input_keys, "dense_tensor_idx": options.dense_tensor_idx}
        return cls(entries=entries, overrides=overrides, **given, pad_to=PadTo.of(options.pad_to))

    @cached_property
    def layouts(self) -> list[FieldLayout]:
        """Every layout."""
        entries = [*self.entries, *self.overrides.values()]
        return [layout for entry in entries for layout in (entry if isinstance(entry, list) else [entry])]

    def _fields(self, batch: Any) -> list[tuple[Any, Entry, Sequence[int]]]:
        """Return (key or position, layouts, items that stay local) for each field of a batch, in order of the result.

        Args:
            batch: A dict or a list.

        Raises:
            BatchStructureError: The fields do not match the meshes.
        """
        wanted: Sequence[Any] = range(len(batch))
        what, kind = f"is a list of {len(batch)} fields", "field"
        if isinstance(batch, Mapping):
            wanted = tuple(batch if self.input_keys is None else self.input_keys)
            missing = [key for key in wanted if key not in batch]
            if missing:
                raise BatchStructureError(f"input_keys {missing} are not in the batch, which has {list(batch)}.")
            what, kind = f"has {len(wanted)} keys {list(wanted)}", "key"
        entries = self.entries * len(wanted) if len(self.entries) == 1 else self.entries
        if len(wanted) != len(entries):
            raise BatchStructureError(
                f"the batch {what}, but meshes has {len(entries)} entries: give one mesh per {kind}, or one for all."
            )
        unknown = [key for key in self.overrides if key not in wanted]
        if unknown:
            raise BatchStructureError(
                f"placements names {unknown}, which the batch does not have, or input_keys leaves out; there are "
                f"{list(wanted)}."
            )
        dense = [()] * len(wanted) if self.dense_tensor_idx is None else self.dense_tensor_idx
        if len(dense) < len(wanted):
            raise BatchStructureError(
                f"dense_tensor_idx has {len(dense)} entries, but the batch has a field {len(dense)}; "
                "give an entry, which may be empty, for each field."
            )
        found = zip(wanted, entries, dense, strict=False)  # there may be more entries in dense_tensor_idx
        return [(key, self.overrides.get(key, entry), items) for key, entry, items in found]

    def place(self, batch: Any, rows: BatchRows) -> tuple[Any, Placed]:
        """Return the batch as distributed tensors, and what is known of it.

        Args:
            batch: A batch with the rows `rows.read`.
            rows: The rows of the batch.

        Raises:
            BatchStructureError: A field does not fit its mesh or cannot be split.
        """
        placed = Placed(rows, self.pad_to)
        value, placed.last = self._mapped(batch, placed.leaf, len(rows.read))
        for path in placed.local - placed.padded:
            raise BatchStructureError(
                f"pad_to names field {path}, but dense_tensor_idx leaves it local, and what is local is "
                "not padded. Leave one of them out; or pad to a fixed length in the collate_fn."
            )
        return value, placed

    def num_rows(self, batch: Any) -> int | None:
        """Return the number of rows of a global batch that was read whole; None if no field has rows."""
        found: dict[tuple[bool, bool], int] = {}

        def count(leaf: Any, path: str, *, layout: FieldLayout, dense: bool) -> None:
            if isinstance(leaf, paddle.Tensor) and leaf.shape and not layout.own_rows:
                found.setdefault((not layout.data_axes, dense), int(leaf.shape[0]))

        self._mapped(batch, count)
        return found[min(found)] if found else None  # of a field that is split, if there is one, and is not local

    def _mapped(self, batch: Any, function: Callable[..., Any], num_read: int | None = None) -> tuple[Any, FieldLayout]:
        """Return a batch with a function applied to each leaf, and the layout of the last field.

        Args:
            batch: It is not changed.
            function: A function of (leaf, its path, layout=its layout, dense=whether it stays local).
            num_read: Number of its rows, by which a list that has one item for each sample is known.
        """
        layout = self.layouts[0]
        has_fields = not isinstance(batch, paddle.Tensor) and (isinstance(batch, Mapping) or is_sequence(batch))
        fields = self._fields(batch) if has_fields else [(0, layout, ())]
        if self.pad_to is not None:
            self.pad_to.check([key for key, *_ in fields])
        if not has_fields:
            stays_local = bool(self.dense_tensor_idx and self.dense_tensor_idx[0])
            return function(batch, "", layout=layout, dense=stays_local), layout
        found: dict[Any, Any] = {}
        for key, entry, dense in fields:
            value, path = batch[key], f"[{key!r}]"
            layout = entry[-1] if isinstance(entry, list) else entry
            if isinstance(entry, FieldLayout) and entry.row_index:
                _check_one_index(value, path)
            if is_sequence(value) and not _is_row_like(value):
                entries = entry if isinstance(entry, list) else [entry] * len(value)
                if len(entries) != len(value):
                    raise BatchStructureError(
                        f"field {path} is a list of {len(value)} items, but its entry in meshes, shard_dims or "
                        f"placements has {len(entries)}."
                    )
                if num_read == len(value) > 1 and not dense:
                    _check_of_fields(value, path, entries)
                items = []
                for number, (item, one) in enumerate(zip(value, entries, strict=True)):
                    of_leaf = partial(function, layout=one, dense=number in dense)
                    items.append(mapped(item, of_leaf, f"{path}[{number}]", _is_row_like))
                found[key] = rebuild(value, items)
            elif isinstance(entry, list) and isinstance(value, paddle.Tensor | Mapping):
                raise BatchStructureError(
                    f"field {path} is a {type(value).__name__}, but its entry in meshes or placements is a list of "
                    f"{len(entry)}: give it one, or make it a list of as many items."
                )
            else:
                one = entry[0] if isinstance(entry, list) else entry
                found[key] = mapped(value, partial(function, layout=one, dense=len(dense) > 0), path, _is_row_like)
        return rebuild(batch, found if isinstance(batch, Mapping) else list(found.values())), layout


def _check_of_fields(value: Any, path: str, entries: Sequence[FieldLayout]) -> None:
    """Refuse a list of dicts with tensors of which each may be one sample's, if rows have to be cut."""
    cut = any(one.num_data_ranks > 1 and not (one.own_rows or one.replicated_in_name) for one in entries)
    if cut and type(value) is list and all(isinstance(item, Mapping) for item in value):
        raise BatchStructureError(
            f"field {path} is a list of {len(value)} dicts with tensors, for {len(value)} samples: is each of one "
            "sample, or has each a row for all samples? What is of one sample stays local with dense_tensor_idx, or "
            "stays a list of one item a sample without arrays and tensors in it; dicts of fields go into a tuple."
        )


def _check_one_index(value: Any, path: str) -> None:
    """Refuse a field of several tensors as "row index": numbers of the others would be taken for places, too."""
    held = named_leaves(value, path, _is_row_like)
    if len(held) > 1:
        raise BatchStructureError(
            f"field {path}: placements says 'row index' of {len(held)} tensors: {', '.join(at for at, _ in held)}. "
            "Make it a list, and say which item is meant, such as placements={field: [None, 'row index']}."
        )


def _take_rows(tensor: Any, positions: Rows) -> Any:
    """Return the rows of a tensor at ascending positions; the tensor itself if these are all its rows."""
    if len(positions) == tensor.shape[0]:
        return tensor
    first, last = int(positions[0]), int(positions[-1])
    if last - first == len(positions) - 1:
        return tensor[first : last + 1]
    # Not `gather`: it lacks dtypes, and its index would be copied to the device, which waits for all that is queued.
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return paddle.concat([tensor[int(run[0]) : int(run[-1]) + 1] for run in runs])


def _places_in_global_batch(tensor: Any, path: str, rows: BatchRows) -> Any:
    """Return a field whose numbers, or those of its first column, are places of samples, with their global places.

    Negative numbers, which are no places, stay.
    """
    places = tensor if tensor.ndim == 1 else tensor[:, 0]
    most = -1
    if tensor.place.is_cpu_place() and tensor.size:  # a device would be waited for
        most = int(places.max())
    if tensor.ndim > 2 or most >= len(rows.read):
        raise BatchStructureError(
            f"field {path}: placements says 'row index', but it has shape {list(tensor.shape)} and numbers up to "
            f"{most}, and this rank's batch has {len(rows.read)} rows. Its numbers, or those in its first column, must "
            "be places of rows in the batch that the collate_fn was given."
        )
    known = paddle.to_tensor(rows.read, place=tensor.place)
    found = paddle.where(places < 0, places, known[places.astype("int64").clip(min=0)].astype(tensor.dtype))
    return found if tensor.ndim == 1 else paddle.concat([found.unsqueeze(1), tensor[:, 1:]], axis=1)


def counts_anew(tensor: Any, num_rows: int) -> bool:
    """Return whether a field's numbers, or those of its first column, count the rows of this rank's batch from 0."""
    if num_rows < 2 or tensor.ndim == 0 or tensor.ndim > 2 or not tensor.size:
        return False
    places: np.ndarray[Any, Any] = (tensor if tensor.ndim == 1 else tensor[:, 0]).numpy()
    known = places[places >= 0]
    ascending = places.dtype.kind in "iuf" and bool((known[1:] >= known[:-1]).all())
    return ascending and np.array_equal(np.unique(known), np.arange(num_rows))


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
    if dense or layout.own_rows or layout.replicated_in_name or rows.apart or layout.num_data_ranks == 1:
        return
    left_out = f" {SAMPLES_LEFT_OUT}" if shape[:1] and shape[0] < len(rows.read) else ""
    raise BatchStructureError(
        f"{what}: it cannot be split by rows. A collate_fn must make one row a sample.{left_out} What is the same for "
        "all samples needs a mesh of its own with shard_dims None. Where each rank is to have what the collate_fn has "
        "made of its own samples: dense_tensor_idx gives it as a local tensor, placements={field: 'as read'} as a "
        "distributed one, of which all data ranks must have as many rows."
    )


def _is_row_like(value: Any) -> bool:
    """True if a leaf other than a tensor may have one item per row, as collated strings have; not a list of numbers."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    if not isinstance(value, list) or not value or any(isinstance(leaf, paddle.Tensor) for leaf in leaves(value)):
        return False
    return not any(isinstance(item, int | float | complex | np.generic) for item in value)
