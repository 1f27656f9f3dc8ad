"""Which sample is at a position of a shuffled epoch, computed without a table of all samples?

`Permutation` is the order of one epoch. `Permutations` are those of many sources, evaluated together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_shard.plan.order import BLOCK, Indices, Order
from paddle_shard.plan.seeding import derive_key

Words = npt.NDArray[np.uint64]

ROUNDS = 6
"""Feistel rounds. With 3 the quality tests fail at every length, with 4 and more they pass from 1,000 up."""
TABLE_MAX = 4096
"""Up to this length a table is drawn: small networks are visibly not uniform."""
MAX_SAMPLES = 1 << 62
MAX_ENTRIES = 1 << 22
"""Entries of tables that are kept for many sources: 2 bytes each."""
VERSION = 1
"""Version of the orders that this package computes; a saved run resumes only with the same version."""

_MULTIPLY = np.uint64(0x9E3779B97F4A7C15)
_FINISH = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class Permutation(Order):
    """A keyed bijection of [0, n): an alternating Feistel network on Z_a x Z_b, repeated until the result is inside.

    a = ceil(sqrt(n)) and b = ceil(n / a), so a * b < n + a and a walk of more than one step is rare. (Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: generalized Feistel and cycle walking.)
    """

    def __init__(self, num_samples: int, key: bytes) -> None:
        """Set up the permutation.

        Args:
            num_samples: n, in [1, 2^62].
            key: 64 bytes; another key gives another permutation.
        """
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise ValueError(f"num_samples must be in [1, 2^62], got {num_samples}.")
        super().__init__(num_samples)
        keys = np.frombuffer(key, dtype="<u8").astype(np.uint64)
        self._tables: tuple[Indices, Indices] | None = None
        if num_samples <= TABLE_MAX:
            table = draw_tables(keys[None], num_samples)[0].astype(np.int64)
            self._tables = table, np.argsort(table, kind="stable").astype(np.int64)
        self._limit, self._sizes, self._rounds = (
            np.uint64(num_samples),
            network_sizes(num_samples),
            list(keys[:ROUNDS]),
        )

    def __call__(self, positions: Indices) -> Indices:
        """Return the sample at each position: int64, same shape."""
        return self._apply(positions, backward=False)

    def inverse(self, samples: Indices) -> Indices:
        """Return the position of each sample: int64, same shape."""
        return self._apply(samples, backward=True)

    def _apply(self, values: Indices, *, backward: bool) -> Indices:
        if self._tables is not None:
            return self._tables[backward][values]
        return walk(
            values,
            self._limit,
            lambda x, _: network(x, self._sizes, self._rounds, backward=backward),
        )


def network_sizes(num_samples: int) -> tuple[np.uint64, np.uint64]:
    """Return a and b of the network for so many samples: a = ceil(sqrt(n)), b = ceil(n / a)."""
    a = math.isqrt(num_samples - 1) + 1
    return np.uint64(a), np.uint64(-(-num_samples // a))


def network(
    x: Words,
    sizes: tuple[np.uint64 | Words, np.uint64 | Words],
    rounds: Sequence[np.uint64 | Words],
    *,
    backward: bool,
) -> None:
    """Replace each number of [0, a * b) in `x` by its image in a Feistel network on Z_a x Z_b.

    Args:
        x: uint64[n], changed in place.
        sizes: a and b, of all numbers or uint64[n].
        rounds: The key of each round, of all numbers or uint64[n].
        backward: True to undo the network.
    """
    left = x // sizes[1]
    right = x - left * sizes[1]
    added, scratch = np.empty_like(x), np.empty_like(x)
    for number in range(len(rounds))[:: -1 if backward else 1]:
        half, other, size = (
            (left, right, sizes[0]) if number % 2 == 0 else (right, left, sizes[1])
        )
        hash_into(other, rounds[number], added, scratch)
        # Into [0, size), size <= 2^32, by the high half of a product (Lemire 2019).
        added >>= _HALF
        added *= size
        added >>= _HALF
        if backward:
            np.subtract(size, added, out=added)
        half += added
        np.subtract(
            half, size, out=scratch
        )  # wraps round to a huge number if half < size
        np.minimum(half, scratch, out=half)
    np.multiply(left, sizes[1], out=x)
    x += right


def hash_into(x: Words, key: np.uint64 | Words, out: Words, scratch: Words) -> None:
    """Write a 64-bit hash of each number into `out`; its high bits are the well-mixed ones."""
    np.bitwise_xor(x, key, out=out)
    out *= _MULTIPLY
    np.right_shift(out, _HALF, out=scratch)
    out ^= scratch
    out *= _FINISH


def walk(
    values: Indices, limits: np.uint64 | Words, step: Callable[[Words, Any], None]
) -> Indices:
    """Apply a network to each value, and again to each result that is not below its limit.

    Args:
        values: int64, of any shape; they stay as they are.
        limits: Of all values, or uint64[n].
        step: Replaces some values, given as an array and as their numbers, by their images.
    """
    out = np.array(values, dtype=np.uint64, order="C")
    flat = out.reshape(-1)
    for start in range(0, flat.size, BLOCK):  # so that all of a step stays in the cache
        step(flat[start : start + BLOCK], slice(start, start + BLOCK))
    outside = np.flatnonzero(flat >= limits)
    while outside.size:
        again = flat[outside]
        step(again, outside)
        flat[outside] = again
        outside = outside[
            again >= (limits[outside] if isinstance(limits, np.ndarray) else limits)
        ]
    return out.view(np.int64)


def draw_tables(keys: Words, length: int) -> npt.NDArray[np.intp]:
    """Return a table of `length` entries, at most 4096, for each row of `keys`: uint64[n, 3 or more]."""
    # Sorting by independent 64-bit hashes gives every order the same chance.
    hashes = np.tile(np.arange(length, dtype=np.uint64), (len(keys), 1))
    scratch = np.empty_like(hashes)
    for number in range(3):
        hash_into(hashes, keys[:, number, None], hashes, scratch)
    return np.argsort(hashes, axis=1, kind="stable")


@lru_cache(maxsize=8)
def permutation(num_samples: int, purpose: str, seed: int, epoch: int) -> Permutation:
    """Return the permutation of an epoch: a function of (purpose, seed, epoch) and the length alone."""
    return Permutation(num_samples, derive_key(purpose, seed, epoch, size=64))


# Many sources at once


class Permutations(threading.local):
    """The permutations of the epochs of some sources, evaluated together.

    Entry by entry, the result is that of `Permutation(length, key)`. With a thousand sources, a batch has a few samples
    of each, and numpy takes longer to begin on an array than to compute a few samples.

    What is kept belongs to the thread: Python runs `__init__` again where another thread first asks. Tables that
    threads shared would need a lock, which survives no fork and no pickling.
    """

    def __init__(self, num_sources: int, key_of: Callable[[int, int], bytes]) -> None:
        """Set up; nothing is computed yet.

        Args:
            num_sources: Number of sources.
            key_of: Returns the key of (source, epoch), 64 bytes. An epoch of a source always has the same length.
        """
        self._num_sources, self._key_of = num_sources, key_of
        self._forget()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how a copy is made: it keeps nothing yet."""
        return Permutations, (self._num_sources, self._key_of)

    def _forget(self) -> None:
        self._slot = np.zeros(self._num_sources, np.int64)
        self._epoch = np.full(self._num_sources, -1, np.int64)
        # Of each slot: the keys of the rounds, a and b of the network, and the place of its table.
        self._keys = np.empty((ROUNDS, 0), np.uint64)
        self._sizes = np.empty((2, 0), np.uint64)
        self._table_at = np.empty(0, np.int64)
        self._tables = np.empty(0, np.int16)
        self._entries = 0

    def __call__(
        self, sources: Indices, epochs: Indices, lengths: Indices, places: Indices
    ) -> Indices:
        """Return the sample at each place: int64, as many as there are places.

        Args:
            sources: int64, the source of each.
            epochs: int64, the epoch of the source.
            lengths: int64, the length of that epoch.
            places: int64, the place in it.
        """
        slots = self._slots(sources, epochs, lengths)
        small = lengths <= TABLE_MAX
        found, large = np.empty(len(places), np.int64), ~small
        found[small] = self._tables[self._table_at[slots[small]] + places[small]]
        found[large] = self._walk(slots[large], lengths[large], places[large])
        return found

    def _slots(self, sources: Indices, epochs: Indices, lengths: Indices) -> Indices:
        """Return where the key, or the table, of each (source, epoch) is kept."""
        if (
            self._entries > MAX_ENTRIES
            or len(self._table_at) > 4 * self._num_sources + BLOCK
        ):
            self._forget()
        slots = self._slot[sources]
        new = np.flatnonzero(self._epoch[sources] != epochs)
        if not new.size:
            return slots
        pairs = epochs[new] * self._num_sources + sources[new]
        _, first, back = np.unique(pairs, return_index=True, return_inverse=True)
        chosen = new[first]
        slots[new] = (len(self._table_at) + np.arange(len(first)))[back.reshape(-1)]
        self._add(sources[chosen], epochs[chosen], lengths[chosen])
        return slots

    def _add(self, sources: Indices, epochs: Indices, lengths: Indices) -> None:
        """Make a slot for each (source, epoch), in their order."""
        start, count = len(self._table_at), len(sources)
        pairs = zip(sources.tolist(), epochs.tolist(), strict=True)
        drawn = np.frombuffer(
            b"".join(self._key_of(*pair) for pair in pairs), "<u8"
        ).reshape(count, 8)
        keys = drawn.astype(np.uint64)
        sizes = np.array([network_sizes(length) for length in lengths.tolist()])
        self._keys = np.concatenate([self._keys, keys[:, :ROUNDS].T], axis=1)
        self._sizes = np.concatenate([self._sizes, sizes.T], axis=1)
        self._table_at = np.concatenate([self._table_at, np.zeros(count, np.int64)])
        for length in np.unique(lengths[lengths <= TABLE_MAX]).tolist():
            rows = np.flatnonzero(lengths == length)
            tables = draw_tables(keys[rows], length).astype(np.int16)
            end = self._entries + tables.size
            if end > len(self._tables):
                grown = np.empty(max(end, 2 * len(self._tables)), np.int16)
                grown[: self._entries] = self._tables[: self._entries]
                self._tables = grown
            self._tables[self._entries : end] = tables.reshape(-1)
            self._table_at[start + rows] = self._entries + np.arange(len(rows)) * length
            self._entries = end
        self._slot[sources], self._epoch[sources] = start + np.arange(count), epochs

    def _walk(self, slots: Indices, lengths: Indices, places: Indices) -> Indices:
        """Return the images of some places in the networks of their slots."""

        def step(x: Words, chosen: Any) -> None:
            own = slots[chosen]
            sizes = self._sizes[0].take(own), self._sizes[1].take(own)
            network(x, sizes, [keys.take(own) for keys in self._keys], backward=False)

        return walk(places, lengths.astype(np.uint64), step)
