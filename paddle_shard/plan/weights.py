"""How do the weights of a mixture become integers?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

from paddle_shard.errors import ArgumentError, ArgumentTypeError

MAX_PERIOD = 1 << 20
"""Largest sum of integer weights. Weights that need a larger one are rounded, by less than 2^-20 each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Integer weights of named sources: `parts[i]` of `period` samples come from source i."""

    names: tuple[str, ...]
    """Names of the sources, in their order."""
    parts: tuple[int, ...]
    """One int >= 0 per source; their greatest common divisor is 1. A source of weight 0 is not drawn."""
    error: float = 0.0
    """The largest difference between the share of a source and what the user asked for; 0 if all are exact."""

    @property
    def period(self) -> int:
        """The sum of the parts: after so many samples, every share is exact."""
        return sum(self.parts)

    def shares(self) -> dict[str, float]:
        """Return the share of each source, by its name."""
        return {name: part / self.period for name, part in zip(self.names, self.parts, strict=True)}


def integer_weights(names: tuple[str, ...], weights: Mapping[str, Any]) -> Weights:
    """Return integer weights for the weights that a user has given.

    A float is taken as the simplest fraction that is equal to it: 0.7 is 7/10. If the exact shares need a period of
    more than 2^20, they are rounded to a period of 2^20, each by less than 2^-20. A source with a smaller share is
    still drawn once in a period, which the largest ones pay for.

    Args:
        names: The sources.
        weights: A number >= 0 for each source. They need not sum to 1.

    Raises:
        ArgumentTypeError: The weights are no mapping, or not numbers.
        ArgumentError: A weight is negative or infinite, all are 0, or a name is missing or unknown.

    Examples:
        >>> integer_weights(("web", "code"), {"web": 0.7, "code": 0.3})
        Weights(names=('web', 'code'), parts=(7, 3), error=0.0)
    """
    if not isinstance(weights, Mapping):
        raise ArgumentTypeError(
            f"weights must be a dict of a number for each source, as {dict.fromkeys(names, 1)}, got "
            f"{type(weights).__name__}: {weights!r}."
        )
    missing, unknown = [name for name in names if name not in weights], [name for name in weights if name not in names]
    if missing or unknown:
        raise ArgumentError(
            f"weights must name each source once: missing {missing}, unknown {unknown}; the sources are {list(names)}. "
            "A source that is not to be drawn has the weight 0."
        )
    fractions = [_fraction(name, weights[name]) for name in names]
    total = sum(fractions)
    if total == 0:
        raise ArgumentError(f"weights: at least one must be above 0, got {dict(weights)}.")
    shares = [fraction / total for fraction in fractions]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return Weights(names=names, parts=tuple(int(share * period) for share in shares))
    parts = _rounded(shares)
    error = max(abs(Fraction(part, MAX_PERIOD) - share) for part, share in zip(parts, shares, strict=True))
    divisor = math.gcd(*parts)
    return Weights(names=names, parts=tuple(part // divisor for part in parts), error=float(error))


def _fraction(name: str, weight: Any) -> Fraction:
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise ArgumentTypeError(f"weights: the weight of {name!r} must be a number, got {weight!r}.")
    if not (math.isfinite(weight) and float(weight) >= 0):
        raise ArgumentError(f"weights: the weight of {name!r} must be a finite number >= 0, got {weight!r}.")
    if isinstance(weight, int | Fraction):
        return Fraction(weight)
    exact = Fraction(float(weight))
    simple = exact.limit_denominator(MAX_PERIOD)
    if float(simple) == float(weight):
        return simple
    return exact


def _rounded(shares: list[Fraction]) -> list[int]:
    """Return parts of `MAX_PERIOD` near the shares; a source with a share above 0 keeps a part of at least 1."""
    ideal = [share * MAX_PERIOD for share in shares]
    parts = [max(math.floor(part), int(part > 0)) for part in ideal]
    left = MAX_PERIOD - sum(parts)
    order = sorted(range(len(parts)), key=lambda at: (parts[at] - ideal[at], at))  # the largest remainder first
    for at in order[:left] if left >= 0 else []:
        parts[at] += 1
    while left < 0:  # the smallest sources were raised to 1
        parts[parts.index(max(parts))] -= 1
        left += 1
    return parts
