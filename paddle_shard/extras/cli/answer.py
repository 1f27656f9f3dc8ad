"""What does a command take, and what does it answer, for people and for programs?"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paddle_shard.errors import ArgumentError
from paddle_shard.extras.cli.hazards import Hazard
from paddle_shard.extras.cli.timeline import Leg, Timeline, timeline
from paddle_shard.record.lines import read

Rows = Sequence[Mapping[str, Any]]
"""A table: in each row, the same names, each with its value."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command has found."""

    found: Mapping[str, Any]
    """JSON values, for programs."""
    said: Sequence[str | Rows]
    """The same for people: lines and tables."""
    failed: bool = False
    """True if the command exits with 1: a hazard, or a verification that has failed."""

    def __str__(self) -> str:
        return "\n".join(one if isinstance(one, str) else f"{table(one)}\n" for one in self.said if one != [])


def with_hazards(found: Mapping[str, Any], said: Sequence[str | Rows], hazards: Sequence[Hazard]) -> Answer:
    """Return an answer that ends with what is wrong."""
    shown = [f"HAZARD: {what.rstrip('.')}." + f" {remedy.rstrip('.')}." * bool(remedy) for what, remedy in hazards]
    told = {"hazards": [{"what": what, "remedy": remedy} for what, remedy in hazards]}
    return Answer(found={**found, **told}, said=[*said, *(shown or ["no hazard was found"])], failed=bool(hazards))


class Progress:
    """Says on stderr how far a command is, if it takes over two seconds."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done, self._due = what, total, 0, time.monotonic() + 2

    def add(self, number: int = 1) -> None:
        """Count what was done since the last call."""
        self._done += number
        if time.monotonic() > self._due:
            print(f"{self._done} of {self._total} {self._what}", file=sys.stderr, flush=True)
            self._due = time.monotonic() + 2


Argument = tuple[str, Mapping[str, Any]]
"""An argument, and what `argparse` wants to know of it."""


class Command(NamedTuple):
    """A command of `paddle-shard`."""

    answer: Callable[[argparse.Namespace], Answer]
    """It has the command's name. Its docstring is what `--help` says, with an example below."""
    arguments: Sequence[Argument]


def command(*arguments: Argument) -> Callable[[Callable[[argparse.Namespace], Answer]], Command]:
    """Return the decorator that makes a command of the function that answers it."""
    return lambda answer: Command(answer, arguments)


RECORD = ("record", {"metavar": "RECORD", "help": "the file of shard_dataloader(record=)"})
EPOCH = ("--epoch", {"type": int, "help": "the epoch; may be left out if the run has one only"})


def table(rows: Rows) -> str:
    """Return rows in columns.

    Examples:
        >>> print(table([{"rank": 0, "row_of_rank": 1}, {"rank": 10, "row_of_rank": None}]))
        rank  row of rank
        0     1
        10    -
    """
    cells = [[name.replace("_", " ") for name in rows[0]], *([cell(one) for one in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def cell(value: Any) -> str:
    """Return a value for people: of a list, consecutive ints are shortened.

    Examples:
        >>> cell([0, 1, 2, 7, None, ["web", 3]]), cell(None), cell("dp=2")
        ('0-2 7 - web:3', '-', 'dp=2')
    """
    if value is None or not isinstance(value, list | tuple):
        return "-" if value is None else str(value)
    found: list[list[Any]] = []
    for one in value:
        name = ":".join(map(str, one)) if isinstance(one, list | tuple) else one
        if found and isinstance(name, int) and name - 1 == found[-1][-1]:
            found[-1].append(name)
        else:
            found.append([name])
    return " ".join(f"{one[0]}-{one[-1]}" if len(one) > 2 else " ".join(map(cell, one)) for one in found)


def check_output(path: str) -> None:
    """Refuse a file that cannot be written, before there is anything to write."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.path.isdir(folder):
        why = "it is a folder" if os.path.isdir(path) else f"No such file or directory: {folder}"
        raise ArgumentError(f"--output {path} cannot be written: {why}.")


def run_of(path: str) -> Timeline:
    """Return what the record in a file tells of its run; what is wrong with the file is printed.

    Raises:
        ArgumentError: It tells nothing.
    """
    lines, problems = read(path)
    for problem in problems:
        print(f"{path}: {problem}", file=sys.stderr)
    return timeline(lines)


def check_epoch(run: Timeline, epoch: int | None) -> int:
    """Return an epoch that the run has begun; None is the one of which it has delivered something, if that is one."""
    known = sorted({leg.start.epoch for leg, _ in run.passes})
    if epoch is None and len(only := run.epochs or known) == 1:
        return only[0]
    if epoch is None or epoch not in known:
        what = "--epoch is missing" if epoch is None else f"--epoch {epoch} was not begun"
        raise ArgumentError(" ".join([f"{what}: the run has the epochs {cell(known)}. Give one of them.", *run.untold]))
    return epoch


def legs_at(run: Timeline, epoch: int | None, step: int) -> list[Leg]:
    """Return what has delivered a step of the epoch that is meant, at least one.

    Raises:
        ArgumentError: The step was not delivered; or several epochs have it, and none was named.
    """
    epoch = check_epoch(run, epoch)
    found = [leg for leg, end in run.passes if leg.start.epoch == epoch and leg.start.steps <= step < end]
    if not found:
        known = ", ".join(f"[{leg.start.steps}, {leg.steps})" for leg in run.legs_of(epoch)) or "none"
        what = f"step {step} of epoch {epoch} was not delivered, says the record"
        raise ArgumentError(" ".join([f"{what}; of this epoch it has {known}.", *run.untold]))
    return found


def parsed(pattern: str, text: str, kind: str) -> Sequence[str]:
    """Return the groups of an argument that a pattern describes; of one that is not there, "".

    Raises:
        ArgumentTypeError: It is another one; `kind` says what it must be.
    """
    if (found := re.fullmatch(pattern, text)) is None:
        raise argparse.ArgumentTypeError(f"must be {kind}, got {text!r}")
    return found.groups("")


def sample_of(text: str) -> Any:
    """Return the sample that a user names: 17, or web:17 of a mixture."""
    source, name, index = parsed(r"((.*):)?(\d+)", text, "an index such as 17, or source:index of a mixture")
    return (name, int(index)) if source else int(index)
