"""How does a rank's own short batch get as many rows as the others?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from paddle_shard.errors import BatchStructureError
from paddle_shard.plan.partition import Rows
from paddle_shard.reading.chunk import ChunkRequest, Gather, Slice
from paddle_shard.tree import is_sequence, leaves, rebuild


def num_rows_of(batch: Any) -> int:
    """Return the number of rows of a batch: the first dim of its first array or tensor that has a dim."""
    for leaf in arrays_of(batch):
        if len(leaf.shape):
            return int(leaf.shape[0])
    raise BatchStructureError(f"a batch has no array or tensor with rows: {type(batch).__name__}.")


class OwnRows:
    """Gives each of a rank's own batches as many rows as the first one, whichever worker has read it."""

    def __init__(self, gather: Gather) -> None:
        self._gather, self._wanted = gather, 0

    def of(self, found: Slice, request: ChunkRequest) -> Slice:
        """Return a batch with as many rows as the first.

        With `pad` or `repeat`, its last row is repeated in every array, tensor and list that has an item for each row.
        Otherwise a short batch becomes None.

        Raises:
            BatchStructureError: It has more rows than the first.
        """
        rows = 0 if found.batch is None else len(found.real)
        wanted = self._wanted = self._wanted or request.local_rows or rows
        if rows > wanted:
            raise BatchStructureError(
                f"a batch of {rows} rows came after batches of {wanted}: every rank's batches must have as many rows, "
                "and only its last may have fewer."
            )
        found = found._replace(state={**found.state, "rows": wanted})
        if found.batch is None or rows == wanted:
            return found
        filled = None
        if request.pad or request.repeat:
            filled = _taken(found.batch, rows, np.minimum(np.arange(wanted), rows - 1), self._gather)
        return found._replace(batch=filled, real=np.arange(wanted) < rows)


def _taken(value: Any, num_rows: int, rows: Rows, gather: Gather) -> Any:
    if isinstance(value, Mapping):
        return rebuild(value, {key: _taken(child, num_rows, rows, gather) for key, child in value.items()})
    if hasattr(value, "shape"):
        if not len(value.shape) or value.shape[0] != num_rows:
            return value
        return value[rows] if isinstance(value, np.ndarray) else gather([value], rows)
    if not is_sequence(value):
        return value
    if len(value) == num_rows and not any(True for _ in arrays_of(value)):
        return [value[row] for row in rows.tolist()]
    return rebuild(value, [_taken(child, num_rows, rows, gather) for child in value])


def arrays_of(value: Any) -> Iterator[Any]:
    """Yield the arrays and tensors of a batch."""
    return (leaf for leaf in leaves(value) if hasattr(leaf, "shape"))
