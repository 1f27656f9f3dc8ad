"""Skipped steps: half-open ranges of steps of the run, and of one epoch."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges [first, end): ascending, none empty, none touches the next."""


def steps_of_epoch(skip_steps: Ranges, steps_before: int) -> Ranges:
    """Return the skipped steps of an epoch, counted from 0.

    Args:
        skip_steps: The skipped steps of the run.
        steps_before: Steps of the run before the epoch.

    Examples:
        >>> steps_of_epoch(((3, 5), (8, 12)), steps_before=10)
        ((0, 2),)
    """
    return tuple(
        (max(0, first - steps_before), end - steps_before)
        for first, end in skip_steps
        if end > steps_before
    )


def is_in(ranges: Ranges, number: int) -> bool:
    """Return whether a number is in one of the ranges."""
    return any(first <= number < end for first, end in ranges)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the numbers of some ranges as ranges that ascend and do not touch.

    Examples:
        >>> union([(6, 10), (0, 4), (3, 5), (5, 6), (12, 12)])
        ((0, 10),)
    """
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif first < end:
            merged.append((first, end))
    return tuple(merged)


def without(first: int, end: int, ranges: Ranges) -> list[tuple[int, int]]:
    """Return what is left of [first, end) without some ranges.

    Examples:
        >>> without(0, 10, ((2, 4), (8, 12)))
        [(0, 2), (4, 8)]
    """
    kept = []
    for skip_first, skip_end in ranges:
        if first < min(skip_first, end):
            kept.append((first, min(skip_first, end)))
        first = max(first, skip_end)
    if first < end:
        kept.append((first, end))
    return kept
