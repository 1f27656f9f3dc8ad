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

from paddle_shard.errors import BatchStructureError
from paddle_shard.place.field import Entry, FieldLayout, from_local, layouts_of_fields
from paddle_shard.place.lengths import Pad, PadTo, Row, Unplaced, check_fill, kind_of
from paddle_shard.place.local_tensor import TensorMaker
from paddle_shard.plan.partition import Rows, slice_rows
from paddle_shard.reading.tensors import arrays_of, becomes_tensor, is_tensor
from paddle_shard.say_once import say_once as warn_once
from paddle_shard.tree import is_sequence, mapped, named_leaves, rebuild

_MOST_RECIPES = 256
"""Recipes that are kept; forms of batches may be many, such as those of texts of all lengths."""
_PLAIN_LEAVES = (np.ndarray, paddle.Tensor)


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
    """True if it stays a local tensor."""
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
        """Return this rank's part of an array, or of a leaf that does not become a tensor."""
        if self.rows is not None:
            leaf = _take_rows(leaf, self.rows)
        if self.index_rows is not None:
            leaf = _places_in_global_batch(leaf, self.path, self.index_rows)
        if self.is_cut_along_dims:
            leaf = self.layout.cut_array(leaf, self.path)
        return leaf

    def place(self, tensor: Any) -> Any:
        """Return the distributed tensor of what `cut` returned, as a tensor."""
        if self.is_local:
            return tensor
        if self.waits or self.empty_shape is not None:
            return self._wait_or_describe(tensor)
        return from_local(tensor, self.layout.mesh, self.layout.placements)

    def place_tensor(self, tensor: Any) -> Any:
        """Return the distributed tensor of a tensor that was read."""
        if self.rows is not None:
            tensor = _take_rows(tensor, self.rows)
        if self.index_rows is not None:
            places = _places_in_global_batch(tensor.numpy(), self.path, self.index_rows)
            tensor = paddle.to_tensor(places, place=tensor.place)
        if self.is_local:
            return tensor
        if self.waits or self.empty_shape is not None:
            return self._wait_or_describe(tensor)
        return self.layout.distributed(tensor, self.path)

    def _wait_or_describe(self, tensor: Any) -> Any:
        if self.empty_shape is not None:
            tensor = paddle.empty(self.empty_shape, tensor.dtype)
        if self.waits:
            return Unplaced(tensor, self.layout, self.path, self.pad)
        return self.layout.distributed(tensor, self.path)


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
    num_rows: frozenset[int]
    """Numbers of rows that its fields have, but for those that need not have one for each sample."""
    num_bytes: int
    """Size in bytes of what was read of the fields."""
    is_host: bool
    """True if all its leaves are arrays, so that any thread may place it on the CPU."""

    def begin(self, leaves: Sequence[Any], owned: bool, maker: TensorMaker) -> Callable[[], Any]:
        """Begin to place a batch, and return a function that returns it placed.

        Args:
            leaves: The leaves of the batch that was read.
            owned: True if nothing else refers to them.
            maker: Makes the tensors.
        """
        recipes = self.leaves
        if not self.is_host:
            rest = maker([leaves[recipe.number] for recipe in recipes if recipe.becomes_tensor], owned)
            return lambda: self._finish(
                [None if recipe.becomes_tensor else recipe.cut(leaves[recipe.number]) for recipe in recipes],
                rest(),
                LeafRecipe.place_tensor,
            )
        owned = owned and len(set(map(id, leaves))) == len(leaves)  # two tensors must not share one array's memory
        pieces = [recipe.cut(leaves[recipe.number]) for recipe in recipes]
        rest = maker([piece for piece, recipe in zip(pieces, recipes, strict=True) if recipe.becomes_tensor], owned)
        return lambda: self._finish(pieces, rest(), LeafRecipe.place)

    def _finish(self, pieces: list[Any], tensors: Sequence[Any], place: Callable[[LeafRecipe, Any], Any]) -> Any:
        """Return the placed batch, given what becomes no tensor, and the tensors of the others."""
        following = iter(tensors)
        for number, recipe in enumerate(self.leaves):
            if recipe.becomes_tensor:
                pieces[number] = place(recipe, next(following))
        return pieces if self.is_flat else mapped(self.template, lambda number, _: pieces[number])


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
    _recipes: dict[Any, BatchRecipe] = field(default_factory=dict, init=False, repr=False, compare=False)

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

    def recipe(self, batch: Any, rows_of: Callable[[Any], BatchRows], key: Any) -> tuple[BatchRecipe, list[Any]]:
        """Return how a batch is placed, and its leaves.

        Args:
            batch: A batch that was read: arrays, tensors and other leaves.
            rows_of: Returns the rows of the batch.
            key: What the rows depend on beside the form of the batch.

        Raises:
            BatchStructureError: A field does not fit its mesh or cannot be split.
            TypeError: An array has a dtype that Paddle does not have.
        """
        leaves: list[Any] = []
        form = _form(batch, leaves, is_batch=True)
        found = None if form is None else self._recipes.get((form, key))
        if found is None:
            leaves = [leaf for _, leaf in named_leaves(batch, "", _leaf_test(batch))]
            found = self._compile(batch, rows_of(batch))
            self._warn_about_keys(batch)
            if len(self._recipes) >= _MOST_RECIPES:
                self._recipes.clear()
            if form is not None:
                self._recipes[form, key] = found
        return found, leaves

    def _compile(self, batch: Any, rows: BatchRows) -> BatchRecipe:
        found = _Compiler(rows, self.pad_to)
        numbered = mapped(batch, lambda leaf, _: found.numbered(leaf), "", _leaf_test(batch))
        template, last = self._mapped(numbered, found.leaf, len(rows.read))
        for path in found.local - found.padded:
            raise BatchStructureError(
                f"pad_to names field {path}, but dense_tensor_idx leaves it local, and what is local is "
                "not padded. Leave one of them out; or pad to a fixed length in the collate_fn."
            )
        return BatchRecipe(
            rows=rows,
            leaves=tuple(found.leaves),
            template=template,
            is_flat=type(template) is list and template == list(range(len(template))),
            last=last,
            row_shapes=found.row_shapes,
            num_rows=frozenset(found.num_rows),
            num_bytes=found.num_bytes,
            is_host=not any(is_tensor(leaf) for leaf in arrays_of(batch)),
        )

    def _warn_about_keys(self, batch: Any) -> None:
        if self.input_keys is None:
            return
        if not isinstance(batch, Mapping):
            warn_once(
                "input_keys=%s chooses among the keys of dicts; of this batch, all fields are delivered.",
                repr(list(self.input_keys)),
            )
        elif left_out := [key for key in batch if key not in self.input_keys]:
            warn_once(
                "input_keys=%s: the keys %s of the batch are left out.", repr(list(self.input_keys)), repr(left_out)
            )

    def num_rows(self, batch: Any) -> int | None:
        """Return the number of rows of a global batch that was read whole; None if no field has rows."""
        found: dict[tuple[bool, bool], int] = {}

        def count(leaf: Any, path: str, *, layout: FieldLayout, dense: bool) -> None:
            if isinstance(leaf, _Leaf) and leaf.shape and not layout.own_rows:
                found.setdefault((not layout.data_axes, dense), leaf.shape[0])

        compiler = _Compiler(None, None)
        self._mapped(mapped(batch, lambda leaf, _: compiler.numbered(leaf), "", _leaf_test(batch)), count)
        return found[min(found)] if found else None  # of a field that is split, if there is one, and is not local

    def _mapped(self, batch: Any, function: Callable[..., Any], num_read: int | None = None) -> tuple[Any, FieldLayout]:
        """Return a batch with a function applied to each leaf, and the layout of the last field.

        Args:
            batch: It is not changed.
            function: A function of (leaf, its path, layout=its layout, dense=whether it stays local).
            num_read: Number of its rows, by which a list that has one item for each sample is known.
        """
        layout = self.layouts[0]
        has_fields = not isinstance(batch, _Leaf) and (isinstance(batch, Mapping) or is_sequence(batch))
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
            if is_sequence(value):
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
                    items.append(mapped(item, of_leaf, f"{path}[{number}]"))
                found[key] = rebuild(value, items)
            elif isinstance(entry, list) and isinstance(value, _Leaf | Mapping):
                raise BatchStructureError(
                    f"field {path} is a {type(value).__name__}, but its entry in meshes or placements is a list of "
                    f"{len(entry)}: give it one, or make it a list of as many items."
                )
            else:
                one = entry[0] if isinstance(entry, list) else entry
                found[key] = mapped(value, partial(function, layout=one, dense=len(dense) > 0), path)
        return rebuild(batch, found if isinstance(batch, Mapping) else list(found.values())), layout


