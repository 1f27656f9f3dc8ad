"""Sequence parallelism: the tokens of a row that each rank of a sequence axis holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
"""Positions in a row."""


def balanced_order(ends: Tokens, parts: int) -> Tokens:
    """Return the tokens of a row in the order in which the ranks hold them, balanced for causal attention.

    Each document is cut into 2 * parts chunks, of which rank r holds chunks r and 2 * parts - 1 - r. The chunks of a
    document differ by a token at most, and the tokens that are left over go to the ranks that have fewest so far. So
    every rank holds as many tokens, and in each document about as many pairs of a query and a key. One document whose
    length is a multiple of 2 * parts has the layout of Paddle's own ring attention (`shard_seq_load_balance`).

    Args:
        ends: int64[documents]: the position after the last token of each document, ascending; the last one is the
            length of the row, a multiple of `parts`.
        parts: Number of ranks.

    Examples:
        >>> balanced_order(np.array([8]), 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
        >>> balanced_order(np.array([5, 8]), 2).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    chunks = np.arange(2 * parts)
    rank_of_chunk = np.minimum(chunks, chunks[::-1]).astype(np.int16)
    ranks = []
    counts = np.zeros(parts, np.int64)
    begin = 0
    for end in ends.tolist():
        size, rest = divmod(end - begin, 2 * parts)
        sizes = np.full(2 * parts, size)
        order = np.argsort(counts, kind="stable")
        # The first chunk of a rank, then its other one.
        sizes[order[:rest]] += 1
        sizes[2 * parts - 1 - order[: max(0, rest - parts)]] += 1
        ranks.append(np.repeat(rank_of_chunk, sizes))
        counts += np.bincount(ranks[-1], minlength=parts)
        begin = end
    return np.argsort(np.concatenate(ranks), kind="stable")
