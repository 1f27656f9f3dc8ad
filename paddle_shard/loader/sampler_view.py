"""What do trainers see as the loader's `batch_sampler`?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from typing import Any

import numpy as np
import paddle.io

from paddle_shard.delivery.rows import LoaderRows
from paddle_shard.inputs.source import Source
from paddle_shard.loader.compat import asked_by_to_static
from paddle_shard.place.field import FieldLayout
from paddle_shard.plan.state import LoaderState
from paddle_shard.position.run import Run


class ShardBatchSampler(paddle.io.DistributedBatchSampler):
    """This rank's batches of indices, as Paddle's own loader shows them to trainers.

    `batch_size`, `nranks` and `local_rank` are a data rank's; `set_epoch` is the loader's; other attributes
    are those of the sampler that the loader was given.
    """

    def __init__(
        self,
        dataloader: paddle.io.DataLoader,
        source: Source,
        own_layout: FieldLayout,
        rows: LoaderRows,
        run: Run,
        batch_size: int | None,
    ) -> None:
        # Not Paddle's: its constructor would look for a rank of its own.
        self._source, self._rows, self._run = source, rows, run
        self._given = dataloader.batch_sampler
        self.dataset = dataloader.dataset
        self.nranks = own_layout.num_data_ranks
        self.local_rank = own_layout.data_rank if own_layout.on_mesh else 0
        self.batch_size = batch_size
        self.drop_last = source.tail.drops
        self.shuffle = bool(getattr(self._given, "shuffle", False))
        self._acc_steps = source.accumulation

    @property
    def epoch(self) -> int:
        """The loader's epoch."""
        return self._run.epoch

    @property
    def num_samples(self) -> int:
        """Samples of a data rank, as Paddle counts them."""
        return math.ceil(len(self.dataset) / self.nranks)

    @property
    def total_size(self) -> int:
        """Samples of all data ranks, as Paddle counts them."""
        return self.num_samples * self.nranks

    def __iter__(self) -> Iterator[list[Any]]:
        batches = copy(self._source.batches)  # looking is not requesting: `set_weights` goes by what was requested
        for step in batches.steps(LoaderState(epoch=self.epoch), self._rows.to_read, self._run.skips):
            yield step.ids.tolist() if isinstance(step.ids, np.ndarray) else list(step.ids)

    def __len__(self) -> int:
        return self._run.num_batches()

    def set_epoch(self, epoch: int = 0, **others: Any) -> None:
        """Set the loader's epoch; further arguments go to the `set_epoch` of the sampler that was given."""
        if asked_by_to_static():
            return  # describing the inputs has not moved the order
        self._run.set_epoch(epoch, others)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_given" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._given, name)
