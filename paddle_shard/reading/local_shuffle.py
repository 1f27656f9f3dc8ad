"""How are the rows of several batches that a rank has read mixed?"""

from __future__ import annotations

from collections import deque

import numpy as np

from paddle_shard.plan.seeding import derive_key
from paddle_shard.plan.shuffle import Permutation
from paddle_shard.reading.chunk import Even, Gather, Slice, as_they_are, take_rows
from paddle_shard.reading.passes import Pass
from paddle_shard.reading.stream_pass import StreamPass


class MixedPass(Pass):
    """A pass that mixes the rows of several slices at a time, in the main process.

    It mixes samples of different parts, but only of the parts that this rank holds. So the batches depend on the
    number of data ranks. Each window of batches has its own key, so a pass can begin at any window.
    """

    def __init__(
        self,
        reading: StreamPass,
        gather: Gather,
        even: Even = as_they_are,
        *,
        window: int,
        first_window: int,
        skip: int,
        num_steps: int | None,
        key: bytes,
    ) -> None:
        """Start the pass.

        Args:
            reading: The pass that reads the slices; it begins at a window.
            gather: Joins tensors and takes rows of them.
            even: Pads the rows of several batches to the same length, if lengths may differ.
            window: Number of batches that are mixed together.
            first_window: Number of the first window.
            skip: Batches of the first window to leave out.
            num_steps: Batches from the start of the first window to the end; None: the end is not known yet.
            key: Key of this rank's order in the epoch.
        """
        self._reading, self._gather, self._even = reading, gather, even
        self._window, self._number, self._skip, self._key = window, first_window, skip, key
        self._left = -1 if num_steps is None else num_steps
        """Number of batches left to read; below 0: the end is not known."""
        self._mixed: deque[Slice] = deque()
        self._behind: Slice | None = None

    def __next__(self) -> Slice:
        """Return the next slice.

        Raises:
            DataReadError: Reading failed.
        """
        while not self._mixed:  # the whole last window may have been delivered before
            self._fill()
            while self._skip and self._mixed:
                self._mixed.popleft()
                self._skip -= 1
        return self._mixed.popleft()

    def at_hand(self, count: int = 1) -> bool:
        """Return whether the next slices are ready, so that `next` need not wait for the workers."""
        wanted = self._skip + count - len(self._mixed)
        return wanted <= 0 or self._reading.at_hand(self._window * -(-wanted // self._window))

    def interrupt(self) -> None:
        """Make a call of `next` that waits in another thread return."""
        self._reading.interrupt()

    def let_go(self) -> None:
        """See `Pass`."""
        self._reading.let_go()

    def finish(self) -> None:
        """End the pass normally; persistent workers stay for the next pass."""
        self._reading.finish()

    def close(self) -> None:
        """End the workers of the pass."""
        self._reading.close()

    def _next(self) -> Slice:
        found, self._behind = self._behind, None
        if found is not None:
            return found
        self._left -= 1
        return next(self._reading)

    def _is_end(self, found: Slice) -> bool:
        """True if this batch comes after the end. Such a batch is not mixed."""
        return found.batch is None or found.empty or (self._left < 0 and not found.fresh)

    def _fill(self) -> None:
        held: list[Slice] = []
        while len(held) < self._window and (self._left != 0 or self._behind is not None):
            found = self._next()
            if self._is_end(found):
                if held:
                    self._behind = found
                else:
                    self._mixed.append(found)
                break
            held.append(found)
        number, self._number = self._number, self._number + 1
        if not held:
            if not self._mixed:
                raise StopIteration
            return
        sizes = [len(one.real) for one in held]
        real = np.concatenate([one.real for one in held])
        # Missing rows stay in their places, so that each batch has as many real rows as without mixing.
        order, own = np.arange(len(real)), np.flatnonzero(real)
        order[own] = own[Permutation(len(own), derive_key(self._key, number, size=64))(np.arange(len(own)))]
        skipped = np.concatenate([np.zeros_like(one.real) if one.skipped is None else one.skipped for one in held])
        batches = self._even([one.batch for one in held])
        for end, one in zip(np.cumsum(sizes).tolist(), held, strict=True):
            rows = order[end - len(one.real) : end]
            batch = take_rows(batches, sizes, rows, self._gather)
            lost = skipped[rows] if skipped.any() else None
            self._mixed.append(Slice(batch, one.real, one.fresh, None, lost, digest=one.digest))
