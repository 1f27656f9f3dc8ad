"""Warnings that a process logs once, at the line of the user's code that led to them."""

from __future__ import annotations

import logging
import sys
from typing import Any

_WARNED: set[tuple[Any, ...]] = set()
_NOT_THE_USER = {
    "paddle_shard",
    "paddle",
    "threading",
    "concurrent",
    "contextlib",
    "functools",
}
"""Packages whose frames are between the user's call and the line that logs."""


def caller_level() -> int:
    """Return the `stacklevel` for `logging` and `warnings` that shows the line of the user's code.

    It counts from the function that calls this one. In a thread of this library there is no such line: it is then 1.
    """
    level = 1
    frame = sys._getframe(1)
    while (
        frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USER
    ):
        if frame.f_back is None:
            return 1
        frame = frame.f_back
        level += 1
    return level


def warn_once(text: str, *values: Any) -> None:
    """Log a warning unless this process has already logged the same one."""
    if (text, values) not in _WARNED:
        _WARNED.add((text, values))
        logger = logging.getLogger("paddle_shard")
        logger.warning(text, *values, stacklevel=max(2, caller_level()))
