"""Which weights and lengths do the sources of a mixture have in a stretch of the run?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the run with the same weights and sources."""

    first: int
    """Position of the run at which it begins."""
    parts: tuple[int, ...]
    """Integer weight of each source; 0: it is not drawn."""
    lengths: tuple[int, ...]
    """Number of samples of each source; 0 for a source that is not there."""


def num_positions_to_read(segments: Sequence[Segment], *, every: bool) -> int | None:
    """Return after how many positions a source's share has reached its length; by then it has been read in full.

    Args:
        segments: The run's segments; the last one has no end.
        every: True for the last of all sources that are ever drawn, False for the first.

    Returns:
        The number; None if a source is not drawn any more before it is read in full, and `every` asks for it.

    Examples:
        >>> num_positions_to_read([Segment(0, (7, 3), (70, 60))], every=False)
        100
    """
    found = [_position_to_read(segments, source) for source in range(len(segments[0].parts))]
    drawn = [at for at, *parts in zip(found, *(segment.parts for segment in segments), strict=True) if any(parts)]
    if every:
        return None if None in drawn else max(at for at in drawn if at is not None)
    return min((at for at in drawn if at is not None), default=None)


def _position_to_read(segments: Sequence[Segment], source: int) -> int | None:
    ends = [*(segment.first for segment in segments[1:]), None]
    share = Fraction(0)
    for segment, end in zip(segments, ends, strict=True):
        weight, left = Fraction(segment.parts[source], sum(segment.parts)), segment.lengths[source] - share
        if left <= 0:
            return segment.first
        if weight:
            needed = segment.first + -(-left // weight)
            if end is None or needed <= end:
                return int(needed)
        share += weight * (0 if end is None else end - segment.first)
    return None
