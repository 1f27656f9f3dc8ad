"""Have the ranks read what they should: replicas the same, and data ranks that are split already different rows?"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paddle_shard.errors import DifferentDataError, SplitError
from paddle_shard.plan.mesh import MeshLayout

_MOST_ROWS = 256
"""Rows of which a rank tells the digests, so that an error can name the samples."""
_SHOWN = 8
FEW_STEPS = 4
"""Steps at the beginning of a pass at which batches of one row are compared, of data that is split already."""

_SPLIT = (
    "the data is split already, by is_dataset_splitted=True or by the loader's sampler"
)

Arrays = Sequence[tuple[str, np.ndarray[Any, Any]]]
"""(path, array) of each leaf of a batch; the first dim of an array is its rows."""


class BatchCheck:
    """Compares the summaries of the ranks' batches of a step."""

    def __init__(
        self,
        split: tuple[MeshLayout, tuple[int, ...]] | None,
        named: Callable[[Any], Any] | None = None,
    ) -> None:
        """Set up the comparison.

        Args:
            split: (layout of the mesh, data axes), if the user says that the data is split already.
            named: Returns the name of a sample, for messages; None: its id.
        """
        self._named, self._data_ranks = (
            named or (lambda sample: sample),
            dict[int, int](),
        )
        self._single: dict[int, tuple[str, ...]] = {}
        """Global rank -> digests of its newest batches of one row."""
        if split is not None:
            layout, axes = split
            self._data_ranks = {
                rank: layout.data_rank(rank, axes) for rank in layout.process_ids
            }

    def compare(self, said: Mapping[int, Mapping[str, Any]]) -> None:
        """Compare the summaries of a step, by global rank.

        Raises:
            SplitError: Of data that is split: two data ranks have the same rows, ranks have different numbers of rows
                or steps, or replicas have different rows.
            DifferentDataError: Two ranks have read the same samples, and their data differ.
        """
        said = {rank: said[rank] for rank in sorted(said)}
        if self._data_ranks:
            self._compare_split(
                {
                    rank: found
                    for rank, found in said.items()
                    if rank in self._data_ranks
                }
            )
            return
        leaders: dict[str, int] = {}
        for rank, found in said.items():
            leader = leaders.setdefault(found["key"], rank)
            if found["fields"] != said[leader]["fields"]:
                raise DifferentDataError(
                    self._different(leader, rank, said[leader], found)
                )

    def _different(
        self, leader: int, rank: int, one: Mapping[str, Any], other: Mapping[str, Any]
    ) -> str:
        ours, theirs = dict(one["fields"]), dict(other["fields"])
        fields = [
            path or "the batch"
            for path in {**ours, **theirs}
            if ours.get(path) != theirs.get(path)
        ]
        rows = [
            at
            for at, pair in enumerate(zip(one["rows"], other["rows"], strict=False))
            if pair[0] != pair[1]
        ]
        ids = one["ids"]
        named = len(ids) == len(
            one["rows"]
        )  # an item that is a whole batch has rows without ids
        samples = [
            self._named(ids[row]) if named else f"row {row}" for row in rows[:_SHOWN]
        ]
        where = f" at the samples {samples}" if samples else ""
        more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        return (
            f"step {one['step']}: global ranks {leader} and {rank} have read the same samples, but their data differ "
            f"in {', '.join(fields) or 'their fields'}{where}{more}. Ranks that share rows must have the same bytes: "
            "give all of them the same version of the data, and draw random numbers from the global generators of "
            "numpy, Python, Paddle (on the CPU) or torch, which are seeded for each sample. verify=None leaves this "
            "check out."
        )

    def _compare_split(self, said: Mapping[int, Mapping[str, Any]]) -> None:
        leaders, by_digest, first = (
            dict[int, int](),
            dict[str, int](),
            min(said, default=0),
        )
        for rank, found in said.items():
            if found["size"] != said[first]["size"]:
                raise SplitError(
                    f"{_SPLIT}, but global rank {first} has {said[first]['size']} rows and global rank "
                    f"{rank} has {found['size']}, so their steps would differ. Give every data rank the same number of "
                    "rows, or leave is_dataset_splitted=False, and this loader splits the data."
                )
            leader = leaders.setdefault(
                self._data_ranks[rank], rank
            )  # the first rank of the replica group
            if found["fields"] != said[leader]["fields"]:
                raise SplitError(
                    f"{_SPLIT}, but global ranks {leader} and {rank}, which are replicas "
                    f"(the same data rank), read different {found['what']}. Split by the data rank, not by the global "
                    "rank, and draw random numbers from a seed that replicas share."
                )
            if found["varies"]:
                self._check_apart(
                    by_digest.setdefault(str(found["fields"]), rank),
                    rank,
                    found["what"],
                )
            elif (
                len(found["rows"]) == 1
            ):  # rows that are all equal prove nothing, but one row in several steps does
                self._single[rank] = (
                    *self._single.get(rank, ()),
                    str(found["fields"]),
                )[-FEW_STEPS:]
        by_digests = dict[tuple[str, ...], int]()
        for rank, digests in self._single.items():
            if len(set(digests)) == FEW_STEPS:
                self._check_apart(by_digests.setdefault(digests, rank), rank, "batches")

    def _check_apart(self, other: int, rank: int, what: str) -> None:
        if self._data_ranks[other] != self._data_ranks[rank]:
            raise SplitError(
                f"{_SPLIT}, but global ranks {other} and {rank}, which are different "
                f"data ranks, read the same {what.removesuffix('es')}: the data is not split. Leave "
                "is_dataset_splitted=False, and this loader splits it. Or give each data rank a loader of its own "
                "rows, for instance with paddle.io.DistributedBatchSampler(num_replicas=, rank=). A sampler that "
                "draws for its rank alone gets random numbers of its own if copy.deepcopy can copy it; else let it "
                "seed a generator with its rank. Where equal rows are meant, verify=None leaves this check out."
            )


