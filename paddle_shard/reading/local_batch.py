"""How does a rank's own short batch get as many rows as the others?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from paddle_shard.errors import BatchStructureError
from paddle_shard.plan.partition import Rows
from paddle_shard.reading.batch import Batch
from paddle_shard.reading.chunk import ChunkRequest
from paddle_shard.reading.parcel import as_array
from paddle_shard.tree import is_sequence, leaves, rebuild


def num_rows_of(batch: Any) -> int:
    """Return the number of rows of a batch: the first dim of its first array or tensor that has a dim."""
    for leaf in arrays_of(batch):
        if len(leaf.shape):
            return int(leaf.shape[0])
    raise BatchStructureError(f"a batch has no array or tensor with rows: {type(batch).__name__}.")


class OwnRows:
    """Gives each of a rank's own batches as many rows as the first one, whichever worker has read it."""

    def __init__(self) -> None:
        self._wanted = 0

    def of(self, found: Batch, request: ChunkRequest) -> Batch:
        """Return a batch with as many rows as the first.

        Raises:
            BatchStructureError: It has more rows.
        """
        rows = 0 if found.value is None else num_rows_of(found.value)
        wanted = self._wanted = self._wanted or request.local_rows or rows
        if rows > wanted:
            raise BatchStructureError(
                f"a batch of {rows} rows came after batches of {wanted}: every rank's batches must have as many rows, "
                "and only its last may have fewer."
            )
        found.step = replace(found.step, sampler_state={**found.step.sampler_state, "rows": wanted})
        if found.value is not None and rows < wanted:
            fills = request.pad or request.repeat
            found.value = _taken(found.value, rows, np.minimum(np.arange(wanted), rows - 1)) if fills else None
            found.real = np.arange(wanted) < rows
        return found


def _taken(value: Any, num_rows: int, rows: Rows) -> Any:
    if isinstance(value, Mapping):
        return rebuild(value, {key: _taken(child, num_rows, rows) for key, child in value.items()})
    if hasattr(value, "shape"):
        if not len(value.shape) or value.shape[0] != num_rows:
            return value
        return as_array(value)[rows]
    if not is_sequence(value):
        return value
    if len(value) == num_rows and not any(True for _ in arrays_of(value)):
        return [value[row] for row in rows.tolist()]
    return rebuild(value, [_taken(child, num_rows, rows) for child in value])


def arrays_of(value: Any) -> Iterator[Any]:
    """Yield the arrays and tensors of a batch."""
    return (leaf for leaf in leaves(value) if hasattr(leaf, "shape"))
