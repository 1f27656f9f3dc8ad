"""Which source does a mixture draw from at a position?"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.shuffle import Indices

CHUNK = 1 << 14
"""Positions that are computed at once."""


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
        self._source = np.empty(self.period, np.int16 if len(parts) < 1 << 15 else np.int32)
        self._draw = np.empty(self.period, np.int32)
        self._known = 0
        self._counts = np.zeros(len(parts), np.int64)
        self._released = np.zeros(len(parts), np.int64)
        self._waiting: list[int] = []
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
        places: Indices = self._by_source[begin[sources] + draws] + periods * self.period
        return places

    def _compute(self, end: int) -> None:
        """Extend the table to `end` entries or more."""
        while self._known < end:
            self._extend(min(self._known + CHUNK, self.period))

    def _extend(self, end: int) -> None:
        start, count = self._known, len(self._parts)
        times, keys = self._releases(end)
        waiting, found, at = self._waiting, [], 0
        last = len(times)
        for position in range(start, end):
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
        draws = np.empty(end - start, np.int64)
        draws[order] = np.arange(end - start) - np.repeat(begin - self._counts, number)
        self._source[start:end], self._draw[start:end] = sources, draws
        self._counts += number
        self._known = end

    def _releases(self, end: int) -> tuple[list[int], list[int]]:
        """Return the draws that may be made from now on and before `end`: the first position, and deadline and source.

        Draw j of a source with the share w may be made at position k if (k + 1) * w - j >= 1 / (2n - 2). It must be
        made at position k at the latest if (k + 1) * w - j > 1 - 1 / (2n - 2).
        """
        scale, period, parts = self._scale, self.period, self._parts
        # the draws with a first position below `end`
        upto = np.where(parts > 0, np.minimum((end * parts * scale - period) // (period * scale) + 1, parts), 0)
        number = np.maximum(upto - self._released, 0)
        sources = np.repeat(np.arange(len(parts)), number)
        begin = np.cumsum(number) - number
        draws = np.arange(len(sources)) - np.repeat(begin - self._released, number)
        own = parts[sources]
        first = -((draws * scale + 1) * -period // (own * scale)) - 1
        deadline = ((draws + 1) * scale - 1) * period // (own * scale)
        self._released += number
        order = np.argsort(first, kind="stable")
        keys = deadline * len(parts) + sources
        return first[order].tolist(), keys[order].tolist()


@lru_cache(maxsize=16)
def chairman(parts: tuple[int, ...]) -> Chairman:
    """Return the sequence for integer weights; it is kept, as it is the same for all epochs."""
    return Chairman(parts)
