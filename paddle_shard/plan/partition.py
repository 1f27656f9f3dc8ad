"""Which rows of a global batch does a data rank deliver, and which batch sizes can be split?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


def slice_rows(num_rows: int, num_data_ranks: int, data_rank: int, accumulation: int = 1) -> Rows:
    """Return the rows of a global batch that `data_rank` delivers, in the order in which it delivers them.

    A global batch is `accumulation` micro-batches one after the other, and every data rank takes its equal
    part of each, so that a slice cut by gradient accumulation holds whole micro-batches (Paddle's rule for
    `batch_sampler._acc_steps`).

    Args:
        num_rows: Rows of the global batch; a multiple of `num_data_ranks * accumulation`.
        num_data_ranks: Product of the sizes of the data axes. Not the world size.
        data_rank: In `range(num_data_ranks)`.
        accumulation: Micro-batches in the global batch.

    Returns:
        int64[num_rows // num_data_ranks]

    Examples:
        >>> [slice_rows(4, 2, r).tolist() for r in range(2)]
        [[0, 1], [2, 3]]
        >>> [slice_rows(8, 2, r, accumulation=2).tolist() for r in range(2)]
        [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    if not 0 <= data_rank < num_data_ranks:
        raise ValueError(
            f"data_rank must be in range({num_data_ranks}), got {data_rank}. "
            "Pass the data rank, not the global rank: `layout.data_rank(global_rank, data_axes)`."
        )
    if num_rows % (num_data_ranks * accumulation):
        raise ValueError(
            f"num_rows must be a multiple of num_data_ranks * accumulation = "
            f"{num_data_ranks} * {accumulation}, got {num_rows}."
        )
    # [micro-batch, data rank, row within]
    rows = np.arange(num_rows, dtype=np.int64).reshape(accumulation, num_data_ranks, -1)
    return rows[:, data_rank].reshape(-1)


def nearest_multiples(number: int, unit: int) -> tuple[int, ...]:
    """Return the multiples of `unit` around `number`, none of them 0: the sizes to offer in an error.

    Examples:
        >>> nearest_multiples(5, 2), nearest_multiples(1, 4)
        ((4, 6), (4,))
    """
    below = number // unit * unit
    return tuple(size for size in (below, below + unit) if size)
