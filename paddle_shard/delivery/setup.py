"""What does a pass need to know about its loader?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import paddle.io

from paddle_shard.delivery.rows import LoaderRows
from paddle_shard.delivery.stats import LoaderStats
from paddle_shard.inputs.options import LoaderOptions
from paddle_shard.inputs.source import Source
from paddle_shard.place.field import FieldLayout
from paddle_shard.place.placer import BatchPlacer
from paddle_shard.position.run import Run
from paddle_shard.ranks.batch_check import BatchCheck
from paddle_shard.ranks.replicas import Replicas
from paddle_shard.reading.reading import Reading


@dataclass(frozen=True, kw_only=True)
class PassSetup:
    """A loader's settings when a pass begins, and the objects that all its passes share."""

    options: LoaderOptions
    source: Source
    dataloader: paddle.io.DataLoader
    """The user's DataLoader, which is only read and never changed."""
    placer: BatchPlacer
    own_layout: FieldLayout
    """Layout of the field whose rows this rank reads."""
    rows: LoaderRows
    reading: Reading
    """The settings of the DataLoader, used to read."""
    run: Run
    stats: LoaderStats
    agreeing_ranks: tuple[int, ...]
    facts: Mapping[str, Any]
    """Settings that must be the same on all ranks."""
    batch_check: BatchCheck | None
    """Compares what the ranks have read; None: they do not compare it."""
    replicas: Replicas
    """How reading is shared with other ranks."""
    verify: int
    """Every how many steps they compare it; 0: the first batch of a pass."""
    prefetch: int
    """Batches that a thread keeps ready; 0: there is no thread."""
    if_worth_it: bool
    """True if the thread is started only if reading a step takes long enough."""
