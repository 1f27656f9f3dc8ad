"""How does a rank's own short batch get as many rows as the others?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from paddle_shard.collate import is_sequence, rebuild
from paddle_shard.errors import BatchStructureError


def num_rows_of(batch: Any) -> int:
    """Return the rows of a batch: the first dim of its first array or tensor."""
    for leaf in _arrays(batch):
        if len(leaf.shape):
            return int(leaf.shape[0])
    raise BatchStructureError(f"a batch has no array or tensor with rows: {type(batch).__name__}.")


def filled(batch: Any, num_rows: int, wanted: int) -> Any:
    """Return a batch with its last row repeated in every array, tensor and list that has an item for each row."""
    rows = np.minimum(np.arange(wanted), num_rows - 1)
    return _taken(batch, num_rows, rows)


def _taken(value: Any, num_rows: int, rows: np.ndarray[Any, Any]) -> Any:
    if isinstance(value, Mapping):
        return rebuild(value, {key: _taken(child, num_rows, rows) for key, child in value.items()})
    if hasattr(value, "shape"):
        return value[rows] if len(value.shape) and value.shape[0] == num_rows else value
    if not is_sequence(value):
        return value
    if len(value) == num_rows and not any(True for _ in _arrays(value)):
        return [value[row] for row in rows.tolist()]
    return rebuild(value, [_taken(child, num_rows, rows) for child in value])


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for child in value.values():
            yield from _arrays(child)
    elif hasattr(value, "shape"):
        yield value
    elif is_sequence(value):
        for child in value:
            yield from _arrays(child)
