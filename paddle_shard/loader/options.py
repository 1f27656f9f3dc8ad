"""Are the options of a loader what they can be?"""

from __future__ import annotations

import numbers
from typing import Any

import paddle.io

from paddle_shard.errors import ArgumentError
from paddle_shard.place.local_tensor import is_cpu
from paddle_shard.say_once import say_once

ON_LOST = ("raise", "exit")
ON_ERROR = ("raise", "skip")


def check_options(*, seed: Any, timeout: Any, on_lost: Any, on_error: Any, dense_tensor_idx: Any) -> None:
    """Check what does not depend on the data.

    Raises:
        ArgumentError: One is not what it can be.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError(f"seed must be an int, got {seed!r}.")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ArgumentError(f"timeout must be a number of seconds > 0, got {timeout!r}.")
    for name, value, known in (("on_lost", on_lost, ON_LOST), ("on_error", on_error, ON_ERROR)):
        if value not in known:
            raise ArgumentError(f"{name} must be {' or '.join(map(repr, known))}, got {value!r}.")
    fine = dense_tensor_idx is None or (
        isinstance(dense_tensor_idx, list | tuple)
        and all(
            isinstance(items, list | tuple) and all(isinstance(i, int) for i in items) for items in dense_tensor_idx
        )
    )
    if not fine:
        raise ArgumentError(
            "dense_tensor_idx must be a list with a list of item numbers for each field, such as [[], [0]], "
            f"got {dense_tensor_idx!r}."
        )


def check_no_stream_options(dataloader: Any, num_batches: Any, num_parts: Any) -> None:
    """Refuse the options of streams for data with an index.

    Raises:
        ArgumentError: One is given.
    """
    for name, value in (("num_batches", num_batches), ("num_parts", num_parts)):
        if value is not None:
            raise ArgumentError(
                f"{name}={value!r} is for streams; the {type(dataloader.dataset).__name__} has a length and an index. "
                f"Leave {name} out."
            )


def checked_prefetch(prefetch: Any, dataloader: paddle.io.DataLoader, *, stream: bool, dealt: bool) -> tuple[int, bool]:
    """Return how many batches a thread keeps ready, and whether only if reading takes long enough.

    Where a DataLoader has its `use_buffer_reader`, Paddle reads in a thread of its own if there are no workers, and
    moves to the device in one. So that is the default here, too, where it is worth its while.

    Args:
        prefetch: As given.
        dataloader: Which is read.
        stream: Whether its data is a stream.
        dealt: Whether this process reads it for its workers.

    Raises:
        ArgumentError: It is no number, or the DataLoader cannot be read in another thread.
    """
    own = type(dataloader).__iter__ is not paddle.io.DataLoader.__iter__
    if prefetch is None:
        moves = not is_cpu(dataloader.places[0])
        helps = (moves and not dealt) if dataloader.num_workers else not stream
        return (2, True) if helps and not own and dataloader.use_buffer_reader else (0, False)
    if isinstance(prefetch, bool) or not isinstance(prefetch, numbers.Integral) or prefetch < 0:
        raise ArgumentError(f"prefetch must be None or an int >= 0, got {prefetch!r}.")
    if prefetch and own:
        raise ArgumentError(
            f"prefetch={prefetch}: the {type(dataloader).__name__} has an __iter__ of its own, which belongs to the "
            "thread that iterates. Leave prefetch out; workers (num_workers=) read ahead all the same."
        )
    if prefetch and stream and (dealt or not dataloader.num_workers):
        say_once(
            "prefetch=%d: this stream is read by this process, by code that may draw random numbers, so it is read "
            "while the training waits for it. Give the DataLoader workers (num_workers=) to read ahead.",
            prefetch,
        )
        return 0, False
    return int(prefetch), False
