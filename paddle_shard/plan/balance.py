"""Balance: assign the rows of a batch to data ranks so that all have about equal cost."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.partition import Rows

_UNITS = 1 << 24
"""Costs are rounded to this many parts of the largest one."""

Costs = npt.NDArray[np.float64]
Load = tuple[float, float]
"""(largest, mean) cost of a data rank."""


def assign_rows(costs: Costs, num_data_ranks: int) -> Rows:
    """Return the rows of a batch in the order in which data ranks take them: equally many each, of nearly equal cost.

    The rows are assigned from the costliest to the cheapest, each to the data rank with the least cost so far that
    is not full (Graham's rule of 1969 with a limit on the number). If the result is no better than the rows as they
    are, they stay so. If a single row costs more than the mean of a data rank, nothing can make them equal.

    Args:
        costs: float64[rows] >= 0.
        num_data_ranks: It divides the number of rows.

    Returns:
        int64[rows]: data rank r takes the r-th of `num_data_ranks` equal stretches, in which rows ascend.

    Examples:
        >>> assign_rows(np.array([9.0, 1.0, 2.0, 8.0]), 2).tolist()
        [0, 1, 2, 3]
        >>> assign_rows(np.array([9.0, 8.0, 2.0, 1.0]), 2).tolist()
        [0, 3, 1, 2]
    """
    in_order = np.arange(len(costs))
    largest = costs.max()
    if num_data_ranks == 1 or not largest:
        return in_order
    # Integers from here on: a sum of floats may differ between machines, on which all ranks must do the same.
    units = np.rint(costs / largest * _UNITS).astype(np.int64)
    rows_per_rank = len(costs) // num_data_ranks
    rows_of: list[list[int]] = [[] for _ in range(num_data_ranks)]
    # A heap of cost * num_data_ranks + rank: one int is compared quickly.
    open_ranks = list(range(num_data_ranks))
    scaled = (units * num_data_ranks).tolist()
    for row in np.argsort(-units, kind="stable").tolist():
        least = open_ranks[0]
        rows = rows_of[least % num_data_ranks]
        rows.append(row)
        if len(rows) < rows_per_rank:
            heapq.heapreplace(open_ranks, least + scaled[row])
        else:
            heapq.heappop(open_ranks)
    assigned = np.sort(np.array(rows_of, np.int64)).reshape(-1)
    is_better = loads(units[assigned], num_data_ranks) < loads(
        units, num_data_ranks
    )
    return assigned if is_better else in_order


def loads(costs: npt.NDArray[Any], num_data_ranks: int) -> Load:
    """Return the load of data ranks.

    Args:
        costs: [rows]: in the order in which data ranks take the rows.
        num_data_ranks: It divides the number of rows.

    Examples:
        >>> loads(np.array([3.0, 3.0, 1.0, 1.0]), 2)
        (6.0, 4.0)
    """
    of_ranks = costs.reshape(num_data_ranks, -1).sum(axis=1)
    return float(of_ranks.max()), float(of_ranks.mean())


def balanced_rows(
    ids: Any,
    micro_size: int,
    *,
    num_data_ranks: int,
    costs_of: Callable[[Any], Costs],
) -> tuple[Rows, Load]:
    """Return the rows of a global batch in the order in which data ranks take them, and their load.

    Args:
        ids: The samples of the batch. The set of rows of each micro-batch stays as it is.
        micro_size: Rows of a micro-batch.
        num_data_ranks: It divides the rows of each micro-batch.
        costs_of: Returns float64[rows] for the ids of some samples.

    Returns:
        int64[rows], and (largest, mean) cost of a data rank, over all micro-batches.
    """
    costs = costs_of(ids)
    order = []
    most = 0.0
    mean = 0.0
    for first in range(0, len(costs), micro_size):
        of_rows = costs[first : first + micro_size]
        rows = assign_rows(of_rows, num_data_ranks)
        largest, usual = loads(of_rows[rows], num_data_ranks)
        most += largest
        mean += usual
        order.append(first + rows)
    return np.concatenate(order), (most, mean)
