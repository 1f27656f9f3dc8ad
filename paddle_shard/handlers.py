"""Was an exception raised by a signal handler, and not by the code that it interrupted?"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any


def raised_by_a_handler(error: BaseException) -> bool:
    """Return whether an exception was raised by a signal handler that ran while something was read.

    A handler is recognized by its argument: the frame that it interrupts. The handlers that are set now prove
    nothing, since many handlers set another one before they raise.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Skip the first frame: it is running. Reading its variables would make it hold the exception, which holds it.
    return any(_is_given_one_of(frames[:number], frames[number]) for number in range(1, len(frames)))


def raise_if_a_handlers(error: BaseException) -> None:
    """Raise the exception unchanged if a signal handler raised it; return otherwise."""
    if raised_by_a_handler(error):
        try:
            raise error
        finally:
            del error  # the traceback has this frame, which would hold the exception, and what its frames hold


def let_go(error: BaseException) -> None:
    """Clear what this package's frames hold that have ended with an error.

    If one of them holds the error, both hold the variables of all callers, such as batches on a device, until a
    collection finds the circle.
    """
    seen, errors = set[int](), [error]
    while errors:
        one = errors.pop()
        seen.add(id(one))
        errors += [other for other in (one.__cause__, one.__context__) if other is not None and id(other) not in seen]
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if str(frame.f_globals.get("__name__")).startswith("paddle_shard."):
                with suppress(RuntimeError):  # it runs
                    frame.clear()


@contextmanager
def ignoring(*kinds: type[BaseException]) -> Iterator[None]:
    """Suppress exceptions of some kinds, as `contextlib.suppress`, but not what a signal handler raises."""
    try:
        yield
    except kinds as error:
        raise_if_a_handlers(error)
        error.__traceback__ = None  # else its frames, and what they hold, stay until a collection (Python 3.13)


def length_or_none(something: Any) -> int | None:
    """Return the length of something of the user's; None if it has none."""
    try:
        return len(something)
    except Exception as error:  # no __len__, or one that raises: Paddle's own WeightedRandomSampler with a list
        raise_if_a_handlers(error)
        return None


def _is_given_one_of(frames: Sequence[FrameType], frame: FrameType) -> bool:
    names, rest, _, values = inspect.getargvalues(frame)
    more = values.get(rest) if rest else None
    given = [*(values.get(name) for name in names), *(more if isinstance(more, tuple) else ())]
    return any(isinstance(value, FrameType) and value in frames for value in given)
