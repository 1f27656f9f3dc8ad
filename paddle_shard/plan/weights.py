"""Weights of a mixture: from the user's numbers to the source at each position.

`schedule_of` turns the user's weights into integers, each for a stretch of the run (`Segment`). The integers decide the
sequence of sources (`WeightedInterleave`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush, nlargest
from numbers import Real
from operator import index as int_of
from typing import Any, NamedTuple

import numpy as np

from paddle_shard.errors import ArgumentError, ArgumentTypeError
from paddle_shard.plan.order import Indices

MAX_PERIOD = 1 << 20
"""Largest sum of integer weights. Weights that need a larger one are rounded; see `integer_weights`."""
CHUNK = 1 << 14
"""Positions of a sequence that are computed at once."""


def integer_weights(
    names: tuple[str, ...], weights: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return an integer weight of each source. The greatest common divisor is 1.

    A float is taken as the simplest fraction that is equal to it: 0.7 is 7/10. If the exact shares need a period of
    more than 2^20, they are rounded to a period of 2^20, each by less than 2^-20. A source with a smaller share is
    still selected once in a period, which the largest ones pay for.

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
            f"weights must be a dict of a number for each source, got {type(weights).__name__}: {weights!r}."
        )
    if unknown := [name for name in weights if name not in names]:
        raise ArgumentError(
            f"weights: unknown sources {unknown}; the sources are {list(names)}."
        )
    fractions = [_fraction(name, weights.get(name, 0)) for name in names]
    total = sum(fractions)
    if total == 0:
        raise ArgumentError(
            f"weights: at least one must be above 0, got {dict(weights)}."
        )
    shares = [fraction / total for fraction in fractions]
    period = math.lcm(*(share.denominator for share in shares))
    exact = [int(share * period) for share in shares]
    integers = exact if period <= MAX_PERIOD else _rounded(shares)
    divisor = math.gcd(*integers)
    return tuple(integer // divisor for integer in integers)


def _fraction(name: str, weight: Any) -> Fraction:
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise ArgumentTypeError(
            f"weights: the weight of {name!r} must be a number, got {weight!r}."
        )
    try:
        # A float32 is what its digits say.
        number = float(
            str(weight) if isinstance(weight, np.generic) else weight
        )
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise ArgumentError(
            f"weights: the weight of {name!r} must be a finite number >= 0, got {number}."
        )
    if isinstance(weight, int | Fraction):
        return Fraction(weight)
    exact = Fraction(number)
    simple = exact.limit_denominator(MAX_PERIOD)
    return simple if float(simple) == number else exact


def _rounded(shares: list[Fraction]) -> list[int]:
    """Return weights of sum `MAX_PERIOD` near the shares; a source with a share above 0 keeps at least 1."""
    ideal = [share * MAX_PERIOD for share in shares]
    weights = [max(math.floor(weight), int(weight > 0)) for weight in ideal]
    rest = MAX_PERIOD - sum(weights)
    # Largest remainder first.
    remainders = [
        ideal[source] - weight for source, weight in enumerate(weights)
    ]
    for source in nlargest(
        rest, range(len(weights)), key=remainders.__getitem__
    ):
        weights[source] += 1
    # If the smallest sources were raised to 1, the largest pay for it.
    for _ in range(-rest):
        weights[weights.index(max(weights))] -= 1
    return weights


class Segment(NamedTuple):
    """A stretch of the run with the same weights."""

    first: int
    """Position of the run at which it begins."""
    weights: tuple[int, ...]
    """Integer weight of each source; 0: it is not selected."""


def schedule_of(
    what: str, names: tuple[str, ...], weights: Any
) -> tuple[Segment, ...]:
    """Return the segments of a run for a user's weights.

    Args:
        what: Begins the messages.
        names: The sources.
        weights: A dict of a number for each source, or [(first sample of the run, such a dict), ...].

    Raises:
        ArgumentTypeError: It is neither.
        ArgumentError: The segments do not begin at 0 and ascend, or a dict does not fit the sources.
    """
    entries = [(0, weights)] if isinstance(weights, Mapping) else weights
    try:
        firsts = [int_of(first) for first, _ in entries]
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{what}: weights must be a dict, or a list of (first sample of the run, dict) for weights that change, "
            f"got {weights!r}."
        ) from None
    if firsts[:1] != [0] or firsts != sorted(set(firsts)):
        raise ArgumentError(
            f"{what}: weights that change must begin at sample 0 and ascend, got {firsts}."
        )
    segments = tuple(
        Segment(first, integer_weights(names, of_segment))
        for first, (_, of_segment) in zip(firsts, entries, strict=True)
    )
    if isinstance(weights, Mapping) and len(weights) < len(names):
        missing = [name for name in names if name not in weights]
        raise ArgumentError(
            f"{what}: weights must name each source, missing {missing}. Give 0 to leave one out."
        )
    return segments


def shares_of(names: Iterable[str], segments: Sequence[Segment]) -> str:
    """Return the shares of the sources in the first segment, and the number of segments, in words."""
    weights = segments[0].weights
    total = sum(weights)
    shares = [
        f"{name} {weight / total:.4g}"
        for name, weight in zip(names, weights, strict=True)
    ]
    if len(segments) > 1:
        shares.append(f"{len(segments)} schedules of weights")
    return ", ".join(shares)


def num_positions_to_read(
    weights: Sequence[int], lengths: Sequence[int], *, every: bool
) -> int:
    """Return after how many positions a source's share has reached its length; by then it has been read in full.

    Args:
        weights: Integer weight of each source.
        lengths: Number of samples of each source.
        every: True for the last of all sources that are selected, False for the first.

    Examples:
        >>> num_positions_to_read((7, 3), (70, 60), every=False)
        100
    """
    period = sum(weights)
    positions = [
        -(-length * period // weight)
        for length, weight in zip(lengths, weights, strict=True)
        if weight
    ]
    return max(positions) if every else min(positions)


class WeightedInterleave:
    """A sequence of sources in which each is as near to its weight as can be, after every prefix.

    After k positions, a source with the share w has been selected within 1 - 1 / (2n - 2) of k * w times, where n is
    the number of sources with a weight above 0. No smaller bound holds for all weights. (Tijdeman, "The chairman
    assignment problem", Discrete Mathematics 32, 1980.)

    Draw j of a source may be made as soon as its share is 1 / (2n - 2) above j, and has a deadline after which the
    bound would be broken. At each position, the draw with the earliest deadline is made of those that may be. All is
    computed in integers. With weights that sum to Q, the sequence has the period Q and is exact at its multiples. So
    one table of Q entries holds the source at any position. It is computed in chunks, up to the position that is
    needed.

    Examples:
        >>> WeightedInterleave((2, 1)).sources_at(np.arange(6))[0].tolist()
        [0, 1, 0, 0, 1, 0]
    """

    def __init__(self, weights: tuple[int, ...]) -> None:
        """Set up the sequence; no entry is computed yet.

        Args:
            weights: An int >= 0 for each source, at least one above 0. Their sum is at most 2^20.
        """
        self._weights = np.array(weights, np.int64)
        self.period = sum(weights)
        # Times are counted in 1 / (2n - 2) draws.
        num_selected = int(np.count_nonzero(weights))
        self._scale = max(1, 2 * num_selected - 2)
        # The source at each position, and how often it was selected before.
        self._sources = np.empty(self.period, np.int32)
        self._draws = np.empty(self.period, np.int32)
        # Threads share a sequence, and no lock survives a fork and pickling. So the state is one value: the entries
        # that are known, the draws of each source, and the heap of released draws. It is never changed, only replaced.
        # Two threads may compute the same entries; they write the same numbers to the same places.
        self._known: tuple[int, list[int], list[int]] = (
            0,
            [0] * len(weights),
            [],
        )

    def sources_at(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return, for each position, its source and how often the source was selected before it.

        Args:
            positions: int64, 0 or more.
        """
        periods, places = np.divmod(positions, self.period)
        self._extend(int(places.max(initial=-1)) + 1)
        sources = self._sources[places].astype(np.int64)
        draws: Indices = periods * self._weights[sources]
        return sources, draws + self._draws[places]

    def counts(self, position: int) -> Indices:
        """Return how often each source is selected before a position: int64[number of sources]."""
        periods, place = divmod(position, self.period)
        self._extend(place)
        counts = np.bincount(
            self._sources[:place], minlength=len(self._weights)
        )
        return periods * self._weights + counts

    def inverse(self, source: int, draws: Indices) -> Indices:
        """Return the position of each draw of a source.

        Args:
            source: A source with a weight above 0.
            draws: int64, counted from 0.
        """
        self._extend(self.period)
        periods, draws = np.divmod(draws, self._weights[source])
        places = np.flatnonzero(self._sources == source)[draws]
        positions: Indices = places + periods * self.period
        return positions

    def _extend(self, end: int) -> None:
        """Extend the table to `end` entries or more."""
        while self._known[0] < end:
            start, counts, heap = self._known
            counts = counts.copy()
            heap = heap.copy()
            num_sources = len(counts)
            stop = min(start + CHUNK, self.period)
            times, keys = self._releases(start, stop)
            sources = []
            draws = []
            for position in range(start, stop):
                while times[-1] <= position:
                    times.pop()
                    heappush(heap, keys.pop())
                source = heappop(heap) % num_sources
                draw = counts[source]
                counts[source] = draw + 1
                sources.append(source)
                draws.append(draw)
            self._sources[start:stop] = sources
            self._draws[start:stop] = draws
            self._known = (stop, counts, heap)

    def _releases(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Return the draws that may be made from one of the positions [start, stop) on, the last one first.

        Draw j of a source with the share w may be made at position k if (k + 1) * w - j >= 1 / (2n - 2). It must be
        made at position k at the latest if (k + 1) * w - j > 1 - 1 / (2n - 2).

        Returns:
            The first position of each draw, after `stop` as the last of them; and a key of its deadline and its source.
        """
        scale = self._scale
        period = self.period
        # The first draw of each source that may not be made yet, at `start` and at `stop`.
        begin, end = (
            (position * self._weights * scale - period) // (period * scale) + 1
            for position in (start, stop)
        )
        number = end - begin
        sources = np.repeat(np.arange(len(number)), number)
        offsets = np.repeat(end - np.cumsum(number), number)
        draws = np.arange(len(sources)) + offsets
        units = self._weights[sources] * scale
        earliest = (draws * scale + 1) * period
        latest = ((draws + 1) * scale - 1) * period
        first = -(-earliest // units) - 1
        deadline = latest // units
        last_first = np.argsort(-first)
        keys = deadline * len(number) + sources
        return [stop, *first[last_first].tolist()], keys[last_first].tolist()


interleave = lru_cache(maxsize=16)(WeightedInterleave)
"""Returns the sequence for integer weights. It is kept, as it is the same for all epochs."""
