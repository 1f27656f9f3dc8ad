"""Warnings that a process logs once."""

from __future__ import annotations

import logging
from typing import Any

_SAID: set[tuple[Any, ...]] = set()


def say_once(text: str, *values: Any) -> None:
    """Log a warning unless this process has already logged the same one."""
    if (text, values) not in _SAID:
        _SAID.add((text, values))
        logging.getLogger("paddle_shard").warning(text, *values)
