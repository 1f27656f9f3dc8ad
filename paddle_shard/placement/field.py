"""Field layouts: on which mesh a field of a batch lives, and along which axes it is split."""

from __future__ import annotations

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
    BatchStructureError,
)
from paddle_shard.plan.mesh import Axes, MeshLayout
from paddle_shard.plan.partition import nearest_multiples


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """A tensor dim split load-balanced for causal attention, for use in `placements`.

    The dim is cut into 2c equal chunks, where c is the size of the axis. Rank r of the axis holds chunks r and 2c-1-r.
    This is the layout of Paddle's own ring attention (`shard_seq_load_balance`).

    Attributes:
        dim: The tensor dim, at least 1.
    """

    dim: int


# Without slots, since cached properties are kept in `__dict__`.
@dataclass(frozen=True, kw_only=True)
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
    is_local: bool = False
    """True if its tensors stay local (`local`, `dense_tensor_idx`)."""

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

    def describe(self) -> dict[str, Any]:
        """Return the mesh and what is split over it: JSON-able."""
        names = self.layout.axes
        return {
            "axes": self.layout.sizes,
            "process_ids": self.layout.process_ids,
            "data_axes": self.data_axis_names,
            "other_dims": {names[axis]: dim for axis, dim in self.dims if dim},
            "balanced": sorted(self.balanced),
        }

    def slice_of(self, global_rank: int) -> tuple[int, int] | None:
        """Return (data rank, number of data ranks) of any process; None if it is not on the mesh."""
        if global_rank not in self.layout.process_ids:
            return None
        data_rank = self.layout.data_rank(global_rank, self.data_axes)
        return data_rank, self.num_data_ranks

    @cached_property
    def rows_only(self) -> FieldLayout:
        """The layout of a tensor with one number per row of the field."""
        return replace(self, dims=tuple((axis, 0) for axis in self.data_axes))

    @cached_property
    def local(self) -> FieldLayout:
        """The layout of a field that stays local."""
        return replace(self, is_local=True)

    @cached_property
    def placements(self) -> list[Any]:
        """One of Paddle's placements for each axis."""
        placements = [dist.Replicate() for _ in self.layout.axes]
        if not self.replicated_in_name:
            for axis, dim in self.dims:
                placements[axis] = dist.Shard(dim)
        return placements

    @cached_property
    def cuts(self) -> list[tuple[int, int, list[int]]]:
        """(tensor dim, number of chunks, this process's chunks) for each split tensor dim except the first.

        Several axes on one dim act as one, in row-major order.
        """
        cuts = []
        for dim in sorted({dim for _, dim in self.dims} - {0}):
            axes = [axis for axis, split_dim in self.dims if split_dim == dim]
            num_chunks = self.layout.num_data_ranks(axes)
            chunk = (
                self.layout.data_rank(self.global_rank, axes)
                if self.on_mesh
                else 0
            )
            chunks = [chunk]
            if dim in self.balanced:
                num_chunks *= 2
                chunks.append(num_chunks - 1 - chunk)
            cuts.append((dim, num_chunks, chunks))
        return cuts

    def cut(self, rows: Any, path: str) -> Any:
        """Return this process's part of an array or tensor of its rows, cut along the other split dims.

        Raises:
            BatchStructureError: It lacks a dim that is to be split, or the dim cannot be cut evenly.
        """
        for dim, num_chunks, chunks in self.cuts:
            shape = list(rows.shape)
            if len(shape) <= dim:
                raise BatchStructureError(
                    f"field {path}: placements splits dim {dim}, but its shape is {shape}. Its dims are 0 to "
                    f"{len(shape) - 1}."
                )
            if shape[dim] % num_chunks:
                sizes = nearest_multiples(shape[dim], num_chunks)
                raise BatchStructureError(
                    f"field {path}: dim {dim} of shape {shape} cannot be cut into {num_chunks} equal chunks. Nearest "
                    f"sizes that can: {' or '.join(map(str, sizes))}."
                )
            size = shape[dim] // num_chunks
            before = [slice(None)] * dim
            pieces = [
                rows[(*before, slice(chunk * size, (chunk + 1) * size))]
                for chunk in chunks
            ]
            join = (
                np.concatenate
                if isinstance(rows, np.ndarray)
                else paddle.concat
            )
            rows = pieces[0] if len(pieces) == 1 else join(pieces, axis=dim)
        return rows

    def distributed(self, rows: Any, path: str) -> Any:
        """Return the distributed tensor of which this process holds the given rows, cut along the other split dims.

        Args:
            rows: The tensor's rows on this process. Off the mesh, only their shape and dtype matter.
            path: The field's path, for errors.

        Raises:
            BatchStructureError: See `cut`.
        """
        return from_local(self.cut(rows, path), self.mesh, self.placements)


def describe_layouts(layouts: Sequence[FieldLayout]) -> list[dict[str, Any]]:
    """Return the descriptions of some layouts, each once."""
    descriptions: list[dict[str, Any]] = []
    for layout in layouts:
        description = layout.describe()
        if description not in descriptions:
            descriptions.append(description)
    return descriptions


def from_local(tensor: Any, mesh: Any, placements: Sequence[Any]) -> Any:
    """Return the distributed tensor of which this process holds a local one, which may be a view and the user's."""
    # Paddle's reshard sends the memory of a local tensor as it lies there: of a view it sends other numbers. Not
    # `contiguous`, which changes the tensor itself.
    # Not `dist.auto_parallel.api.dtensor_from_local`: it fails in a thread while another one builds a static program.
    return core.dtensor_from_local(
        tensor if tensor.is_contiguous() else tensor.clone(), mesh, placements
    )


def field_layout(
    mesh: Any,
    axes: Axes | Mapping[str | int, Any],
    global_rank: int,
    **others: bool,
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
            f"meshes must be paddle.distributed.ProcessMesh objects, got {type(mesh).__name__}: {mesh!r}. Pass "
            "dist.ProcessMesh([0, 1], dim_names=['dp']), with the global ranks of your job."
        )
    layout = MeshLayout(
        shape=tuple(mesh.shape),
        axes=tuple(mesh.dim_names),
        process_ids=tuple(mesh.process_ids),
    )
    if not isinstance(axes, Mapping):
        axes = dict.fromkeys(layout.axis_indices(axes), 0)
    # each is there, and named once
    layout.axis_indices(tuple(axes), "placements")
    dims: dict[int, int] = {}
    balanced: dict[int, bool] = {}
    """Tensor dim -> True if it is split `Balanced`."""
    for axis, placement in axes.items():
        if placement is None:
            continue
        is_balanced = isinstance(placement, Balanced)
        dim = placement.dim if is_balanced else placement
        if type(dim) is not int or dim < is_balanced:
            raise ArgumentError(
                f"placements[{axis!r}] must be a tensor dim >= 0, Balanced(dim=...) of a dim >= 1, or None, "
                f"got {placement!r}."
            )
        if balanced.setdefault(dim, is_balanced) != is_balanced:
            raise ArgumentError(
                f"placements splits one dim both plainly and Balanced: {axes}."
            )
        dims[layout.axis_indices(axis)[0]] = dim
    return FieldLayout(
        mesh=mesh,
        layout=layout,
        dims=tuple(sorted(dims.items())),
        balanced=frozenset(dim for dim in balanced if balanced[dim]),
        global_rank=global_rank,
        **others,
    )
