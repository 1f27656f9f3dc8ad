"""The ranks agree at which step a pass ends or fails, in the background and before delivery."""

from paddle_shard.agree.agreement import Agreement
from paddle_shard.agree.alone import AloneAgreement
from paddle_shard.agree.coordinator import Coordinator
from paddle_shard.agree.facts import described, differences
from paddle_shard.agree.group import Group, TwoLevelGroup
from paddle_shard.agree.progress_table import ProgressTable

__all__ = [
    "Agreement",
    "AloneAgreement",
    "Coordinator",
    "Group",
    "ProgressTable",
    "TwoLevelGroup",
    "described",
    "differences",
]