class _Leaf:
    """A leaf of a batch, with its number."""

    __slots__ = ("is_tensor", "number", "shape", "value")

    def __init__(self, value: Any, number: int) -> None:
        self.value = value
        self.number = number
        self.is_tensor = becomes_tensor(value)
        self.shape = tuple(map(int, value.shape)) if self.is_tensor else ()


class _Compiler:
    """Compiles the leaves of a batch into recipes, one by one."""

    def __init__(self, rows: Any, pad_to: PadTo | None) -> None:
        self._rows: BatchRows = rows
        self._pad_to = pad_to
        self._num_leaves = 0
        self.leaves: list[LeafRecipe] = []
        self.local: set[str] = set()
        """Fields that `pad_to` names, and some of whose tensors stay local."""
        self.padded: set[str] = set()
        self.row_shapes: dict[str, Row] = {}
        self.num_rows: set[int] = set()
        self.num_bytes = 0

    def numbered(self, value: Any) -> _Leaf:
        """Return a leaf with the next number."""
        self._num_leaves += 1
        return _Leaf(value, self._num_leaves - 1)

    def leaf(self, leaf: _Leaf, path: str, *, layout: FieldLayout, dense: bool) -> int:
        """Compile a leaf, and return the number of its recipe."""
        compiled = self._tensor(leaf, path, layout, dense=dense) if leaf.is_tensor else self._other(leaf, path, layout)
        self.leaves.append(compiled)
        return len(self.leaves) - 1

    def _other(self, leaf: _Leaf, path: str, layout: FieldLayout) -> LeafRecipe:
        rows = self._rows
        taken = None
        if layout.on_mesh and _is_row_like(leaf.value) and len(leaf.value) == len(rows.read):
            taken = _slice_of(rows.positions(layout), len(rows.read))
        return LeafRecipe(number=leaf.number, layout=layout, path=path, rows=taken, becomes_tensor=False)

    def _tensor(self, leaf: _Leaf, path: str, layout: FieldLayout, *, dense: bool) -> LeafRecipe:
        _check_dtype(leaf.value, path)
        rows, shape = self._rows, list(leaf.shape)
        self.num_bytes += int(np.prod(shape, dtype=np.int64)) * _item_size(leaf.value)
        if not (dense or layout.own_rows):
            self.num_rows.update(shape[:1])
        has_row_each = shape[:1] == [len(rows.read)]
        is_split = len(layout.data_axes) > 0
        by_rows = is_split and has_row_each and not layout.own_rows
        if is_split and not by_rows:
            _check_own_rows(shape, layout, path, rows, dense=dense)
        taken = _slice_of(rows.positions(layout), len(rows.read)) if by_rows and layout.on_mesh else None

        # With pad_to, a tensor waits for the lengths of the other ranks.
        pad = None if self._pad_to is None else self._pad_to.pad_of(path)
        if pad is not None:
            (self.local if dense else self.padded).add(pad.path)
        waits = self._pad_to is not None and not dense and len(shape) > 0
        dtype = _paddle_dtype(leaf.value)
        if waits and pad is not None:
            check_fill(pad.value, dtype, path)
        if waits or (self._pad_to is None and not (dense or layout.replicated_in_name)):
            kind = kind_of(dtype)
            if is_split and not by_rows and layout.num_data_ranks > 1:  # all data ranks must have as many
                kind += f", {shape[0]} rows of "
            self.row_shapes[path] = [kind, *shape[1:]]
        empty_shape = None
        if not (dense or layout.on_mesh):
            first = [rows.num_rows // layout.num_data_ranks] if has_row_each else shape[:1]
            empty_shape = (*first, *shape[1:])
        has_index = layout.row_index and layout.on_mesh and not (dense or layout.replicated_in_name)
        return LeafRecipe(
            number=leaf.number,
            layout=layout,
            path=path,
            rows=taken,
            is_local=dense,
            empty_shape=empty_shape,
            index_rows=rows if has_index else None,
            is_cut_along_dims=layout.cuts_dims and not (dense or waits or empty_shape is not None),
            waits=waits,
            pad=pad,
        )


def _leaf_test(batch: Any) -> Callable[[Any], bool]:
    """Return whether a list inside a batch is a leaf: one item for each row."""
    return lambda value: value is not batch and _is_row_like(value)


def _form(value: Any, leaves: list[Any], *, is_batch: bool = False) -> Any:
    """Return what the recipe of a batch depends on, and append its leaves; None if a container is of another type.

    Containers of other types may have attributes of their own, which differ from batch to batch.
    """
    kind = type(value)
    if kind is np.ndarray:
        leaves.append(value)
        return value.dtype, value.shape
    if isinstance(value, paddle.Tensor):
        leaves.append(value)
        return str(value.dtype), tuple(value.shape), str(value.place)
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_make")):
        if kind is list and not is_batch and _is_row_like(value):
            leaves.append(value)
            return "rows", len(value)
        forms = [_form(child, leaves) for child in value]
        return None if None in forms else (kind, *forms)
    if kind is dict:
        forms = [_form(child, leaves) for child in value.values()]
        return None if None in forms else (kind, tuple(value), *forms)
    if isinstance(value, Mapping) or is_sequence(value):
        return None
    leaves.append(value)
    shape = tuple(value.shape) if hasattr(value, "shape") else None
    return kind, shape, str(getattr(value, "dtype", ""))


def _slice_of(positions: Rows, num_rows: int) -> slice | Rows | None:
    """Return ascending positions as a slice if they are consecutive; None if they are all rows."""
    if len(positions) == num_rows:
        return None
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first == len(positions) - 1 else positions


def _take_rows(leaf: Any, rows: slice | Rows) -> Any:
    """Return some rows of an array, a tensor or a list."""
    if isinstance(leaf, np.ndarray):
        return leaf[rows]
    if isinstance(leaf, list):
        return leaf[rows] if isinstance(rows, slice) else [leaf[row] for row in rows.tolist()]
    if isinstance(rows, slice):
        return leaf[rows]
    # Not `gather`: it lacks dtypes, and its index would be copied to the device, which waits for all that is queued.
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return paddle.concat([leaf[int(run[0]) : int(run[-1]) + 1] for run in runs])


def _item_size(leaf: Any) -> int:
    return int(leaf.itemsize) if isinstance(leaf, np.ndarray) else int(getattr(leaf, "element_size", lambda: 1)())


def _paddle_dtype(leaf: Any) -> str:
    """Return the name of the dtype that a leaf has as a tensor of Paddle: arrays of uint16 are Paddle's bfloat16."""
    name = kind_of(leaf.dtype)
    return "bfloat16" if name == "uint16" else name


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
    held = named_leaves(value, path)
    if len(held) > 1:
        raise BatchStructureError(
            f"field {path}: placements says 'row index' of {len(held)} tensors: {', '.join(at for at, _ in held)}. "
            "Make it a list, and say which item is meant, such as placements={field: [None, 'row index']}."
        )


def _places_in_global_batch(leaf: Any, path: str, rows: BatchRows) -> np.ndarray[Any, Any]:
    """Return a field whose numbers, or those of its first column, are places of samples, with their global places.

    Negative numbers, which are no places, stay.
    """
    array = np.array(leaf if isinstance(leaf, np.ndarray) else leaf.numpy())
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
    return array


def _check_dtype(array: Any, path: str) -> None:
    """Refuse an array of numbers that Paddle cannot hold; a tensor is fine.

    Raises:
        TypeError: Paddle does not have its dtype or its byte order.
    """
    if not isinstance(array, np.ndarray):
        return
    kind, size = array.dtype.kind, array.dtype.itemsize
    at = f" at field {path}" if path else ""
    if (kind == "u" and size > 2) or (kind == "f" and size > 8) or size > 16:
        raise TypeError(
            f"Paddle has no tensors of dtype {array.dtype}{at}; convert it, for instance with .astype('int64')."
        )
    if not array.dtype.isnative:
        raise TypeError(
            f"array of dtype {array.dtype!r}{at} is in another byte order than this machine's; convert it with "
            f".astype({array.dtype.name!r})."
        )


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
    if not isinstance(value, list) or not value:
        return False
    if isinstance(value[0], _PLAIN_LEAVES) or any(becomes_tensor(leaf) for leaf in arrays_of(value)):
        return False
    return not any(isinstance(item, int | float | complex | np.generic) for item in value)
