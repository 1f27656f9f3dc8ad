"""How is a pass read without other ranks, on the caller's thread or ahead of it?"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from paddle_shard.loader.prefetch import Ahead
from paddle_shard.plan.handlers import raise_if_a_handlers
from paddle_shard.reading.passes import Pass
from paddle_shard.reading.reader import AGAIN
from paddle_shard.reading.worker_guards import in_use

_CACHED = 256 << 10
"""Bytes of batches that are better read at once than one by one."""


class PlacedPass:
    """What one pass has read, without other ranks."""

    def __init__(
        self,
        reading: Pass,
        prepare: Callable[[Any], Any],
        prefetch: int = 0,
        worth: float = 0.0,
        draw: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Start the pass; see `AgreedPass`."""
        self._reading, self._prepare, self._prefetch, self._draw = reading, prepare, prefetch, draw
        self._ahead = Ahead(self._step, lambda: reading.runs_free, worth=worth) if prefetch else None
        self._several: deque[Any] = deque()
        """What was read at once, and has yet to be prepared."""
        self._ready: deque[tuple[Any, Exception | None]] = deque()
        self._delivered = self._num_bytes = 0
        self._over = False

    def __iter__(self) -> PlacedPass:
        return self

    def __next__(self) -> Any:
        """Return what is delivered next."""
        if self._ahead is None:
            return self._prepare(next(self._reading))
        count = limit = self._delivered + 1
        if self._ahead.start() or self._at_once > 1:
            limit += self._prefetch
        self._draw(limit)
        self._ahead.need(count, limit)
        if not self._ready:
            raise StopIteration
        self._delivered += 1
        found, failure = self._ready.popleft()
        if failure is not None:
            raise failure
        return found

    def _step(self, free: bool) -> bool:
        if self._over:
            raise StopIteration
        try:
            found = self._read(free)
            if found is AGAIN:
                return False
            with in_use:
                placed = self._prepare(found)
            self._ready.append((placed, None))
            self._num_bytes = placed[1].num_bytes
        except StopIteration:
            raise
        except Exception as failure:  # raised at its own step
            raise_if_a_handlers(failure)
            self._over = True
            self._ready.append((None, failure))
        return True

    @property
    def _at_once(self) -> int:
        """Steps that are read at once: several, if they are quick, and so small that they stay in the cache."""
        count = 1 + self._prefetch
        quick = self._ahead is not None and self._ahead.quick
        return count if quick and count * self._num_bytes <= _CACHED else 1

    def _read(self, free: bool) -> Any:
        if not free and self._at_once > 1 and not self._several:  # it looks at generators that are the caller's
            self._several.extend(self._reading.several(self._at_once))
        return self._several.popleft() if self._several else read_next(self._reading, free)

    def close(self) -> None:
        """End the workers and threads; safe to call again."""
        self._over = True
        close_reading(self._reading, self._ahead)


def read_next(reading: Pass, free: bool) -> Any:
    """Return what a pass has read next, or `AGAIN` if the training thread must wait for it."""
    return reading.next_free() if free else next(reading)


def close_reading(reading: Pass, ahead: Ahead | None) -> None:
    """End what reads ahead, and the reading; safe to call again."""
    if ahead is not None:
        ahead.stop(reading.interrupt)
    reading.close()
