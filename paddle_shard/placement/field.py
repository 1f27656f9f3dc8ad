"""Field layouts: on which mesh each field of a batch lives, and along which axes it is split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.base import core

from paddle_shard.errors import (
    ArgumentError,
    ArgumentTypeError,
    AxisError,
    BatchStructureError,
)
from paddle_shard.plan.mesh import Axes, MeshLayout
from paddle_shard.plan.partition import nearest_multiples


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """A tensor dim split load-balanced for causal attention, for use in `placements`.

    The dim is cut into 2c equal chunks, where c is the size of the axis. Rank r of the axis holds chunks r and 2c-1-r.
    This is the layout of Paddle's own ring attention (`shard_seq_load_balance`).
    """

    dim: int
    """The tensor dim, at least 1."""


@dataclass(
    frozen=True, kw_only=True
)  # without slots, since cached properties are kept in `__dict__`
class FieldLayout:
    """A mesh and how a field is split over it, as one process sees it."""

    mesh: Any
    """A `paddle.distributed.ProcessMesh`."""
    layout: MeshLayout
    dims: tuple[tuple[int, int], ...]
    """(axis of the mesh, tensor dim that it splits), sorted by axis. The other axes replicate."""
    balanced: frozenset[int] = frozenset()
    """The tensor dims that are split `Balanced`."""
    global_rank: int
    replicated_in_name: bool = False
    """True if the data is split, but the placements say `Replicate` (Paddle's auto-DP mode): each data rank computes on
    its own batch, whose shape may differ from the others'."""
    own_rows: bool = False
    """True if the rows are not the samples; each data rank has what was made of its samples."""
    row_index: bool = False
    """True if its numbers are places of samples in the rank's batch, which become places in the global batch."""

    @cached_property
    def on_mesh(self) -> bool:
        """True if this process holds any of the field's data."""
        return self.global_rank in self.layout.process_ids

    @cached_property
    def data_axes(self) -> tuple[int, ...]:
        """The axes that split the batch's rows."""
        return tuple(axis for axis, dim in self.dims if dim == 0)

    @cached_property
    def data_axis_names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self.layout.axes[axis] for axis in self.data_axes)

    @cached_property
    def num_data_ranks(self) -> int:
        """Number of slices that the rows are cut into."""
        return self.layout.num_data_ranks(self.data_axes)

    @cached_property
    def data_rank(self) -> int:
        """This process's data rank; defined only if `on_mesh`."""
        return self.layout.data_rank(self.global_rank, self.data_axes)

    def slice_of(self, global_rank: int) -> tuple[int, int] | None:
        """Return (number of data ranks, data rank) of any process; None if it is not on the mesh."""
        if global_rank not in self.layout.process_ids:
            return None
        return self.num_data_ranks, self.layout.data_rank(global_rank, self.data_axes)

    @cached_property
    def rows_only(self) -> FieldLayout:
        """The layout of a tensor with one number per row of the field."""
        return replace(
            self, dims=tuple((axis, dim) for axis, dim in self.dims if dim == 0)
        )

    @cached_property
    def placements(self) -> list[Any]:
        """One of Paddle's placements for each axis."""
        placements = [dist.Replicate() for _ in self.layout.axes]
        if not self.replicated_in_name:
            for axis, dim in self.dims:
                placements[axis] = dist.Shard(dim)
        return placements

    @cached_property
    def _cuts(self) -> tuple[tuple[int, int, list[int]], ...]:
        """(tensor dim, number of chunks, this process's chunks) for each split tensor dim except the first.

        Several axes on one dim act as one, in row-major order.
        """
        cuts = []
        for dim in sorted({dim for _, dim in self.dims} - {0}):
            axes = [axis for axis, d in self.dims if d == dim]
            parts = math.prod(self.layout.shape[axis] for axis in axes)
            part = self.layout.data_rank(self.global_rank, axes) if self.on_mesh else 0
            balanced = dim in self.balanced
            cuts.append(
                (
                    dim,
                    2 * parts if balanced else parts,
                    [part, 2 * parts - 1 - part] if balanced else [part],
                )
            )
        return tuple(cuts)

    @cached_property
    def cuts_dims(self) -> bool:
        """True if it splits other tensor dims than the first."""
        return len(self._cuts) > 0

    def cut(self, rows: Any, path: str) -> Any:
        """Return this process's part of an array or tensor of its rows, cut along the other split dims.

        Raises:
            BatchStructureError: It lacks a dim that is to be split, or the dim cannot be cut evenly.
        """
        for dim, num_chunks, chunks in self._cuts:
            size = self._chunk_size(rows.shape, dim, num_chunks, path)
            pieces = [
                rows[(slice(None),) * dim + (slice(c * size, (c + 1) * size),)]
                for c in chunks
            ]
            concatenate = (
                np.concatenate if isinstance(rows, np.ndarray) else paddle.concat
            )
            rows = pieces[0] if len(pieces) == 1 else concatenate(pieces, axis=dim)
        return rows

    @staticmethod
    def _chunk_size(shape: Sequence[int], dim: int, num_chunks: int, path: str) -> int:
        if len(shape) <= dim:
            raise BatchStructureError(
                f"field {path} has {len(shape)} dims, so its dim {dim} cannot be split."
            )
        size, rest = divmod(shape[dim], num_chunks)
        if rest:
            sizes = " or ".join(map(str, nearest_multiples(shape[dim], num_chunks)))
            raise BatchStructureError(
                f"field {path}: dim {dim} has size {shape[dim]}, which cannot be cut into {num_chunks} equal "
                f"chunks. Nearest sizes that can: {sizes}."
            )
        return size

    def distributed(self, rows: Any, path: str) -> Any:
        """Return the distributed tensor of which this process holds the given rows, cut along the other split dims.

        Args:
            rows: The tensor's rows on this process. Off the mesh, only their shape and dtype matter.
            path: The field's path, for errors.

        Raises:
            BatchStructureError: See `cut`.
        """
        return from_local(self.cut(rows, path), self.mesh, self.placements)


