"""Answers of commands, as JSON and as text, and the arguments that several commands take."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Json = dict[str, Any]
"""A JSON object."""
Rows = Sequence[Mapping[str, Any]]
"""A table: each row maps the same column names to values."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of a command."""

    values: Json
    """For programs."""
    text: Sequence[str | Rows]
    """The same for people: lines and tables."""
    failed: bool = False
    """True if a verification has failed, or the machine has a problem."""

    def __str__(self) -> str:
        return "\n".join(
            section if isinstance(section, str) else f"{table(section)}\n"
            for section in self.text
            if section != []
        )


Argument = tuple[list[str], dict[str, Any]]
"""Flags, and the keyword arguments of `add_argument`."""


def argument(flags: str, text: str, **options: Any) -> Argument:
    """Return an argument of a command: its flags, its help, and options of `add_argument`."""
    return flags.split(), {"help": text, **options}


class Command(NamedTuple):
    """A command of `paddle-shard`."""

    answer: Callable[[argparse.Namespace], Answer]
    """Its docstring is the help, with an example below."""
    arguments: Sequence[Argument]


def command(
    *arguments: Argument,
) -> Callable[[Callable[[argparse.Namespace], Answer]], Command]:
    """Decorate a function that answers a command."""
    return lambda answer: Command(answer, arguments)


RECORD = argument(
    "record", "the file of shard_dataloader(record=)", metavar="RECORD"
)


def table(rows: Rows) -> str:
    """Return rows in columns.

    Examples:
        >>> print(table([{"rank": 0, "row_of_rank": 1}, {"rank": 10, "row_of_rank": None}]))
        rank  row of rank
        0     1
        10    -
    """
    lines = [[name.replace("_", " ") for name in rows[0]]]
    lines += [[cell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines
    )


def cell(value: Any) -> str:
    """Return a value for people; in a list of ints, consecutive ones are shortened.

    Examples:
        >>> cell([0, 1, 2, 7]), cell([5, None]), cell([["web", 3]]), cell("dp=2")
        ('0-2 7', '5 -', 'web:3', 'dp=2')
    """
    if value is None:
        return "-"
    if not isinstance(value, list | tuple):
        return str(value)
    if not all(isinstance(item, int) for item in value):
        return " ".join(
            ":".join(map(str, item))
            if isinstance(item, list | tuple)
            else cell(item)
            for item in value
        )
    position = itertools.count()
    texts: list[str] = []
    for _, run in itertools.groupby(
        value, lambda number: number - next(position)
    ):
        first, *others = map(str, run)
        texts.append(
            f"{first}-{others[-1]}"
            if len(others) > 1
            else " ".join([first, *others])
        )
    return " ".join(texts)


def sample_of(text: str) -> Any:
    """Return the sample that a user names: 17, or web:17 for a mixture."""
    source, _, index = text.rpartition(":")
    return (source, int(index)) if source else int(index)
