"""Where is a row delivered, if rows are dealt by cost, or left out?"""

from __future__ import annotations

import numpy as np

from paddle_shard.plan.partition import place_of_row, row_of_place
from paddle_shard.plan.shard_plan import Where
from paddle_shard.samplers.batches import IndexBatch
from paddle_shard.samplers.dealt import DealtBatch


def place_in(batch: IndexBatch, place: Where, num_data_ranks: int) -> Where | None:
    """Return where a row is delivered; None if it is left out.

    Args:
        batch: The batch as it is delivered.
        place: The place of the row in the plan, at the step of the batch.
        num_data_ranks: Data ranks of the plan.
    """
    if place.data_rank is None or place.row is None:
        return place
    row = row_of_place(place.data_rank, place.row, batch.num_rows, num_data_ranks, batch.micro_size)
    if isinstance(batch, DealtBatch):
        row = int(np.flatnonzero(batch.order == row)[0])
    if not batch.valid(np.array([row]))[0]:
        return None
    data_rank, local = place_of_row(row, batch.num_rows, num_data_ranks, batch.micro_size)
    return Where(step=place.step, data_rank=data_rank, row=local)