def from_local(tensor: Any, mesh: Any, placements: Sequence[Any]) -> Any:
    """Return the distributed tensor of which this process holds a local one, which may be a view and the user's."""
    # Paddle's reshard sends the memory of a local tensor as it lies there: of a view it sends other numbers. Not
    # `contiguous`, which changes the tensor itself.
    # Not `dist.auto_parallel.api.dtensor_from_local`: it fails in a thread while another one builds a static program.
    return core.dtensor_from_local(
        tensor if tensor.is_contiguous() else tensor.clone(), mesh, placements
    )


def field_layout(
    mesh: Any, axes: Axes | Mapping[str | int, Any], global_rank: int, **others: bool
) -> FieldLayout:
    """Return the layout of a field.

    Args:
        mesh: A `ProcessMesh`.
        axes: The axes that split the rows (`shard_dims`), or a mapping of each axis to its tensor dim.
        global_rank: Paddle's process id.
        others: Further fields of `FieldLayout`.

    Raises:
        AxisError: The mesh does not have an axis, or an axis is named twice.
        ArgumentError: A tensor dim is not valid, or is split both plainly and `Balanced`.
        ArgumentTypeError: `mesh` is not a `ProcessMesh`.
    """
    if not isinstance(mesh, dist.ProcessMesh):
        raise ArgumentTypeError(
            f"meshes must be paddle.distributed.ProcessMesh objects, got {type(mesh).__name__}: {mesh!r}."
        )
    layout = MeshLayout(
        shape=tuple(mesh.shape),
        axes=tuple(mesh.dim_names),
        process_ids=tuple(mesh.process_ids),
    )
    given = (
        axes
        if isinstance(axes, Mapping)
        else dict.fromkeys(layout.axis_indices(axes), 0)
    )
    split: dict[int, int] = {}
    plain: set[int] = set()
    balanced: set[int] = set()
    for axis, placement in given.items():
        if placement is None:
            continue
        is_balanced = isinstance(placement, Balanced)
        dim: Any = placement.dim if isinstance(placement, Balanced) else placement
        if type(dim) is not int or dim < is_balanced:
            raise ArgumentError(
                f"placements[{axis!r}] must be a tensor dim >= 0, Balanced(dim=...) of a dim >= 1, or None, "
                f"got {placement!r}."
            )
        for number in layout.axis_indices(axis):
            if number in split:  # by its name and by its index
                raise AxisError(
                    f"placements names an axis twice: {dict(given)}. Name each axis once."
                )
            split[number] = dim
        (balanced if is_balanced else plain).add(dim)
    if balanced & plain:
        raise ArgumentError(
            f"placements splits one dim both plainly and Balanced: {dict(given)}."
        )
    dims = tuple(sorted(split.items()))
    return FieldLayout(
        mesh=mesh,
        layout=layout,
        dims=dims,
        balanced=frozenset(balanced),
        global_rank=global_rank,
        **others,
    )


Entry = FieldLayout | list[FieldLayout]
"""The layout of all leaves of a field, or one for each item of a field that is a list."""


AS_READ = "as read"
"""A field's entry in `placements`: its rows are not the samples; each data rank keeps what was made of its samples."""
ROW_INDEX = "row index"
"""The same, and its numbers, or those in its first column, are places of samples in the batch."""


