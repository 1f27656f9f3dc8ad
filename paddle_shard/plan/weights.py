"""Which source of a mixture is drawn at a position?

The user's weights become integers (`integer_weights`), which hold for a stretch of the run (`Segment`). The integers
decide the sequence of sources (`Chairman`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.order import Indices

MAX_PERIOD = 1 << 20
"""Largest sum of integer weights. Weights that need a larger one are rounded; see `integer_weights`."""
CHUNK = 1 << 14
"""Positions of a sequence that are computed at once."""


def integer_weights(
    names: tuple[str, ...], weights: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return an integer weight of each source, for the weights that a user has given. The greatest common divisor is 1.

    A float is taken as the simplest fraction that is equal to it: 0.7 is 7/10. If the exact shares need a period of
    more than 2^20, they are rounded to a period of 2^20, each by less than 2^-20. A source with a smaller share is
    still drawn once in a period, which the largest ones pay for.

    Args:
        names: The sources.
        weights: A number >= 0 for each source; a source without one has the weight 0. They need not sum to 1.

    Raises:
        ArgumentTypeError: The weights are no mapping, or not numbers.
        ArgumentError: A weight is negative or infinite, all are 0, or a name is unknown.

    Examples:
        >>> integer_weights(("web", "code"), {"web": 0.7, "code": 0.3})
        (7, 3)
    """
    if not isinstance(weights, Mapping):
        raise ArgumentTypeError(
            f"weights must be a dict of a number for each source, as {dict.fromkeys(names, 1)}, got "
            f"{type(weights).__name__}: {weights!r}."
        )
    if unknown := [name for name in weights if name not in names]:
        close = [
            match
            for name in unknown
            for match in get_close_matches(str(name), names, 1)
        ]
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ArgumentError(
            f"weights: unknown sources {unknown}; the sources are {list(names)}.{hint}"
        )
    fractions = [_fraction(name, weights.get(name, 0)) for name in names]
    total = sum(fractions)
    if total == 0:
        raise ArgumentError(
            f"weights: at least one must be above 0, got {dict(weights)}."
        )
    shares = [fraction / total for fraction in fractions]
    period = math.lcm(*(share.denominator for share in shares))
    parts = (
        [int(share * period) for share in shares]
        if period <= MAX_PERIOD
        else _rounded(shares)
    )
    divisor = math.gcd(*parts)
    return tuple(part // divisor for part in parts)


_LARGEST = 1e300


def _fraction(name: str, weight: Any) -> Fraction:
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise ArgumentTypeError(
            f"weights: the weight of {name!r} must be a number, got {weight!r}."
        )
    value: Any = weight
    if not isinstance(weight, int | Fraction):  # a float32 is what its digits say
        value = float(str(weight)) if isinstance(weight, np.generic) else float(weight)
    if not 0 <= value <= _LARGEST:  # nor is nan
        long = isinstance(value, int) and abs(value) > _LARGEST
        shown = "an int of more than 300 digits" if long else repr(weight)
        raise ArgumentError(
            f"weights: the weight of {name!r} must be a finite number >= 0, got {shown}."
        )
    exact = Fraction(value)
    simple: Fraction = exact.limit_denominator(MAX_PERIOD)
    return simple if isinstance(value, float) and float(simple) == value else exact


def _rounded(shares: list[Fraction]) -> list[int]:
    """Return parts of `MAX_PERIOD` near the shares; a source with a share above 0 keeps a part of at least 1."""
    ideal = [share * MAX_PERIOD for share in shares]
    parts = [max(math.floor(part), int(part > 0)) for part in ideal]
    left = MAX_PERIOD - sum(parts)
    for at in heapq.nsmallest(
        left, range(len(parts)), key=lambda at: parts[at] - ideal[at]
    ):  # largest remainder first
        parts[at] += 1
    for _ in range(-left):  # the smallest sources were raised to 1
        parts[parts.index(max(parts))] -= 1
    return parts


class Segment(NamedTuple):
    """A stretch of the run with the same weights and sources."""

    first: int
    """Position of the run at which it begins."""
    parts: tuple[int, ...]
    """Integer weight of each source; 0: it is not drawn."""
    lengths: tuple[int, ...]
    """Number of samples of each source."""


def schedule_of(
    what: str, names: tuple[str, ...], weights: Any, lengths: tuple[int, ...]
) -> tuple[Segment, ...]:
    """Return the segments of a run for a user's weights.

    Args:
        what: Begins the messages.
        names: The sources.
        weights: A dict of a number for each source, or [(first sample of the run, such a dict), ...].
        lengths: Number of samples of each source.

    Raises:
        ArgumentTypeError: It is neither.
        ArgumentError: The segments do not begin at 0 and ascend, or a dict does not fit the sources.
    """
    entries = [(0, weights)] if isinstance(weights, Mapping) else weights
    is_schedule = isinstance(entries, Sequence) and all(
        isinstance(entry, tuple | list)
        and len(entry) == 2
        and isinstance(entry[0], int | np.integer)
        for entry in entries
    )
    if not is_schedule or isinstance(entries, str):
        raise ArgumentTypeError(
            f"{what}: weights must be a dict, or a list of (first sample of the run, dict) for weights that change, "
            f"got {weights!r}."
        )
    firsts = [int(first) for first, _ in entries]
    if firsts[:1] != [0] or any(
        first >= following for first, following in pairwise(firsts)
    ):
        raise ArgumentError(
            f"{what}: weights that change must begin at sample 0 and ascend, got {firsts}."
        )
    segments = tuple(
        Segment(int(first), integer_weights(names, of_entry), lengths)
        for first, of_entry in entries
    )
    if isinstance(weights, Mapping) and (
        missing := [name for name in names if name not in weights]
    ):
        raise ArgumentError(
            f"{what}: weights must name each source, missing {missing}. Give 0 to leave one out."
        )
    return segments


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
    drawn = [
        source
        for source, parts in enumerate(
            zip(*(one.parts for one in segments), strict=True)
        )
        if any(parts)
    ]
    found = [_position_to_read(segments, source) for source in drawn]
    if every and None in found:
        return None
    return (max if every else min)(
        (position for position in found if position is not None), default=None
    )


def _position_to_read(segments: Sequence[Segment], source: int) -> int | None:
    ends = [*(segment.first for segment in segments[1:]), None]
    share = Fraction(0)
    for segment, end in zip(segments, ends, strict=True):
        weight, left = (
            Fraction(segment.parts[source], sum(segment.parts)),
            segment.lengths[source] - share,
        )
        if left <= 0:
            return segment.first
        if weight:
            needed = segment.first + -(-left // weight)
            if end is None or needed <= end:
                return int(needed)
        share += weight * (0 if end is None else end - segment.first)
    return None


class Chairman:
    """A sequence of sources in which each is as near to its weight as can be, after every prefix.

    After k positions, a source with the share w has been drawn within 1 - 1 / (2n - 2) of k * w times, where n is the
    number of sources with a weight above 0. No smaller bound holds for all weights. (Tijdeman, "The chairman assignment
    problem", Discrete Mathematics 32, 1980.)

    A source's draw number j may be made as soon as its share is 1 / (2n - 2) above j, and has a deadline after which
    the bound would be broken. At each position, the draw with the earliest deadline is made of those that may be. All
    is computed in integers. With weights that sum to Q, the sequence has the period Q and is exact at its multiples. So
    one table of at most Q entries tells the source at any position. It is computed in chunks, up to the position that
    is asked for.

    Examples:
        >>> Chairman((2, 1)).at(np.arange(6))[0].tolist()
        [0, 1, 0, 0, 1, 0]
    """

    def __init__(self, parts: tuple[int, ...]) -> None:
        """Set up the sequence; no entry is computed yet.

        Args:
            parts: An int >= 0 for each source, at least one above 0. Their sum is at most 2^20.
        """
        divisor = math.gcd(*parts)
        self._parts = np.array([part // divisor for part in parts], np.int64)
        self.period = int(self._parts.sum())
        drawn = int((self._parts > 0).sum())
        self._scale = max(1, 2 * drawn - 2)  # times are counted in 1 / (2n - 2) draws
        self._source = np.empty(
            self.period, np.int16 if len(parts) < 1 << 15 else np.int32
        )
        self._draw = np.empty(self.period, np.int32)
        nothing = np.zeros(len(parts), np.int64)
        self._state: tuple[int, Indices, Indices, list[int]] = (0, nothing, nothing, [])
        self._by_source: npt.NDArray[np.intp] | None = None

    def at(self, positions: Indices) -> tuple[npt.NDArray[np.int64], Indices]:
        """Return, for each position, its source and how often the source was drawn before it.

        Args:
            positions: int64, 0 or more.
        """
        if not positions.size:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        periods, places = np.divmod(positions, self.period)
        self._compute(int(places.max()) + 1)
        sources = self._source[places].astype(np.int64)
        draws: Indices = periods * self._parts[sources]
        draws += self._draw[places]
        return sources, draws

    def counts(self, position: int) -> Indices:
        """Return how often each source is drawn before a position: int64[number of sources]."""
        periods, place = divmod(position, self.period)
        self._compute(place)
        counts: Indices = periods * self._parts
        return counts + np.bincount(self._source[:place], minlength=len(self._parts))

    def inverse(self, sources: Indices, draws: Indices) -> Indices:
        """Return the position at which each source is drawn for so many times.

        Args:
            sources: int64, of sources with a weight above 0.
            draws: int64, counted from 0.
        """
        if not sources.size:
            return np.empty(0, np.int64)
        periods, draws = np.divmod(draws, self._parts[sources])
        self._compute(self.period)
        if self._by_source is None:
            self._by_source = np.argsort(self._source, kind="stable")
        begin = np.cumsum(self._parts) - self._parts
        places: Indices = (
            self._by_source[begin[sources] + draws] + periods * self.period
        )
        return places

    def _compute(self, end: int) -> None:
        """Extend the table to `end` entries or more."""
        # Threads share a sequence, and no lock survives a fork and pickling. So the state is one value: the entries
        # that are known, and what was drawn, released and waits after them. It is never changed, only replaced. Two
        # threads may compute the same entries; they write the same numbers to the same places.
        count = len(self._parts)
        while self._state[0] < end:
            start, counts, released, waiting = self._state
            stop, waiting = min(start + CHUNK, self.period), list(waiting)
            times, keys, released = self._releases(released, stop)
            found, at, last = [], 0, len(times)
            for position in range(start, stop):
                while at < last and times[at] <= position:
                    heapq.heappush(waiting, keys[at])
                    at += 1
                found.append(heapq.heappop(waiting) % count)
            for key in keys[at:]:
                heapq.heappush(waiting, key)
            sources = np.array(found, self._source.dtype)
            order = np.argsort(sources, kind="stable")
            number = np.bincount(sources, minlength=count)
            begin = np.cumsum(number) - number
            draws = np.empty(stop - start, np.int64)
            draws[order] = np.arange(stop - start) - np.repeat(begin - counts, number)
            self._source[start:stop], self._draw[start:stop] = sources, draws
            self._state = stop, counts + number, released, waiting

    def _releases(
        self, released: Indices, end: int
    ) -> tuple[list[int], list[int], Indices]:
        """Return the draws that may be made from now on and before `end`: the first position, and deadline and source.

        The third value is how many draws of each source are released by then.

        Draw j of a source with the share w may be made at position k if (k + 1) * w - j >= 1 / (2n - 2). It must be
        made at position k at the latest if (k + 1) * w - j > 1 - 1 / (2n - 2).
        """
        scale, period, parts = self._scale, self.period, self._parts
        # the draws with a first position below `end`
        upto = np.where(
            parts > 0,
            np.minimum((end * parts * scale - period) // (period * scale) + 1, parts),
            0,
        )
        number = np.maximum(upto - released, 0)
        sources = np.repeat(np.arange(len(parts)), number)
        begin = np.cumsum(number) - number
        draws = np.arange(len(sources)) - np.repeat(begin - released, number)
        own = parts[sources]
        first = -((draws * scale + 1) * -period // (own * scale)) - 1
        deadline = ((draws + 1) * scale - 1) * period // (own * scale)
        order = np.argsort(first, kind="stable")
        keys = deadline * len(parts) + sources
        return first[order].tolist(), keys[order].tolist(), released + number


chairman = lru_cache(maxsize=16)(Chairman)
"""Returns the sequence for integer weights. It is kept, as it is the same for all epochs."""
