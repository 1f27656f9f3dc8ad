"""`MeshLayout`: the coordinate of a process on a mesh, its data rank, and the ranks that share its data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paddle_shard.errors import ArgumentError, AxisError

Axes = str | int | Sequence[str | int] | None
"""One axis by name or index, several of them, or None for no axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout:
    """Processes laid out in row-major order on named axes.

    Attributes:
        shape: Size of each axis, all >= 1.
        axes: One unique name per axis. Paddle calls these `dim_names`.
        process_ids: Global ranks in row-major order; need not start at 0 nor be sorted.

    Examples:
        >>> mesh = MeshLayout(shape=(2, 2), axes=("mp", "dp"), process_ids=(0, 1, 2, 3))
        >>> [mesh.data_rank(rank, "dp") for rank in mesh.process_ids]
        [0, 1, 0, 1]
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    process_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("shape", "axes", "process_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        # Paddle has checked its own meshes; others are made by hand.
        is_named = len({*self.axes}) == len(self.axes) == len(self.shape)
        ids = self.process_ids
        is_full = len({*ids}) == len(ids) == math.prod(self.shape) > 0
        if not is_named or not is_full:
            raise ArgumentError(
                "a mesh needs different axes, one for each size of its shape, and as many different process_ids as "
                f"the sizes make together, got {self}."
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Name of each axis -> its size."""
        return dict(zip(self.axes, self.shape, strict=True))

    def axis_indices(
        self, axes: Axes, argument: str = "shard_dims"
    ) -> tuple[int, ...]:
        """Return the indices of `axes` in the mesh's own order, which is the row-major order of the data.

        Args:
            axes: Names or indices, in any order; negative indices count from the end. None: no axis.
            argument: The argument that names them, for messages.

        Raises:
            AxisError: An axis is unknown or is given twice.

        Examples:
            >>> mesh = MeshLayout(shape=(2, 1, 2), axes=("dp", "pp", "sharding"), process_ids=(0, 1, 2, 3))
            >>> mesh.axis_indices(["sharding", "dp"])
            (0, 2)
        """
        names = [axes] if isinstance(axes, str | int) else [*(axes or ())]
        indices = sorted(self._axis_index(name, argument) for name in names)
        if len(set(indices)) != len(indices):
            raise AxisError(
                f"{argument} names an axis twice: {names}. Name each axis once."
            )
        return tuple(indices)

    def _axis_index(self, axis: str | int, argument: str) -> int:
        count = len(self.axes)
        is_index = isinstance(axis, int) and not isinstance(axis, bool)
        if is_index and axis in range(-count, count):
            return int(axis) % count
        if axis not in self.axes:
            raise AxisError(
                f"{argument}: the mesh has no axis {axis!r}; its axes are {list(self.axes)} with shape "
                f"{list(self.shape)}."
            )
        return self.axes.index(axis)

    def coordinate(self, global_rank: int) -> tuple[int, ...]:
        """Return the coordinate of a process, one number per axis.

        Args:
            global_rank: Paddle's process id; must be on the mesh.

        Raises:
            ArgumentError: The rank is not on the mesh.
        """
        if global_rank not in self.process_ids:
            raise ArgumentError(
                f"global_rank {global_rank} is not on the mesh; its process_ids are {list(self.process_ids)}."
            )
        return tuple(
            map(
                int,
                np.unravel_index(
                    self.process_ids.index(global_rank), self.shape
                ),
            )
        )

    def num_data_ranks(self, data_axes: Axes) -> int:
        """Return the product of the sizes of the data axes; 1 if there are none.

        Args:
            data_axes: Names or indices of axes, or one of them.
        """
        return math.prod(
            self.shape[axis] for axis in self.axis_indices(data_axes)
        )

    def data_rank(self, global_rank: int, data_axes: Axes) -> int:
        """Return the coordinate of a process along the data axes, which act as one in row-major order.

        Args:
            global_rank: Paddle's process id; must be on the mesh.
            data_axes: The axes that the batch is split over.

        Returns:
            A number in `range(self.num_data_ranks(data_axes))`; 0 if there is no data axis.
        """
        coordinate = self.coordinate(global_rank)
        rank = 0
        for axis in self.axis_indices(data_axes):
            rank = rank * self.shape[axis] + coordinate[axis]
        return rank


def replica_groups(mesh: MeshLayout, data_axes: Axes) -> list[list[int]]:
    """Return the ranks of each data rank, in mesh order: all of them get the same data.

    Args:
        mesh: The mesh.
        data_axes: Its data axes.

    Examples:
        >>> replica_groups(MeshLayout(shape=(2, 2), axes=("mp", "dp"), process_ids=(0, 1, 2, 3)), "dp")
        [[0, 2], [1, 3]]
    """
    groups: list[list[int]] = [
        [] for _ in range(mesh.num_data_ranks(data_axes))
    ]
    for rank in mesh.process_ids:
        groups[mesh.data_rank(rank, data_axes)].append(rank)
    return groups
