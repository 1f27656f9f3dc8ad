"""Place batches: cut the rows that a rank has read, and make distributed tensors of them.

How a batch is placed depends on its structure, dtypes and shapes alone. So the first batch of each form is compiled
into a `BatchRecipe`, which checks it; the batches of that form that follow only apply the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import paddle

from paddle_shard.core.trees import is_sequence, mapped, named_leaves, rebuild
from paddle_shard.core.warn_once import say_once as warn_once
from paddle_shard.errors import BatchStructureError
from paddle_shard.placement.field import (
    Entry,
    FieldLayout,
    from_local,
    layouts_of_fields,
)
from paddle_shard.placement.lengths import Pad, PadTo, Row, Unplaced, check_fill
from paddle_shard.placement.local_tensor import TensorMaker
from paddle_shard.plan.partition import Rows, slice_rows
from paddle_shard.reading.tensors import (
    SPARSE,
    arrays_of,
    as_array,
    becomes_tensor,
    dtype_of,
    is_tensor,
)

_MOST_RECIPES = 256
"""Recipes that are kept; forms of batches may be many, such as those of texts of all lengths."""


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
        self.num_rows = num_rows
        self.apart = apart
        self._micro_size = micro_size
        self._positions: dict[int, Rows] = {}
        if (
            read is None
        ):  # A rank on none of the meshes reads one row, for the dtypes and the other dims.
            mine = [self._rows_of(layout) for layout in layouts if layout.on_mesh]
            read = np.unique(np.concatenate(mine)) if mine else np.zeros(1, np.int64)
        self.read = read

    @property
    def to_read(self) -> Rows | range:
        """The rows that are read; a range if they are consecutive."""
        rows = _as_slice(self.read)
        return range(rows.start, rows.stop) if isinstance(rows, slice) else rows

    def _rows_of(self, layout: FieldLayout) -> Rows:
        return slice_rows(
            self.num_rows, layout.num_data_ranks, layout.data_rank, self._micro_size
        )

    def positions(self, layout: FieldLayout) -> Rows:
        """Return the positions of a field's rows on this rank among the rows that were read."""
        # This is called for each leaf of each batch. The cache is keyed by id(layout), since layouts live as long.
        found = self._positions.get(id(layout))
        if found is None:
            found = self._positions[id(layout)] = np.searchsorted(
                self.read, self._rows_of(layout)
            )
        return found

    def valid(
        self, mask: np.ndarray[Any, Any], layout: FieldLayout, make: TensorMaker
    ) -> Any:
        """Return one bool per row of a field, True if the row is real, placed like the rows.

        Args:
            mask: bool[len(read)], for the rows that were read.
            layout: The layout of the field.
            make: Makes tensors where the batch is.
        """
        mine = (
            mask[self.positions(layout)]
            if layout.on_mesh
            else np.ones(self.num_rows // layout.num_data_ranks, bool)
        )
        return layout.rows_only.distributed(make([mine], True)()[0], "valid")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRecipe:
    """What becomes of one leaf of a batch."""

    number: int
    """Number of the leaf in the batch that was read."""
    layout: FieldLayout
    path: str
    rows: slice | Rows | None = None
    """The rows of the leaf to take; None: all."""
    becomes_tensor: bool = True
    """False if the leaf is no array or tensor that Paddle can hold; then only its rows are taken."""
    is_local: bool = False
    """True if it does not become a distributed tensor."""
    empty_shape: tuple[int, ...] | None = None
    """Shape of this rank's part if the rank is not on the mesh, where only metadata matters."""
    index_rows: BatchRows | None = None
    """If the numbers of the leaf are places of rows ("row index"): the rows of the batch."""
    is_cut_along_dims: bool = False
    """True if the layout splits other dims than the first, too."""
    waits: bool = False
    """True if it is placed once the lengths of all ranks are known (`pad_to`)."""
    pad: Pad | None = None

    def cut(self, leaf: Any) -> Any:
        """Return this rank's part of an array, a tensor or another leaf."""
        if self.rows is not None:
            leaf = _take_rows(leaf, self.rows)
        if self.index_rows is not None:
            leaf = _places_in_global_batch(leaf, self.path, self.index_rows)
        if self.is_cut_along_dims:
            leaf = self.layout.cut(leaf, self.path)
        return leaf

    def place(self, part: Any) -> Any:
        """Return the distributed tensor of what `cut` returned, as a tensor; other leaves stay."""
        if self.is_local:
            return part
        if self.empty_shape is not None:
            part = paddle.empty(self.empty_shape, part.dtype)
        if self.waits:
            return Unplaced(part, self.layout, self.path, self.pad)
        return from_local(part, self.layout.mesh, self.layout.placements)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecipe:
    """How batches of one form are placed."""

    rows: BatchRows
    leaves: tuple[LeafRecipe, ...]
    template: Any
    """The batch that is delivered, with the number of a leaf recipe in place of each leaf."""
    is_flat: bool
    """True if the batch that is delivered is the list of its leaves."""
    last: FieldLayout
    """The layout of its last field."""
    row_shapes: Mapping[str, Row]
    """Path -> kind and shape of a row, of each tensor; with `pad_to`, of each that is `Unplaced`."""
    is_host: bool
    """True if all its leaves are arrays, so that any thread may place it on the CPU."""

    def begin(
        self, leaves: Sequence[Any], owned: bool, maker: TensorMaker
    ) -> Callable[[], Any]:
        """Begin to place a batch, and return a function that returns it placed.

        Args:
            leaves: The leaves of the batch that was read.
            owned: True if nothing else refers to them.
            maker: Makes the tensors.
        """
        owned = owned and len(set(map(id, leaves))) == len(
            leaves
        )  # two tensors must not share one array's memory
        parts = [leaves[recipe.number] for recipe in self.leaves]
        if self.is_host:
            parts = self._cut(parts)
        rest = maker(
            [
                part
                for part, recipe in zip(parts, self.leaves, strict=True)
                if recipe.becomes_tensor
            ],
            owned,
        )
        return partial(self._finish, parts, rest)

    def _cut(self, parts: Sequence[Any]) -> list[Any]:
        return [
            recipe.cut(part) for part, recipe in zip(parts, self.leaves, strict=True)
        ]

    def _finish(
        self, parts: Sequence[Any], make_tensors: Callable[[], list[Any]]
    ) -> Any:
        tensors = iter(make_tensors())
        parts = [
            next(tensors) if recipe.becomes_tensor else part
            for part, recipe in zip(parts, self.leaves, strict=True)
        ]
        if not self.is_host:
            parts = self._cut(parts)
        placed = [
            recipe.place(part) for part, recipe in zip(parts, self.leaves, strict=True)
        ]
        return (
            placed
            if self.is_flat
            else mapped(self.template, lambda number, _: placed[number])
        )


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
    _recipes: dict[Any, BatchRecipe] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _key_orders: dict[frozenset[Any], tuple[Any, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The keys of batches -> their order in the first such batch."""

    @classmethod
    def of(
        cls,
        meshes: Any,
        shard_dims: Any,
        *,
        input_keys: Sequence[Any] | None,
        placements: Any,
        dense_tensor_idx: Sequence[Sequence[int]] | None,
        pad_to: Any,
        global_rank: int,
        replicated_in_name: bool,
    ) -> BatchPlacer:
        """Read the arguments of `shard_dataloader` that say what becomes of fields; see `layouts_of_fields`."""
        entries, overrides = layouts_of_fields(
            meshes,
            shard_dims,
            input_keys,
            placements,
            global_rank,
            replicated_in_name=replicated_in_name,
        )
        return cls(
            entries=entries,
            overrides=overrides,
            input_keys=input_keys,
            dense_tensor_idx=dense_tensor_idx,
            pad_to=PadTo.of(pad_to),
        )

    @property
    def own_layout(self) -> FieldLayout:
        """Layout of the field whose rows this rank reads: the one with most data ranks."""
        local = [layout for layout in self.layouts if layout.on_mesh]
        return max(local or self.layouts, key=lambda layout: layout.num_data_ranks)

    @cached_property
    def layouts(self) -> list[FieldLayout]:
        """Every layout."""
        entries = [*self.entries, *self.overrides.values()]
        return [
            layout
            for entry in entries
            for layout in (entry if isinstance(entry, list) else [entry])
        ]

    def _fields(self, batch: Any) -> list[tuple[Any, Entry, Sequence[int]]]:
        """Return (key or position, layouts, items that stay local) for each field of a batch, in order of the result.

        Args:
            batch: A dict or a list.

        Raises:
            BatchStructureError: The fields do not match the meshes.
        """
        names: Sequence[Any] = range(len(batch))
        if isinstance(batch, Mapping):
            order = self._key_orders.setdefault(
                frozenset(batch), tuple(batch)
            )  # samples of two writers may differ
            names = tuple(order if self.input_keys is None else self.input_keys)
            missing = [key for key in names if key not in batch]
            if missing:
                raise BatchStructureError(
                    f"input_keys {missing} are not in the batch, which has {list(batch)}."
                )
        self._check_names(names)
        entries = self.entries * len(names) if len(self.entries) == 1 else self.entries
        if len(names) != len(entries):
            raise BatchStructureError(
                f"the batch has the {len(names)} fields {list(names)}, but meshes has {len(entries)} entries: give one "
                "mesh per field, or one for all."
            )
        dense = [*(self.dense_tensor_idx or ()), *[()] * len(names)]
        fields = zip(names, entries, dense, strict=False)
        return [
            (key, self.overrides.get(key, entry), items) for key, entry, items in fields
        ]

    def _check_names(self, names: Sequence[Any]) -> None:
        """Refuse arguments that name other fields than those that are delivered."""
        padded = {} if self.pad_to is None else self.pad_to.fields
        for argument, given in (("placements", self.overrides), ("pad_to", padded)):
            unknown = [key for key in given if key not in names]
            if unknown:
                raise BatchStructureError(
                    f"{argument} names {unknown}, but the fields that are delivered are {list(names)} (input_keys "
                    "chooses them, if it is given)."
                )

    def recipe(
        self, batch: Any, rows_of: Callable[[Any], BatchRows], key: Any
    ) -> tuple[BatchRecipe, list[Any]]:
        """Return how a batch is placed, and its leaves.

        Args:
            batch: A batch that was read: arrays, tensors and other leaves.
            rows_of: Returns the rows of the batch.
            key: What the rows depend on beside the form of the batch.

        Raises:
            BatchStructureError: A field does not fit its mesh or cannot be split.
            TypeError: An array has a dtype that Paddle does not have.
        """
        named = named_leaves(batch, "", _leaf_test(batch))
        form = tuple((path, *_form(leaf)) for path, leaf in named)
        recipe = self._recipes.get((form, key))
        if recipe is None:
            recipe = self._compile(
                batch,
                rows_of(batch),
                {path: number for number, (path, _) in enumerate(named)},
            )
            self._warn_about_keys(batch)
            if len(self._recipes) >= _MOST_RECIPES:
                self._recipes.clear()
            self._recipes[form, key] = recipe
        return recipe, [leaf for _, leaf in named]

    def _compile(
        self, batch: Any, rows: BatchRows, numbers: Mapping[str, int]
    ) -> BatchRecipe:
        compiler = _Compiler(rows, self.pad_to, numbers)
        template, last = self._mapped(batch, compiler.leaf)
        return BatchRecipe(
            rows=rows,
            leaves=tuple(compiler.leaves),
            template=template,
            is_flat=type(template) is list and template == list(range(len(template))),
            last=last,
            row_shapes=compiler.row_shapes,
            is_host=not any(is_tensor(leaf) for leaf in arrays_of(batch)),
        )

    def _warn_about_keys(self, batch: Any) -> None:
        if self.input_keys is not None and isinstance(batch, Mapping):
            dropped = [key for key in batch if key not in self.input_keys]
            if dropped:
                warn_once(
                    "input_keys=%s: the keys %s of the batch are left out.",
                    repr(list(self.input_keys)),
                    repr(dropped),
                )

    def num_rows(self, batch: Any) -> int | None:
        """Return the number of rows of a global batch that was read whole; None if no field has rows."""
        sizes: dict[tuple[bool, bool], int] = {}

        def count(leaf: Any, path: str, *, layout: FieldLayout, dense: bool) -> None:
            if becomes_tensor(leaf) and len(leaf.shape) and not layout.own_rows:
                sizes.setdefault((not layout.data_axes, dense), int(leaf.shape[0]))

        self._mapped(batch, count)
        return (
            sizes[min(sizes)] if sizes else None
        )  # of a field that is split, if there is one, and is not local

    def _mapped(
        self, batch: Any, function: Callable[..., Any]
    ) -> tuple[Any, FieldLayout]:
        """Return a batch with a function applied to each leaf, and the layout of the last field.

        Args:
            batch: It is not changed.
            function: A function of (leaf, its path, layout=its layout, dense=whether it stays local).
        """
        is_leaf = _leaf_test(batch)
        layout = self.layouts[0]
        if not isinstance(batch, Mapping) and not is_sequence(batch):
            self._check_names([0])
            stays_local = bool(self.dense_tensor_idx and self.dense_tensor_idx[0])
            return function(batch, "", layout=layout, dense=stays_local), layout
        children: dict[Any, Any] = {}
        for key, entry, dense in self._fields(batch):
            value = batch[key]
            path = f"[{key!r}]"
            layout = entry[-1] if isinstance(entry, list) else entry
            if is_sequence(value) and not is_leaf(value):
                entries = entry if isinstance(entry, list) else [entry] * len(value)
                if len(entries) != len(value):
                    raise BatchStructureError(
                        f"field {path} is a list of {len(value)} items, but its entry in meshes, shard_dims or "
                        f"placements has {len(entries)}."
                    )
                items = []
                for number, (item, item_layout) in enumerate(
                    zip(value, entries, strict=True)
                ):
                    of_leaf = partial(
                        function, layout=item_layout, dense=number in dense
                    )
                    items.append(mapped(item, of_leaf, f"{path}[{number}]", is_leaf))
                children[key] = rebuild(value, items)
            elif isinstance(entry, list):
                raise BatchStructureError(
                    f"field {path} is a {type(value).__name__}, but its entry in meshes or placements is a list of "
                    f"{len(entry)}: give it one, or make it a list of as many items."
                )
            else:
                children[key] = mapped(
                    value,
                    partial(function, layout=entry, dense=len(dense) > 0),
                    path,
                    is_leaf,
                )
        return rebuild(
            batch, children if isinstance(batch, Mapping) else list(children.values())
        ), layout


class _Compiler:
    """Compiles the leaves of a batch into recipes, one by one."""

    def __init__(
        self, rows: BatchRows, pad_to: PadTo | None, numbers: Mapping[str, int]
    ) -> None:
        self._rows = rows
        self._pad_to = pad_to
        self._numbers = numbers
        """Path of a leaf -> its number in the batch that was read."""
        self.leaves: list[LeafRecipe] = []
        self.row_shapes: dict[str, Row] = {}

    def leaf(self, leaf: Any, path: str, *, layout: FieldLayout, dense: bool) -> int:
        """Compile a leaf, and return the number of its recipe."""
        recipe = (
            self._tensor(leaf, path, layout, dense=dense)
            if becomes_tensor(leaf)
            else self._other(leaf, path, layout, dense=dense)
        )
        self.leaves.append(recipe)
        return len(self.leaves) - 1

    def _other(
        self, leaf: Any, path: str, layout: FieldLayout, *, dense: bool
    ) -> LeafRecipe:
        is_number = isinstance(leaf, int | float | np.number) and not isinstance(
            leaf, bool
        )
        if is_number and not dense and layout.num_data_ranks > 1:
            raise BatchStructureError(
                f"field {path or 'batch'} is the number {leaf!r}, made of this rank's rows: each data rank has its own,"
                " and one process has that of the whole batch. Have the collate_fn return one number for each "
                "row, such as their lengths, and add them up; or keep this rank's, by dense_tensor_idx."
            )
        rows = None
        if layout.on_mesh and _is_row_like(leaf) and len(leaf) == len(self._rows.read):
            rows = self._rows_to_take(layout)
        number = self._numbers[path]
        return LeafRecipe(
            number=number,
            layout=layout,
            path=path,
            rows=rows,
            becomes_tensor=False,
            is_local=True,
        )

    def _rows_to_take(self, layout: FieldLayout) -> slice | Rows | None:
        positions = self._rows.positions(layout)
        return None if len(positions) == len(self._rows.read) else _as_slice(positions)

    def _tensor(
        self, leaf: Any, path: str, layout: FieldLayout, *, dense: bool
    ) -> LeafRecipe:
        if not dense or isinstance(leaf, np.ndarray):
            _check_dtype(leaf, path)
        rows = self._rows
        shape = tuple(map(int, leaf.shape))
        has_row_each = shape[:1] == (len(rows.read),)
        is_split = len(layout.data_axes) > 0
        by_rows = is_split and has_row_each and not layout.own_rows
        if is_split and not by_rows:
            _check_own_rows(shape, layout, path, rows, dense=dense)

        # With pad_to, a tensor waits for the lengths of the other ranks.
        pad = None if self._pad_to is None else self._pad_to.pad_of(path)
        waits = self._pad_to is not None and not dense and len(shape) > 0
        dtype = dtype_of(leaf)
        if waits and pad is not None:
            check_fill(pad.value, dtype, path)
        if waits or (self._pad_to is None and not (dense or layout.replicated_in_name)):
            if (
                is_split and not by_rows and layout.num_data_ranks > 1
            ):  # all data ranks must have as many
                dtype += f", {shape[0]} rows of "
            self.row_shapes[path] = [dtype, *shape[1:]]

        empty_shape = None
        if not (dense or layout.on_mesh):
            empty_shape = (
                (rows.num_rows // layout.num_data_ranks, *shape[1:])
                if has_row_each
                else shape
            )
            if not waits:
                empty_shape = layout.cut(np.empty(empty_shape, bool), path).shape
        has_index = (
            layout.row_index
            and layout.on_mesh
            and not (dense or layout.replicated_in_name)
        )
        return LeafRecipe(
            number=self._numbers[path],
            layout=layout,
            path=path,
            rows=self._rows_to_take(layout) if by_rows and layout.on_mesh else None,
            is_local=dense,
            empty_shape=empty_shape,
            index_rows=rows if has_index else None,
            is_cut_along_dims=layout.cuts_dims
            and not (dense or waits or empty_shape is not None),
            waits=waits,
            pad=pad,
        )


def _leaf_test(batch: Any) -> Callable[[Any], bool]:
    """Return whether a list inside a batch is a leaf: one item for each row."""
    return lambda value: value is not batch and _is_row_like(value)


def _form(leaf: Any) -> tuple[Any, ...]:
    """Return what the recipe of a leaf depends on."""
    if isinstance(leaf, list):
        return list, len(leaf)
    return (
        type(leaf),
        tuple(getattr(leaf, "shape", ())),
        getattr(leaf, "dtype", None),
        str(getattr(leaf, "place", "")),
    )


def _as_slice(rows: Rows) -> slice | Rows:
    """Return ascending rows as a slice if they are consecutive."""
    if len(rows) == 0:
        return slice(0, 0)
    first = int(rows[0])
    last = int(rows[-1])
    return slice(first, last + 1) if last - first == len(rows) - 1 else rows


def _take_rows(leaf: Any, rows: slice | Rows) -> Any:
    """Return some rows of an array, a tensor or a list."""
    if isinstance(leaf, np.ndarray):
        return leaf[rows]
    if isinstance(leaf, list):
        return (
            leaf[rows]
            if isinstance(rows, slice)
            else [leaf[row] for row in rows.tolist()]
        )
    if isinstance(rows, slice):
        return leaf[rows]
    # Not `gather`: it lacks dtypes, and its index would be copied to the device, which waits for all that is queued.
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return paddle.concat([leaf[int(run[0]) : int(run[-1]) + 1] for run in runs])


def _places_in_global_batch(leaf: Any, path: str, rows: BatchRows) -> Any:
    """Return a field whose numbers, or those of its first column, are places of samples, with their global places.

    Negative numbers, which are no places, stay.
    """
    array = np.array(as_array(leaf))
    places = array if array.ndim == 1 else array[:, 0]
    most = int(places.max()) if array.size else -1
    if array.ndim > 2 or most >= len(rows.read):
        raise BatchStructureError(
            f"field {path}: placements says 'row index', but it has shape {list(array.shape)} and numbers up to "
            f"{most}, and this rank's batch has {len(rows.read)} rows. Its numbers, or those in its first column, must "
            "be places of rows in the batch that the collate_fn was given."
        )
    is_place = places >= 0
    places[is_place] = rows.read[places[is_place].astype(np.int64)]
    return (
        array
        if isinstance(leaf, np.ndarray)
        else paddle.to_tensor(array, place=leaf.place)
    )


def _check_dtype(array: Any, path: str) -> None:
    """Refuse a sparse tensor, and an array of numbers that Paddle cannot hold.

    Raises:
        TypeError: It is sparse, or Paddle does not have its dtype or its byte order.
    """
    if not isinstance(array, np.ndarray):
        if isinstance(array, paddle.Tensor) and not array.is_dense():
            raise TypeError(f"field {path or 'batch'}: {SPARSE}")
        return
    dtype = array.dtype
    too_large = {"u": 2, "f": 8}.get(dtype.kind, 16) < dtype.itemsize
    if too_large or not dtype.isnative:
        raise TypeError(
            f"field {path or 'batch'}: Paddle has no tensors of dtype {dtype} (byte order {dtype.byteorder!r}): "
            "convert it, for instance with .astype('int64')."
        )


def _check_own_rows(
    shape: Sequence[int],
    layout: FieldLayout,
    path: str,
    rows: BatchRows,
    *,
    dense: bool,
) -> None:
    """Refuse a field whose rows are not the samples, if it would have to be cut or cannot be a distributed tensor."""
    reads_others = layout.on_mesh and len(rows.positions(layout)) < len(rows.read)
    stays_whole = (
        layout.own_rows
        or layout.replicated_in_name
        or rows.apart
        or layout.num_data_ranks == 1
    )
    if not reads_others and (dense or (len(shape) > 0 and stays_whole)):
        return
    raise BatchStructureError(
        f"field {path or 'batch'} has shape {list(shape)} for {len(rows.read)} samples: it cannot be split by rows. A "
        "collate_fn must make one row a sample (have __getitem__ raise instead of returning None, and give "
        "on_error='skip'). What is the same for all samples needs a mesh of its own with shard_dims None. Where each "
        "rank reads its own samples only, as it does if all fields are split alike, it can have what the collate_fn "
        "has made of them: dense_tensor_idx gives it as a local tensor, placements={field: 'as read'} as a "
        "distributed one, of which all data ranks must have as many rows."
    )


def _is_row_like(value: Any) -> bool:
    """True if a leaf other than a tensor may have one item per row, as collated strings have; not a list of numbers."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    if not isinstance(value, list) or not value:
        return False
    has_numbers = any(
        isinstance(item, int | float | complex | np.generic) for item in value
    )
    return not has_numbers and not any(
        becomes_tensor(leaf) for leaf in arrays_of(value)
    )
