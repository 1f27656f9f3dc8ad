"""What becomes of a batch that was read?"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from paddle_shard.delivery.setup import PassSetup
from paddle_shard.ranks.batch_check import summary
from paddle_shard.reading.batch import Batch
from paddle_shard.say_once import say_once
from paddle_shard.tree import named_leaves


def placed(setup: PassSetup, batch: Batch) -> Batch:
    """Make distributed tensors of a batch; with `pad_to`, they stay `Unplaced` until all ranks' lengths are known."""
    value, first = batch.value, batch.is_first
    compares = setup.batch_check is not None and len(setup.agreeing_ranks) > 1
    # A row that holds another sample than its own tells nothing.
    if compares and batch.skipped is None and (first or (setup.verify > 0 and batch.step.number % setup.verify == 0)):
        batch.summary = _summary(setup, batch)
    batch.rows = setup.rows.of(batch, setup.placer)
    batch.value, batch.layout, batch.row_shapes, batch.num_bytes = setup.placer.place(value, batch.rows)
    if first and isinstance(value, Mapping) and len(batch.value) < len(value):
        left_out = [key for key in value if key not in batch.value]
        say_once("input_keys=%s: the keys %s of the batch are left out.", repr(list(batch.value)), repr(left_out))
    return batch


def _summary(setup: PassSetup, batch: Batch) -> dict[str, Any]:
    """Return what the ranks compare of a batch."""
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
