"""Batch recipes: how batches of one form become distributed tensors.

How a batch is placed depends on its structure, dtypes and shapes alone. So the first batch of each form is compiled
into a `BatchRecipe`, which checks it; the batches of that form that follow only apply the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddle_shard.core.collate import Texts
from paddle_shard.core.trees import map_leaves
from paddle_shard.errors import BatchStructureError
from paddle_shard.placement.field import FieldLayout, from_local
from paddle_shard.placement.lengths import Pad, PadTo, Row, check_fill
from paddle_shard.placement.local_tensor import TensorMaker
from paddle_shard.placement.rows import BatchRows, as_range
from paddle_shard.plan.partition import Rows
from paddle_shard.reading.tensors import (
    SPARSE,
    arrays_of,
    as_array,
    becomes_tensor,
    dtype_of,
)

Function = Callable[[Any], Any]


@dataclass(slots=True, kw_only=True)
class BatchRecipe:
    """Placement of the batches of one form. The leaves that are delivered are numbered in their order."""

    rows: BatchRows
    is_host: bool
    """True if all leaves are arrays, so that any thread may place the batch on the CPU."""
    last: FieldLayout
    """The layout of the last leaf."""
    template: Any
    """The batch that is delivered, with its number in place of each leaf; None: it is the list of the leaves."""
    tensors: list[int] = field(default_factory=list)
    """The leaves that become tensors; others are no arrays or tensors that Paddle can hold."""
    cuts: list[tuple[int, Function]] = field(default_factory=list)
    """(leaf, function that returns this rank's part of it), to be applied in this order."""
    pads: list[tuple[int, str, Pad]] = field(default_factory=list)
    """(leaf, its path, its padding), to be applied when the rows of all ranks are known."""
    places: list[tuple[int, Function]] = field(default_factory=list)
    """(leaf, function that returns the distributed tensor of a local one)."""
    row_shapes: dict[str, Row] = field(default_factory=dict)
    """Path -> kind and shape of a row, of each tensor."""

    def begin(
        self,
        leaves: Sequence[Any],
        owned: bool,
        maker: TensorMaker,
        *,
        is_alone: bool,
    ) -> Callable[[], Any]:
        """Begin to place a batch, and return a function that returns it placed, or if it `waits`, its local leaves.

        Args:
            leaves: The leaves that are delivered.
            owned: True if nothing else refers to them.
            maker: Makes the tensors.
            is_alone: True if no other rank has rows, to whose length these would be padded.
        """
        # Two tensors must not share one array's memory.
        owned = owned and len(set(map(id, leaves))) == len(leaves)
        parts = list(leaves)
        if self.is_host:
            _apply(self.cuts, parts)
        make_tensors = maker([parts[number] for number in self.tensors], owned)
        return partial(self._finish, parts, make_tensors, is_alone)

    def _finish(
        self,
        parts: list[Any],
        make_tensors: Callable[[], list[Any]],
        is_alone: bool,
    ) -> Any:
        for number, tensor in zip(self.tensors, make_tensors(), strict=True):
            parts[number] = tensor
        if not self.is_host:
            _apply(self.cuts, parts)
        if self.pads and not is_alone:
            return parts
        return self.placed(parts, [self.row_shapes])

    def placed(
        self, parts: list[Any], of_ranks: Iterable[Mapping[str, Row]]
    ) -> Any:
        """Return the batch, with distributed tensors in place of local ones.

        Args:
            parts: The leaves, which are replaced.
            of_ranks: `row_shapes` of the batch of every rank, which fit together.

        Raises:
            BatchStructureError: Rows are longer than all sizes of `pad_to`; raised on all ranks.
        """
        for number, path, pad in self.pads:
            rows = [row_shapes[path] for row_shapes in of_ranks]
            parts[number] = pad.fill(parts[number], rows)
        _apply(self.places, parts)
        if self.template is None:
            return parts
        return map_leaves(self.template, lambda number, _: parts[number])


def _apply(functions: Sequence[tuple[int, Function]], parts: list[Any]) -> None:
    for number, function in functions:
        parts[number] = function(parts[number])


class Leaf(NamedTuple):
    """A leaf of a batch that is delivered."""

    path: str
    value: Any
    layout: FieldLayout


def compile_leaf(
    recipe: BatchRecipe, pad_to: PadTo | None, number: int, leaf: Leaf
) -> None:
    """Add a leaf to a recipe.

    Args:
        recipe: The recipe.
        pad_to: See `BatchPlacer`.
        number: Number of the leaf.
        leaf: The leaf.

    Raises:
        BatchStructureError: It does not fit its mesh or cannot be split.
        TypeError: Paddle has no tensors of its dtype.
    """
    _, value, layout = leaf
    rows = recipe.rows
    is_tensor = becomes_tensor(value)
    if is_tensor:
        recipe.tensors.append(number)
        is_split = _is_split(leaf, rows)
    else:
        _check_plain_value(leaf)
        is_split = is_row_like(value) and len(value) == len(rows.read)
    if is_split and layout.on_mesh:
        positions = rows.positions(layout)
        if len(positions) < len(rows.read):
            cut = partial(_rows_of_leaf, rows=as_range(positions))
            recipe.cuts.append((number, cut))
    if is_tensor and not layout.is_local:
        _compile_distributed(recipe, pad_to, number, leaf, is_split)


def _compile_distributed(
    recipe: BatchRecipe,
    pad_to: PadTo | None,
    number: int,
    leaf: Leaf,
    is_split: bool,
) -> None:
    """Add the placing of a tensor to a recipe; see `compile_leaf`."""
    path, value, layout = leaf
    shape = list(value.shape)
    dtype = dtype_of(value)
    if pad_to is not None or not layout.replicated_in_name:
        # If the rows are not the samples, all ranks must have as many.
        counts = layout.num_data_ranks > 1 and not is_split
        kind = f"{dtype}, {shape[0]} rows of " if counts else dtype
        recipe.row_shapes[path] = [kind, *shape[1:]]
    if not layout.on_mesh:  # only the metadata matter
        if shape[:1] == [len(recipe.rows.read)]:
            shape[0] = recipe.rows.num_rows // layout.num_data_ranks
        recipe.cuts.append((number, partial(_empty, shape)))
    elif layout.row_index and not layout.replicated_in_name:
        index = partial(_number_globally, path=path, rows=recipe.rows)
        recipe.cuts.append((number, index))
    pad = None if pad_to is None else pad_to.pad_of(path)
    if pad is not None:
        check_fill(pad.value, dtype, path)
        recipe.pads.append((number, path, pad))
        place = partial(layout.distributed, path=path)
    else:
        if layout.cuts:
            recipe.cuts.append((number, partial(layout.cut, path=path)))
        place = partial(
            from_local, mesh=layout.mesh, placements=layout.placements
        )
    recipe.places.append((number, place))


def _empty(shape: Sequence[int], part: Any) -> Any:
    """Return rows of a field of which this process holds nothing."""
    empty = np.empty if isinstance(part, np.ndarray) else paddle.empty
    return empty(shape, part.dtype)


def _is_split(leaf: Leaf, rows: BatchRows) -> bool:
    """Return whether the rows of a tensor are split, after checking that they can be."""
    path, value, layout = leaf
    if not layout.is_local or isinstance(value, np.ndarray):
        _check_dtype(value, path)
    if not layout.data_axes:
        return False
    num_read = len(rows.read)
    shape = list(value.shape)
    if shape[:1] == [num_read] and not layout.own_rows:
        return True
    # The rows are not the samples: they may not be cut.
    reads_others = layout.on_mesh and len(rows.positions(layout)) < num_read
    stays_whole = (
        layout.own_rows
        or layout.replicated_in_name
        or rows.apart
        or layout.num_data_ranks == 1
    )
    if reads_others or not (layout.is_local or (stays_whole and shape)):
        raise BatchStructureError(
            f"field {path} has shape {shape} for {num_read} samples: it cannot be split by rows. {_OWN_ROWS}"
        )
    return False


_OWN_ROWS = (
    "Return one row per sample from the collate_fn. For a value that all samples share, give the field a mesh of its "
    "own and shard_dims None. For rows that are not the samples, pass placements={field: 'as read'}, which needs as "
    "many rows on every data rank, or dense_tensor_idx, which keeps the field local. To skip samples that cannot be "
    "read, raise in __getitem__ and pass on_error='skip'."
)


def is_row_like(value: Any) -> bool:
    """Return whether a leaf other than a tensor may have one item per row, as collated strings have."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    if isinstance(value, Texts):
        return True
    if not isinstance(value, list) or not value:
        return False
    no_rows = int | float | complex | np.generic | Texts
    return not any(isinstance(item, no_rows) for item in value) and not any(
        map(becomes_tensor, arrays_of(value))
    )


def _rows_of_leaf(leaf: Any, rows: range | Rows) -> Any:
    """Return some rows of an array, a tensor or a list."""
    if isinstance(rows, range):
        return leaf[rows.start : rows.stop]
    if isinstance(leaf, np.ndarray):
        return leaf[rows]
    if isinstance(leaf, list):
        return [leaf[row] for row in rows.tolist()]
    # Not `gather`: it lacks dtypes, and its index would be copied to the device, which waits for all that is queued.
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return paddle.concat([leaf[int(run[0]) : int(run[-1]) + 1] for run in runs])


def _number_globally(leaf: Any, path: str, rows: BatchRows) -> Any:
    """Return a field whose numbers, or those of its first column, are places of samples, with their global places.

    Negative numbers, which are no places, stay.
    """
    array = np.array(as_array(leaf))
    places = array if array.ndim == 1 else array[:, 0]
    most = int(places.max(initial=-1))
    if array.ndim > 2 or most >= len(rows.read):
        raise BatchStructureError(
            f"field {path}: placements says 'row index', but it has shape {list(array.shape)} and numbers up to "
            f"{most}, and this rank's batch has {len(rows.read)} rows. Its numbers, or those in its first column, must "
            "be places of rows in the batch that the collate_fn was given."
        )
    is_place = places >= 0
    places[is_place] = rows.read[places[is_place].astype(np.int64)]
    if isinstance(leaf, np.ndarray):
        return array
    return paddle.to_tensor(array, place=leaf.place)


def _check_dtype(leaf: Any, path: str) -> None:
    """Reject a sparse tensor, and an array of numbers that Paddle cannot hold.

    Raises:
        TypeError: It is sparse, or Paddle does not have its dtype or its byte order.
    """
    if isinstance(leaf, paddle.Tensor) and not leaf.is_dense():
        raise TypeError(f"field {path}: {SPARSE}")
    if not isinstance(leaf, np.ndarray):
        return
    dtype = leaf.dtype
    largest = {"u": 2, "f": 8}.get(dtype.kind, 16)
    if dtype.itemsize > largest or not dtype.isnative:
        raise TypeError(
            f"field {path}: Paddle has no tensors of dtype {dtype} (byte order {dtype.byteorder!r}): "
            "convert it, for instance with .astype('int64')."
        )


def _check_plain_value(leaf: Leaf) -> None:
    """Reject a dataclass, whose fields are not looked into, and a number that each data rank makes of its own rows."""
    path, value, layout = leaf
    if is_dataclass(value) and not layout.is_local:
        raise BatchStructureError(
            f"field {path} is a {type(value).__name__}, and the fields of a dataclass are not split. Have the "
            "collate_fn return a dict, a list or a named tuple."
        )
    is_number = (
        isinstance(value, int | float | np.number) and type(value) is not bool
    )
    if is_number and layout.num_data_ranks > 1 and not layout.is_local:
        raise BatchStructureError(
            f"field {path} is the number {value!r}, which the collate_fn computed from this rank's rows; other data "
            "ranks have other numbers. Return one number per row, such as its length, and add them up; or keep this "
            "rank's number, by dense_tensor_idx."
        )
