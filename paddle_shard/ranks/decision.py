"""Progress of ranks in one epoch iterator, and the decision that follows from it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

FAIL, END, CLOSED, OK = range(4)
"""A rank reports one of these about the first step that it has not announced; at the same step, the least wins."""
OTHER = 4
"""Kind of a decision only: the data that the ranks have read differs at the step; at -1, their labels."""
NEVER = 2**60


@dataclass(slots=True)
class RankProgress:
    """Report of one rank about one epoch iterator."""

    step: int = 0
    """The rank can serve every step before this one."""
    kind: int = OK
    """Kind of `step`. OK: nothing is known yet. Any other value is final, and no step follows."""
    exhausted: int = NEVER
    """From this step on, the rank has no valid rows; NEVER while it may have some."""
    delivered: int = 0
    report: Any = ""
    """Report of a failure. In a decision: the label or the digest by which ranks differ."""

    @property
    def is_ending(self) -> bool:
        """True if the rank has no valid rows, or will have none."""
        return self.kind != OK or self.exhausted < NEVER


class Decision(NamedTuple):
    """Decision that follows from the reports of all ranks; the same on all of them."""

    step: int
    """Every step before this one may be delivered; -1: none, since the labels differ."""
    kind: int
    """Final event at `step`; OK: it is not decided yet."""


def decide(ranks: Collection[RankProgress]) -> Decision:
    """Return the decision that follows from the reports of all ranks.

    It does not depend on when it is computed. The iteration ends at the first step that any rank cannot serve; the
    reason is decided when every rank has reported what it can do there.

    Examples:
        >>> ahead, ends, fails = RankProgress(step=9), RankProgress(step=5, kind=END), RankProgress(step=5, kind=FAIL)
        >>> decide([ahead, ends])
        Decision(step=5, kind=1)
        >>> decide([ahead, ends, fails])
        Decision(step=5, kind=0)
        >>> decide([RankProgress(step=5), ends])  # the first rank has not reported on step 5
        Decision(step=5, kind=3)
        >>> decide([RankProgress(step=9, exhausted=3), RankProgress(step=9, exhausted=6)])
        Decision(step=6, kind=1)
    """
    first = min(4 * rank.step + rank.kind for rank in ranks)
    exhausted = max(rank.exhausted for rank in ranks)
    if exhausted < NEVER:
        first = min(first, 4 * exhausted + END)
    step, kind = divmod(first, 4)
    is_known = all(rank.kind != OK or rank.step > step for rank in ranks)
    return Decision(step, kind if is_known else OK)
