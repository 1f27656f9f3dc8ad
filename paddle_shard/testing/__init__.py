"""What a test of distributed training needs: real processes, a CPU static graph.

Importing this does not import paddle; what the tests of a script need loads on first use.
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
