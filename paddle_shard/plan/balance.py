"""Balance: assign the rows of a batch to data ranks so that all have about equal cost."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.partition import Rows

_UNITS = 1 << 24
"""Costs are rounded to this many parts of a batch's total."""
_CLOSE = 1 << 8
"""Data ranks whose costs are above the mean by less than 1/256 are close enough."""
_MOST_SWAPS = 32

Costs = npt.NDArray[np.float64]


def assign_rows(costs: Costs, num_data_ranks: int) -> Rows:
    """Return the rows of a batch in the order in which data ranks take them: equally many each, of nearly equal cost.

    The rows are assigned from the costliest to the cheapest, each to the data rank with the least cost so far that
    is not full (Graham's rule of 1969 with a limit on the number). Then the data rank with most cost swaps rows with
    others as long as that helps. If the result is no better than the rows as they are, they stay so. If a single row
    costs more than the mean of a data rank, nothing can make them equal.

    Args:
        costs: float64[rows, columns] >= 0: the cost of each row, for each kind of cost. All columns weigh the same.
        num_data_ranks: It divides the number of rows.

    Returns:
        int64[rows]: data rank r takes the r-th of `num_data_ranks` equal stretches, in which rows ascend.

    Examples:
        >>> assign_rows(np.array([[9.0], [1.0], [2.0], [8.0]]), 2).tolist()
        [0, 1, 2, 3]
        >>> assign_rows(np.array([[9.0], [8.0], [2.0], [1.0]]), 2).tolist()
        [0, 3, 1, 2]
    """
    num_rows = len(costs)
    largest = costs.max(axis=0)
    if num_data_ranks == 1 or not largest.any():
        return np.arange(num_rows)
    # Integers from here on: a sum of floats may differ between machines, on which all ranks must do the same.
    parts = np.rint(costs / np.where(largest, largest, 1.0) * _UNITS).astype(np.int64)
    parts = parts * _UNITS // np.maximum(parts.sum(axis=0), 1)
    assigned = _assign(parts.max(axis=1), num_data_ranks)
    most = _swap(assigned, parts)
    if parts.reshape(num_data_ranks, -1, parts.shape[1]).sum(axis=1).max() <= most:
        return np.arange(num_rows)
    assigned.sort(axis=1)
    return assigned.reshape(-1)


def loads(costs: Costs, num_data_ranks: int) -> tuple[float, float]:
    """Return (cost of the data rank that has most, mean cost of a data rank), in the column where they differ most.

    Args:
        costs: float64[rows, columns]: in the order in which data ranks take the rows.
        num_data_ranks: It divides the number of rows.

    Examples:
        >>> loads(np.array([[3.0], [3.0], [1.0], [1.0]]), 2)
        (6.0, 4.0)
    """
    of_ranks = costs.reshape(num_data_ranks, -1, costs.shape[1]).sum(axis=1)
    most = of_ranks.max(axis=0)
    mean = of_ranks.mean(axis=0)
    worst = int((most / np.where(mean, mean, 1.0)).argmax())
    return float(most[worst]), float(mean[worst])


def balanced_rows(
    ids: Any, micro_size: int, *, num_data_ranks: int, costs_of: Callable[[Any], Costs]
) -> tuple[Rows, tuple[float, float]]:
    """Return the rows of a global batch in the order in which data ranks take them, and their load.

    Args:
        ids: The samples of the batch. The set of rows of each micro-batch stays as it is.
        micro_size: Rows of a micro-batch.
        num_data_ranks: It divides the rows of each micro-batch.
        costs_of: Returns float64[rows, columns] for the ids of some samples.

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


def _assign(costs: npt.NDArray[np.int64], num_data_ranks: int) -> Rows:
    """Return the rows of each data rank: int64[num_data_ranks, rows / num_data_ranks]."""
    rows_per_rank = len(costs) // num_data_ranks
    rows_of: list[list[int]] = [[] for _ in range(num_data_ranks)]
    # A heap of cost * num_data_ranks + rank: one int is compared quickly.
    open_ranks = list(range(num_data_ranks))
    scaled = (costs * num_data_ranks).tolist()
    for row in np.argsort(-costs, kind="stable").tolist():
        least = open_ranks[0]
        rows = rows_of[least % num_data_ranks]
        rows.append(row)
        if len(rows) < rows_per_rank:
            heapq.heapreplace(open_ranks, least + scaled[row])
        else:
            heapq.heappop(open_ranks)
    return np.array(rows_of, np.int64)


def _swap(assigned: Rows, costs: npt.NDArray[np.int64]) -> int:
    """Swap rows between data ranks as long as the largest cost becomes less; return it."""
    of_row = costs[assigned]  # [data rank, row, column]
    sums = of_row.sum(axis=1)
    close = sums.sum(axis=0).max() // len(assigned)
    close += close // _CLOSE
    for _ in range(_MOST_SWAPS):
        worst, column = divmod(int(sums.argmax()), sums.shape[1])
        most = sums[worst, column]
        if most <= close:
            break
        other = int(sums[:, column].argmin())
        # [row of the worst, row of the other, column]
        less = of_row[worst][:, None] - of_row[other][None]
        after = np.maximum(sums[worst] - less, sums[other] + less).max(axis=2)
        row, other_row = divmod(int(after.argmin()), after.shape[1])
        if after[row, other_row] >= most:
            break
        sums[worst] -= less[row, other_row]
        sums[other] += less[row, other_row]
        ranks = [worst, other]
        for array in (assigned, of_row):
            array[ranks, [row, other_row]] = array[ranks[::-1], [other_row, row]]
    return int(sums.max())
