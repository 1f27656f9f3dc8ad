"""How many random examples a law is tried with, and how many faults are drawn; all of them by `make test-long`."""

import os

LONG = "PADDLE_SHARD_LONG" in os.environ
SHARE = 1 if LONG else 4


def trials(number: int) -> int:
    """Return how many of `number` examples are tried, at least 5: a quarter, or all by `make test-long`."""
    return max(min(number, 5), number // SHARE)


def draws(number: int) -> int:
    """Return how many of `number` faults a test draws: a third, or all in the rounds of `make faults` too."""
    return number if LONG or "FAULT_SEED" in os.environ else (number + 2) // 3
