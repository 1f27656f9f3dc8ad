"""Every order and tail there is, for the laws: a new row of `ORDERINGS` or `TAILS` joins all of them."""

import numpy as np

from paddle_shard.plan.blocks import Blocks
from paddle_shard.plan.orders import ORDERINGS, PaddleSequential, find_ordering
from paddle_shard.plan.partition import slice_rows
from paddle_shard.plan.shard_plan import global_batches
from paddle_shard.plan.step import rank_steps
from paddle_shard.plan.tails import INDEX_TAILS

BLOCKS = Blocks(size=3, window=2)
"""Blocks that are smaller than the data sets of the tests."""
ALL = [BLOCKS if name == "blocks" else name for name in ORDERINGS]


def _of_any_mesh(shuffle):
    ordering = find_ordering(shuffle)
    one, two = (
        ordering.fingerprint(num_data_ranks=ranks, accumulation=1)
        for ranks in (1, 2)
    )
    return one == two


OF_ANY_MESH = [shuffle for shuffle in ALL if _of_any_mesh(shuffle)]
"""Those that do not depend on the number of data ranks."""
UNNAMED = [PaddleSequential()]

SERVING_TAILS = [tail for tail in INDEX_TAILS if not tail.refuses]
"""Those that every length of data can have."""


def delivered(plan, epoch=0):
    """The samples of the real rows of an epoch, over all steps and data ranks, as each data rank reads them."""
    found = []
    for step in range(plan.num_steps):
        num_rows, micro_size = (
            plan.num_rows(step=step),
            plan.micro_size(step=step),
        )
        for data_rank in range(plan.num_data_ranks):
            rows = slice_rows(
                num_rows, plan.num_data_ranks, data_rank, micro_size
            )
            batches = global_batches(plan, epoch, [step])
            [made] = rank_steps(batches, epoch, lambda *_, rows=rows: rows)
            real = (
                np.ones(len(rows), bool) if made.valid is None else made.valid
            )
            found += plan.indices(epoch=epoch, step=step, data_rank=data_rank)[
                real
            ].tolist()
    return found


def check_some_steps(plan, epoch=0):
    """Check the first, the middle and the last steps of a long plan: disjoint slices, undone by `where`."""
    for step in (0, 1, plan.num_steps // 2, plan.num_steps - 1):
        parts = [
            plan.indices(epoch=epoch, step=step, data_rank=rank)
            for rank in range(plan.num_data_ranks)
        ]
        read = np.concatenate(parts)
        first = plan.first_position(step=step)
        num_positions = min(len(read), plan.num_positions - first)
        assert sorted(read[:num_positions].tolist()) == sorted(
            plan.samples(epoch=epoch, first=first, end=first + num_positions)
        )
        assert len(set(read[:num_positions].tolist())) == num_positions
        for rank, part in enumerate(parts):
            for row in range(
                0,
                min(len(part), num_positions - rank * len(part)),
                1 + len(part) // 5,
            ):
                place = plan.where(epoch=epoch, sample=int(part[row]))
                assert (place.step, place.data_rank, place.row) == (
                    step,
                    rank,
                    row,
                )
    assert plan.num_served == plan.num_positions
