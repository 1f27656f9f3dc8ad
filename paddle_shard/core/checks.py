"""Checks of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paddle_shard.errors import ArgumentError


def holds(kind: str, number: float) -> bool:
    """Return whether numbers of a kind, such as "bool", "int32" or "float16", can be this one.

    Examples:
        >>> holds("uint8", -1), holds("int64", 0.5), holds("bool", 1), holds("float16", 1e6)
        (False, False, True, False)
    """
    dtype = np.dtype("float32" if kind == "bfloat16" else kind)
    try:
        with np.errstate(all="ignore"):
            cast = np.array(number).astype(dtype)
    except OverflowError:
        return False
    return bool(
        np.isfinite(cast) == np.isfinite(number)
        if dtype.kind == "f"
        else cast == number
    )


def check_count(
    name: str, value: object, least: int = 1, most: int | None = None, meaning: str = ""
) -> int:
    """Return an argument as an int; refuse what is not an int of at least `least` and at most `most`.

    Args:
        name: Its name in the error.
        value: The argument: an int or one of numpy's.
        least: The least that is allowed.
        most: The most that is allowed; None: anything.
        meaning: What it counts, for the error.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | np.integer)
        or value < least
        or (most is not None and value > most)
    ):
        allowed = f">= {least}" if most is None else f"in [{least}, {most}]"
        raise ArgumentError(
            f"{name} must be an int {allowed}{meaning and f' ({meaning})'}, got {value!r}."
        )
    return int(value)


def listed(values: Sequence[object], most: int = 12) -> str:
    """Return the first of some values in a line, with dots if there are more."""
    return ", ".join(map(str, values[:most])) + (", ..." if len(values) > most else "")


def length_or_none(something: Any) -> int | None:
    """Return the length of an object of the user's; None if it has none."""
    try:
        return len(something)
    except (
        Exception
    ):  # no __len__, or one that raises: Paddle's own WeightedRandomSampler with a list
        return None
