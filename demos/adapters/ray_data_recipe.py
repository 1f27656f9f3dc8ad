"""Batches of a `ray.data.Dataset`, which Ray Data splits among the data ranks: a recipe on `ExternalLoader`.

Ray Data reads, decodes and splits in processes of its own, by `streaming_split(equal=False)`: no row is dropped, and
shares differ in length, so give `tail=`. Its order is not the same when it is read again, so a run cannot be resumed
within an epoch, and each data rank's share must be read by one process. Copy this file and `shares.py` beside your
training script.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import count
from typing import Any

import shares

from paddle_shard import ExternalLoader, ShardOptions
from paddle_shard.errors import ArgumentError, ArgumentTypeError

_numbers = count()


def ray_loader(dataset: Any, batch_size: int) -> ExternalLoader:
    """Return the loader of a data set.

    Args:
        dataset: A `ray.data.Dataset`, made alike on all ranks.
        batch_size: Rows of the global batch: a multiple of the number of data ranks.
    """
    with shares.needs("'ray[data]'"):
        import ray.data
    if not isinstance(dataset, ray.data.Dataset):
        raise ArgumentTypeError(
            f"ray_loader: dataset must be a ray.data.Dataset, got {type(dataset).__name__}."
        )
    shares.check_batch_size(batch_size)
    return ExternalLoader(_Shares(dataset, batch_size), name="Ray Data")


class Splits:
    """What runs in an actor, by whose name the ranks of a job find each other: it splits the data set for all."""

    def __init__(self, dataset: Any, num_shards: int) -> None:
        # Equal shares would drop rows. Ranks whose share has ended are told by their agreement.
        self._shares = dataset.streaming_split(num_shards, equal=False)
        self._taken: dict[int, str] = {}

    def share(self, shard: int, process: str) -> Any:
        """Return the share of a data rank; None if another process has it."""
        return (
            self._shares[shard]
            if self._taken.setdefault(shard, process) == process
            else None
        )


class _Shares:
    """Opens a rank's share; all ranks make their streams in the same order."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        self._dataset, self._batch_size = dataset, batch_size
        self._number, self._process, self._held = (
            next(_numbers),
            os.getpid(),
            list[Any](),
        )

    def __call__(self, share: ShardOptions) -> Iterable[Any]:
        import ray

        if os.getpid() != self._process:
            raise ArgumentError(
                "ray_loader: Ray cannot be used in a worker process. Ray Data reads ahead by itself: give the "
                "DataLoader num_workers=0, or the stream itself to shard_dataloader."
            )
        rows = shares.local_rows(self._batch_size, share)
        if not self._held:
            if not ray.is_initialized():
                ray.init(address="auto")
            job = (
                os.environ.get("PADDLE_MASTER")
                or os.environ.get("PADDLE_TRAINER_ENDPOINTS")
                or str(os.getpid())
            )
            name = f"paddle_shard: {job}, stream {self._number}"
            options = {
                "name": name,
                "namespace": "paddle_shard",
                "get_if_exists": True,
                "num_cpus": 0,
            }
            splits = (
                ray.remote(Splits)
                .options(**options)
                .remote(self._dataset, share.num_shards)
            )
            me = f"{ray.util.get_node_ip_address()}, {os.getpid()}"
            self._held = [ray.get(splits.share.remote(share.shard, me)), splits]
        if self._held[0] is None:
            raise ArgumentError(
                f"ray_loader: another process reads the share of data rank {share.shard}, and Ray Data gives each row "
                "to one process. For ranks of a host that read the same rows (mp, pp, sep): replicas='leader'."
            )
        batches: Iterable[Any] = self._held[0].iter_batches(batch_size=rows)
        return batches
