"""Which rank reads for which others?"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedReader:
    """The ranks of one host that read the same samples; the first of them reads for all."""

    ranks: tuple[int, ...]
    """Global ranks, ascending; at least two."""

    @property
    def leader(self) -> int:
        """Global rank that reads."""
        return self.ranks[0]

    @property
    def followers(self) -> tuple[int, ...]:
        """Global ranks that it reads for."""
        return self.ranks[1:]


def shared_reader(rank: int, rows: Mapping[int, Hashable], hosts: Sequence[str]) -> SharedReader | None:
    """Return who reads what a rank reads; None if the rank reads for itself only.

    Args:
        rank: Global rank.
        rows: Global rank -> what stands for the rows that it reads; equal for ranks that read the same.
        hosts: Host of each global rank.

    Examples:
        >>> rows = {0: "first half", 1: "second half", 2: "first half", 3: "second half"}
        >>> shared_reader(3, rows, ["a", "a", "a", "a"])
        SharedReader(ranks=(1, 3))
        >>> shared_reader(3, rows, ["a", "a", "b", "b"]) is None
        True
    """
    ranks = sorted(one for one in rows if rows[one] == rows[rank] and hosts[one] == hosts[rank])
    return SharedReader(ranks=tuple(ranks)) if len(ranks) > 1 else None
