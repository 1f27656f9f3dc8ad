"""Comparison of what ranks have read: replicas the same rows, and data ranks that are split already different ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddle_shard.errors import DifferentDataError, PaddleShardError, SplitError
from paddle_shard.ranks.reports import differences
from paddle_shard.reading.digest import WHOLE, digest

_SPLIT = "the data is split already, by is_dataset_splitted=True or by the loader's sampler"

Arrays = Sequence[tuple[str, np.ndarray[Any, Any]]]
"""(path, array) of each leaf of a batch; the first dim of an array is its rows."""
Summary = Mapping[str, Any]
"""Result of `summary`."""


def compare_batches(
    summaries: Mapping[int, Summary], data_ranks: Mapping[int, Any]
) -> None:
    """Compare the summaries of the ranks' batches of a step.

    Args:
        summaries: Global rank -> its summary.
        data_ranks: Global rank -> data rank, if the user says that the data is split already; else empty.

    Raises:
        SplitError: The data is split, and two data ranks have the same rows, ranks have different numbers of rows or
            steps, or replicas have different rows.
        DifferentDataError: Two ranks have read the same samples, and their data differ.
    """
    leaders: dict[Any, int] = {}
    for rank, summary in sorted(summaries.items()):
        if data_ranks and rank not in data_ranks:
            continue
        leader = leaders.setdefault(data_ranks.get(rank, summary["key"]), rank)
        if summary["fields"] != summaries[leader]["fields"]:
            raise _replicas_differ(
                leader, rank, summaries, is_split=bool(data_ranks)
            )
    if data_ranks:
        _compare_split({rank: summaries[rank] for rank in leaders.values()})


def _replicas_differ(
    leader: int, rank: int, summaries: Mapping[int, Summary], *, is_split: bool
) -> PaddleShardError:
    first = summaries[leader]
    if is_split:
        return SplitError(
            f"{_SPLIT}, but global ranks {leader} and {rank}, which are replicas (the same data rank), read "
            f"different {first['what']}. Split by the data rank, not by the global rank, and draw random numbers "
            "from a seed that replicas share."
        )
    text = differences({at: summaries[at]["fields"] for at in (leader, rank)})
    return DifferentDataError(
        f"step {first['step']}: global ranks {leader} and {rank} have read the same samples, but their data "
        f"differ in these digests: {text}. Ranks that "
        "share rows must have the same bytes: give all of them the same version of the data, and draw random "
        "numbers from the global generators of numpy, Python, Paddle (on the CPU) or torch, which are seeded for "
        "each sample. verify=None leaves this check out."
    )


def _compare_split(summaries: Mapping[int, Summary]) -> None:
    """Compare data ranks, which must have as many rows, and different ones.

    Args:
        summaries: Global rank -> its summary, for one rank of each data rank.
    """
    ranks_by_fields: dict[str, int] = {}
    first = min(summaries, default=0)
    for rank, summary in summaries.items():
        size = summaries[first]["size"]
        if summary["size"] != size:
            raise SplitError(
                f"{_SPLIT}, but global rank {first} has {size} rows and global rank {rank} has {summary['size']}, so "
                "their steps would differ. Give every data rank the same number of rows, or leave "
                "is_dataset_splitted=False, and this loader splits the data."
            )
        other = ranks_by_fields.setdefault(str(summary["fields"]), rank)
        if other != rank and summary["varies"]:
            raise SplitError(
                f"{_SPLIT}, but global ranks {other} and {rank}, which are different data ranks, read the same "
                f"{summary['what']}: the data is not split. Leave is_dataset_splitted=False, and this loader splits "
                "it. Or give each data rank a loader of its own rows, for instance with "
                "paddle.io.DistributedBatchSampler(num_replicas=, rank=). A sampler that draws for its rank alone says "
                "so: sampler.draws_for_rank = True. "
                "Where equal rows are meant, verify=None leaves this check out."
            )


def summary(
    arrays: Arrays,
    *,
    step: int,
    first: bool,
    key: str,
    num_steps: int | None,
) -> dict[str, Any]:
    """Return what `compare_batches` compares of a rank's batch: JSON-able and small.

    Args:
        arrays: The leaves of the batch.
        step: Step of the epoch.
        first: True for the first batch of an epoch iterator.
        key: Ranks with the same key have read the same samples.
        num_steps: Steps of this rank's epoch; None if not known.
    """
    num_rows = next((len(array) for _, array in arrays if array.ndim), 0)
    steps = "" if num_steps is None else f"{num_steps} steps, "
    digests = {
        path or "the batch": str(digest(array, 0, WHOLE))
        for path, array in arrays
    }
    return {
        "step": step,
        "key": key,
        "what": "first batches" if first else f"batches at step {step}",
        "size": f"{steps}a first batch of {num_rows}" if first else "",
        # as text, in one order on all ranks
        "fields": dict(sorted(digests.items())),
        # If all rows are equal, or there is only one, ranks may have the same by chance.
        "varies": any(
            array.ndim and (array != array[:1]).any() for _, array in arrays
        ),
    }
