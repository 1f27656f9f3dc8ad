"""Tools for tests of distributed training: real processes, simulated ranks, static graphs on the CPU.

Importing this does not import Paddle, which is loaded on first use.
"""

from __future__ import annotations

from paddle_shard.testing.cpu_static import StaticGroupsError, cpu_static
from paddle_shard.testing.job import Job, RanksFailed, report, run_ranks, start_ranks
from paddle_shard.testing.simulated import on_each_rank

__all__ = [
    "Job",
    "RanksFailed",
    "StaticGroupsError",
    "cpu_static",
    "on_each_rank",
    "report",
    "run_ranks",
    "start_ranks",
]
