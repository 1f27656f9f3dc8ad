"""What differs between versions of Paddle and of numpy."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import paddle.distributed as dist

from paddle_shard.core.trees import leaves
from paddle_shard.errors import ArgumentError

try:  # Paddle >= 3.1
    from paddle.distributed.auto_parallel.auto_dp_utils import (
        in_auto_dp_mode as in_auto_dp_mode,
    )
except ImportError:

    def in_auto_dp_mode() -> bool:
        """Return whether data is split behind the user's back; Paddle 3.0 has no such mode."""
        return False


def auto_dp_axis(meshes: Any) -> str | int:
    """Return the axis of meshes, perhaps nested, over which Paddle's DataLoader splits the data in auto-DP mode.

    Raises:
        ArgumentError: No axis is named "dp", and meshes have several axes.
    """
    all_meshes = list(leaves(meshes))
    # A value that is no mesh, or has no such axis where another has, is rejected later, by name.
    if any("dp" in getattr(mesh, "dim_names", ["dp"]) for mesh in all_meshes):
        return "dp"
    if all(len(mesh.shape) == 1 for mesh in all_meshes):
        return 0
    raise ArgumentError(
        "shard_dims is missing: in auto-DP mode (dist.enable_auto_dp()) each data rank has rows of its own, and meshes "
        f"have no axis 'dp': {[mesh.dim_names for mesh in all_meshes]}. Name the axis."
    )


@functools.cache  # once a process
def mend_process_mesh() -> None:
    """Make `ProcessMesh.get_rank_by_dim_and_process_id` work with numpy >= 2.4.

    Paddle (to 3.3.1 at least) calls `int()` on an array of one element, which numpy has stopped taking;
    sharding optimizers and Paddle's own loader go through it. The result is the same, so is the signature. It is called
    where a loader is made or Paddle is patched, so that an import alone changes nothing of Paddle's.
    """
    original = dist.ProcessMesh.get_rank_by_dim_and_process_id

    @functools.wraps(original)
    def get_rank_by_dim_and_process_id(
        self: Any, dim: str | int, process_id: int
    ) -> int:
        # Tried each time: a mesh made here to try it once would shift the seeds that Paddle gives to later meshes.
        try:
            return int(original(self, dim, process_id))
        except TypeError:
            axis = dim if isinstance(dim, int) else self._dim_names.index(dim)
            return int(np.argwhere(self._mesh == process_id)[0][axis])

    dist.ProcessMesh.get_rank_by_dim_and_process_id = (
        get_rank_by_dim_and_process_id
    )


def asked_by_to_static(depth: int = 2) -> bool:
    """Return whether the caller of the caller is `DistModel`, describing its inputs.

    It takes one batch and then calls `batch_sampler.set_epoch(0)` on whatever has that method.
    """
    return (
        sys._getframe(depth).f_code.co_name
        == "_prepare_data_spec_from_dataloader"
    )
