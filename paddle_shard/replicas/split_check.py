"""Is data that was said to be split really split?"""

from __future__ import annotations

import hashlib
import itertools
import time
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import paddle.distributed as dist
from paddle.framework import core

from paddle_shard.errors import SplitError
from paddle_shard.plan.mesh import MeshLayout

TIMEOUT = 30.0
"""Seconds to wait for another rank's first batch before giving up on the comparison."""

_UNKNOWN = "unknown"
_numbers = itertools.count()


def next_number() -> int:
    """Return a number for a loader that is said to be split; all ranks make these in the same order."""
    return next(_numbers)


class SplitCheck:
    """Compares this rank's first batch with another data rank's and a replica's, once, before it is served.

    Each rank publishes a digest and reads two: nothing is gathered, whatever the number of ranks.
    """

    def __init__(self, number: int, layout: MeshLayout, data_axes: tuple[int, ...], global_rank: int) -> None:
        """Set up the comparison.

        Args:
            number: From `next_number`; the same on every rank.
            layout: Of the mesh.
            data_axes: The axes over which the data is split.
            global_rank: This process.
        """
        self._key = f"paddle_shard/split/{number}"
        self._rank = global_rank
        mine, count = layout.data_rank(global_rank, data_axes), layout.num_data_ranks(data_axes)
        by_data_rank = {layout.data_rank(rank, data_axes): rank for rank in reversed(layout.process_ids)}
        self._replica, self._other = by_data_rank[mine], by_data_rank[(mine + 1) % count]

    def run(self, arrays: Iterable[np.ndarray[Any, Any]], num_steps: int | None) -> None:
        """Compare this rank's first batch, and the length of its epoch.

        Args:
            arrays: The batch's leaves, rows first.
            num_steps: Of this rank's epoch; None if it is not known.

        Raises:
            SplitError: On every rank, if another data rank has the same rows; or if a replica has others.
        """
        if not dist.is_initialized():
            return  # no way to ask the others yet
        store = core.create_or_get_global_tcp_store()
        batch = list(arrays)
        size = f"{num_steps} steps, first batch of {len(batch[0]) if batch and batch[0].ndim else 0}"
        mine = f"{size}/{digest(batch)}"
        store.set(f"{self._key}/{self._rank}", mine)
        store.add(f"{self._key}/{self._rank}/there", 1)
        other, replica = self._read(store, self._other), self._read(store, self._replica)
        if not other or not replica:
            return
        if other.split("/")[0] != size:
            raise SplitError(
                f"is_dataset_splitted=True, but global rank {self._rank} has {size} rows and global rank "
                f"{self._other} {other.split('/')[0]}: ranks would part. Give every data rank as many rows, or leave "
                "is_dataset_splitted at False to have this loader split the data."
            )
        if mine.endswith(_UNKNOWN) or other.endswith(_UNKNOWN) or replica.endswith(_UNKNOWN):
            return
        if mine == other:
            raise SplitError(
                f"is_dataset_splitted=True, but global ranks {self._rank} and {self._other}, which are different "
                "data ranks, read the same first batch: the data is not split. Leave is_dataset_splitted at False "
                "to have this loader split it, or give each data rank a loader of its own rows, for instance with "
                "paddle.io.DistributedBatchSampler(num_replicas=, rank=)."
            )
        if mine != replica:
            raise SplitError(
                f"is_dataset_splitted=True, but global ranks {self._rank} and {self._replica}, which are replicas "
                "(the same data rank), read different first batches. Split by the data rank, not by the global "
                "rank, and draw random numbers from a seed that replicas share."
            )

    def _read(self, store: Any, rank: int) -> str:
        deadline = time.monotonic() + TIMEOUT
        # Waiting or getting would block for ever on a rank that never comes; adding 0 asks and returns.
        while not store.add(f"{self._key}/{rank}/there", 0):
            if time.monotonic() > deadline:
                warnings.warn(
                    f"is_dataset_splitted=True: rank {rank} has read no batch within {TIMEOUT:g} s, so that the "
                    "data is really split could not be checked.",
                    stacklevel=2,
                )
                return ""
        return str(store.get(f"{self._key}/{rank}").decode())


def digest(arrays: Iterable[np.ndarray[Any, Any]]) -> str:
    """Return a digest of a batch; the same for all batches whose rows are all alike, which tell nothing."""
    found, varies = hashlib.blake2b(digest_size=16), False
    for array in arrays:
        found.update(repr((array.shape, array.dtype.str)).encode())
        found.update(np.ascontiguousarray(array).tobytes())
        varies = varies or (array.ndim > 0 and bool((array != array[:1]).any()))
    return found.hexdigest() if varies else _UNKNOWN
