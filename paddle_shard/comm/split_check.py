"""Is data that was declared as split really split?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paddle_shard.errors import SplitError
from paddle_shard.plan.mesh import MeshLayout

_UNKNOWN = "unknown"


class SplitCheck:
    """Compares the first batches of the ranks: data ranks must differ, and replicas must be equal."""

    def __init__(self, layout: MeshLayout, data_axes: tuple[int, ...]) -> None:
        """Set up the comparison.

        Args:
            layout: Layout of the mesh.
            data_axes: The axes over which the data is split.
        """
        self._data_ranks = {rank: layout.data_rank(rank, data_axes) for rank in layout.process_ids}

    def compare(self, said: Mapping[int, Mapping[str, Any]]) -> None:
        """Compare the results of `first_batch` on the ranks, by global rank.

        Raises:
            SplitError: Two data ranks have the same rows, ranks have different numbers of rows or steps, or replicas
                have different rows.
        """
        said = {rank: said[rank] for rank in sorted(said) if rank in self._data_ranks}
        leaders: dict[int, int] = {}
        """Data rank -> first global rank of its replica group."""
        for rank in said:
            leaders.setdefault(self._data_ranks[rank], rank)
        by_digest: dict[str, int] = {}
        for rank, found in said.items():
            first = next(iter(said))
            if found["size"] != said[first]["size"]:
                raise SplitError(
                    f"is_dataset_splitted=True, but global rank {first} has {said[first]['size']} rows and global rank "
                    f"{rank} has {found['size']}, so their steps would differ. Give every data rank the same number of "
                    "rows, or leave is_dataset_splitted=False, and this loader splits the data."
                )
            leader = leaders[self._data_ranks[rank]]
            if found["digest"] != said[leader]["digest"]:
                raise SplitError(
                    f"is_dataset_splitted=True, but global ranks {leader} and {rank}, which are replicas "
                    "(the same data rank), read different first batches. Split by the data rank, not by the global "
                    "rank, and draw random numbers from a seed that replicas share."
                )
            other = by_digest.setdefault(found["digest"], rank)
            if found["digest"] != _UNKNOWN and self._data_ranks[other] != self._data_ranks[rank]:
                raise SplitError(
                    f"is_dataset_splitted=True, but global ranks {other} and {rank}, which are different "
                    "data ranks, read the same first batch: the data is not split. Leave "
                    "is_dataset_splitted=False, and this loader splits it. Or give each data rank a loader of its own "
                    "rows, for instance with paddle.io.DistributedBatchSampler(num_replicas=, rank=)."
                )


def first_batch(arrays: Iterable[np.ndarray[Any, Any]], num_steps: int | None) -> dict[str, Any]:
    """Return what `SplitCheck` compares: the size and the digest of a rank's first batch.

    Args:
        arrays: The batch's leaves; their first dim is the rows.
        num_steps: Steps of this rank's epoch; None if not known.
    """
    batch = list(arrays)
    rows = len(batch[0]) if batch and batch[0].ndim else 0
    return {"size": f"{num_steps} steps, first batch of {rows}", "digest": digest(batch)}


def digest(arrays: Iterable[np.ndarray[Any, Any]]) -> str:
    """Return a digest of a batch; the same for all batches whose rows are all equal, since these prove nothing."""
    found, varies = hashlib.blake2b(digest_size=16), False
    for array in arrays:
        found.update(repr((array.shape, array.dtype.str)).encode())
        found.update(np.ascontiguousarray(array).tobytes())
        varies = varies or (array.ndim > 0 and bool((array != array[:1]).any()))
    return found.hexdigest() if varies else _UNKNOWN
