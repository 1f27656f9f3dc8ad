"""Ranks that agree, ahead of delivery and in the background, at which step a pass ends or fails."""

from paddle_shard.agree.agreement import Agreement
from paddle_shard.agree.alone import AloneAgreement
from paddle_shard.agree.board import Board
from paddle_shard.agree.coordinator import Coordinator
from paddle_shard.agree.facts import described, differences
from paddle_shard.agree.group import Group, TwoLevelGroup

__all__ = ["Agreement", "AloneAgreement", "Board", "Coordinator", "Group", "TwoLevelGroup", "described", "differences"]
