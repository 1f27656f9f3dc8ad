"""Has this process already logged this line?"""

from __future__ import annotations

import logging
from typing import Any

_SAID: set[tuple[Any, ...]] = set()


def say_once(text: str, *values: Any) -> None:
    """Log a line, unless this process has already logged the same line."""
    if (text, values) not in _SAID:
        _SAID.add((text, values))
        logging.getLogger("paddle_shard").warning(text, *values)
