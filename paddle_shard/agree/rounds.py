"""What does an agreement need from the `Coordinator` that created it?"""

from __future__ import annotations

from threading import Condition
from typing import Any, Protocol

from paddle_shard.agree.group import Group
from paddle_shard.agree.progress_table import ProgressTable


class Rounds(Protocol):
    """The rounds in which all passes of this rank take part."""

    group: Group
    changed: Condition
    table: ProgressTable | None
    introductions: dict[int, bytes]

    @property
    def is_over(self) -> bool:
        """See `Coordinator`."""

    @staticmethod
    def tag(label: str) -> int:
        """See `Coordinator`."""

    def hear(self, agreement: Any) -> None:
        """See `Coordinator`."""

    def wait(self, agreement: Any, step: int, start: float, look_again: float | None = None) -> None:
        """See `Coordinator`."""
