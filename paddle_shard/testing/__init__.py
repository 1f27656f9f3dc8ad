"""Tools for tests of distributed training: real processes and simulated ranks.

Importing this does not import Paddle, which is loaded on first use.
"""

from __future__ import annotations

from paddle_shard.testing.job import (
    Job,
    RanksFailed,
    report,
    run_ranks,
    start_ranks,
)
from paddle_shard.testing.simulated import on_each_rank

__all__ = [
    "Job",
    "RanksFailed",
    "on_each_rank",
    "report",
    "run_ranks",
    "start_ranks",
]
