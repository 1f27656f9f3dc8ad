"""Batch queue: hand batches from the thread that reads ahead to the training loop."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

_Item = TypeVar("_Item")

_MOST_AT_ONCE = 8
"""Items for which a waiting training loop is woken once, at most."""
_GATHER_SECONDS = 2e-3
"""Seconds after which a training loop that waits takes what there is."""


class BatchQueue(Generic[_Item]):
    """A queue between two threads that hand over the interpreter lock rarely.

    Each time that two threads wait for each other costs about 0.1 ms, as much as a small batch. So a training loop that
    waits is woken for several batches at once, if they come fast.

    Examples:
        >>> queue = BatchQueue()
        >>> queue.put("a batch")
        >>> queue.get()
        'a batch'
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._items: deque[_Item] = deque()
        self._num_new = 0
        """Items since the training loop was last woken."""
        self._is_awaited = False
        self._is_urgent = False
        """True if the training loop has waited for long, and is woken for the next item."""
        self._woken = threading.Event()

    @property
    def wants_more(self) -> bool:
        """True if the training loop waits, and is not woken yet for what there is."""
        is_gathering = self._is_awaited and not self._is_urgent
        return is_gathering and 0 < self._num_new < _MOST_AT_ONCE

    def put(self, item: _Item) -> None:
        """Add an item."""
        self._items.append(item)
        self._num_new += 1
        if not self.wants_more:
            self.wake()

    def wake(self) -> None:
        """Let the training loop take what there is: no more will come soon."""
        self._num_new = 0
        if self._is_awaited:
            self._woken.set()

    def get(self) -> _Item:
        """Return the next item; wait for it."""
        if not self._items:
            self._is_awaited = True
            while not self._items:
                self._is_urgent = not self._woken.wait(_GATHER_SECONDS)
                self._woken.clear()
            self._is_awaited = False
            self._is_urgent = False
        return self._items.popleft()
