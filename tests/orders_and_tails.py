"""Every order and tail there is, for the laws: a new row of `ORDERINGS` or `TAILS` joins all of them."""

from paddle_shard.plan.blocks import Blocks
from paddle_shard.plan.orders import ORDERINGS, find_ordering
from paddle_shard.plan.paddle_order import PaddleSequential
from paddle_shard.plan.tails import INDEX_TAILS

BLOCKS = Blocks(size=3, window=2)
"""Blocks that are smaller than the data sets of the tests."""
ALL = [BLOCKS if name == "blocks" else name for name in ORDERINGS]


def _of_any_mesh(shuffle):
    ordering = find_ordering(shuffle)
    one, two = (ordering.fingerprint(num_data_ranks=ranks, accumulation=1) for ranks in (1, 2))
    return one == two


OF_ANY_MESH = [shuffle for shuffle in ALL if _of_any_mesh(shuffle)]
"""Those that do not depend on the number of data ranks."""
UNNAMED = [PaddleSequential()]

SERVING_TAILS = [tail for tail in INDEX_TAILS if not tail.refuses]
"""Those that every length of data can have."""
