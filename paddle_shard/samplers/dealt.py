"""How are the rows of a batch dealt to the data ranks by their cost?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.balance import Costs, deal, loads
from paddle_shard.plan.partition import Rows, place_of_row
from paddle_shard.plan.shard_plan import Where
from paddle_shard.samplers.batches import IndexBatch

CostsOf = Callable[[Any], Costs]
"""Returns float64[rows, columns] for the ids of some samples."""


@dataclass(slots=True)
class DealtBatch:
    """A global batch whose rows are dealt so that each data rank's cost about as much; its set of rows is unchanged.

    Each micro-batch is dealt for itself.
    """

    batch: IndexBatch
    """The batch in the order of the plan or the sampler."""
    num_data_ranks: int
    costs_of: CostsOf
    _order: Rows | None = field(default=None, init=False)
    _ids: Any = field(default=None, init=False)
    _load: tuple[float, float] = field(default=(0.0, 0.0), init=False)

    @property
    def num_rows(self) -> int:
        """Rows of the global batch, padding included."""
        return self.batch.num_rows

    @property
    def micro_size(self) -> int:
        """Rows of each of its micro-batches."""
        return self.batch.micro_size

    @property
    def num_real(self) -> int:
        """Positions of the epoch's order that the batch serves."""
        return self.batch.num_real

    @property
    def sampler_state(self) -> Mapping[str, Any] | None:
        """The state of the user's own sampler after it has drawn this batch."""
        return self.batch.sampler_state

    @property
    def all_real(self) -> bool:
        """True if no row is padding; False also if that is not known."""
        return self.batch.all_real

    @property
    def order(self) -> Rows:
        """The rows of `batch`, in the order in which the data ranks take them."""
        if self._order is None:
            self._deal()
            assert self._order is not None
        return self._order

    @property
    def load(self) -> tuple[float, float]:
        """(cost of the data rank that has most, mean cost of a data rank), added up over the micro-batches.

        Of several columns, the one with the largest difference counts.
        """
        return self._load

    def take(self, rows: Rows | range) -> Any:
        """Return the data set's indices at some rows; an array if all are ints."""
        wanted = self.order[rows if isinstance(rows, np.ndarray) else np.asarray(rows, np.int64)]
        ids = self._ids
        return ids[wanted] if isinstance(ids, np.ndarray) else [ids[row] for row in wanted.tolist()]

    def valid(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of some rows are real."""
        return self.batch.valid(self.order[rows])

    def moved(self, place: Where) -> Where:
        """Return where a row is delivered.

        Args:
            place: Where it would be delivered if the rows were not dealt.
        """
        if place.data_rank is None or place.row is None:
            return place
        each = self.micro_size // self.num_data_ranks
        micro, within = divmod(place.row, each)
        row = micro * self.micro_size + place.data_rank * each + within
        at = int(np.flatnonzero(self.order == row)[0])
        data_rank, local = place_of_row(at, self.num_rows, self.num_data_ranks, self.micro_size)
        return Where(step=place.step, data_rank=data_rank, row=local)

    def _deal(self) -> None:
        ids = self.batch.take(range(self.num_rows))
        costs, order, most, mean = self.costs_of(ids), [], 0.0, 0.0
        for first in range(0, self.num_rows, self.micro_size):
            of_rows = costs[first : first + self.micro_size]
            dealt = deal(of_rows, self.num_data_ranks)
            load = loads(of_rows[dealt], self.num_data_ranks)
            most, mean = most + load[0], mean + load[1]
            order.append(first + dealt)
        self._ids, self._load = ids, (most, mean)
        self._order = np.concatenate(order)
