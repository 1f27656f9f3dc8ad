"""What a test of distributed training needs: real processes, a CPU static graph, stages without a GPU."""

from __future__ import annotations

from paddle_shard.testing.run_ranks import RanksFailed, report, run_ranks

__all__ = ["RanksFailed", "report", "run_ranks"]