def summary(
    arrays: Arrays,
    *,
    step: int,
    first: bool,
    key: str,
    ids: Iterable[Any],
    num_steps: int | None,
) -> Any:
    """Return what `BatchCheck` compares of a rank's batch: JSON-able, a few KB at most.

    Args:
        arrays: The leaves of the batch.
        step: Step of the epoch.
        first: True for the first batch of a pass.
        key: Ranks with the same key have read the same samples.
        ids: The samples, one for each row; empty if they have no number.
        num_steps: Steps of this rank's epoch; None if not known.
    """
    fields, varies = [], False
    num_rows = next((len(array) for _, array in arrays if array.ndim), 0)
    rows = [0] * num_rows if num_rows <= _MOST_ROWS else []
    for path, array in arrays:
        whole, form = (
            np.ascontiguousarray(array),
            zlib.crc32(f"{array.shape}{array.dtype.str}".encode()),
        )
        varies = varies or (array.ndim > 0 and bool((array != array[:1]).any()))
        if array.ndim and len(array) == len(rows) and array.size:
            of_rows = [
                zlib.crc32(row.data)
                for row in whole.reshape(len(rows), -1).view(np.uint8)
            ]
            rows = [
                zlib.crc32(b"%d" % one, before)
                for one, before in zip(of_rows, rows, strict=True)
            ]
            fields.append([path, zlib.crc32(repr(of_rows).encode(), form)])
        else:
            fields.append(
                [path, zlib.crc32(whole.reshape(-1).view(np.uint8).data, form)]
            )
    steps = "" if num_steps is None else f"{num_steps} steps, "
    what = "first batches" if first else f"batches at step {step}"
    return {
        "step": step,
        "key": key,
        "what": what,
        "size": f"{steps}a first batch of {num_rows}" if first else "",
        "fields": sorted(fields),  # dicts may have their keys in any order
        "varies": varies,
        "rows": rows,
        "ids": list(ids) if rows else [],
    }
