"""Where does a field of the batch live: on which mesh, split along which axes?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import paddle.distributed as dist

from paddle_shard.errors import ArgumentError, ArgumentTypeError, AxisError
from paddle_shard.plan.mesh import Axes, MeshLayout
from paddle_shard.plan.partition import Rows, slice_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """A tensor dim split load-balanced for causal attention, for use in `placements`.

    The dim is cut into 2c equal chunks, where c is the size of the axis. Rank r of the axis holds chunks r and 2c-1-r.
    This is the layout of Paddle's own ring attention (`shard_seq_load_balance`).
    """

    dim: int
    """The tensor dim, at least 1."""


@dataclass(frozen=True, kw_only=True)
class FieldLayout:
    """A mesh and how a field is split over it, as one process sees it."""

    mesh: Any
    """A `paddle.distributed.ProcessMesh`."""
    layout: MeshLayout
    dims: tuple[tuple[int, int | Balanced], ...]
    """(axis of the mesh, tensor dim that it splits), sorted by axis. The other axes replicate."""
    global_rank: int
    replicated_in_name: bool = False
    """True if the data is split, but the placements say `Replicate` (Paddle's auto-DP mode)."""
    own_rows: bool = False
    """True if the rows are not the samples; each data rank has what was made of its samples."""

    @cached_property
    def on_mesh(self) -> bool:
        """True if this process holds any of the field's data."""
        return self.global_rank in self.layout.process_ids

    @cached_property
    def data_axes(self) -> tuple[int, ...]:
        """The axes that split the batch's rows."""
        return tuple(axis for axis, dim in self.dims if dim == 0)

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
    def placements(self) -> list[Any]:
        """One of Paddle's placements for each axis."""
        placements = [dist.Replicate() for _ in self.layout.axes]
        if not self.replicated_in_name:
            for axis, dim in self.dims:
                placements[axis] = dist.Shard(dim.dim if isinstance(dim, Balanced) else dim)
        return placements

    def rows(self, num_rows: int, micro_size: int | None) -> Rows:
        """Return the rows of a global batch that this process holds."""
        return slice_rows(num_rows, self.num_data_ranks, self.data_rank, micro_size)

    @cached_property
    def sequence_splits(self) -> tuple[tuple[int, int, int, bool], ...]:
        """(tensor dim, parts, this process's part, balanced) for each split tensor dim except the first.

        Several axes on one dim act as one, in row-major order.
        """
        splits = []
        for dim in sorted({d.dim if isinstance(d, Balanced) else d for _, d in self.dims} - {0}):
            axes = [axis for axis, d in self.dims if d == dim or d == Balanced(dim=dim)]
            balanced = any(isinstance(d, Balanced) for axis, d in self.dims if axis in axes)
            parts = math.prod(self.layout.shape[axis] for axis in axes)
            part = self.layout.data_rank(self.global_rank, axes) if self.on_mesh else 0
            splits.append((dim, parts, part, balanced))
        return tuple(splits)


def field_layout(
    mesh: Any,
    axes: Axes | Mapping[str | int, Any],
    global_rank: int,
    *,
    replicated_in_name: bool = False,
    own_rows: bool = False,
) -> FieldLayout:
    """Return the layout of a field.

    Args:
        mesh: A `ProcessMesh`.
        axes: The axes that split the rows (`shard_dims`), or a mapping of each axis to its tensor dim.
        global_rank: Paddle's process id.
        replicated_in_name: See `FieldLayout`.
        own_rows: See `FieldLayout`.

    Raises:
        AxisError: The mesh does not have an axis, or an axis is named twice.
        ArgumentError: A tensor dim is not valid, or is split both plainly and `Balanced`.
        ArgumentTypeError: `mesh` is not a `ProcessMesh`.
    """
    if not isinstance(mesh, dist.ProcessMesh):
        raise ArgumentTypeError(
            f"meshes must be paddle.distributed.ProcessMesh objects, got {type(mesh).__name__}: {mesh!r}."
        )
    layout = MeshLayout(shape=tuple(mesh.shape), axes=tuple(mesh.dim_names), process_ids=tuple(mesh.process_ids))
    if isinstance(axes, Mapping):
        named = {axis: dim for axis, dim in axes.items() if dim is not None}
        for axis, dim in named.items():
            least, number = (1, dim.dim) if isinstance(dim, Balanced) else (0, dim)
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ArgumentError(
                    f"placements[{axis!r}] must be a tensor dim >= 0, Balanced(dim=...) of a dim >= 1, or None, "
                    f"got {dim!r}."
                )
        indices = {layout.axis_indices(axis)[0]: dim for axis, dim in named.items()}
        if len(indices) != len(named):
            raise AxisError(f"placements names an axis twice: {dict(axes)}. Name each axis once.")
        dims = tuple(sorted(indices.items(), key=lambda item: item[0]))
        for dim in {d.dim for _, d in dims if isinstance(d, Balanced)}:
            if any(d == dim for _, d in dims):
                raise ArgumentError(f"placements splits dim {dim} both plainly and Balanced: {dict(axes)}.")
    else:
        dims = tuple((axis, 0) for axis in layout.axis_indices(axes))
    return FieldLayout(
        mesh=mesh,
        layout=layout,
        dims=dims,
        global_rank=global_rank,
        replicated_in_name=replicated_in_name,
        own_rows=own_rows,
    )
