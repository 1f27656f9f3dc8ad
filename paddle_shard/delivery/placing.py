"""What becomes of a batch that was read?"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import paddle

from paddle_shard.comm.batch_check import summary
from paddle_shard.delivery.pending import Pending
from paddle_shard.delivery.setup import PassSetup
from paddle_shard.place.lengths import rows_of
from paddle_shard.place.placer import named_tensors, tensors
from paddle_shard.say_once import say_once


def placed(setup: PassSetup, batch: Any, pending: Pending) -> tuple[Any, Pending]:
    """Return a placed batch; with `pad_to`, tensors stay `Unplaced` until all ranks' row lengths are known."""
    if _is_compared(setup, pending):
        pending.summary = _summary(setup, batch, pending)
    if pending.rows is None:
        pending.rows = setup.rows.of_item(batch, setup.input_keys)
    pending.row_shapes, pending.num_bytes = row_shapes(batch)
    if setup.described is not None:
        setup.described.check(pending.row_shapes)
    pad_to = setup.pad_to
    placed, pending.layout, apart = setup.placer.place(batch, pending.rows, setup.input_keys, pad_to)
    if pad_to is not None:
        pending.row_shapes = rows_of(placed)
    elif apart:
        pending.row_shapes = [*pending.row_shapes, *apart]
    if pending.is_first and isinstance(batch, Mapping) and len(placed) < len(batch):
        left_out = [key for key in batch if key not in placed]
        say_once("input_keys=%s: the keys %s of the batch are left out.", repr(list(placed)), repr(left_out))
    return placed, pending


def _is_compared(setup: PassSetup, pending: Pending) -> bool:
    """Return whether the ranks compare the batch of a step; not if a row of it holds another sample."""
    if setup.batch_check is None or len(setup.agreeing_ranks) == 1 or pending.skipped is not None:
        return False
    return pending.is_first or (setup.verify > 0 and pending.step % setup.verify == 0)


def _summary(setup: PassSetup, batch: Any, pending: Pending) -> dict[str, Any]:
    ids, stream = pending.indices, setup.source.stream
    if stream is not None:
        key = f"parts {stream.parts}"
    else:
        key = f"{zlib.crc32(ids.tobytes() if isinstance(ids, np.ndarray) else repr(ids).encode())} of {len(ids)}"
    found: dict[str, Any] = summary(
        [(path, leaf.numpy()) for path, leaf in named_tensors(batch)],
        step=pending.step,
        first=pending.is_first,
        key=key,
        ids=[one if isinstance(one, int | str) else repr(one) for one in np.asarray(ids).tolist()],
        num_steps=setup.run.num_steps_or_none(),
    )
    return found


def row_shapes(batch: Any) -> tuple[Sequence[Any], int]:
    """Return (dtype, *shape of a row) of each tensor of a batch, and the bytes of all."""
    return _measured(tuple((tensor.dtype, *tensor.shape) for tensor in tensors(batch)))


@lru_cache(maxsize=64)
def _measured(shapes: tuple[Any, ...]) -> tuple[Sequence[Any], int]:
    """Return (dtype, *shape of a row) of each tensor and the bytes of all tensors, given (dtype, *shape) of each."""
    num_bytes = sum(math.prod(shape) * _element_size(dtype) for dtype, *shape in shapes)
    return [[str(dtype).rsplit(".", 1)[-1], *shape[1:]] for dtype, *shape in shapes], num_bytes


@cache
def _element_size(dtype: Any) -> int:
    return int(paddle.empty([1], dtype).element_size())
