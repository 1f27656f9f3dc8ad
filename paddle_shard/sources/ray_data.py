"""How do ranks read a data set of Ray Data, each its own share?"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterable
from itertools import count
from typing import Any

from paddle_shard.checks import check_count
from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.sources.external import ExternalLoader, ShardOptions
from paddle_shard.sources.files import needs

_numbers = count()
_CONNECT_SECONDS = 10.0
"""Seconds for which a cluster may not answer."""


def connect() -> None:
    """Connect this process to Ray, unless it is.

    Raises:
        ConnectionError: `RAY_ADDRESS` is no address, or nothing answers there. Ray itself would try for minutes.
    """
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    way_out = "Start one there (ray start --head), or correct or unset RAY_ADDRESS"
    if found := re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address):
        try:
            socket.create_connection((found[1], int(found[2])), _CONNECT_SECONDS).close()
        except OSError as error:
            raise ConnectionError(f"no Ray cluster answers at RAY_ADDRESS={address} ({error}). {way_out}.") from error
    ours = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address="auto")
    except ValueError as error:
        raise ConnectionError(f"RAY_ADDRESS={address} names no Ray cluster ({error}). {way_out}.") from error
    if threading.current_thread() is threading.main_thread():  # Ray takes the signal; it is the user's
        signal.signal(signal.SIGTERM, ours)


def ray_loader(dataset: Any, batch_size: int) -> ExternalLoader:
    """Return the loader of a `ray.data.Dataset`; see `Stream.ray`."""
    with needs("ray", "Stream.ray: "):
        import ray.data
    if not isinstance(dataset, ray.data.Dataset):
        raise ArgumentTypeError(f"Stream.ray: dataset must be a ray.data.Dataset, got {type(dataset).__name__}.")
    return ExternalLoader(_Shares(dataset, check_count("Stream.ray: batch_size", batch_size)), name="Ray Data")


class Splits:
    """What runs in an actor, by whose name the ranks of a job find each other: it splits the data set for all."""

    def __init__(self, dataset: Any, num_shards: int) -> None:
        # Equal shares would drop rows. Ranks whose share has ended are told by their agreement.
        self._shares = dataset.streaming_split(num_shards, equal=False)
        self._taken: dict[int, str] = {}

    def share(self, shard: int, process: str) -> Any:
        """Return the share of a data rank; None if another process has it."""
        return self._shares[shard] if self._taken.setdefault(shard, process) == process else None


class _Shares:
    """Opens a rank's share; all ranks make their streams in the same order."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        self._dataset, self._batch_size = dataset, batch_size
        self._number, self._process, self._held = next(_numbers), os.getpid(), list[Any]()

    def __call__(self, share: ShardOptions) -> Iterable[Any]:
        import ray

        if os.getpid() != self._process:
            raise ArgumentError(
                "Stream.ray: Ray cannot be used in a worker process. Ray Data reads ahead by itself: give the "
                "DataLoader num_workers=0, or the stream itself to shard_dataloader."
            )
        rows, rest = divmod(self._batch_size, share.num_shards)
        if rest:
            raise ArgumentError(
                f"Stream.ray: batch_size={self._batch_size} cannot be split evenly over {share.num_shards} data ranks."
            )
        if not self._held:
            connect()
            job = os.environ.get("PADDLE_MASTER") or os.environ.get("PADDLE_TRAINER_ENDPOINTS") or str(os.getpid())
            name = f"paddle_shard: {job}, stream {self._number}"
            options = {"name": name, "namespace": "paddle_shard", "get_if_exists": True, "num_cpus": 0}
            splits = ray.remote(Splits).options(**options).remote(self._dataset, share.num_shards)
            me = f"{ray.util.get_node_ip_address()}, {os.getpid()}"
            self._held = [ray.get(splits.share.remote(share.shard, me)), splits]
        if self._held[0] is None:
            raise ArgumentError(
                f"Stream.ray: another process reads the share of data rank {share.shard}, and Ray Data gives each row "
                "to one process. For ranks of a host that read the same rows (mp, pp, sep): replicas='leader'."
            )
        batches: Iterable[Any] = self._held[0].iter_batches(batch_size=rows)
        return batches
