"""Checks of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.errors import ArgumentError


def holds(kind: str, number: float) -> bool:
    """Return whether a dtype, such as "bool", "int32" or "float16", can hold a number.

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
    name: str,
    value: object,
    least: int = 1,
    most: int | None = None,
    meaning: str = "",
) -> int:
    """Return an argument as an int, if it is one in [`least`, `most`].

    Args:
        name: Its name in the error.
        value: The argument: an int or one of numpy's.
        least: The smallest allowed value.
        most: The largest allowed value; None: any.
        meaning: What it counts, for the error.

    Raises:
        ArgumentError: It is no int, or out of range.
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


def check_lengths(lengths: Any) -> npt.NDArray[Any]:
    """Return lengths as an array, if they are a list or an array of ints >= 0.

    Args:
        lengths: The argument of that name.

    Raises:
        ArgumentError: They are anything else.
    """
    # numpy would read a data set to its end, which it may not have.
    is_array = isinstance(lengths, Sequence) or hasattr(lengths, "__array__")
    array = np.asarray(lengths if is_array else None)
    is_row = array.ndim == 1 and array.dtype.kind in "iu"
    if not is_row or array.min(initial=0) < 0:
        raise ArgumentError(
            "lengths must be an array of ints >= 0 or a list, one for each sample, such as [len(sample) for sample in "
            f"dataset], got {type(lengths).__name__} of {array.dtype}, shape {list(array.shape)}: {lengths!r:.80}."
        )
    return array


def check_flag(name: str, value: object) -> bool:
    """Return an argument that must be True or False.

    Args:
        name: Its name in the error.
        value: The argument.

    Raises:
        ArgumentError: It is neither.
    """
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {value!r}.")
    return value


def listed(values: Sequence[object], most: int = 12) -> str:
    """Return the first `most` values, separated by commas, with dots if there are more."""
    return ", ".join(map(str, values[:most])) + (
        ", ..." if len(values) > most else ""
    )


def length_or_none(something: Any) -> int | None:
    """Return the length of a user's object; None if it has none."""
    try:
        return len(something)
    except Exception:  # of Paddle's WeightedRandomSampler with a list, too
        return None
