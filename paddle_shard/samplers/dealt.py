"""How are the rows of a batch dealt to the data ranks by their cost?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.balance import Costs, deal, loads
from paddle_shard.plan.partition import Rows
from paddle_shard.samplers.batches import IndexBatch, WrappedBatch

CostsOf = Callable[[Any], Costs]
"""Returns float64[rows, columns] for the ids of some samples."""


class DealtBatch(WrappedBatch):
    """A global batch whose rows are dealt so that each data rank's cost about as much; its set of rows is unchanged.

    Each micro-batch is dealt for itself.
    """

    def __init__(self, batch: IndexBatch, num_data_ranks: int, costs_of: CostsOf) -> None:
        super().__init__(batch)
        self._num_data_ranks, self._costs_of = num_data_ranks, costs_of
        self._order: Rows | None = None
        self._ids: Any = None
        self._load = 0.0, 0.0

    @property
    def order(self) -> Rows:
        """The rows of `batch`, in the order in which the data ranks take them."""
        if self._order is None:
            self._order = self._deal()
        return self._order

    @property
    def load(self) -> tuple[float, float]:
        """See `IndexBatch`; added up over the micro-batches. Of several columns, the most unequal one counts."""
        return self._load

    def take(self, rows: Rows | range) -> Any:
        """See `IndexBatch`."""
        wanted = self.order[rows if isinstance(rows, np.ndarray) else np.asarray(rows, np.int64)]
        ids = self._ids
        return ids[wanted] if isinstance(ids, np.ndarray) else [ids[row] for row in wanted.tolist()]

    def valid(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """See `IndexBatch`."""
        return self.batch.valid(self.order[rows])

    def num_left_out(self, rows: Rows) -> int:
        """See `IndexBatch`."""
        return self.batch.num_left_out(self.order[rows])

    def _deal(self) -> Rows:
        self._ids = self.batch.take(range(self.num_rows))
        costs, order, most, mean = self._costs_of(self._ids), [], 0.0, 0.0
        for first in range(0, self.num_rows, self.micro_size):
            of_rows = costs[first : first + self.micro_size]
            dealt = deal(of_rows, self._num_data_ranks)
            load = loads(of_rows[dealt], self._num_data_ranks)
            most, mean = most + load[0], mean + load[1]
            order.append(first + dealt)
        self._load = most, mean
        return np.concatenate(order)
