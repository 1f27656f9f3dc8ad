"""Rows of a global batch that a data rank delivers, and the batch sizes that can be split."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paddle_shard.errors import BatchSizeError

Rows = npt.NDArray[np.int64]


def slice_rows(
    num_rows: int,
    num_data_ranks: int,
    data_rank: int,
    micro_size: int | None = None,
) -> Rows:
    """Return the rows of a global batch that `data_rank` delivers, in the order in which it delivers them.

    A global batch is one or more micro-batches, one after the other. Every data rank takes an equal part of each,
    so that gradient accumulation cuts a slice into whole micro-batches (Paddle's rule for
    `batch_sampler._acc_steps`).

    Args:
        num_rows: Rows of the global batch; a multiple of `num_data_ranks`.
        num_data_ranks: Product of the sizes of the data axes. Not the world size.
        data_rank: The data rank, in `range(num_data_ranks)`.
        micro_size: Rows of a micro-batch, a multiple of `num_data_ranks`; the last one may have fewer.
            None: the whole batch is one micro-batch.

    Returns:
        int64[num_rows // num_data_ranks]

    Examples:
        >>> [slice_rows(4, 2, r).tolist() for r in range(2)]
        [[0, 1], [2, 3]]
        >>> [slice_rows(8, 2, r, micro_size=4).tolist() for r in range(2)]
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        >>> [slice_rows(6, 2, r, micro_size=4).tolist() for r in range(2)]
        [[0, 1, 4], [2, 3, 5]]
    """
    if not 0 <= data_rank < num_data_ranks:
        raise ValueError(
            f"data_rank must be in range({num_data_ranks}), got {data_rank}. "
            "Pass the data rank, not the global rank: `layout.data_rank(global_rank, data_axes)`."
        )
    micro_size = num_rows if micro_size is None else micro_size
    if num_rows % num_data_ranks or micro_size % num_data_ranks:
        raise ValueError(
            f"num_rows and micro_size must be multiples of num_data_ranks = {num_data_ranks}, "
            f"got {num_rows} and {micro_size}."
        )
    rows = np.arange(num_rows)
    data_ranks, _ = place_of_rows(
        rows, num_rows, num_data_ranks, max(1, micro_size)
    )
    return np.flatnonzero(data_ranks == data_rank)


def place_of_rows(
    rows: Rows, num_rows: int, num_data_ranks: int, micro_size: int
) -> tuple[Rows, Rows]:
    """Return (data rank, row in its slice) for some rows of a global batch.

    Examples:
        >>> [values.tolist() for values in place_of_rows(np.arange(6), 6, 2, 4)]
        [[0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 2, 2]]
    """
    micro, within = np.divmod(rows, micro_size)
    # The last micro-batch may be short.
    num_micro_rows = np.minimum(micro_size, num_rows - micro * micro_size)
    data_ranks, row = np.divmod(within, num_micro_rows // num_data_ranks)
    return data_ranks, micro * (micro_size // num_data_ranks) + row


def nearest_multiples(number: int, unit: int) -> tuple[int, ...]:
    """Return the positive multiples of `unit` next to `number`, which errors suggest.

    Examples:
        >>> nearest_multiples(5, 2), nearest_multiples(1, 4)
        ((4, 6), (4,))
    """
    below = number // unit * unit
    return tuple(size for size in (below, below + unit) if size)


_ITEMS_ARE_BATCHES = (
    "If an item is a batch already, give the DataLoader batch_size=None."
)


def check_batch_size(
    batch_size: int,
    num_data_ranks: int,
    accumulation: int = 1,
    *,
    hint: str = _ITEMS_ARE_BATCHES,
) -> None:
    """Reject a global batch that cannot be cut into equal slices.

    Args:
        batch_size: Rows of the global batch.
        num_data_ranks: Number of data ranks.
        accumulation: Number of micro-batches, each of which is cut.
        hint: The end of the error's text.

    Raises:
        BatchSizeError: The batch cannot be cut; the text names both numbers and the nearest sizes that work.
    """
    unit = num_data_ranks * accumulation
    if batch_size % unit:
        over = f"{num_data_ranks} data ranks"
        if accumulation > 1:
            over += f" times {accumulation} accumulation steps"
        sizes = " or ".join(map(str, nearest_multiples(batch_size, unit)))
        raise BatchSizeError(
            f"batch_size: a global batch of {batch_size} cannot be split evenly over {over}. Nearest sizes that can: "
            f"{sizes}. {hint}"
        )
