"""Was an exception raised by a signal's handler, and so not by what the handler interrupted?"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from types import FrameType


def raised_by_a_handler(error: BaseException) -> bool:
    """Return whether an exception is that of a signal's handler, which ran while something was read.

    A handler is known by what it is called with: the frame that it interrupts. Which handlers are set now does not
    tell, since many a handler sets another before it raises.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Not the first, which is running: a look at its variables would have it hold the exception, which holds the frame.
    return any(_is_given_one_of(frames[:number], frames[number]) for number in range(1, len(frames)))


def raise_if_a_handlers(error: BaseException) -> None:
    """Raise an exception that is a signal handler's, as it is; return for any other."""
    if raised_by_a_handler(error):
        raise error


def _is_given_one_of(frames: Sequence[FrameType], frame: FrameType) -> bool:
    names, rest, _, values = inspect.getargvalues(frame)
    more = values.get(rest) if rest else None
    given = [*(values.get(name) for name in names), *(more if isinstance(more, tuple) else ())]
    return any(isinstance(value, FrameType) and value in frames for value in given)
