"""Stop requests: a SIGTERM to any rank becomes known on all ranks at the same step.

A rank that has received the signal sends it with the next step that it announces (`StepMessages`), so all ranks know it
when they deliver that step. A message on a step that is not delivered is repeated by the next iterator.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_installed: list[Any] = []
"""The handler that was there before ours; empty if ours is not installed."""
_heard: list[int] = []
_agreed: set[tuple[int, ...]] = set()
"""Groups of global ranks that know of the request; it holds for all loaders over the same ranks."""


def listen() -> None:
    """Note SIGTERM from now on, and call the user's handler, too; on another thread than the main one do nothing."""
    if not _installed and threading.current_thread() is threading.main_thread():
        _installed.append(signal.getsignal(signal.SIGTERM))
        signal.signal(signal.SIGTERM, _note)


def _note(number: int, frame: FrameType | None) -> None:
    _heard.append(number)
    if callable(_installed[0]):
        _installed[0](number, frame)


def is_requested(ranks: tuple[int, ...]) -> bool:
    """Return whether some ranks have agreed that they were asked to stop; a single rank knows it at once."""
    return ranks in _agreed or (len(ranks) == 1 and bool(_heard))


def has_news(ranks: tuple[int, ...]) -> bool:
    """Return whether this rank has heard what the others may not know."""
    return bool(_heard) and ranks not in _agreed


def agree(ranks: tuple[int, ...]) -> None:
    """Note that all ranks have delivered the step with which one of them sent the signal."""
    _agreed.add(ranks)