def layouts_of_fields(
    meshes: Any,
    shard_dims: Any,
    input_keys: Sequence[Any] | None,
    placements: Any,
    global_rank: int,
    **others: bool,
) -> tuple[list[Entry], dict[Any, Entry]]:
    """Read the arguments of `shard_dataloader` that say where fields go.

    Args:
        meshes: See `shard_dataloader`, as for the arguments below.
        shard_dims: The axes that split the rows.
        input_keys: The keys that the meshes belong to.
        placements: Placements of single fields.
        global_rank: Paddle's process id.
        others: Further fields of every `FieldLayout`.

    Returns:
        An entry for each given mesh, and the layouts of single fields from `placements`, by key or position.

    Raises:
        ArgumentError: An argument is empty, or does not match the others.
        AxisError: A mesh does not have a given axis.
    """
    given = list(meshes) if isinstance(meshes, list | tuple) else [meshes]
    if not given or any(isinstance(m, list | tuple) and not m for m in given):
        raise ArgumentError(
            f"meshes must hold at least one ProcessMesh, got {meshes!r}."
        )
    if input_keys is not None and not isinstance(input_keys, list | tuple):
        raise ArgumentError(f"input_keys must be a list of keys, got {input_keys!r}.")
    if input_keys is not None and len(given) > 1 and len(input_keys) != len(given):
        raise ArgumentError(
            f"input_keys {list(input_keys)} has {len(input_keys)} entries and meshes has {len(given)}: "
            "give one mesh per key, or one for all."
        )
    axes = _axes_by_mesh(shard_dims, len(given))
    entries: list[Entry] = []
    for number, (mesh, dims) in enumerate(zip(given, axes, strict=True)):
        if not isinstance(mesh, list | tuple) and not (
            isinstance(dims, list) and len(given) > 1
        ):
            entries.append(field_layout(mesh, dims, global_rank, **others))
            continue
        # A field that is a list: its items have a mesh each, or an entry of `shard_dims` each, or both.
        each = dims if isinstance(dims, list) else [dims] * len(mesh)
        of_items = mesh if isinstance(mesh, list | tuple) else [mesh] * len(each)
        if len(each) != len(of_items):
            raise ArgumentError(
                f"shard_dims[{number}] {dims!r} has {len(each)} entries and meshes[{number}] has {len(of_items)}: "
                "give one per mesh, or one for all."
            )
        entries.append(
            [
                field_layout(m, d, global_rank, **others)
                for m, d in zip(of_items, each, strict=True)
            ]
        )
    overrides: dict[Any, Entry] = {}
    for key, of_field in _placements_by_field(placements).items():
        number = _mesh_of_field(key, given, input_keys)
        layouts = []
        for placement in of_field if isinstance(of_field, list) else [of_field]:
            own = {
                "own_rows": placement in (AS_READ, ROW_INDEX),
                "row_index": placement == ROW_INDEX,
            }
            split = placement if isinstance(placement, Mapping) else axes[number]
            layouts.append(
                field_layout(given[number], split, global_rank, **own, **others)
            )
        overrides[key] = layouts if isinstance(of_field, list) else layouts[0]
    return entries, overrides


def _axes_by_mesh(shard_dims: Any, num_meshes: int) -> list[Any]:
    """Return the `shard_dims` of each mesh.

    For one mesh, a list names several axes that act as one. For several meshes, a list has one entry per mesh. Such an
    entry can be a tuple, which names several axes, or a list, which has one entry for each item of a field that is a
    list (Paddle's rule).
    """
    if shard_dims is None or isinstance(shard_dims, str | int):
        return [shard_dims] * num_meshes
    if not isinstance(shard_dims, list | tuple) or not shard_dims:
        raise ArgumentError(
            f"shard_dims must be an axis, a list of them, or None, got {shard_dims!r}."
        )
    if num_meshes == 1:
        return [shard_dims[0] if len(shard_dims) == 1 else tuple(shard_dims)]
    if len(shard_dims) != num_meshes:
        raise ArgumentError(
            f"shard_dims {shard_dims!r} has {len(shard_dims)} entries and meshes has {num_meshes}: "
            "give one per mesh, or one for all."
        )
    return list(shard_dims)


def _placements_by_field(placements: Any) -> Mapping[Any, Any]:
    """Return the entries of `placements` by key or position of their field."""
    if isinstance(placements, list | tuple):
        placements = {
            number: entry
            for number, entry in enumerate(placements)
            if entry is not None
        }
    if placements is None:
        return {}
    entries = (
        list(placements.values()) if isinstance(placements, Mapping) else [placements]
    )
    items = [
        item
        for entry in entries
        for item in (entry if isinstance(entry, list) else [entry or ""])
    ]
    if not all(
        isinstance(item, Mapping) or item in (AS_READ, ROW_INDEX, None)
        for item in items
    ):
        raise ArgumentError(
            "placements must map a field's key or position to {axis: tensor dim}, such as "
            f"{{'input_ids': {{'dp': 0, 'sep': 1}}}}, or to 'as read' or 'row index'; a field that is a list, "
            f"to a list of these, with None for the others; got {placements!r}."
        )
    return dict(placements)


def _mesh_of_field(
    key: Any, meshes: Sequence[Any], input_keys: Sequence[Any] | None
) -> int:
    """Return the number of the mesh of a field that `placements` names."""
    keys = list(range(len(meshes)) if input_keys is None else input_keys)
    number = 0 if len(meshes) == 1 else keys.index(key) if key in keys else None
    if number is None or isinstance(meshes[number], list | tuple):
        raise ArgumentError(
            f"placements names the field {key!r}, which has no mesh of its own: name it in input_keys, or give one "
            "mesh. A field with a list of meshes cannot have placements."
        )
    return number
