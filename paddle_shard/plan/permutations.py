"""Which samples are at some positions of many shuffled epochs at once, of sources of any lengths?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.shuffle import (
    BLOCK,
    ROUNDS,
    TABLE_MAX,
    Indices,
    Permutation,
    Words,
    hash_into,
    network,
    network_sizes,
)

MAX_ENTRIES = 1 << 22
"""Entries of tables that are kept: 2 bytes each."""

KeyOf = Callable[[int, int], bytes]
"""Returns the 64 bytes that are the key of a source's epoch."""


class Permutations:
    """The permutations of the epochs of some sources, evaluated together.

    Entry by entry, the result is that of `Permutation(length, key)`. With a thousand sources, a batch has a few samples
    of each, and numpy takes longer to begin on an array than to compute a few samples.
    """

    def __init__(self, num_sources: int, key_of: KeyOf) -> None:
        """Set up; nothing is computed yet.

        Args:
            num_sources: Number of sources.
            key_of: Returns the key of (source, epoch). An epoch of a source always has the same length.
        """
        self._num_sources, self._key_of = num_sources, key_of
        self._forget()

    def _forget(self) -> None:
        self._slot = np.zeros(self._num_sources, np.int64)
        self._epoch = np.full(self._num_sources, -1, np.int64)
        self._count = 0
        self._keys = np.empty((ROUNDS, 64), np.uint64)
        self._sizes = np.empty((2, 64), np.uint64)
        self._table_at = np.empty(64, np.int64)
        self._tables = np.empty(0, np.int16)
        self._entries = 0

    def __call__(self, sources: Indices, epochs: Indices, lengths: Indices, places: Indices) -> Indices:
        """Return the sample at each place: int64, as many as there are places.

        Args:
            sources: int64, the source of each.
            epochs: int64, the epoch of the source.
            lengths: int64, the length of that epoch.
            places: int64, the place in it.
        """
        slots = self._slots(sources, epochs, lengths)
        small = lengths <= TABLE_MAX
        if small.all():
            drawn: Indices = self._tables[self._table_at[slots] + places].astype(np.int64)
            return drawn
        if not small.any():
            return self._walk(slots, lengths, places)
        found, large = np.empty(len(places), np.int64), ~small
        found[small] = self._tables[self._table_at[slots[small]] + places[small]]
        found[large] = self._walk(slots[large], lengths[large], places[large])
        return found

    def _slots(self, sources: Indices, epochs: Indices, lengths: Indices) -> Indices:
        """Return where the key, or the table, of each (source, epoch) is kept."""
        if self._entries > MAX_ENTRIES or self._count > 4 * self._num_sources + BLOCK:
            self._forget()
        slots = self._slot[sources]
        new = np.flatnonzero(self._epoch[sources] != epochs)
        if not new.size:
            return slots
        pairs = epochs[new] * self._num_sources + sources[new]
        _, first, back = np.unique(pairs, return_index=True, return_inverse=True)
        chosen = new[first]
        slots[new] = (self._count + np.arange(len(first)))[back.reshape(-1)]
        self._add(sources[chosen], epochs[chosen], lengths[chosen])
        return slots

    def _add(self, sources: Indices, epochs: Indices, lengths: Indices) -> None:
        """Make a slot for each (source, epoch), in their order."""
        start, count = self._count, len(sources)
        while len(self._table_at) < start + count:
            self._keys = np.concatenate([self._keys, np.empty_like(self._keys)], axis=1)
            self._sizes = np.concatenate([self._sizes, np.empty_like(self._sizes)], axis=1)
            self._table_at = np.concatenate([self._table_at, np.empty_like(self._table_at)])
        pairs = zip(sources.tolist(), epochs.tolist(), strict=True)
        drawn = np.frombuffer(b"".join(self._key_of(*pair) for pair in pairs), "<u8").reshape(count, 8)
        keys = drawn.astype(np.uint64)
        self._keys[:, start : start + count] = keys[:, :ROUNDS].T
        self._sizes[:, start : start + count] = np.array([network_sizes(length) for length in lengths.tolist()]).T
        for length in np.unique(lengths[lengths <= TABLE_MAX]).tolist():
            rows = np.flatnonzero(lengths == length)
            self._draw_tables(start + rows, keys[rows], length)
        self._slot[sources], self._epoch[sources] = start + np.arange(count), epochs
        self._count += count

    def _draw_tables(self, slots: Indices, keys: Words, length: int) -> None:
        """Draw the tables of some epochs of one length, as `Permutation` draws one."""
        hashes = np.tile(np.arange(length, dtype=np.uint64), (len(slots), 1))
        scratch = np.empty_like(hashes)
        for number in range(3):
            hash_into(hashes, keys[:, number, None], hashes, scratch)
        tables = np.argsort(hashes, axis=1, kind="stable").astype(np.int16)
        end = self._entries + tables.size
        if end > len(self._tables):
            grown = np.empty(max(end, 2 * len(self._tables)), np.int16)
            grown[: self._entries] = self._tables[: self._entries]
            self._tables = grown
        self._tables[self._entries : end] = tables.reshape(-1)
        self._table_at[slots] = self._entries + np.arange(len(slots)) * length
        self._entries = end

    def _walk(self, slots: Indices, lengths: Indices, places: Indices) -> Indices:
        """Apply the network of each slot, and again to each result outside the source's length."""
        limits, found = lengths.astype(np.uint64), places.astype(np.uint64)
        for start in range(0, len(places), BLOCK):  # so that all of a step stays in the cache
            self._apply(found[start : start + BLOCK], slots[start : start + BLOCK])
        outside = np.flatnonzero(found >= limits)
        while outside.size:
            again = found[outside]
            self._apply(again, slots[outside])
            found[outside] = again
            outside = outside[again >= limits[outside]]
        return found.view(np.int64)

    def _apply(self, x: Words, slots: Indices) -> None:
        """Replace each number in `x` by its image in the network of its slot."""
        a, b = self._sizes[0].take(slots), self._sizes[1].take(slots)
        rounds = [(number, keys.take(slots)) for number, keys in enumerate(self._keys)]
        network(x, (a, b), rounds, backward=False)

    def inverse(self, sources: Indices, epochs: Indices, lengths: Indices, samples: Indices) -> Indices:
        """Return the place of each sample: int64; the arguments are those of a call."""
        found = np.empty(len(samples), np.int64)
        _, first, back = np.unique(epochs * self._num_sources + sources, return_index=True, return_inverse=True)
        for number, at in enumerate(first.tolist()):
            chosen = back.reshape(-1) == number
            order = Permutation(int(lengths[at]), self._key_of(int(sources[at]), int(epochs[at])))
            found[chosen] = order.inverse(samples[chosen])
        return found


def identity(sources: Indices, epochs: Indices, lengths: Indices, places: Indices) -> npt.NDArray[np.int64]:
    """Return the places: the order of sources that are not shuffled, and its inverse."""
    return places
