"""Digests of samples, by which readers and ranks compare what they have read."""

from __future__ import annotations

import datetime
import numbers
import sys
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddle_shard.core.trees import is_sequence

_ITEMS = 64
"""Number of characters of a text that are looked at, at most; of elements of an array or list, less than twice that."""
WHOLE = sys.maxsize
"""As many items as any leaf has."""
_WITH_REPR = numbers.Number | np.generic | datetime.date | datetime.time | None
"""Types whose `repr` tells the value."""


def digest(value: Any, before: int = 0, most: int = _ITEMS) -> int:
    """Return a digest in [0, 2^32) of a sample and of the samples before it, whose digest is `before`.

    It looks at `most` items of each leaf: some are enough to tell the samples of a data set apart. Different samples
    nearly always have different digests, and the same sample has the same digest in every process. Of an object that
    is not a number, date, text, array, image, mapping or sequence, only the type counts.

    Examples:
        >>> digest([1, "a"]) == digest([1, "a"]), digest([1, "a"]) == digest([2, "a"])
        (True, False)
    """
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            before = digest(
                value[key], zlib.crc32(repr(key).encode(), before), most
            )
        return before
    if _is_dense_tensor(value):
        value = np.asarray(value.numpy())
    if isinstance(value, np.ndarray):
        before = zlib.crc32(f"{value.shape}{value.dtype}".encode(), before)
        some = value.reshape(-1)[:: max(1, value.size // most)]
        if value.dtype.hasobject:
            return digest(some.tolist(), before, most)
        return zlib.crc32(np.ascontiguousarray(some).tobytes(), before)
    if isinstance(value, str | bytes | bytearray):
        seen = (
            value[:most].encode(errors="replace")
            if isinstance(value, str)
            else value[:most]
        )
        return zlib.crc32(b"%d" % len(value) + seen, before)
    if is_sequence(value):
        before = zlib.crc32(b"%d" % len(value), before)
        for item in value[:: max(1, len(value) // most)]:
            before = digest(item, before, most)
        return before
    # an image of PIL
    if hasattr(value, "tobytes") and not isinstance(value, np.generic):
        return zlib.crc32(value.tobytes()[:most], before)
    is_known = isinstance(value, _WITH_REPR)
    text = repr(value) if is_known else type(value).__qualname__
    return zlib.crc32(text.encode(), before)


def _is_dense_tensor(value: Any) -> bool:
    """Return whether a value is a tensor with a `numpy`; that of a sparse one of Paddle's crashes."""
    is_tensor = hasattr(value, "shape") and hasattr(value, "numpy")
    return is_tensor and (not hasattr(value, "is_dense") or value.is_dense())


class TurnDigests:
    """Digests of what a reader has read of a stream that all readers read whole: of two samples of each turn."""

    def __init__(self, turn_size: int, *, apart: bool) -> None:
        """Begin a pass.

        Args:
            turn_size: Samples of a turn: a stripe for each part. All readers read whole turns.
            apart: True if each sample has a digest of its own. A sample is a whole batch then, and after a resume the
                workers of one rank do not all begin at one batch.
        """
        self._turn_size = turn_size
        self._apart = apart
        self._turns: deque[tuple[int, int]] = deque()
        """(turn, digest up to it) of the turns that were read ahead."""
        self._read = self._found = 0

    def see(self, number: int, samples: Sequence[Any]) -> None:
        """Add consecutive samples of the stream, given the number of the first, which begins a turn."""
        for start in range(0, len(samples), self._turn_size):
            turn = (number + start) // self._turn_size
            of_turn = samples[start : start + self._turn_size]
            # The first one, and another one each time.
            pair = of_turn[0], of_turn[(turn + 1) % len(of_turn)]
            self._read = digest(pair, 0 if self._apart else self._read)
            self._turns.append((turn, self._read))

    def until(self, last: int) -> int:
        """Return the digest up to a turn, which all readers reach; this one may have read further."""
        while self._turns and self._turns[0][0] <= last:
            _, self._found = self._turns.popleft()
        return self._found
