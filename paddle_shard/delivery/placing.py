"""What becomes of a batch that was read?"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import paddle

from paddle_shard.delivery.setup import PassSetup
from paddle_shard.place.lengths import rows_of
from paddle_shard.ranks.batch_check import summary
from paddle_shard.reading.batch import Batch
from paddle_shard.say_once import say_once
from paddle_shard.tree import named_leaves


def placed(setup: PassSetup, batch: Batch) -> Batch:
    """Make distributed tensors of a batch; with `pad_to`, they stay `Unplaced` until all ranks' lengths are known."""
    if _is_compared(setup, batch):
        batch.summary = _summary(setup, batch)
    value = batch.value
    batch.rows = setup.rows.of(batch, setup.placer)
    batch.value, batch.layout, shapes, apart = setup.placer.place(value, batch.rows)
    batch.row_shapes, batch.num_bytes = _measured(shapes)
    if setup.placer.pad_to is not None:
        batch.row_shapes = rows_of(batch.value)
    elif apart:
        batch.row_shapes = [*batch.row_shapes, *apart]
    if batch.is_first and isinstance(value, Mapping) and len(batch.value) < len(value):
        left_out = [key for key in value if key not in batch.value]
        say_once("input_keys=%s: the keys %s of the batch are left out.", repr(list(batch.value)), repr(left_out))
    return batch


def _is_compared(setup: PassSetup, batch: Batch) -> bool:
    """Return whether the ranks compare a batch; not if a row of it holds another sample."""
    if setup.batch_check is None or len(setup.agreeing_ranks) == 1 or batch.skipped is not None:
        return False
    return batch.is_first or (setup.verify > 0 and batch.step.number % setup.verify == 0)


def _summary(setup: PassSetup, batch: Batch) -> dict[str, Any]:
    ids, stream = batch.step.ids, setup.source.stream
    if stream is not None:
        key = f"parts {stream.parts}"
    else:
        key = f"{zlib.crc32(ids.tobytes() if isinstance(ids, np.ndarray) else repr(ids).encode())} of {len(ids)}"
    found: dict[str, Any] = summary(
        [(path, leaf.numpy()) for path, leaf in named_leaves(batch.value) if isinstance(leaf, paddle.Tensor)],
        step=batch.step.number,
        first=batch.is_first,
        key=key,
        ids=[one if isinstance(one, int | str) else repr(one) for one in np.asarray(ids).tolist()],
        num_steps=setup.run.num_steps_or_none(),
    )
    return found


@lru_cache(maxsize=64)
def _measured(shapes: tuple[Any, ...]) -> tuple[Sequence[Any], int]:
    """Return (dtype, *shape of a row) of each tensor and the bytes of all tensors, given (dtype, *shape) of each."""
    num_bytes = sum(math.prod(shape) * _element_size(dtype) for dtype, *shape in shapes)
    return [[str(dtype).rsplit(".", 1)[-1], *shape[1:]] for dtype, *shape in shapes], num_bytes


@cache
def _element_size(dtype: Any) -> int:
    return int(paddle.empty([1], dtype).element_size())
