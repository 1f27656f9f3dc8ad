"""How many random examples a law is tried with: `make quick` tries a quarter of them."""

import os

SHARE = 4 if "PADDLE_SHARD_QUICK" in os.environ else 1


def trials(number: int) -> int:
    """Return how many of `number` examples are tried, at least 5."""
    return max(min(number, 5), number // SHARE)
