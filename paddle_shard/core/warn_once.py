"""Warnings that a process logs once."""

from __future__ import annotations

import logging
from typing import Any

_WARNED: set[tuple[Any, ...]] = set()


def warn_once(text: str, *values: Any) -> None:
    """Log a warning unless this process has already logged the same one."""
    if (text, values) not in _WARNED:
        _WARNED.add((text, values))
        logger = logging.getLogger("paddle_shard")
        logger.warning(text, *values, stacklevel=2)  # the place of the caller
