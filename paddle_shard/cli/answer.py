"""What does a command answer, for people and for programs?"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddle_shard.errors import ArgumentError
from paddle_shard.record.lines import read
from paddle_shard.record.timeline import Leg, Timeline, timeline


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command has found."""

    text: str
    found: dict[str, Any] = field(default_factory=dict)
    """The same as JSON values."""
    failed: bool = False
    """True if the command exits with 1: a hazard, or a verification that has failed."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of `paddle-shard`."""

    does: str
    """In a sentence."""
    example: str
    arguments: Callable[[argparse.ArgumentParser], object]
    answer: Callable[[argparse.Namespace], Answer]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return rows in columns.

    Examples:
        >>> print(table(["rank", "rows"], [[0, "a"], [10, "b"]]))
        rank  rows
        0     a
        10    b
    """
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def numbers(values: Sequence[int]) -> str:
    """Return ints, stretches of consecutive ones shortened.

    Examples:
        >>> numbers([0, 1, 2, 7, 9, 10])
        '0-2 7 9 10'
    """
    found: list[list[int]] = []
    for value in values:
        if found and value == found[-1][-1] + 1:
            found[-1] = [found[-1][0], value]
        else:
            found.append([value])
    shown = (f"{one[0]}-{one[-1]}" if one[-1] - one[0] > 1 else " ".join(map(str, one)) for one in found)
    return " ".join(shown)


def samples_shown(samples: Sequence[Any]) -> str:
    """Return samples in their order; None stands for a row of padding, or one that was left out."""
    names = ("-" if one is None else ":".join(map(str, one)) if isinstance(one, list) else str(one) for one in samples)
    return " ".join(names)


def run_of(path: str) -> Timeline:
    """Return what the record in a file tells of its run."""
    return timeline(read(path)[0])


def leg_of(run: Timeline, epoch: int | None, step: int) -> tuple[int, list[Leg]]:
    """Return the epoch that is meant, and what has delivered a step of it.

    Raises:
        ArgumentError: The step was not delivered; or several epochs have it, and none was named.
    """
    epoch = run.epochs[0] if epoch is None and len(run.epochs) == 1 else epoch
    if epoch is None:
        raise ArgumentError(f"--epoch is missing: the run has the epochs {numbers(run.epochs)}. Give one of them.")
    found = run.legs_of(epoch, step)
    if not found:
        known = ", ".join(f"[{leg.start.steps}, {leg.steps})" for leg in run.legs_of(epoch)) or "none"
        raise ArgumentError(
            f"step {step} of epoch {epoch} was not delivered, says the record; of this epoch it has {known}."
        )
    return epoch, found
